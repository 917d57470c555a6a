"""What commands of the lab refuse: in one line, with the exit code 2, before weights are loaded. Nothing is written.

Models and files that are none are refused as well, and leave nothing behind.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import versions
from command_line import check_refused, run, said
from kvlayers_lab.calibration import Calibration, MeasuredSetting
from matrix import once
from model_directories import save_with_tokenizer
from models import fresh_model

pytestmark = pytest.mark.usefixtures("text_directory")

MODEL = "{model}"
TASKS, DOCUMENTS = ("--tasks", "needle"), ("--documents", "2")

OF_ALL = (
    (("./none",), "`MODEL` must be a model directory"),
    ((MODEL, "--text", "none.txt"), "`--text`: none.txt cannot be read"),
    ((MODEL, "--device", "cuda:77"), "`--device` must be a device of this machine, got 'cuda:77'"),
)
"""What every way to call a command refuses."""

OF_REPORTS = (((MODEL, "--report", "no/such/report.html"), "`--report`: no/such/report.html cannot be written"),)

USUAL: dict[str, tuple[str, ...]] = {
    "bench": (),
    "fidelity": (),
    "fidelity of tasks": (*TASKS, "--lengths", "320"),
    "fidelity of documents": (*DOCUMENTS, "--document-tokens", "40"),
    "calibrate": ("--max-kl", "1", "--context", "272", "--scored", "8", "--passages", "1"),
}
"""The options of each way to call a command, unless a case has another value for them."""

REFUSED: dict[str, Sequence[tuple[Sequence[str], str]]] = {
    "bench": (
        *OF_ALL,
        *OF_REPORTS,
        ((MODEL, "--lengths", "1k,lots"), "a number of tokens.*got 'lots'"),
        ((MODEL, "--lengths", "0"), "`--lengths` must be at least 1 token each, got 0"),
        ((MODEL, "--steps", "512"), "`--steps` must be fewer than the 512 positions.*got 512"),
        ((MODEL, "--cache", "dinamic"), "did you mean 'dynamic'"),
        ((MODEL, "--against", "int4"), "`--against` must be transformers, or .*got 'int4'"),
        ((MODEL, "--text", "."), "`--text`: . cannot be read"),
        ((MODEL, "--text", "empty.txt"), "empty.txt is empty"),
        ((MODEL, "--text", "binary"), "`--text` must be a text in UTF-8, but binary is not"),
        ((MODEL, "--text", "zeros"), "zeros has zero bytes"),
        ((MODEL, "--text", "short.txt"), "at least 480 tokens, got 4"),
        ((MODEL, "--report", "."), "`--report`: . cannot be written"),
        ((MODEL, "--report", "~nobody-of-that-name/x.html"), "no home"),
        ((MODEL, "--device", "meta"), "'meta'"),
        (("no/model",), "no/model cannot be loaded"),
        ((".",), "must be a causal language model"),
    ),
    "fidelity": (
        *OF_ALL,
        *OF_REPORTS,
        ((MODEL, "--bits", "lots"), "`--bits` must be bits, such as 4.*got 'lots'"),
        ((MODEL, "--bits", "4,7"), "`--bits` .*one of 1, 2, 3, 4, 5, 6, 8, got 7"),
        ((MODEL, "--bits", "fp8:4"), "`--bits` of the fp8 backend must be one of 8, got 4"),
        ((MODEL, "--context", "32q"), "a number of tokens.*got '32q'"),
        ((MODEL, "--context", "100"), "multiples of `--chunk`, 32"),
        ((MODEL, "--scored", "0"), "at least one token must be scored, got"),
        ((MODEL, "--context", "512"), "within the 512 positions of the model"),
        ((MODEL, "--text", "short.txt"), "4 passages of 481 tokens, but one has only"),
        *(((MODEL, "--max-bytes", wrong), "`--max-bytes` must be ") for wrong in ("0%", "101%", "-5%", "half", "%")),
        ((MODEL, "--max-kl", "inf"), "`--max-kl` must be a finite number, at least 0, got inf"),
        ((MODEL, "--max-perplexity-increase", "inf"), "`--max-perplexity-increase` must be a finite number"),
        ((MODEL, "--calibration", "~nobody-of-that-name/x"), "no home"),
        ((MODEL, "--seed", "0"), "`--seed` is for tasks: pass `--tasks` as well, or leave `--seed` out"),
        ((MODEL, "--budget", "5"), "`--budget` is for tasks"),
        ((MODEL, "--recompute", "5%"), "is for documents: pass `--documents` as well"),
        ((MODEL, "--calibration", "none"), "`--calibration`: "),
        ((MODEL, "--calibration", "three_layers.json"), "2 layers of the model, got 3"),
        ((MODEL, "--cache", "int5"), "`--cache` must be .* got 'int5'. Did you mean int"),
        ((MODEL, "--cache", "no.module:cache"), "`--cache` must be a callable that can be imported, got 'no.module:c"),
        ((MODEL, "--cache", "none_caches:fails"), r"none_caches:fails cannot make a cache.*\(no cache today\)"),
        ((MODEL, "--against", "none"), "`--against` must be transformers, or .*got 'none'"),
        ((MODEL, "--results", "no/such/file.jsonl"), "`--results`: no/such/file.jsonl cannot be written"),
        ((MODEL, "--results", "one", "--report", "./one"), "`--results` and `--report` must be two files, got one for"),
        (("no/model",), "no/model cannot be loaded"),
    ),
    "fidelity of tasks": (
        *OF_ALL,
        *OF_REPORTS,
        ((MODEL, "--tasks", "needles"), r"`--tasks` must be keys, needle, .*or all, got 'needles'"),
        ((MODEL, "--tasks", "needle,"), "`--tasks` must be .*got ''"),
        ((MODEL, "--lengths", "many"), "`--lengths` must be a number of tokens.*got 'many'"),
        ((MODEL, "--lengths", "0"), "`--lengths` must be at least 1 token each, got 0"),
        ((MODEL, "--lengths", "300,600"), "`--lengths` must be within the 512 positions of the model, got 600"),
        ((MODEL, "--lengths", "512"), "must leave room for the answer within the 512 positions"),
        ((MODEL, "--lengths", "20"), "`--lengths` must be at least .* tokens for the task 'needle'"),
        ((MODEL, "--depths", "0,150"), "`--depths` must be percentages from 0 to 100.*got '150'"),
        ((MODEL, "--depths", "nan"), "`--depths` must be percentages.*got 'nan'"),
        ((MODEL, "--depths", ""), "`--depths` must be percentages.*got ''"),
        ((MODEL, "--budget", "101"), "`--budget` must be percentage points from 0 to 100, got 101"),
        ((MODEL, "--bits", "lots"), "`--bits` must be bits, such as 4.*got 'lots'"),
        ((MODEL, "--bits", ""), "`--bits` must be bits"),
        ((MODEL, "--cache", "dynamik"), "`--cache` must be .*got 'dynamik'. Did you mean dynamic"),
        ((MODEL, "--cache", "no_module:made"), "`--cache` must be a callable that can be imported, got 'no_"),
        ((MODEL, "--cache", "none_caches:made"), "none_caches:made must return a cache of transformers, got"),
        ((MODEL, "--cache", "none_caches:ends"), "none_caches:ends cannot make a cache .*SystemExit .7."),
        ((MODEL, "--cache", "none_caches:filled"), "must return a new, empty cache at each call, got one"),
        ((MODEL, "--against", "dynamo"), "`--against` must be .*got 'dynamo'"),
        ((MODEL, "--results", "no/such.jsonl"), "`--results`: no/such.jsonl cannot be written"),
        ((MODEL, "--results", "/dev/null"), "`--results`: /dev/null must be a file, but it is a device"),
        ((MODEL, "--results", ":b:/x"), "`--results`: :b:/x cannot be written"),
        ((MODEL, "--results", "one", "--report", "./one"), "`--results` and `--report` must be two files, got one for"),
        ((MODEL, "--calibration", "none"), "`--calibration`: "),
        ((MODEL, "--calibration", "three_layers.json"), "2 layers of the model, got 3"),
        ((MODEL, "--max-kl", "1"), "`--max-kl` is for a running text: leave out either it or `--tasks`"),
        ((MODEL, "--passages", "4"), "`--passages` is for a running text"),
    ),
    "fidelity of documents": (
        *OF_ALL,
        *OF_REPORTS,
        ((MODEL, "--documents", "1"), "`--documents` must be whole numbers, at least 2"),
        ((MODEL, "--documents", "two"), "`--documents` must be whole numbers, at least 2"),
        ((MODEL, "--recompute", "120%"), "`--recompute` must be a number of first tokens"),
        ((MODEL, "--recompute", "-3"), "`--recompute` must be a number of first tokens"),
        ((MODEL, "--document-tokens", "0"), "`--document-tokens` must be at least 1"),
        ((MODEL, "--scored", "1"), "`--scored` must be at least 2 tokens"),
        ((MODEL, "--documents", "40"), "within the 512 positions of the model"),
        ((MODEL, "--bits", "4"), "`--bits` does not apply to `--documents`"),
        ((MODEL, *TASKS, "--lengths", "512"), "`--lengths` does not apply to `--documents`"),
        ((MODEL, "--results", "file"), "`--results` needs `--tasks`"),
        ((MODEL, "--budget", "2"), "`--budget` is for tasks"),
        ((MODEL, *TASKS, "--max-kl", "2"), "`--max-kl` is for a running text"),
    ),
    "calibrate": (
        *OF_ALL,
        ((MODEL, "--bytes-per-token", "5KiB"), "one budget, .* got both"),
        ((MODEL, "--max-kl", "0"), "`--max-kl` must be a number above 0, got 0"),
        ((MODEL, "--max-kl", "inf"), "`--max-kl` must be a number above 0, got inf"),
        ((MODEL, "--bits", "2,x"), "`--bits` must be numbers separated by commas, .* got '2,x'"),
        ((MODEL, "--bits", "4"), "`--bits` must be two or more numbers of bits"),
        ((MODEL, "--bits", "2,7"), "`--bits` must be a list of 1, 2, 3, 4, 5, 6, 8, got"),
        ((MODEL, "--backend", "none"), "none"),
        ((MODEL, "--context", "32q"), "`--context` must be a number of tokens.*got '32q'"),
        ((MODEL, "--context", "64"), "`--context` must be at least .* tokens, .* got 64"),
        ((MODEL, "--context", "1k"), "`--context` and `--scored` .* within the 512 positions"),
        ((MODEL, "--scored", "0"), "`--scored` must be at least 1, got 0"),
        ((MODEL, "--text", "short.txt"), "1 passages of"),
        ((MODEL, "--output", "other.json"), "`--output`: other.json is not a calibration"),
        ((MODEL, "--output", "text.txt/x.json"), "`--output`: text.txt/x.json cannot be written"),
        ((MODEL, "--output", "new/" + 300 * "x"), "`--output`: new/x+/.* cannot be written"),
    ),
    "calibrate without a budget": (((MODEL,), "one budget, `--bytes-per-token` .* or `--max-kl` .* got neither"),),
    "calibrate within bytes": (
        ((MODEL, "--bytes-per-token", "lots"), "`--bytes-per-token` must be a number of bytes.*got 'lots'"),
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = fresh_model("llama", max_position_embeddings=512)
    return save_with_tokenizer(tmp_path_factory.mktemp("models") / "llama", made)


@pytest.fixture
def files(text_directory: Path) -> dict[str, bytes]:
    """Files that are not what options ask for, in the current directory."""
    for name, content in {
        "empty.txt": b" \n",
        "short.txt": b"the sea is a",
        "binary": b"\x80\xff",
        "zeros": b"the\0sea",
        "other.json": b"{}",
        "one": b"",
    }.items():
        (text_directory / name).write_bytes(content)
    found = MeasuredSetting({"key_nbits": [8, 2, 4], "value_nbits": [2, 4, 4]}, 100.0, 0.1)
    Calibration(found, None, ()).save(text_directory / "three_layers.json")
    (text_directory / "none_caches.py").write_text(
        "import torch, transformers\n"
        "def made(config): return None\n"
        "def ends(config): raise SystemExit(7)\n"
        "def fails(config): raise ValueError('no cache today')\n"
        "def filled(config):\n"
        "    cache = transformers.DynamicCache(config=config)\n"
        "    cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)\n"
        "    return cache\n"
    )
    return contents(text_directory)


def contents(directory: Path) -> dict[str, bytes]:
    found = (path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


@pytest.mark.parametrize(
    ("way", "arguments", "words"), [(way, *case) for way, cases in REFUSED.items() for case in cases]
)
def test_bad_input_is_one_line_and_exit_code_2_before_weights_are_loaded(
    model: Path,
    files: dict[str, bytes],
    text_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    arguments: Sequence[str],
    words: str,
) -> None:
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    usual = ("--text", "text.txt", *USUAL.get(way, ()))
    pairs = zip(usual[::2], usual[1::2], strict=True)
    given = [str(model) if each == MODEL else each for each in arguments]
    given += [word for option, value in pairs if option not in given for word in (option, value)]
    check_refused(words, way.partition(" ")[0], *given)
    assert contents(text_directory) == files


# Models and files that are none

COMMANDS = {
    "bench": ("--text", "text.txt", "--lengths", "16", "--steps", "2", "--trials", "1", "--cache", "dynamic"),
    "fidelity": (
        *("--text", "text.txt", "--context", "64", "--scored", "8", "--passages", "1", "--chunk", "8", "--bits", "4"),
    ),
    "plan": ("--context", "1k"),
}
MEASURE = ("bench", "fidelity")


def check_last_line(words: str, command: str, *arguments: object) -> None:
    """See that a command is refused, in its last line: behind the bars of what was loaded before."""
    result = run(command, *arguments, *COMMANDS[command], code=2)
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"kvlayers {command}: "), result.stderr
    assert words in last
    assert "Traceback" not in result.output
    assert not result.stdout.strip().startswith("{")


def changed(**fields: Any) -> Callable[[Path], None]:
    """What makes a model's config say something else."""

    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, **fields}))

    return change


