"""`kvlayers fidelity`: its figures beside a slow reference, its budgets, and how it ends."""

import dataclasses
import functools
import itertools
import json
import math
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import command_line
import kvlayers
import kvlayers_lab
from browser import looked_at, needs_browser
from kvlayers_lab.calibration import MeasuredSetting
from kvlayers_lab.cli import report as page
from kvlayers_lab.cli.console import read_text, usage_line
from kvlayers_lab.measuring.contenders import kvlayers_contender, setting, settings
from kvlayers_lab.measuring.fidelity import FidelityBudget, SettingFidelity
from kvlayers_lab.measuring.nbytes import bytes_of
from kvlayers_lab.measuring.text import passages
from model_directories import random_text, save_sharp_model
from models import COMMON
from slow_fidelity import slow_tokens
from web_page import check_self_contained

pytestmark = pytest.mark.usefixtures("text_directory")

CONTEXT, SCORED, CHUNK = 210, 30, 30
"""After the context, a block is packed: 16 sinks, 128 newest tokens and 64 others are fewer."""
QUICK = ("--context", CONTEXT, "--scored", SCORED, "--passages", 2, "--chunk", CHUNK)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharp_model(tmp_path_factory.mktemp("models") / "<i>llama", logits=30)


fidelity = functools.partial(command_line.run, "fidelity")


def measured(model: Path, *arguments: object) -> Any:
    result = fidelity(model, "--text", "text.txt", *QUICK, "--json", *arguments)
    return json.loads(result.stdout), result.exit_code


def slow_figures(directory: Path, **options: Any) -> dict[str, float]:
    """What a setting comes to, from the figures of each token."""

    def make_cache(config: Any) -> Any:
        return kvlayers.QuantizedCache(config=config, **options)

    tokens = list(itertools.chain(*slow_tokens(directory, make_cache, CONTEXT, SCORED, CHUNK)))
    perplexity = math.exp(sum(token.surprise for token in tokens) / len(tokens))
    in_full = math.exp(sum(token.surprise_in_full for token in tokens) / len(tokens))
    return {
        "tokens": len(tokens),
        "kl": sum(token.kl for token in tokens) / len(tokens),
        "perplexity": perplexity,
        "perplexity_increase": 100 * (perplexity / in_full - 1),
        "agreement": sum(token.agrees for token in tokens) / len(tokens),
    }


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("int2", {"nbits": 2}),
        ("k4v2", {"key_nbits": 4, "value_nbits": 2}),
    ],
)
def test_figures_are_those_of_a_slow_reference(llama: Path, name: str, options: dict[str, Any]) -> None:
    said, code = measured(llama, "--bits", name.removeprefix("int"))
    assert code == 0
    full, rounded = said["settings"]
    assert (full["name"], full["kl"], full["agreement"], rounded["name"]) == ("full", 0, 1, name)
    expected = slow_figures(llama, **options)
    assert expected["kl"] > 0.005
    assert rounded["perplexity_increase"] == pytest.approx(expected.pop("perplexity_increase"), abs=1e-2)
    assert {key: rounded[key] for key in expected} == pytest.approx(expected, rel=1e-3)
    assert sum(rounded["kl_of_passages"]) / 2 == pytest.approx(expected["kl"], rel=1e-3)


def test_a_calibration_is_measured_as_what_it_has_found(llama: Path, tmp_path: Path) -> None:
    bits = {"key_nbits": [8, 2], "value_nbits": [2, 4]}
    found = MeasuredSetting(bits, 100.0, 0.1)
    kvlayers_lab.Calibration(found, None, ()).save(tmp_path)
    said, code = measured(llama, "--bits", "4", "--calibration", tmp_path)
    assert code == 0
    assert [each["name"] for each in said["settings"]] == ["full", "int4", "calibrated"]
    assert said["settings"][2]["kl"] == pytest.approx(slow_figures(llama, **bits)["kl"], rel=1e-3)


def test_bytes_are_those_of_a_real_cache_in_bfloat16(llama: Path) -> None:
    config = tf.AutoConfig.from_pretrained(llama)
    said, _ = measured(llama, "--bits", "4,k8v2,hqq:4" if reports_hqq() else "4,k8v2")
    tokens = CONTEXT + SCORED
    for each in said["settings"]:
        if each["name"] == "full":
            cache: Any = kvlayers.DynamicCache(config=config, length_hint=tokens)
        else:
            _, named = setting(each["name"])
            cache = kvlayers.make_cache(named.name, config, length_hint=tokens, **named.options)
        for layer in range(config.num_hidden_layers):
            states = torch.randn(1, 2, tokens, 8).bfloat16()
            cache.update(states, states, layer)
        assert each["nbytes"] == cache.nbytes, each["name"]
        assert each["bytes_per_token"] == cache.nbytes / tokens
    full, rounded = said["settings"][:2]
    assert rounded["of_full"] == rounded["nbytes"] / full["nbytes"]


