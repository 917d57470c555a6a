"""Caches on a CUDA device give what they give on a CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cuda_device
import kvlayers
from cuda_caches import KINDS, Kind, on_device
from cuda_device import DEVICE
from cuda_device import exact_products as exact_products
from kvlayers.upstream.cache_argument import name_for
from models import prompt, tiny_model
from packed_reference import relative_error

pytestmark = [*cuda_device.on_cuda, pytest.mark.usefixtures("exact_products")]


class Pair:
    """A model and a cache on a CPU, and the same on the device."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        model = kind.model()
        self.models = model, on_device(model, DEVICE)
        self.caches = kind.make(model.config), kind.make(model.config)

    def feed(self, ids: torch.Tensor) -> None:
        """Feed tokens `[batch, tokens]` to both; the logits must agree."""
        with torch.no_grad():
            expected, seen = (
                model(input_ids=ids.to(model.device), use_cache=True, **{name_for(model): cache}).logits
                for model, cache in zip(self.models, self.caches, strict=True)
            )
        error = relative_error(seen.cpu(), expected)
        assert error < self.kind.tolerance, f"after {self.caches[0].get_seq_length()} tokens: {error:.1e}"

    def decode(self, ids: torch.Tensor) -> None:
        """Feed tokens `[batch, tokens]` one at a time."""
        for step in range(ids.shape[1]):
            self.feed(ids[:, step : step + 1])

    def both(self, operation: Callable[[kvlayers.Cache, torch.device], Any]) -> None:
        """Do the same with both caches: it succeeds on both, or fails on both."""
        failed = []
        for model, cache in zip(self.models, self.caches, strict=True):
            try:
                operation(cache, model.device)
                failed.append(None)
            except kvlayers.KVLayersError as error:
                failed.append(type(error))
        assert failed[0] == failed[1]


@pytest.mark.parametrize("name", KINDS)
def test_a_model_decodes_as_on_a_cpu(name: str) -> None:
    pair = Pair(KINDS[name])
    ids = prompt(2, 170, seed=3)
    pair.feed(ids[:, :70])
    # At 64 tokens to a block, one block is packed and another one is begun.
    pair.decode(ids[:, 70:110])
    pair.both(lambda cache, device: cache.crop(-3))
    pair.decode(ids[:, 110:120])
    pair.both(lambda cache, device: cache.reorder_cache(torch.tensor([1, 0], device=device)))
    pair.decode(ids[:, 120:125])
    # A second turn, and then more of it.
    (pair.decode if pair.kind.one_by_one else pair.feed)(ids[:, 125:140])
    pair.decode(ids[:, 140:150])
    fork = pair.caches[1].fork()
    pair.decode(ids[:, 150:155])
    # The fork is where the cache was: it may not notice what the cache did since.
    assert fork.get_seq_length() == pair.caches[1].get_seq_length() - 5
    pair.both(lambda cache, device: cache.reset())
    pair.feed(ids[:, :20])
    pair.decode(ids[:, 20:25])


@pytest.mark.parametrize(("family", "batch", "beams"), [("t5", 2, 1), ("bart", 2, 1), ("llama", 1, 3), ("llama", 3, 3)])
def test_models_with_an_encoder_and_beams_generate_as_on_a_cpu(family: str, batch: int, beams: int) -> None:
    model, ids = tiny_model(family), prompt(batch, 16)
    how = {"max_new_tokens": 10, "num_beams": beams, "do_sample": False}
    with kvlayers.installed():
        expected = model.generate(ids, **how)
        seen = on_device(model, DEVICE).generate(ids.to(DEVICE), **how)
    assert torch.equal(seen.cpu(), expected)


@pytest.mark.parametrize("name", ["dynamic", "windows", "static that grows", "int4"])
def test_eight_samples_of_a_prompt_are_those_of_a_cpu(name: str) -> None:
    pair = Pair(KINDS[name])
    pair.feed(prompt(1, 90))
    pair.both(lambda cache, device: cache.expand(8))
    pair.decode(prompt(8, 12, seed=1))


@pytest.mark.parametrize("name", ["dynamic", "windows", "static", "int4", "offloaded", "sinks"])
def test_a_saved_cache_goes_on_on_a_cpu(name: str, tmp_path: Any) -> None:
    kind = KINDS[name]
    pair = Pair(kind)
    ids = prompt(1, 100)
    pair.feed(ids[:, :90])
    path = tmp_path / "cache.safetensors"
    kvlayers.save_cache(pair.caches[1], path, config=pair.models[1].config)
    loaded = kvlayers.load_cache(path, "cpu", pair.models[0].config)
    pair.caches = loaded, pair.caches[1]
    pair.decode(ids[:, 90:])
