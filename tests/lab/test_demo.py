"""The demo, on a model of a few thousand weights, and the way it finds the model that it is for."""

import dataclasses
import functools
import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers
from rich.console import Console
from safetensors import safe_open
from transformers.utils import logging

import command_line
import kvlayers
from kvlayers.__main__ import main
from kvlayers.commands.common import Dtype
from kvlayers_lab import models as demo_model
from kvlayers_lab.measuring import contenders, decoding
from kvlayers_lab.measuring.nbytes import cache_nbytes
from kvlayers_lab.names import DEMO_MODEL
from model_directories import save_with_tokenizer, word_tokenizer
from models import fresh_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Without padding: its embedding is zero, and before 5.12 transformers' static layers count no token with zeros.
    return save_with_tokenizer(tmp_path_factory.mktemp("llama"), fresh_model("llama", pad_token_id=None))


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which nothing brings a demo model."""
    monkeypatch.delenv(demo_model.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo_model, "is_bundled", lambda: False)
    return tmp_path


# The demo is a script. A benchmark is called `demo` too, so that no folder of it is on the path.
spec: Any = importlib.util.spec_from_file_location("demo_script", Path(__file__).parents[2] / "lab" / "demo.py")
demo_run = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(demo_run)
APP = command_line.typer.Typer()
APP.command()(demo_run.demo)


_demo = functools.partial(command_line.run, app=APP)


def _table_rows(output: str) -> list[list[str]]:
    lines = [line for line in output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def _cache_rows(output: str) -> list[list[str]]:
    """Rows of the table of caches, which has no borders: library, cache, predictions, prompt, step, held."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]
    return [row for row in rows if len(row) == 6 and row[0] in ("transformers", "kvlayers")]


def test_the_demo_shows_every_cache_samples_and_a_second_turn(llama: Path) -> None:
    # In float32, where another order of sums does not change which token is drawn.
    options = ("--tokens", 6, "--trials", 2, "--context", 90, "--dtype", "float32", "--json")
    result = _demo("the sea is", "--model", llama, *options, code=0)
    # Where stdout has JSON, people read stderr.
    rows, caches = _table_rows(result.stderr), _cache_rows(result.stderr)
    assert [[*row[:2], row[2].split(", KL")[0]] for row in caches if row[1] not in ("int8", "int4", "sink")] == [
        ["transformers", "dynamic", "reference"],
        ["transformers", "static", "same tokens"],
        ["kvlayers", "dynamic", "same tokens"],
        ["kvlayers", "static", "same tokens"],
    ]
    assert all(len(line) <= 80 for line in result.stderr.splitlines() if line.split()[:1] == ["kvlayers"])
    predictions = {row[1]: row[2] for row in caches}
    assert all(predictions[name].startswith("rounded, KL ") for name in ("int8", "int4"))
    assert predictions["sink"].startswith("evicting, KL ")
    for *_, prompt, step, held in caches:
        assert prompt.endswith(" s")
        assert all(float(figure.split()[0]) > 0 for figure in (step, held))
    assert [row[0] for row in rows[:2]] == ["transformers", "kvlayers"]
    assert [row[:2] for row in rows[2:]] == [
        ["transformers, the whole chat again", "reference"],
        ["transformers, its cache kept", ""],
        ["kvlayers.PrefixStore", "same"],
    ]
    assert "Next: `kvlayers bench`" in result.stderr
    said = json.loads(result.stdout)
    assert (said["tokens"], said["model"]) == (6, llama.name)
    exact = [row for row in said["caches"] if row["failure"] is None and row["fidelity"] == "exact"]
    assert [(row["library"], row["cache"]) for row in exact] == [
        ("transformers", "dynamic"),
        ("transformers", "static"),
        *(("kvlayers", name) for name in ("dynamic", "static")),
    ]
    assert all(row["same_tokens"] and row["nbytes"] > 0 for row in exact)
    assert said["samples"]["kvlayers"]["samples"] == 8
    # transformers' own cache, kept, has what the first turn left: from it comes the same answer.
    assert said["second_turn"]["kept"]["tokens"] == said["second_turn"]["alone"]["tokens"]
    assert len(said["second_turn"]["stored"]["tokens"]) == 6


