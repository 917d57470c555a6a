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
from kvlayers_lab.calibration import MeasuredSetting
from kvlayers_lab.measuring.text import passages
from model_directories import random_text, save_sharp_model, word_tokenizer

pytestmark = pytest.mark.usefixtures("text_directory")

CONTEXT, SCORED = 272, 34
QUICK = ("--context", CONTEXT, "--scored", SCORED, "--passages", 1, "--bits", "2,8", "--text", "text.txt")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharp_model(tmp_path_factory.mktemp("models") / "llama", logits=30, max_position_embeddings=512)


calibrate = functools.partial(command_line.run, "calibrate")


# Two layers of two heads of 8 states, keys in 2 bits and values in 8 or the other way round. A scale and a zero in
# bfloat16 are for 64 tokens of a channel of keys, and for a token of a head of values.
MIDDLE = 2 * 2 * max(8 * 2 / 8 + 8 * 4 / 64 + 8 + 4, 8 + 8 * 4 / 64 + 8 * 2 / 8 + 4)


def test_it_finds_what_calibrate_finds(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "directory" / "kvlayers_calibration.json"
    result = calibrate(llama, "--bytes-per-token", MIDDLE, "--output", file.parent, *QUICK, "--json", code=0)
    said = json.loads(result.stdout)
    assert said["file"] == str(file)
    found = kvlayers_lab.Calibration.load(file)
    assert f"keys: {' '.join(map(str, found.cache_config['key_nbits']))}\n" in result.stderr
    assert re.search(r"calibrated +\d+ B", result.stderr)
    assert f"\nWritten to {file}\n" in result.stderr
    (use,) = re.findall(r"To use it: kvlayers.generate\(model, ..., (.*)\)\n", result.stderr)
    assert eval(f"dict({use})")["cache_config"] == found.cache_config
    assert said["chosen"]["cache_config"] == found.cache_config == said["use"]["cache_config"]
    model = tf.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    assert found == kvlayers_lab.calibrate(
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
    assert said["use"]["cache_implementation"] == "quantized"
    kvlayers.make_cache("quantized", model, **said["use"]["cache_config"])


def test_it_replaces_another_calibration_in_the_current_directory(llama: Path, tmp_path: Path) -> None:
    other = MeasuredSetting({"nbits": 4}, 100.0, 0.1)
    kvlayers_lab.Calibration(other, None, ()).save(tmp_path)
    assert "\nWritten to kvlayers_calibration.json\n" in calibrate(llama, "--max-kl", 100, *QUICK, code=0).output
    assert kvlayers_lab.Calibration.load(tmp_path).chosen != other


@pytest.mark.parametrize(
    ("budget", "least", "code"),
    [("--max-kl", 1e-12, 1), ("--bytes-per-token", 1, 2)],
    ids=["a divergence that cannot be met", "bytes that no bits fit"],
)
def test_a_budget_that_cannot_be_kept(llama: Path, tmp_path: Path, budget: str, least: float, code: int) -> None:
    result = calibrate(llama, budget, least, *QUICK, code=code)
    assert result.stderr.splitlines()[-1].startswith(f"kvlayers calibrate: `{budget}` must be at least")
    assert not (tmp_path / "kvlayers_calibration.json").exists()
