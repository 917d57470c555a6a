"""`lab/benchmarks/long_decode.py` counts what it says."""

import json
import pathlib
from typing import Any

import pytest
import torch
import transformers as tf

import versions
from models import fresh_model

BENCHMARKS = pathlib.Path(__file__).parents[2] / "lab" / "benchmarks"

pytestmark = versions.benchmarks_of_transformers


@pytest.fixture
def long_decode(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import long_decode

    return long_decode


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_exact_cache_decodes_to_the_end_and_another_text_ends_it(long_decode: Any, temperature: float) -> None:
    model = fresh_model("llama")
    prompt = torch.randint(model.config.vocab_size, (1, 20))

    def decoded(text: torch.Tensor | None = None) -> torch.Tensor:
        cache = tf.DynamicCache(config=model.config)
        found: torch.Tensor = long_decode.decode(model, prompt, cache, 12, temperature, text=text)
        return found

    text = decoded()
    assert torch.equal(decoded(text), text)
    text[0, 5] += 1
    assert decoded(text).shape[1] == 6


def test_samples_have_the_distribution_of_the_model(long_decode: Any) -> None:
    # Of two tokens, one twice as likely as the other.
    class Model(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            return tf.modeling_outputs.CausalLMOutput(logits=torch.tensor([[[2.0, 1.0]]]).log())

    found = long_decode.decode(Model(), torch.zeros(1, 1, dtype=torch.int64), None, 600, 1.0)
    assert 0.25 < float((found == 1).double().mean()) < 0.42


@pytest.mark.slow
def test_a_quick_run_has_each_quarter(long_decode: Any, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "found.json"
    assert long_decode.main(["--quick", "--output", str(output)]) == 0
    found = json.loads(output.read_text())["results"]["long_decode"]
    assert set(found) == {key.name for key in long_decode.MAKERS}
    for figures in found.values():
        assert len(figures["quarters"]) == 4
        assert len(figures["free"]) == 5