def reports_hqq() -> bool:
    try:
        import hqq  # noqa: F401
    except ImportError:
        return False
    return True


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
    return {each["name"]: each for each in measured(llama, "--bits", "8,4,2", "--results", known)[0]["settings"]}


def test_the_table_and_the_budget(llama: Path, known: Path, figures: dict[str, dict[str, float]]) -> None:
    kl = {name: found["kl"] for name, found in figures.items()}
    assert kl["int8"] < kl["int4"] < kl["int2"]
    between = (kl["int4"] + kl["int2"]) / 2
    arguments = (llama, "--text", "text.txt", *QUICK, "--bits", "8,4,2", "--results", known, "--json")
    result = fidelity(*arguments, "--max-kl", between)
    assert result.exit_code == 0, result.output
    # Where stdout has JSON, people read stderr.
    shown = " ".join(result.stderr.split())
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

    none = fidelity(*arguments, "--max-kl", kl["int8"] / 2)
    assert none.exit_code == 1
    assert "No setting is within a KL divergence of" in none.stderr


def test_the_cache_that_loses_least_within_some_memory(
    llama: Path, known: Path, figures: dict[str, dict[str, float]], tmp_path: Path
) -> None:
    """The answer is the first line, whether or not there is a budget. No report is written unasked."""
    percent = round(50 * (figures["int4"]["of_full"] + figures["int8"]["of_full"]))
    assert 100 * figures["int4"]["of_full"] < percent < 100 * figures["int8"]["of_full"]
    arguments = (llama, "--text", "text.txt", *QUICK, "--bits", "8,4,2", "--results", known)
    result = fidelity(*arguments, "--max-bytes", f"{percent}%", "--json")
    shown = " ".join(result.stderr.split())
    answer = f"Within {percent}% of memory: int4, int2. Least is lost with int4, with "
    assert answer in shown
    assert shown.index(answer) < shown.index("Perplexity")
    assert "cache_implementation='int4'" in shown
    within = json.loads(result.stdout)
    assert (within["recommended"], within["budget"]["max_bytes"]) == ("int4", f"{percent}%")
    assert result.exit_code == 0

    plain = " ".join(fidelity(*arguments).stdout.split())
    assert re.search("In half the memory of full precision, least is lost with int|No measured setting takes", plain)
    none = fidelity(*arguments, "--max-bytes", "1B")
    assert none.exit_code == 1
    assert "No setting is within 1 B of memory" in none.stdout
    for wrong in ("0%", "101%", "-5%", "half", "%"):
        refused = fidelity(*arguments, "--max-bytes", wrong)
        assert refused.exit_code == 2
        assert "--max-bytes" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


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
    small, large, outside = (
        SettingFidelity(name, nbytes, nbytes / 10, 0.5, within=within)
        for name, nbytes, within in (("small", 100, True), ("large", 200, True), ("outside", 50, False))
    )
    assert FidelityBudget().best_of([large, small, outside]) is small
    assert FidelityBudget().best_of([outside]) is None
    large, small = dataclasses.replace(large, kl=0.1), dataclasses.replace(small, kl=0.2)
    assert FidelityBudget(max_bytes=1000).best_of([large, small, outside]) is large


