"""Pinned memory: what the allocator rounds up to is counted, planned, and room for tokens."""

import pathlib
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvlayers
import kvlayers.offload.offloading
from kvlayers.offload import DiskMemory, HostMemory, Prefetcher, storage
from kvlayers.upstream import compat
from models import COMMON
from named_factories import registered
from recording_transfers import held_bytes, recording_transfers

CONFIG = transformers.LlamaConfig(**COMMON)
CACHES: dict[str, Callable[..., kvlayers.Cache]] = {
    "offloaded": lambda **options: kvlayers.OffloadedCache(config=CONFIG, **options),
    "offloaded_static": lambda **options: kvlayers.OffloadedStaticCache(CONFIG, 777, **options),
    "offloaded_quantized": lambda **options: kvlayers.QuantizedCache(config=CONFIG, offloading=True, **options),
}


class PinnedAllocator:
    """Hands out pinned memory as torch's allocator does: in powers of two.

    Attributes:
        requests: number of requests.
        pinned: bytes of what is handed out and not freed, as rounded up.
    """

    def __init__(self) -> None:
        self.requests = self.pinned = 0

    def __call__(self, elements: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(elements, dtype=dtype)
        size = tensor.nbytes and 1 << (tensor.nbytes - 1).bit_length()
        self.requests += 1
        self.pinned += size
        weakref.finalize(tensor.untyped_storage(), self._free, size)
        return tensor

    def _free(self, size: int) -> None:
        self.pinned -= size


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> PinnedAllocator:
    """The host of an accelerator, from which caches are offloaded."""
    made = PinnedAllocator()
    monkeypatch.setattr(storage, "_pinned", made)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)

    def prefetcher(memory: Any) -> Prefetcher:
        return Prefetcher(memory, transfers=recording_transfers)

    monkeypatch.setattr(kvlayers.offload.offloading, "Prefetcher", prefetcher)
    return made


def update(cache: Any, tokens: int, times: int = 1) -> None:
    for _ in range(times):
        for index in range(CONFIG.num_hidden_layers):
            cache.update(*torch.randn(2, 1, CONFIG.num_key_value_heads, tokens, CONFIG.head_dim), layer_idx=index)


def pinned_bytes(cache: Any) -> int:
    """The cache's bytes, without the counts that a static layer leaves on its device."""
    return int(cache.nbytes) - count_bytes(cache) * len(cache.layers)


def count_bytes(cache: Any) -> int:
    return 2 * torch.int64.itemsize if isinstance(cache, kvlayers.StaticCache) else 0


@pytest.mark.parametrize("name", CACHES)
def test_the_bytes_of_a_cache_are_those_that_were_pinned(allocator: PinnedAllocator, name: str) -> None:
    cache = CACHES[name]()
    for tokens, times in ((300, 1), (1, 200)):
        update(cache, tokens, times)
        assert pinned_bytes(cache) == allocator.pinned
    twin = cache.fork()
    cache.crop(-20)
    assert pinned_bytes(cache) + pinned_bytes(twin) == allocator.pinned
    del cache, twin
    assert allocator.pinned == 0


@pytest.mark.parametrize("tokens", [1, 100, 513, 777])
@pytest.mark.parametrize("name", CACHES)
def test_a_plan_says_what_is_pinned(allocator: PinnedAllocator, name: str, tokens: int) -> None:
    cache = CACHES[name]()
    update(cache, tokens)

    with registered(pinned=lambda request: CACHES[name]()):
        planned = kvlayers.plan(CONFIG, tokens, names=["pinned"])["pinned"]
    assert planned.nbytes == planned.host_bytes == cache.nbytes
    # Copies on the device have no spare room of this kind.
    assert planned.device_bytes == 2 * (held_bytes(cache.layers[0]) + count_bytes(cache))


def test_a_buffer_grows_in_the_memory_that_was_rounded_up_to(allocator: PinnedAllocator) -> None:
    cache, plain, taken = CACHES["offloaded"](), kvlayers.DynamicCache(config=CONFIG), []
    # The capacity grows from 728 tokens to 857 and 986, and then beyond what the first memory was rounded up to.
    for seed, (tokens, times) in enumerate([(600, 1), (1, 986 - 600), (1, 20)]):
        for each in (cache, plain):
            torch.manual_seed(seed)
            update(each, tokens, times)
        taken.append((allocator.pinned, allocator.requests))
    pinned, requests = taken[0]
    assert pinned == 2 * CONFIG.num_hidden_layers * CONFIG.num_key_value_heads * CONFIG.head_dim * 4 * 1024
    assert taken[1:] == [(pinned, requests), (2 * pinned, 2 * requests)]
    torch.testing.assert_close([*cache], [*plain], rtol=0, atol=0)


def test_a_pickle_has_no_spare_room(allocator: PinnedAllocator) -> None:
    layer = kvlayers.OffloadedLayer(kvlayers.DynamicLayer(), Prefetcher(transfers=recording_transfers))
    keys, values = torch.randn(2, 1, 2, 520, 8)
    layer.update(keys, values)
    assert len(pickle.dumps(layer)) < 2 * keys.nbytes + 10_000 < layer.nbytes + 10_000
    assert torch.equal(pickle.loads(pickle.dumps(layer)).keys, keys)


@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 4096, 4097, 75_497_472])
def test_what_is_requested_is_not_rounded_up_any_further(nbytes: int) -> None:
    requested = compat.pinned_nbytes(nbytes)
    assert nbytes <= requested <= max(2 * nbytes - 1, 0)
    assert requested.bit_count() <= 1


@pytest.mark.skipif(not compat.LIMITS_PINNED_ROUNDING, reason="this torch rounds up all sizes")
@pytest.mark.parametrize(
    ("settings", "exact_from"),
    [
        ("", None),
        ("expandable_segments:True", None),
        ("pinned_max_round_threshold_mb:4", 4),
        ("expandable_segments:True,pinned_max_cached_size_mb: 2,pinned_max_round_threshold_mb:8", 2),
    ],
)
def test_large_memory_is_exact_if_the_allocator_is_told_so(
    monkeypatch: pytest.MonkeyPatch, settings: str, exact_from: int | None
) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: settings)
    for megabytes in (1, 3, 5, 9):
        nbytes = (megabytes << 20) + 12
        is_exact = exact_from is not None and megabytes >= exact_from
        assert (compat.pinned_nbytes(nbytes) == nbytes) is is_exact


def test_memory_that_is_not_pinned_is_exact(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for memory in (HostMemory(), DiskMemory(tmp_path)):
        tensor = memory.empty((5, 3, 7), torch.float16)
        assert tensor.untyped_storage().nbytes() == memory.allocated_nbytes(210) == 210
        assert memory.extended(tensor, 6) is None