def _loaded(directory: Path) -> demo_model.LoadedModel:
    console = Console(quiet=True)
    return demo_model.load(console, demo_model.find(console, str(directory), "cpu"), Dtype.float32)


def test_the_demo_shows_the_prompt_and_what_the_model_makes_of_it(llama: Path) -> None:
    result = _demo("the sea is", "--model", llama, "--tokens", 6, "--trials", 1)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(llama)
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    ids = tokenizer("the sea is", return_tensors="pt").input_ids
    continuation = loaded.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert "the sea is" + tokenizer.decode(continuation, skip_special_tokens=True) in result.output


def test_the_prompt_comes_after_real_text(llama: Path) -> None:
    shown = command_line.words(_demo("--model", llama, "--context", 32, "--tokens", 3, "--trials", 1, code=0).output)
    assert "32 of them from the Python documentation" in shown
    assert "Once upon a time, a programmer" in shown


@pytest.mark.parametrize(
    ("family", "names"),
    [
        # Without rotary embeddings there are no sinks, and a row with a refusal would teach nobody anything.
        ("gpt2", ["dynamic", "static", "int8", "int4"]),
        ("gemma3", ["dynamic", "static", "sliding_window", "hybrid", "int8", "int4", "sink"]),
    ],
)
def test_a_model_is_run_with_the_caches_that_it_can_have(family: str, names: list[str]) -> None:
    found = demo_run.demo_contenders(fresh_model(family), 20)
    assert [contender.cache for contender in found if contender.library == "kvlayers"] == names


