"""`kvlayers fidelity` by position, with caches of any library, and as a run that goes on."""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers as tf

import command_line
import kvlayers
import kvlayers_lab
from kvlayers_lab.calibration import MeasuredSetting
from kvlayers_lab.measuring import scoring
from kvlayers_lab.measuring.fidelity import FidelityBudget, SettingFidelity, by_position, drift
from kvlayers_lab.measuring.nbytes import bytes_of, held_nbytes
from kvlayers_lab.measuring.run_file import PassageFile
from kvlayers_lab.measuring.scoring import PassageScores
from model_directories import save_sharp_model
from models import COMMON
from slow_fidelity import SlowToken, slow_tokens

CONTEXT, SCORED, CHUNK = 224, 24, 8
QUICK = ("--context", CONTEXT, "--scored", SCORED, "--passages", 2, "--chunk", CHUNK)

CACHES = """
import kvlayers, transformers

def windowed(config):
    return kvlayers.SinkCache(64, 4, config=config)

def full(config):
    return transformers.DynamicCache(config=config)
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharp_model(tmp_path_factory.mktemp("models") / "llama", logits=30)


@pytest.fixture(autouse=True)
def _caches(text_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(text_directory)
    (text_directory / "caches_of_a_user.py").write_text(CACHES)


def fidelity(model: Path, *arguments: object) -> Any:
    return command_line.run("fidelity", model, "--text", "text.txt", *arguments)


def measured(model: Path, *arguments: object) -> dict[str, Any]:
    result = fidelity(model, *QUICK, "--json", *arguments)
    assert result.exit_code == 0, result.output
    return {each["name"]: each for each in json.loads(result.stdout)["settings"]}


def check_ranges(said: Sequence[dict[str, Any]], tokens: Sequence[tuple[int, SlowToken]]) -> None:
    """The ranges are those of a slow reference, and every token is in one of them."""
    assert sum(each["tokens"] for each in said) == len(tokens)
    for each in said:
        within = [token for place, token in tokens if each["start"] <= place < each["stop"]]
        assert each["tokens"] == len(within)
        assert each["kl"] == pytest.approx(sum(token.kl for token in within) / len(within), rel=1e-3, abs=1e-9)
        assert each["agreement"] == pytest.approx(sum(token.agrees for token in within) / len(within))


def int2(config: Any) -> Any:
    return kvlayers.QuantizedCache(config=config, nbits=2)


def test_figures_by_position_are_those_of_a_slow_reference(llama: Path) -> None:
    said = measured(llama, "--bits", 2)["int2"]
    passages = slow_tokens(llama, int2, CONTEXT, SCORED, CHUNK)
    tokens = list(itertools.chain(*passages))
    check_ranges(said["by_position"], [(token.position, token) for token in tokens])
    assert [(each["start"], each["stop"]) for each in said["by_position"]] == [
        (start, start + 2) for start in range(224, 248, 2)
    ]
    first, last = said["drift"]["first"], said["drift"]["last"]
    assert (first["start"], first["stop"], last["start"], last["stop"]) == (224, 230, 242, 248)
    check_ranges([first], [(token.position, token) for token in tokens if token.position < 230])
    check_ranges([last], [(token.position, token) for token in tokens if token.position >= 242])
    grown = [sum(token.kl for token in each[-6:]) > sum(token.kl for token in each[:6]) for each in passages]
    assert said["drift"]["growing_passages"] == sum(grown)


def test_without_context_the_whole_passage_has_a_curve(llama: Path) -> None:
    result = fidelity(llama, "--context", 0, "--scored", 248, "--passages", 2, "--chunk", 8, "--bits", 2, "--json")
    said = json.loads(result.stdout)["settings"][1]
    tokens = list(itertools.chain(*slow_tokens(llama, int2, 0, 248, 8)))
    check_ranges(said["by_position"], [(token.position, token) for token in tokens])
    assert said["by_position"][0]["start"] == 0
    kl = {each["start"]: each["kl"] for each in said["by_position"]}
    assert kl[0] < 1e-9 < kl[240]
    assert "KL grows between tokens 0 to 61 and tokens 186 to 247: int2 from" in result.stderr


def scores(kl: Sequence[float]) -> PassageScores:
    return PassageScores(tuple(kl), (0.5,) * len(kl), (True,) * len(kl))


def test_ranges_have_equal_widths_and_no_range_is_empty() -> None:
    passages = [scores(range(40)), scores(range(40, 80))]
    found = by_position(passages, 100)
    assert [(each.start, each.stop, each.tokens) for each in found[:2]] == [(100, 103, 6), (103, 106, 6)]
    assert (len(found), found[-1].start, found[-1].stop, found[-1].tokens) == (14, 139, 140, 2)
    assert found[0].kl == (0 + 1 + 2 + 40 + 41 + 42) / 6


GROWING, STEADY = [1.0] * 4 + [3.0] * 4, [1.0] * 8


@pytest.mark.parametrize(
    ("passages", "grows"),
    [
        ([GROWING], True),
        ([GROWING, GROWING, STEADY], True),
        ([GROWING, STEADY], False),
        ([[1.0] * 4 + [1.4] * 4], False),
        ([[0.0] * 4 + [1e-9] * 4], False),
        ([[0.0] * 4 + [1e-3] * 4], True),
        ([[1.0]], False),
    ],
)
def test_growth_must_be_clear_and_in_most_passages(passages: list[list[float]], grows: bool) -> None:
    assert drift([scores(kl) for kl in passages], 0).grows is grows


def test_a_cache_of_any_name_is_measured(llama: Path) -> None:
    said = measured(
        llama, "--cache", "int4", "--cache", "caches_of_a_user:windowed", "--cache", "caches_of_a_user:full"
    )
    assert list(said) == ["full", "int4", "caches_of_a_user:windowed", "caches_of_a_user:full"]
    windowed, full = said["caches_of_a_user:windowed"], said["caches_of_a_user:full"]

    def sinks(config: Any) -> Any:
        return kvlayers.SinkCache(64, 4, config=config)

    tokens = list(itertools.chain(*slow_tokens(llama, sinks, CONTEXT, SCORED, CHUNK)))
    assert windowed["kl"] == pytest.approx(sum(token.kl for token in tokens) / len(tokens), rel=1e-3)
    check_ranges(windowed["by_position"], [(token.position, token) for token in tokens])
    config = tf.AutoConfig.from_pretrained(llama)
    assert windowed["nbytes"] == bytes_of(lambda: sinks(config), config, CONTEXT + SCORED)
    # A cache of another library has no arithmetic: it was filled.
    assert full["kl"] == 0
    assert full["nbytes"] == said["full"]["nbytes"] == 2 * 2 * (CONTEXT + SCORED) * 2 * 8 * 2
    assert "use" not in full
    assert said["int4"]["use"] == {"cache_implementation": "int4"}


def test_caches_of_transformers_are_measured_beside_settings(llama: Path) -> None:
    pytest.importorskip("optimum.quanto", reason="no optimum-quanto here")
    said = measured(llama, "--bits", 4, "--against", "quanto")
    assert list(said) == ["full", "int4", "transformers quanto"]
    quanto = said["transformers quanto"]
    assert quanto["kl"] > 0
    assert quanto["by_position"]
    assert 0 < quanto["of_full"] < 1


def test_bytes_that_are_not_known_stay_empty_and_count_as_the_most() -> None:
    class Refusing(tf.DynamicCache):
        def update(self, *arguments: Any) -> Any:
            raise RuntimeError("not today")

    assert held_nbytes(Refusing, tf.LlamaConfig(**COMMON), 64, 8) is None
    unknown = SettingFidelity("unknown", None, None, None, kl=0.1, within=True)
    known = SettingFidelity("known", 10, 1.0, 0.5, kl=0.2, within=True)
    assert FidelityBudget().best_of([unknown, known]) is known
    assert FidelityBudget().best_of([unknown]) is unknown
    assert FidelityBudget(max_bytes=10).best_of([known, unknown]) is unknown


def counting(monkeypatch: pytest.MonkeyPatch, most: float = math.inf) -> list[list[str]]:
    """The caches of each reading of a passage; more than `most` readings are interrupted."""
    read: Callable[..., Any] = scoring.read_passage
    seen: list[list[str]] = []

    def read_passage(model: Any, ids: Any, makers: Any, *arguments: Any) -> Any:
        if len(seen) == most:
            raise KeyboardInterrupt
        seen.append(list(makers))
        return read(model, ids, makers, *arguments)

    monkeypatch.setattr(scoring, "read_passage", read_passage)
    return seen


def test_a_run_that_was_stopped_goes_on(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured(llama, "--bits", "4,2")
    arguments = (*QUICK, "--bits", "4,2", "--json", "--results", "run.jsonl")
    with monkeypatch.context() as patched:
        counting(patched, most=1)
        assert fidelity(llama, *arguments).exit_code != 0
    file = tmp_path / "run.jsonl"
    written = file.read_bytes()
    assert written.count(b"\n") == 1 + 3
    # As if the process had been killed within a line.
    file.write_bytes(written[:-100])
    seen = counting(monkeypatch)
    result = fidelity(llama, *arguments)
    assert seen == [["full", "int2"], ["full", "int4", "int2"]]
    assert {each["name"]: each for each in json.loads(result.stdout)["settings"]} == whole
    assert "2 of 6 readings of a passage through a cache were in run.jsonl." in result.stderr

    seen.clear()
    assert measured(llama, "--bits", "4,2", "--results", "run.jsonl") == whole
    assert seen == []
    more = measured(llama, "--bits", "4,2", "--cache", "caches_of_a_user:windowed", "--results", "run.jsonl")
    assert seen == [["full", "caches_of_a_user:windowed"]] * 2
    assert {name: more[name] for name in whole} == whole


def test_a_calibration_of_other_bits_is_read_again(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, found = counting(monkeypatch), []
    for bits in (8, 2):
        setting = MeasuredSetting({"key_nbits": [bits, bits], "value_nbits": [bits, bits]}, 100.0, 0.1)
        kvlayers_lab.Calibration(setting, None, ()).save(tmp_path)
        said = measured(llama, "--bits", 4, "--calibration", tmp_path, "--results", "run.jsonl")
        found.append(said["calibrated"]["kl"])
    assert seen == [["full", "int4", "calibrated"]] * 2 + [["full", "calibrated"]] * 2
    assert 10 * found[0] < found[1]


def test_a_file_of_another_run_is_refused(llama: Path, tmp_path: Path) -> None:
    assert fidelity(llama, *QUICK, "--bits", "4", "--results", "run.jsonl").exit_code == 0
    kept = (tmp_path / "run.jsonl").read_bytes()
    for arguments, words in (
        (("--chunk", 4), "is of another run, with chunk 8 (now 4): name another file"),
        (("--passages", 1), "with passages 2 (now 1)"),
        (("--dtype", "bfloat16"), "dtype float32 (now bfloat16)"),
    ):
        result = fidelity(llama, *QUICK, "--bits", "4", "--results", "run.jsonl", *arguments)
        assert result.exit_code == 2
        assert words in " ".join(result.stderr.splitlines()[-1].split())
    assert (tmp_path / "run.jsonl").read_bytes() == kept
    (tmp_path / "run.jsonl").write_bytes(kept + b'{"passage": 0}\n')
    assert "line 6 has no scores" in fidelity(llama, *QUICK, "--bits", "4", "--results", "run.jsonl").stderr


def test_a_failure_and_scores_that_are_not_finite_are_tried_again(tmp_path: Path) -> None:
    for _ in range(2):
        record = PassageFile(tmp_path / "run.jsonl", {}, {})
        assert set(record.of_passage(0)) <= {"good"}
        record.add(0, "bad", PassageScores(failure="MemoryError: "))
        record.add(0, "overflowing", scores([math.nan]))
        record.add(0, "good", scores([0.1, 1 / 3]))
    assert record.of_passage(0) == {"good": scores([0.1, 1 / 3])}