def test_a_setting_that_fails_is_said_and_ends_with_1(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = kvlayers.QuantizedCache.update

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.get_seq_length() >= 96 and self.quantization.keys.nbits == 3:
            raise RuntimeError("no more")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(kvlayers.QuantizedCache, "update", update)
    said, code = measured(llama, "--bits", "4,3", "--max-kl", 100)
    assert code == 1
    full, four, three = said["settings"]
    assert three["failure"] == "RuntimeError: no more"
    assert (three["within"], four["within"], full["within"]) == (False, True, None)
    assert said["recommended"] == "int4"
    assert "int3 failed: RuntimeError: no more" in fidelity(llama, "--text", "text.txt", *QUICK, "--bits", "3").output


needs_reports = pytest.mark.skipif(
    bool(page.missing_packages()), reason="no matplotlib or jinja2 here: the extra 'report' brings them"
)


@needs_reports
@needs_browser
def test_a_browser_shows_the_whole_report(llama: Path, known: Path, tmp_path: Path) -> None:
    arguments = ("--text", "text.txt", *QUICK, "--bits", "8,2", "--results", known, "--report", "report.html")
    result = fidelity(llama, *arguments)
    assert result.exit_code == 0, result.output
    for seen in looked_at([tmp_path / "report.html"]):
        seen.check()
        assert seen.drawings == 2


@needs_reports
def test_the_report_is_one_file_that_needs_nothing(llama: Path, known: Path, tmp_path: Path) -> None:
    arguments = ("--text", "text.txt", *QUICK, "--bits", "8,2", "--results", known)
    arguments += ("--max-kl", 100, "--report", "report.html")
    result = fidelity(llama, *arguments)
    assert result.exit_code == 0, result.output
    parsed = check_self_contained((tmp_path / "report.html").read_text())
    rows = {row[0]: row for row in parsed.cells}
    assert rows["Setting"][1:3] == ["KL", "KL, 99th"]
    assert rows["int8"][-1] == rows["int2"][-1] == "yes"
    assert rows["Model"] == ["Model", "<i>llama"]
    assert rows["Text"] == ["Text", "text.txt"]
    assert parsed.tags.count("svg") == 2
    assert "mathdefault" not in parsed.text
    assert {"int8", "int2"} <= set(parsed.text.split())
    for words in ("nothing is chosen at random", "Fidelity by position"):
        assert words in parsed.text


def test_usual_lengths_are_cut_to_the_positions_of_the_model(llama: Path) -> None:
    result = fidelity(llama, "--text", "text.txt", "--passages", 1, "--bits", "4", "--json")
    said = json.loads(result.stdout)
    assert (said["context"], said["scored"], said["chunk"]) == (160, 64, 32)


def test_what_is_too_short_to_be_rounded_is_said(llama: Path) -> None:
    result = fidelity(llama, "--text", "text.txt", "--context", 32, "--scored", 32, "--passages", 1, "--bits", "4")
    assert "Nothing was rounded" in result.output


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
    config = tf.LlamaConfig(num_hidden_layers=1)
    less, more = (kvlayers_contender(*setting(text), config, 4096).make for text in ("k4v2", "4"))
    assert bytes_of(less, config, 4096) < bytes_of(more, config, 4096)


def test_what_is_recommended_can_be_pasted() -> None:
    """Every setting is a name that there is, or a name with its options."""
    config = tf.LlamaConfig(**COMMON)
    for name, named in settings("8,4,3,2,fp8,k4v2,hqq:4" if reports_hqq() else "8,4,3,2,fp8,k4v2").items():
        contender = kvlayers_contender(name, named, config, 64)
        line = usage_line(contender.generate_options or {})
        arguments = eval(line.replace("To use it: kvlayers.generate(model, ..., ", "dict("))
        made = kvlayers.make_cache(arguments["cache_implementation"], config, **arguments.get("cache_config", {}))
        assert made.quantization == contender.make().quantization
    assert setting("4")[1].generate_options == {"cache_implementation": "int4"}
    assert setting("3")[1].generate_options == {"cache_implementation": "quantized", "cache_config": {"nbits": 3}}


def test_passages_begin_at_lines_where_there_are_any() -> None:
    class Letters:
        def __call__(self, text: str) -> Any:
            return tf.BatchEncoding({"input_ids": [ord(letter) for letter in text]})

    def read(text: str, count: int, tokens: int) -> list[str]:
        return ["".join(map(chr, ids[0].tolist())) for ids in passages(Letters(), text, count, tokens)]

    assert read("abcd\nefgh\nijkl", 2, 4) == ["abcd", "ijkl"]
    assert read("abcdefghij", 2, 4) == ["abcd", "fghi"]
    with pytest.raises(kvlayers.OptionError, match="3 passages of 4 tokens, but one has only 3"):
        read("abcdefghij", 3, 4)


def test_without_a_file_the_text_is_that_of_pythons_help() -> None:
    assert len(read_text(None)) > 100_000


def test_a_package_that_is_missing_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hqq.core.quantize", None)
    result = fidelity(llama, "--bits", "hqq:4")
    assert result.exit_code == 2
    assert 'pip install ".[hqq]"' in result.stderr
    assert "Traceback" not in result.output