def test_other_tokens_are_reported_and_the_demo_fails(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second_turn = demo_run.second_turn

    def one_wrong_token(*arguments: Any, **options: Any) -> list[decoding.ContenderResult]:
        rows = decoding.measure(*arguments, **options)
        [static] = [row for row in rows if row.contender.key == ("kvlayers", "static")]
        static.other_tokens += 1
        return rows

    def another_answer(*arguments: Any) -> Any:
        chat, answers = second_turn(*arguments)
        answers.stored.tokens[2] += 1
        return chat, answers

    with monkeypatch.context() as patched:
        patched.setattr(demo_run, "measure", one_wrong_token)
        output = _demo("the sea is", "--model", llama, "--tokens", 6, code=1).output
    assert [row[2] for row in _cache_rows(output) if row[:2] == ["kvlayers", "static"]] == ["1 other tokens"]
    monkeypatch.setattr(demo_run, "second_turn", another_answer)
    assert _table_rows(_demo("the sea is", "--model", llama, "--tokens", 6, code=1).output)[-1][1] == "another"


def test_a_tie_is_no_other_answer(llama: Path) -> None:
    loaded = _loaded(llama).model
    chat = torch.full((1, 5), 4)
    likeliest, least = (int(index) for index in loaded(chat).logits[0, -1].topk(97).indices[[0, -1]])
    assert demo_run.differs(loaded, chat, [likeliest, 8], [least, 8])
    assert not demo_run.differs(loaded, chat, [likeliest, 8], [likeliest, 8])
    torch.nn.init.zeros_(loaded.lm_head.weight)
    assert not demo_run.differs(loaded, chat, [likeliest, 8], [least, 8])


def test_the_summary_has_what_the_figures_of_this_run_support() -> None:
    slow, fast = demo_run.Samples(8.0, 8), demo_run.Samples(2.0, 1)
    answers = demo_run.Answers(*(demo_run.Answer(seconds, [1]) for seconds in (3.0, 0.12, 0.1)))
    reference = _row("dynamic", seconds=0.4, nbytes=100, library="transformers")
    static = _row("static", seconds=0.25, nbytes=100, library="transformers")
    rows = [reference, _row("dynamic", seconds=0.2, nbytes=110), _row("int4", seconds=0.1, nbytes=30)]
    int4 = "int4 holds 30% of the bytes, at 2.00 of dynamic's speed."
    assert demo_run.summary([*rows, static], (slow, fast), answers) == (
        "With kvlayers, dynamic decodes 2.0 times as fast as transformers' DynamicCache, and 1.2 times as fast as its "
        f"StaticCache of this length. {int4} 8 samples of one prompt come 4.0 times as fast. The first token of a "
        "second turn comes after 0.10 s: transformers takes 3.00 s to read the chat again, or 0.12 s with its cache "
        "kept."
    )
    dynamic = "dynamic decodes 2.0 times as fast as transformers' DynamicCache."
    assert demo_run.summary(rows, None, None) == f"With kvlayers, {dynamic} {int4}"
    rows[1].trials[0] = dataclasses.replace(rows[1].trials[0], prefill_seconds=0.5)
    read = "It reads the prompt 2.0 times as fast."
    assert demo_run.summary(rows, None, None) == f"With kvlayers, {dynamic} {read} {int4}"
    same = [reference, _row("int4", seconds=0.4, nbytes=100)]
    assert "changes little" in demo_run.summary(same, (fast, fast), None)


def test_a_busy_machine_is_said_and_no_speed_is_claimed() -> None:
    rows = [_row("dynamic", seconds=0.4, nbytes=100, library="transformers"), _row("int4", seconds=0.2, nbytes=30)]
    assert not demo_run.is_noisy(rows)
    rows[1].trials[0] = dataclasses.replace(rows[1].trials[0], step_seconds=[0.1, 0.2, 0.4, 0.5])
    assert demo_run.is_noisy(rows)
    assert demo_run.summary(rows, None, None) == "With kvlayers, int4 holds 30% of the bytes."


def test_caches_take_turns_after_each_step(llama: Path) -> None:
    model, passed = _loaded(llama).model, list[Any]()

    def note(module: Any, args: Any, options: dict[str, Any]) -> None:
        passed.append(next(each for each in options.values() if isinstance(each, kvlayers.Cache)))

    made = [contenders.Contender("kvlayers", name, kvlayers.DynamicCache) for name in ("dynamic", "static")]
    with model.register_forward_pre_hook(note, with_kwargs=True):
        first, second = decoding.measure(model, torch.full((1, 5), 4), 4, 1, made, lambda *_: None, 2)
    # The reference first decodes alone.
    assert [int(cache is passed[6]) for cache in passed[5:]] == [0, 1, 0, 1, 1, 0, 0, 1, 1, 0]
    assert len(first.trials[0].step_seconds) == len(second.trials[0].step_seconds) == 4
    assert (second.other_tokens, second.trials[0].kl) == (0, 0.0)


def _row(cache: str, seconds: float, nbytes: int, library: str = "kvlayers") -> decoding.ContenderResult:
    trial = decoding.Trial(1.0, [seconds], nbytes, torch.zeros(1, 2), 0.0)
    return decoding.ContenderResult(contenders.Contender(library, cache, dict), [trial])


def test_bytes_of_transformers_include_what_views_keep_alive() -> None:
    cache = transformers.DynamicCache()
    whole = torch.zeros(1, 2, 100, 8)
    cache.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0)
    cache.layers[0].keys, cache.layers[0].values = whole[:, :, :3], whole[:, :, 50:]
    assert cache_nbytes(cache) == 1 * 2 * 100 * 8 * 4


def test_the_context_is_real_text_of_as_many_tokens_as_asked_for() -> None:
    tokenizer = word_tokenizer()
    assert len(demo_run.real_text_ids(tokenizer, 500)) == 500
    assert len(demo_run.input_ids(tokenizer, "the sea", 500)[0]) == 502
    assert demo_run.input_ids(tokenizer, "the sea", 0).tolist() == [[3, 4]]