def text_of(name: str, content: bytes) -> Callable[[Path], None]:
    """What replaces a file of a model."""
    return lambda model: (model / name).write_bytes(content) and None


BROKEN: dict[str, Callable[[Path], None]] = {
    "a config that is a list": text_of("config.json", b"[1, 2]"),
    "a config of another kind of model": changed(model_type="zzz"),
    "code of its own": changed(model_type="zzz", auto_map={"AutoConfig": "x.X", "AutoModelForCausalLM": "x.Y"}),
    "weights of other shapes": changed(hidden_size=64),
    "layers that are a word": changed(num_hidden_layers="two"),
    "no heads": changed(num_attention_heads=0),
    "weights that are none": text_of("model.safetensors", b"\xff" * 300),
    "a tokenizer that is empty": text_of("tokenizer.json", b"{}"),
}


# Both commands that measure find and load a model in the same way.
@pytest.mark.parametrize(
    ("command", "broken"),
    [
        *once(MEASURE, BROKEN),
        *(("plan", broken) for broken in ("a config that is a list", "code of its own", "layers that are a word")),
    ],
)
def test_a_model_that_cannot_be_loaded(model: Path, tmp_path: Path, command: str, broken: str) -> None:
    copied = shutil.copytree(model, tmp_path / "model")
    BROKEN[broken](copied)
    # Before 5.0, configs of transformers do not check what they hold.
    said = broken == "layers that are a word" and Version("5.1") > versions.TRANSFORMERS
    words = "describes its layers" if said else "model cannot be loaded"
    check_last_line("" if command == "plan" else words, command, copied, "--json")


