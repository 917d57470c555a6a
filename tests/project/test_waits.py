"""What the host waits for is counted, and is no more with a cache of kvlayers than with that of transformers."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import device_counts as counting
import kvlayers
import versions
from kvlayers.eviction import BUILTIN_RULES
from matrix import once
from models import fresh_model

DEVICE = counting.DEVICE


@pytest.fixture(autouse=True)
def _on_a_gpu() -> Iterator[None]:
    with torch.no_grad(), counting.gpu():
        yield


# The counter


def on_device(*shape: int) -> Tensor:
    return torch.empty(shape, device=DEVICE)


STALLS: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda tensor: tensor.sum().item(),
    "a condition": lambda tensor: bool(tensor.isfinite().all()),
    "a comparison": lambda tensor: torch.equal(tensor, tensor),
    "a list": lambda tensor: tensor.tolist(),
    "a copy to the host": lambda tensor: tensor.cpu(),
    "a copy into the memory of the host": lambda tensor: torch.empty(tensor.shape).copy_(tensor),
    "a copy to the device": lambda tensor: torch.ones(3).to(tensor.device),
    "a copy into the memory of the device": lambda tensor: tensor.copy_(torch.ones(3)),
    "numbers of the host": lambda tensor: torch.tensor([1, 2], device=tensor.device),
    "an index of the host": lambda tensor: tensor[torch.tensor([0, 2])],
}


@pytest.mark.parametrize("kind", STALLS)
def test_whatever_the_host_waits_for_is_counted(kind: str) -> None:
    with counting.counted() as counts:
        STALLS[kind](on_device(3))
    assert sum(counts.stalls.values()) == 1


@pytest.mark.parametrize("find", [torch.nonzero, lambda tensor: tensor[tensor > 0], torch.unique])
def test_a_shape_that_depends_on_numbers_is_refused(find: Callable[[Tensor], Any]) -> None:
    with counting.counted() as counts, pytest.raises(NotImplementedError):
        find(on_device(3))
    assert counts.stalls


def test_two_devices_do_not_mix() -> None:
    with counting.counted(), pytest.raises(RuntimeError, match="of the device and of the CPU"):
        on_device(3) + torch.ones(3)


# A model


# One rule of eviction that needs queries, and one that does not, stand for the others.
CACHES = sorted({*kvlayers.cache_names()} - {"auto", *BUILTIN_RULES} | {"snapkv", "keydiff"})
PROMPT, CROPPED = 400, 230


def make_cache(name: str, config: Any, padding: Tensor | None) -> Any:
    from kvlayers.core.named_caches import CacheRequest
    from kvlayers.generation.cache_by_name import cache_for

    cache: Any = cache_for(name, CacheRequest(config, {}, 2, 2 * PROMPT, attention_mask=padding))
    return transferring(cache)


def transferring(cache: Any) -> Any:
    """The cache, with states that are offloaded from the device."""
    prefetcher = kvlayers.offload.Prefetcher(transfers=counting.Transfers)
    for layer in cache.layers:
        if isinstance(layer, kvlayers.OffloadedLayer):
            layer.use_prefetcher(prefetcher)
    return cache


def passed(model: Any, cache: Any, seen: int, new: int, padded: bool) -> Any:
    """Counts of a forward pass of new tokens behind those that the cache has seen."""
    ids = torch.zeros(2, new, dtype=torch.int64, device=DEVICE)
    mask = torch.ones(2, seen + new, dtype=torch.int64, device=DEVICE) if padded else None
    with counting.counted() as counts:
        positions = torch.arange(seen, seen + new, device=DEVICE)[None]
        model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    return counts


@pytest.mark.parametrize(("family", "padded", "name"), once([("gemma3", True), ("llama", False)], CACHES))
def test_the_host_waits_no_more_than_with_the_cache_of_transformers(family: str, name: str, padded: bool) -> None:
    versions.need_since("5.1", "models on a device that torch.autocast does not know")
    if (family, name) == ("llama", "sliding_window"):
        pytest.skip("the model has no windows")
    model = fresh_model(family, max_position_embeddings=2 * PROMPT).to(DEVICE)
    upstream = transformers.DynamicCache(config=model.config)
    padding = torch.ones(2, PROMPT, dtype=torch.int64) if padded else None
    if padding is not None:
        padding[0, :9] = 0
    cache, seen = make_cache(name, model.config, padding), 0
    allowed = [passed(model, upstream, tokens, new, padded).stalls for tokens, new in ((0, PROMPT), (PROMPT, 1))][1]

    def check_step(cache: Any, seen: int) -> int:
        stalls = passed(model, cache, seen, 1, padded).stalls
        assert Counter(stalls) - Counter(allowed) == Counter()
        return seen + 1

    passed(model, cache, 0, PROMPT, padded)
    seen = check_step(cache, check_step(cache, PROMPT))
    with counting.counted() as counts:
        cache.reorder_cache(torch.zeros(2, dtype=torch.int64, device=DEVICE))
    # The host selects sequences where they are held, and it counts the tokens of each sequence that evicts: with
    # padding, sequences hold different numbers, so it reads once which sequences go on.
    counting_layers = sum(isinstance(layer, kvlayers.EvictingLayer) for layer in cache.layers) if padded else 0
    assert sum(counts.stalls.values()) <= counting_layers or "offloaded" in name
    seen = check_step(cache, seen)
    check_step(transferring(cache.fork()), seen)
    if family == "llama" and cache.layers[0].fidelity != "evicting":
        cache.crop(CROPPED)
        check_step(cache, check_step(cache, CROPPED))
    cache.reset()
    passed(model, cache, 0, PROMPT, padded)
    check_step(cache, PROMPT)
