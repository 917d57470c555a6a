"""`kvlayers calibrate`: that it finds what `calibrate` finds, where it writes it, and how it ends."""

import functools
import json
import re
from pathlib import Path

import pytest
import torch
import transformers as tf

import command_line
import kvlayers
import kvlayers_lab
from kvlayers_lab.measuring.text import passages
from model_directories import random_text, save_with_tokenizer, word_tokenizer
from models import fresh_model

pytestmark = pytest.mark.usefixtures("text_directory")

CONTEXT, SCORED = 272, 8
QUICK = ("--context", CONTEXT, "--scored", SCORED, "--passages", 1, "--bits", "2,8", "--text", "text.txt")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = fresh_model("llama", max_position_embeddings=512)
    with torch.no_grad():
        model.lm_head.weight.mul_(30)
    return save_with_tokenizer(tmp_path_factory.mktemp("models") / "llama", model)


calibrate = functools.partial(command_line.run, "calibrate")


# Two layers of two heads of 8 states, keys in 2 bits and values in 8 or the other way round. A scale and a zero in
# bfloat16 are for 64 tokens of a channel of keys, and for a token of a head of values.
MIDDLE = 2 * 2 * max(8 * 2 / 8 + 8 * 4 / 64 + 8 + 4, 8 + 8 * 4 / 64 + 8 * 2 / 8 + 4)


def test_it_finds_what_calibrate_finds(llama: Path, tmp_path: Path) -> None:
    result = calibrate(llama, "--bytes-per-token", MIDDLE, "--output", tmp_path / "new" / "directory", *QUICK, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    file = tmp_path / "new" / "directory" / "kvlayers_calibration.json"
    assert said["file"] == str(file)
    found = kvlayers_lab.Calibration.load(file)
    assert said["chosen"]["cache_config"] == found.cache_config == said["use"]["cache_config"]
    model = tf.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    expected = kvlayers_lab.calibrate(
        model,
        passages(word_tokenizer(), random_text(600), 1, CONTEXT + SCORED),
        kvlayers_lab.BytesBudget(MIDDLE),
        quantization=kvlayers.Quantization(),
        widths=[2, 8],
        passages=1,
        context_length=CONTEXT,
        scored_tokens=SCORED,
        dtype=torch.bfloat16,
    )
    assert found == expected
    assert said["use"]["cache_implementation"] == "quantized"
    kvlayers.make_cache("quantized", model, **said["use"]["cache_config"])


def test_it_says_bits_by_layer_and_how_to_use_them(llama: Path, tmp_path: Path) -> None:
    result = calibrate(llama, "--max-kl", 100, *QUICK)
    assert result.exit_code == 0, result.output
    found = kvlayers_lab.Calibration.load(tmp_path)
    assert f"keys: {' '.join(map(str, found.cache_config['key_nbits']))}\n" in result.output
    assert re.search(r"calibrated +\d+ B", result.output)
    assert "\nWritten to kvlayers_calibration.json\n" in result.output
    line = re.search(r"To use it: kvlayers.install\(\); model.generate\(..., (.*)\)\n", result.output)
    assert line is not None
    assert eval(f"dict({line[1]})")["cache_config"] == found.cache_config
    # Another time it replaces it.
    assert calibrate(llama, "--max-kl", 100, *QUICK).exit_code == 0


def test_a_divergence_that_cannot_be_met_ends_with_1(llama: Path, tmp_path: Path) -> None:
    result = calibrate(llama, "--max-kl", 1e-12, *QUICK)
    assert result.exit_code == 1, result.output
    assert result.stderr.splitlines()[-1].startswith("kvlayers calibrate: `--max-kl` must be at least")
    assert not (tmp_path / "kvlayers_calibration.json").exists()


def test_a_budget_that_no_bits_fit_ends_with_2(llama: Path) -> None:
    result = calibrate(llama, "--bytes-per-token", 1, *QUICK)
    assert result.exit_code == 2, result.output
    assert "`--bytes-per-token` must be at least" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{model}"], "one budget, `--bytes-per-token` .* or `--max-kl` .* got neither"),
        (["{model}", "--max-kl", "1", "--bytes-per-token", "5KiB"], "one budget, .* got both"),
        (["{model}", "--max-kl", "0"], "`--max-kl` must be a number above 0, got 0"),
        (["{model}", "--max-kl", "inf"], "`--max-kl` must be a number above 0, got inf"),
        (["{model}", "--bytes-per-token", "lots"], "`--bytes-per-token` must be a number of bytes.*got 'lots'"),
        (["{model}", "--max-kl", "1", "--bits", "2,x"], "`--bits` must be numbers separated by commas, .* got '2,x'"),
        (["{model}", "--max-kl", "1", "--bits", "4"], "`--bits` must be two or more numbers of bits"),
        (["{model}", "--max-kl", "1", "--bits", "2,7"], "`--bits` must be a list of 1, 2, 3, 4, 5, 6, 8, got"),
        (["{model}", "--max-kl", "1", "--backend", "none"], "none"),
        (["{model}", "--max-kl", "1", "--context", "32q"], "`--context` must be a number of tokens.*got '32q'"),
        (["{model}", "--max-kl", "1", "--context", "64"], "`--context` must be at least .* tokens, .* got 64"),
        (
            ["{model}", "--max-kl", "1", "--context", "1k"],
            "`--context` and `--scored` .* within the 512 positions",
        ),
        (["{model}", "--max-kl", "1", "--scored", "0"], "`--scored` must be at least 1, got 0"),
        (["{model}", "--max-kl", "1", "--text", "none.txt"], "none.txt cannot be read"),
        (["{model}", "--max-kl", "1", "--text", "short.txt"], "1 passages of"),
        (["{model}", "--max-kl", "1", "--device", "cuda:77"], "`--device` must be a device of this machine"),
        (["{model}", "--max-kl", "1", "--output", "other.json"], "`--output`: other.json is not a calibration"),
        (["{model}", "--max-kl", "1", "--output", "text.txt/x.json"], "`--output`: text.txt/x.json cannot be written"),
        (["{model}", "--max-kl", "1", "--output", "new/" + 300 * "x"], "`--output`: new/x+/.* cannot be written"),
        (["./none", "--max-kl", "1"], "`MODEL` must be a model directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_before_weights_are_loaded(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    (tmp_path / "short.txt").write_text("the sea is a")
    (tmp_path / "other.json").write_text("{}")
    given = [str(llama) if argument == "{model}" else argument for argument in arguments]
    usual = {"--text": "text.txt", "--context": str(CONTEXT), "--scored": str(SCORED), "--passages": "1"}
    given += [word for pair in usual.items() if pair[0] not in given for word in pair]
    result = calibrate(*given)
    assert result.exit_code == 2, (result.output, result.exception)
    assert re.search(words, result.stderr), result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("kvlayers calibrate: ")
    assert (tmp_path / "other.json").read_text() == "{}"
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "kvlayers_calibration.json").exists()
