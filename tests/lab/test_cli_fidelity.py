"""`kvlayers fidelity`: its figures beside a slow reference, by position, and how it ends.

A run that was stopped goes on.
"""

import functools
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch
import transformers as tf
from torch import Tensor

import command_line
import kvlayers
import kvlayers_lab
from browser import looked_at, needs_browser
from kvlayers_lab.calibration import MeasuredSetting
from kvlayers_lab.cli import report as page
from kvlayers_lab.cli.console import read_text, usage_line
from kvlayers_lab.measuring import scoring
from kvlayers_lab.measuring.contenders import is_installed, kvlayers_contender, setting, settings
from kvlayers_lab.measuring.fidelity import FidelityBudget, SettingFidelity, by_position, drift
from kvlayers_lab.measuring.nbytes import bytes_of, held_nbytes
from kvlayers_lab.measuring.run_file import PassageFile
from kvlayers_lab.measuring.scoring import PassageScores
from kvlayers_lab.measuring.text import passages, rows
from model_directories import random_text, save_sharp_model, word_tokenizer
from models import COMMON
from web_page import check_self_contained

CONTEXT, SCORED, CHUNK = 224, 24, 8
"""16 sinks, 128 tokens of the residual and 64 that are not packed yet are 208 tokens: one more, and a block is packed.
That is after 216 tokens, in chunks of 8, and the next time is after 280."""
QUICK = ("--text", "text.txt", "--context", CONTEXT, "--scored", SCORED, "--passages", 2, "--chunk", CHUNK)
pytestmark = pytest.mark.usefixtures("text_directory")

WITH_HQQ = ",hqq:4" if is_installed("hqq") else ""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharp_model(tmp_path_factory.mktemp("models") / "<i>llama", logits=30)


fidelity = functools.partial(command_line.run, "fidelity")


def measured(model: Path, *arguments: object) -> dict[str, Any]:
    """The measured settings by name."""
    said = command_line.said("fidelity", model, *QUICK, *arguments)
    return {each["name"]: each for each in said["settings"]}


def calibrated(directory: Path, keys: list[int], values: list[int]) -> dict[str, list[int]]:
    """The bits of a calibration that is saved in a directory."""
    bits = {"key_nbits": keys, "value_nbits": values}
    kvlayers_lab.Calibration(MeasuredSetting(bits, 100.0, 0.1), None, ()).save(directory)
    return bits


class SlowToken(NamedTuple):
    """One scored token."""

    position: int
    kl: float
    surprise: float
    surprise_in_full: float
    agrees: bool


