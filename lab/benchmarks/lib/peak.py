"""Counts the bytes that are in use while a cache grows, storage by storage, and the bytes that operations write."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lib.contenders import Maker
from lib.internals import cache_nbytes


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every tensor storage that an operation allocates, for as long as anything keeps it alive.

    Every operation below autograd passes through here, so each storage is counted from the moment it exists: while
    `torch.cat` returns the new buffer and the cache still holds the old one, and while a growing buffer is copied to
    its successor, both are alive and both are counted. Storages are tracked by weak references, which neither keep
    memory alive nor mistake a new storage for a freed one at the same address. Dead storages are removed whenever a new
    one appears, which is the only time at which the sum can rise. Scratch memory inside a single kernel is not counted.

    Args:
        ignored: tensors that do not count, such as the states that are fed in.
    """

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._ignored = [StorageWeakRef(tensor.untyped_storage()) for tensor in ignored]
        self._ignored_ids = {reference.cdata for reference in self._ignored}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        reference = StorageWeakRef(storage)
        if reference.cdata in self._alive or reference.cdata in self._ignored_ids:
            return
        self._alive[reference.cdata] = (reference, storage.nbytes())
        self.peak = max(self.peak, self.now())

    def now(self) -> int:
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        return sum(nbytes for _, nbytes in self._alive.values())

    def peak_since(self) -> int:
        peak, self.peak = self.peak, self.now()
        return peak


def measure_peak(make: Maker, config: Any, length: int, worst_from: int) -> dict[str, float]:
    """Grow a cache from empty, one token at a time through all layers, and count.

    States are narrow (one KV head of 8), because every count here is proportional to their width, and growing wide
    states to 16k tokens by concatenation would take hours.

    Args:
        make: makes the cache.
        config: the model's config, for its layers.
        length: tokens to grow to.
        worst_from: tokens from which on the worst moment counts; with fewer, a fixed minimum of spare room dominates.

    Returns:
        `live_bytes` of the tokens at the end; `peak` and `held` as multiples of it; `worst_moment`, the largest
        multiple of the live bytes at any time; and `reported`, the bytes that the cache reports divided by the counted
        bytes.
    """
    layers = config.num_hidden_layers
    keys, values = torch.randn(2, 1, 1, 1, 8).to(torch.bfloat16).unbind(0)
    token_bytes = layers * (keys.nbytes + values.nbytes)
    cache = make(config, length)
    peak, worst = 0, 0.0
    with torch.no_grad(), LiveBytes(ignored=(keys, values)) as counter:
        for token in range(1, length + 1):
            for layer_idx in range(layers):
                cache.update(keys, values, layer_idx)
            most = counter.peak_since()
            peak = max(peak, most)
            if token >= worst_from:
                worst = max(worst, most / (token * token_bytes))
        held = counter.now()
    live = length * token_bytes
    return {
        "live_bytes": live,
        "peak": peak / live,
        "held": held / live,
        "worst_moment": worst,
        "reported": cache_nbytes(cache) / held,
    }


WRITING_NOTHING = {"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "set_", "_unsafe_view"}
"""Operators that return a tensor and write no state, beside views."""


class MovedBytes(TorchDispatchMode):
    """Counts the bytes of every tensor that an operation writes, new or in place. Views write nothing.

    Attributes:
        nbytes: bytes written so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in WRITING_NOTHING:
            self.nbytes += sum(leaf.nbytes for leaf in tree_leaves(found) if isinstance(leaf, Tensor))
        return found