def test_the_model_that_is_given_comes_first(nowhere: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(demo_model.VARIABLE, str(nowhere))
    assert demo_model.find_model(str(llama)) == str(llama)
    assert demo_model.find_model("owner/name") == "owner/name"


def test_the_default_model_is_searched_for_in_order(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo_model.find_model() == demo_model.HUB_NAME

    def export(target: Path) -> Path:
        return target

    monkeypatch.setattr(demo_model, "is_bundled", lambda: True)
    monkeypatch.setattr(demo_model, "export_bundled_model", export)
    assert demo_model.find_model() == str(nowhere / "cache" / "kvlayers" / DEMO_MODEL)

    (nowhere / ".models" / DEMO_MODEL).mkdir(parents=True)
    assert demo_model.find_model() == str(Path(".models") / DEMO_MODEL)

    (nowhere / "elsewhere").mkdir()
    monkeypatch.setenv(demo_model.VARIABLE, str(nowhere / "elsewhere"))
    assert demo_model.find_model() == str(nowhere / "elsewhere")


NO_DIRECTORY = "`--model` must be a model directory, but there is no directory at"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("", "--context", 0), "Pass a prompt, or a `--context`"),
        (("the sea", "--context", 250), "within the 256 positions of the model"),
        # By default the context is longer than this model has positions for.
        (("--tokens", 3), "Context, prompt and continuation together"),
        (("--device", "cuda:77"), "`--device` must be a device of this machine, got 'cuda:77'"),
        *((("--model", name), NO_DIRECTORY) for name in ("./none", "/no/such/model", "~/no-such-model", "a/b/c")),
        (("--model", "kvlayers/no-such-model"), "kvlayers/no-such-model cannot be loaded"),
        (("--model", "."), "must be a causal language model"),
        ((), "`KVLAYERS_DEMO_MODEL` must be a model directory"),
    ],
)
def test_bad_input_is_one_sentence(
    llama: Path, nowhere: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[Any, ...], words: str
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv(demo_model.VARIABLE, "owner/name" if not arguments else str(llama))
    result = _demo(*arguments, code=2)
    assert words in result.stderr
    assert "Traceback" not in result.output
    assert result.stderr.count("\n") == 1


def test_an_export_that_fails_leaves_nothing_behind(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise OSError("the disk is full")

    def found(name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(submodule_search_locations=[str(nowhere)])

    monkeypatch.setattr(demo_model, "_export", fail)
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", found)
    with pytest.raises(demo_model.ModelError, match="the disk is full"):
        demo_model.export_bundled_model(nowhere / "models" / "target")
    assert list((nowhere / "models").iterdir()) == []


def test_the_export_takes_16_bits_and_says_so(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights.gguf").touch()
    target = tmp_path / "target"
    target.mkdir()
    of_llama = {
        name: types.SimpleNamespace(from_pretrained=lambda source, auto=auto, gguf_file=None, **how: auto(llama, **how))
        for name, auto in (
            (
                "AutoModelForCausalLM",
                lambda place, dtype: transformers.LlamaForCausalLM.from_pretrained(place, dtype=dtype),
            ),
            ("AutoTokenizer", transformers.AutoTokenizer.from_pretrained),
        )
    }
    monkeypatch.setattr(demo_model, "transformers", types.SimpleNamespace(**of_llama))
    monkeypatch.setattr(demo_model.models, "dequantizing_gguf", dict)
    demo_model._export(tmp_path, target)
    with safe_open(target / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118
    assert transformers.AutoConfig.from_pretrained(target).dtype is torch.bfloat16


def test_an_export_that_is_there_is_not_made_again_and_says_its_dtype(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = nowhere / "config.json"
    config.write_text('{"dtype": "float32", "rope_theta": 3}')
    monkeypatch.delattr(demo_model, "_export")
    for _ in range(2):
        assert demo_model.export_bundled_model(nowhere) == nowhere
        assert json.loads(config.read_text()) == {"dtype": "bfloat16", "rope_theta": 3}


@pytest.mark.parametrize("enabled", [True, False])
def test_bars_of_transformers_are_hidden_only_while_weights_are_loaded(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    monkeypatch.setattr(logging, "_tqdm_active", enabled)
    _loaded(llama)
    assert capsys.readouterr().err == ""
    assert logging.is_progress_bar_enabled() is enabled


def test_the_version_is_shown() -> None:
    result = command_line.run("--version")
    assert result.output == f"kvlayers {kvlayers.__version__}\n"


def test_the_command_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "kvlayers: the commands need typer: pip install typer\n"