def slow_tokens(directory: Path, make_cache: Callable[[Any], Any]) -> list[list[SlowToken]]:
    """The scored tokens of the two passages of `random_text(600)`, as slowly as can be."""
    model = tf.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    lines = random_text(600).splitlines()
    # Of 75 lines, the first passage begins at the first one, the second behind the middle of the text.
    halfway = next(index for index in range(75) if len("\n".join(lines[:index])) >= len("\n".join(lines)) // 2)
    found = []
    for begin in (0, halfway):
        words = " ".join(lines[begin:]).split()[: CONTEXT + SCORED + 1]
        ids = torch.tensor([word_tokenizer().convert_tokens_to_ids(words)])
        full = slow_log_probabilities(model, ids, None)
        seen = slow_log_probabilities(model, ids, make_cache(model.config))
        places = range(CONTEXT, CONTEXT + SCORED)
        found.append([slow_token(ids, place, full[place], seen[place]) for place in places])
    return found


@torch.no_grad()
def slow_log_probabilities(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """Of each position but the last, `[tokens, vocab]` in float64; without a cache in one pass, else in chunks."""
    parts = ids[:, :-1].split(ids.shape[1] if cache is None else CHUNK, dim=1)
    logits = [model(part, past_key_values=cache, use_cache=cache is not None).logits[0] for part in parts]
    return torch.cat(logits).double().log_softmax(-1)


def slow_token(ids: Tensor, position: int, full: Tensor, seen: Tensor) -> SlowToken:
    chances = zip(full.tolist(), seen.tolist(), strict=True)
    kl = sum(math.exp(expected) * (expected - got) for expected, got in chances)
    came = int(ids[0, position + 1])
    return SlowToken(position, kl, -float(seen[came]), -float(full[came]), int(full.argmax()) == int(seen.argmax()))


def slowly(directory: Path, **options: Any) -> list[list[SlowToken]]:
    """The tokens of each passage, read with quantized states."""
    return slow_tokens(directory, functools.partial(kvlayers.QuantizedCache, "native", **options))


def check_ranges(said: Sequence[dict[str, Any]], tokens: Sequence[SlowToken]) -> None:
    """The ranges are those of a slow reference, and every token is in one of them."""
    assert sum(each["tokens"] for each in said) == len(tokens)
    for each in said:
        within = [token for token in tokens if each["start"] <= token.position < each["stop"]]
        assert each["tokens"] == len(within)
        assert each["kl"] == pytest.approx(fmean([token.kl for token in within]), rel=1e-3, abs=1e-9)
        assert each["agreement"] == pytest.approx(fmean([token.agrees for token in within]))


@pytest.mark.parametrize(("name", "options"), [("int2", {"nbits": 2}), ("k4v2", {"key_nbits": 4, "value_nbits": 2})])
def test_figures_are_those_of_a_slow_reference(llama: Path, name: str, options: dict[str, Any]) -> None:
    found = measured(llama, "--bits", name.removeprefix("int"))
    full, said = found["full"], found[name]
    assert (full["kl"], full["agreement"]) == (0, 1)
    read = slowly(llama, **options)
    tokens = list(itertools.chain(*read))
    kl, agreement = fmean([token.kl for token in tokens]), fmean([token.agrees for token in tokens])
    perplexity = math.exp(fmean([token.surprise for token in tokens]))
    increase = 100 * (perplexity / math.exp(fmean([token.surprise_in_full for token in tokens])) - 1)
    assert kl > 0.005
    assert said["perplexity_increase"] == pytest.approx(increase, abs=1e-2)
    expected = {"tokens": len(tokens), "kl": kl, "perplexity": perplexity, "agreement": agreement}
    assert {key: said[key] for key in expected} == pytest.approx(expected, rel=1e-3)
    assert fmean(said["kl_of_passages"]) == pytest.approx(kl, rel=1e-3)

    check_ranges(said["by_position"], tokens)
    assert [(each["start"], each["stop"]) for each in said["by_position"]] == [
        (start, start + 2) for start in range(224, 248, 2)
    ]
    first, last = said["drift"]["first"], said["drift"]["last"]
    assert (first["start"], first["stop"], last["start"], last["stop"]) == (224, 230, 242, 248)
    check_ranges([first], [token for token in tokens if token.position < 230])
    check_ranges([last], [token for token in tokens if token.position >= 242])
    grown = [sum(token.kl for token in each[-6:]) > sum(token.kl for token in each[:6]) for each in read]
    assert said["drift"]["growing_passages"] == sum(grown)


def test_without_context_the_whole_passage_has_a_curve(llama: Path) -> None:
    result = fidelity(llama, *QUICK, "--context", 0, "--scored", 248, "--bits", 2, "--json", code=0)
    kl = {each["start"]: each["kl"] for each in json.loads(result.stdout)["settings"][1]["by_position"]}
    assert kl[0] < 1e-9 < kl[240]
    assert "KL grows between tokens 0 to 61 and tokens 186 to 247: int2 from" in result.stderr


def test_a_calibration_is_measured_as_what_it_has_found(llama: Path, tmp_path: Path) -> None:
    """Each is read anew, also if a file of results has another one of the same name."""
    for keys, values in (([8, 8], [8, 8]), ([8, 2], [2, 4])):
        bits = calibrated(tmp_path, keys, values)
        said = measured(llama, "--bits", "4", "--calibration", tmp_path, "--results", "run.jsonl")
        assert list(said) == ["full", "int4", "calibrated"]
        expected = fmean([token.kl for token in itertools.chain(*slowly(llama, **bits))])
        assert said["calibrated"]["kl"] == pytest.approx(expected, rel=1e-3)


def test_a_cache_of_any_name_is_measured(llama: Path) -> None:
    names = ["int4", "caches_of_a_user:windowed", "caches_of_a_user:full"]
    said = measured(llama, *(word for name in names for word in ("--cache", name)))
    assert list(said) == ["full", *names]
    _, int4, windowed, full = said.values()

    def sinks(config: Any) -> Any:
        return kvlayers.SinkCache(64, 4, config=config)

    tokens = list(itertools.chain(*slow_tokens(llama, sinks)))
    assert windowed["kl"] == pytest.approx(fmean([token.kl for token in tokens]), rel=1e-3)
    check_ranges(windowed["by_position"], tokens)
    config = tf.AutoConfig.from_pretrained(llama)
    assert windowed["nbytes"] == bytes_of(lambda: sinks(config), config, CONTEXT + SCORED)
    # A cache of another library has no arithmetic: it was filled.
    assert full["kl"] == 0
    assert full["nbytes"] == said["full"]["nbytes"] == 2 * 2 * (CONTEXT + SCORED) * 2 * 8 * 2
    assert "use" not in full
    assert int4["use"] == {"cache_implementation": "int4"}
    nbytes = int4["nbytes"]
    assert (int4["bytes_per_token"], int4["of_full"]) == (nbytes / (CONTEXT + SCORED), nbytes / full["nbytes"])


@pytest.fixture(scope="module")
def known(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the readings with 8, 4 and 2 bits, from which other runs go on: they read nothing."""
    folder = tmp_path_factory.mktemp("known")
    (folder / "text.txt").write_text(random_text(600))
    measured(llama, "--text", folder / "text.txt", "--bits", "8,4,2", "--results", folder / "known")
    return folder / "known"


@pytest.fixture
def figures(llama: Path, known: Path) -> dict[str, dict[str, float]]:
    """What 8, 4 and 2 bits come to, by the name of the setting."""
    return measured(llama, "--bits", "8,4,2", "--results", known)


def test_the_table_and_the_budget(llama: Path, known: Path, figures: dict[str, dict[str, float]]) -> None:
    kl = {name: found["kl"] for name, found in figures.items()}
    assert kl["int8"] < kl["int4"] < kl["int2"]
    between = (kl["int4"] + kl["int2"]) / 2
    arguments = (llama, *QUICK, "--bits", "8,4,2", "--results", known, "--json", "--max-kl")
    # Where stdout has JSON, people read stderr.
    result = fidelity(*arguments, between, code=0)
    shown = command_line.words(result.stderr)
    assert f"Within a KL divergence of {between:g}: int8, int4. The smallest is int4, with " in shown
    cells = {line.split()[0]: line.split() for line in result.stderr.splitlines() if line.strip()}
    assert [cells[name][-1] for name in ("int8", "int4", "int2")] == ["yes", "yes", "no"]
    assert all(len(line) <= 80 for line in result.stderr.splitlines() if str(known) not in line)
    assert "…" not in result.stderr
    assert cells["int4"][1] == f"{kl['int4']:.2g}"
    assert "\nTo use it: kvlayers.generate(model, ..., cache_implementation='int4')\n" in result.stderr

    within = json.loads(result.stdout)
    assert within["settings"][2]["use"] == {"cache_implementation": "int4"}
    assert (within["recommended"], within["passed"]) == ("int4", True)
    assert within["budget"] == {"max_kl": between, "max_perplexity_increase": None, "max_bytes": None}
    none = fidelity(*arguments, kl["int8"] / 2, code=1)
    assert "No setting is within a KL divergence of" in none.stderr


def test_the_cache_that_loses_least_within_some_memory(
    llama: Path, known: Path, figures: dict[str, dict[str, float]], tmp_path: Path
) -> None:
    """The answer is the first line, whether or not there is a budget. No report is written unasked."""
    percent = round(50 * (figures["int4"]["of_full"] + figures["int8"]["of_full"]))
    assert 100 * figures["int4"]["of_full"] < percent < 100 * figures["int8"]["of_full"]
    arguments = (llama, *QUICK, "--bits", "8,4,2", "--results", known)
    result = fidelity(*arguments, "--max-bytes", f"{percent}%", "--json", code=0)
    shown = command_line.words(result.stderr)
    answer = f"Within {percent}% of memory: int4, int2. Least is lost with int4, with "
    assert answer in shown
    assert shown.index(answer) < shown.index("Perplexity")
    assert "cache_implementation='int4'" in shown
    within = json.loads(result.stdout)
    assert (within["recommended"], within["budget"]["max_bytes"]) == ("int4", f"{percent}%")

    plain = command_line.words(fidelity(*arguments).stdout)
    assert re.search("In half the memory of full precision, least is lost with int|No measured setting takes", plain)
    assert "No setting is within 1 B of memory" in fidelity(*arguments, "--max-bytes", "1B", code=1).stdout
    assert not {path.name for path in tmp_path.iterdir()} - {"text.txt", "caches_of_a_user.py"}


HALF = FidelityBudget(max_bytes=Fraction(1, 2))
FIXED = FidelityBudget(max_bytes=51)


@pytest.mark.parametrize(
    ("budget", "kl", "perplexity_increase", "nbytes", "allowed"),
    [
        (FidelityBudget(max_perplexity_increase=1.0), 5.0, 0.9, None, True),
        (FidelityBudget(max_perplexity_increase=1.0), 0.0, 1.1, None, False),
        (FidelityBudget(max_kl=0.1, max_perplexity_increase=1.0), 0.2, 0.5, None, False),
        (FidelityBudget(max_kl=0.1), math.nan, math.nan, None, False),
        (FidelityBudget(), 9.0, 9.0, None, True),
        *((HALF, 9.0, 9.0, nbytes, nbytes == 50) for nbytes in (None, 50, 51)),
        (HALF, math.nan, 0.0, 50, False),
        *((FIXED, 9.0, 9.0, nbytes, nbytes == 51) for nbytes in (None, 51, 52)),
    ],
)
def test_budgets_of_divergence_perplexity_and_bytes(
    budget: FidelityBudget, kl: float, perplexity_increase: float, nbytes: int | None, allowed: bool
) -> None:
    assert budget.allows(kl, perplexity_increase, nbytes, 100) is allowed


def test_the_smallest_is_best_and_within_bytes_the_one_that_loses_least() -> None:
    """Bytes that are not known count as the most."""
    small, large, unknown, outside = (
        SettingFidelity(name, nbytes, None, None, kl=kl, within=name != "outside")
        for name, nbytes, kl in (("small", 100, 0.3), ("large", 200, 0.2), ("unknown", None, 0.1), ("outside", 50, 0.0))
    )
    for budget, measured, best in (
        (FidelityBudget(), (large, small, unknown, outside), small),
        (FidelityBudget(), (unknown, outside), unknown),
        (FidelityBudget(), (outside,), None),
        (FidelityBudget(max_bytes=1000), (small, large, outside), large),
        (FidelityBudget(max_bytes=1000), (small, unknown, outside), unknown),
    ):
        assert budget.best_of(measured) is best


def test_bytes_of_a_cache_that_takes_no_random_states_are_not_known() -> None:
    class Refusing(tf.DynamicCache):
        def update(self, *arguments: Any) -> Any:
            raise RuntimeError("not today")

    assert held_nbytes(Refusing, tf.LlamaConfig(**COMMON), 64, 8) is None


def test_a_cache_that_fails_is_said_and_ends_with_1(llama: Path) -> None:
    name = "caches_of_a_user:failing"
    result = fidelity(llama, *QUICK, "--bits", 4, "--cache", name, "--max-kl", 100, "--json", code=1)
    said = json.loads(result.stdout)
    full, four, failing = said["settings"]
    assert failing["failure"] == "RuntimeError: no more\nthan 96"
    assert (failing["within"], four["within"], full["within"]) == (False, True, None)
    assert said["recommended"] == "int4"
    assert f"{name} failed: RuntimeError: no more" in result.stderr


needs_reports = pytest.mark.skipif(
    bool(page.missing_packages()), reason="no matplotlib or jinja2 here: the extra 'report' brings them"
)


@needs_reports
@needs_browser
def test_a_browser_shows_the_whole_report(llama: Path, known: Path, tmp_path: Path) -> None:
    fidelity(llama, *QUICK, "--bits", "8,2", "--results", known, "--report", "report.html", code=0)
    for seen in looked_at([tmp_path / "report.html"]):
        seen.check()
        assert seen.drawings == 2


@needs_reports
def test_the_report_is_one_file_that_needs_nothing(llama: Path, known: Path, tmp_path: Path) -> None:
    options = ("--bits", "8,2", "--results", known, "--max-kl", 100, "--report", "report.html")
    fidelity(llama, *QUICK, *options, code=0)
    parsed = check_self_contained((tmp_path / "report.html").read_text())
    cells = {row[0]: row for row in parsed.cells}
    assert cells["Setting"][1:3] == ["KL", "KL, 99th"]
    assert cells["int8"][-1] == cells["int2"][-1] == "yes"
    assert (cells["Model"][1:], cells["Text"][1:]) == (["<i>llama"], ["text.txt"])
    assert parsed.tags.count("svg") == 2
    assert "mathdefault" not in parsed.text
    assert {"int8", "int2"} <= set(parsed.text.split())
    for words in ("nothing is chosen at random", "Fidelity by position"):
        assert words in parsed.text


def test_usual_lengths_are_cut_to_the_positions_of_the_model(llama: Path) -> None:
    said = command_line.said("fidelity", llama, "--text", "text.txt", "--passages", 1, "--bits", "4")
    assert (said["context"], said["scored"], said["chunk"]) == (160, 64, 32)


def test_what_is_too_short_to_be_rounded_is_said(llama: Path) -> None:
    assert "Nothing was rounded" in fidelity(llama, *QUICK, "--context", 32, "--scored", 32, "--bits", "4").output


def test_settings_go_by_the_names_that_people_write() -> None:
    assert list(settings("8, INT4,4,k4v2,fp8,native:3,hqq:k4v2")) == [
        "int8",
        "int4",
        "k4v2",
        "fp8",
        "int3",
        "hqq:k4v2",
    ]
    assert setting("hqq:k4v2")[1].options == {"backend": "hqq", "key_nbits": 4, "value_nbits": 2}
    assert setting("native")[1].options == {"backend": "native"}
    for wrong in ("", "four", "k4", "4v2", "none:4", "-4", "4,"):
        with pytest.raises(kvlayers.OptionError, match="`--bits` must be bits, such as 4"):
            settings(wrong)


def test_what_is_recommended_can_be_pasted() -> None:
    """Every setting is a name that there is, or a name with its options."""
    config = tf.LlamaConfig(**COMMON)
    for name, named in settings(f"8,4,3,2,fp8,k4v2{WITH_HQQ}").items():
        contender = kvlayers_contender(name, named, config, 64)
        line = usage_line(contender.generate_options or {})
        arguments = eval(line.replace("To use it: kvlayers.generate(model, ..., ", "dict("))
        made = kvlayers.make_cache(arguments["cache_implementation"], config, **arguments.get("cache_config", {}))
        assert made.quantization == contender.make().quantization
    assert setting("4")[1].generate_options == {"cache_implementation": "int4"}
    assert setting("3")[1].generate_options == {"cache_implementation": "quantized", "cache_config": {"nbits": 3}}


class Letters:
    """A tokenizer of letters."""

    def __call__(self, text: str) -> Any:
        return tf.BatchEncoding({"input_ids": [ord(letter) for letter in text]})


def test_passages_begin_at_lines_where_there_are_any_and_rows_at_other_places() -> None:
    def read(text: str, count: int, tokens: int) -> list[str]:
        return ["".join(map(chr, ids[0].tolist())) for ids in passages(Letters(), text, count, tokens)]

    assert read("abcd\nefgh\nijkl", 2, 4) == ["abcd", "ijkl"]
    assert read("abcdefghij", 2, 4) == ["abcd", "fghi"]
    with pytest.raises(kvlayers.OptionError, match="3 passages of 4 tokens, but one has only 3"):
        read("abcdefghij", 3, 4)
    assert rows(Letters(), "abcdefgh", 3, 4).tolist() == [list(b"abcd"), list(b"cdef"), list(b"efgh")]
    assert rows(Letters(), "abcd", 2, 4).tolist() == [list(b"abcd")] * 2


def test_without_a_file_the_text_is_that_of_pythons_help() -> None:
    assert len(read_text(None)) > 100_000


def test_a_package_that_is_missing_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hqq.core.quantize", None)
    command_line.check_refused(r'pip install "\.\[hqq\]"', "fidelity", llama, "--bits", "hqq:4")


# By position


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


# Runs that go on


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
    arguments = (llama, *QUICK, "--bits", "4,2", "--json", "--results", "run.jsonl")
    with monkeypatch.context() as patched:
        counting(patched, most=1)
        assert fidelity(*arguments).exit_code != 0
    file = tmp_path / "run.jsonl"
    written = file.read_bytes()
    assert written.count(b"\n") == 1 + 3
    # As if the process had been killed within a line.
    file.write_bytes(written[:-100])
    seen = counting(monkeypatch)
    result = fidelity(*arguments)
    assert seen == [["full", "int2"], ["full", "int4", "int2"]]
    assert {each["name"]: each for each in json.loads(result.stdout)["settings"]} == whole
    assert "2 of 6 readings of a passage through a cache were in run.jsonl." in result.stderr

    seen.clear()
    more = measured(llama, "--bits", "4,2", "--cache", "caches_of_a_user:windowed", "--results", "run.jsonl")
    assert seen == [["full", "caches_of_a_user:windowed"]] * 2
    assert {name: more[name] for name in whole} == whole


def test_a_file_of_another_run_is_refused(llama: Path, tmp_path: Path) -> None:
    arguments, file = (llama, *QUICK, "--bits", "4", "--results", "run.jsonl"), tmp_path / "run.jsonl"
    fidelity(*arguments, code=0)
    kept = file.read_bytes()
    for changed, words in (
        (("--chunk", 4), "is of another run, with chunk 8 (now 4): name another file"),
        (("--passages", 1), "with passages 2 (now 1)"),
        (("--dtype", "bfloat16"), "dtype float32 (now bfloat16)"),
    ):
        result = fidelity(*arguments, *changed, code=2)
        assert words in command_line.words(result.stderr.splitlines()[-1])
    assert file.read_bytes() == kept
    file.write_bytes(kept + b'{"passage": 0}\n')
    assert "line 6 has no scores" in fidelity(*arguments).stderr


def test_a_failure_and_scores_that_are_not_finite_are_tried_again(tmp_path: Path) -> None:
    for _ in range(2):
        record = PassageFile(tmp_path / "run.jsonl", {}, {})
        assert set(record.of_passage(0)) <= {"good"}
        record.add(0, "bad", PassageScores(failure="MemoryError: "))
        record.add(0, "overflowing", scores([math.nan]))
        record.add(0, "good", scores([0.1, 1 / 3]))
    assert record.of_passage(0) == {"good": scores([0.1, 1 / 3])}