@pytest.mark.parametrize("command", MEASURE)
def test_a_tokenizer_of_another_model(tmp_path: Path, command: str) -> None:
    other = save_with_tokenizer(tmp_path / "model", fresh_model("llama", vocab_size=40))
    check_last_line("token ids from 0 to 39", command, other)


def test_a_model_that_cannot_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("out of something\nand more of it")

    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", fail)
    check_last_line("RuntimeError (out of something)", "fidelity", model)


def test_a_link_that_leads_to_no_file_yet_stays_one(model: Path, tmp_path: Path) -> None:
    link, target = tmp_path / "link.html", tmp_path / "target.html"
    link.symlink_to(target)
    check_last_line("", "bench", model, "--report", link, "--device", "meta")
    assert link.is_symlink()
    assert not target.exists()
    run("bench", model, "--report", link, *COMMANDS["bench"], code=0)
    assert "</html>" in target.read_text()


def test_names_that_are_no_utf_8(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "\udcff.html"
    monkeypatch.setattr("sys.argv", ["kvlayers", "bench", "--report", name])
    result = run("bench", model, "--report", name, *COMMANDS["bench"], code=0)
    assert r"\udcff.html" in result.output
    assert r"\udcff.html" in (tmp_path / name).read_text()


@pytest.mark.parametrize("command", MEASURE)
def test_a_model_whose_logits_are_nan_is_measured_and_fails(tmp_path: Path, command: str) -> None:
    made = fresh_model("llama")
    with torch.no_grad():
        made.lm_head.weight.fill_(torch.nan)
    broken = save_with_tokenizer(tmp_path / "model", made)
    assert "NaN" not in json.dumps(said(command, broken, *COMMANDS[command], code=1))
