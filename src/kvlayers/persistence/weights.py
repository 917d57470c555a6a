"""Identifies the weights of a model."""

import functools
import hashlib
import threading
import weakref
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvlayers.errors import ConfigError

SCHEME = "all:"
"""Prefix of ids that are made of all bytes. Ids of earlier versions, made of a few elements, have no prefix."""

BLOCK = 4096
"""Words of 8 bytes in a block. Each block has one sum."""

BLOCKS_AT_ONCE = 64
"""Blocks that are summed at once, so that intermediate results, 2 MiB, stay in a processor's cache."""

PROBED = 3
"""Elements that are probed in each dimension of a weight, to detect a change."""

Mark = tuple[str, int, int | None, torch.Size, torch.dtype]
"""Name, address, count of writes, shape and dtype of a weight. Nearly every change of a weight changes one of them."""


class _Known(NamedTuple):
    """An id, with the marks and the probe of the weights when it was made."""

    marks: tuple[Mark, ...]
    probe: bytes
    text: str


class _Models:
    """Ids of living models, and a lock for each model, so that no id is made twice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: weakref.WeakKeyDictionary[torch.nn.Module, threading.Lock] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, _Known] = weakref.WeakKeyDictionary()

    def lock(self, model: torch.nn.Module) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(model, threading.Lock())

    def get(self, model: torch.nn.Module) -> _Known | None:
        with self._lock:
            return self._known.get(model)

    def put(self, model: torch.nn.Module, known: _Known) -> None:
        with self._lock:
            self._known[model] = known


_models = _Models()


@torch.no_grad()
def weights_id(model: torch.nn.Module) -> str:
    """An id of a model's weights: equal for equal weights, different if a single element differs.

    Two models with equal configs may have different weights, and one cannot use the states of the other. The id is made
    of every byte of every weight, computed on the weight's device, once for a model. A second call only compares the
    addresses of the weights, torch's counts of writes to them, and a few elements of each. (It may miss a write through
    `.data` to single elements.) The id depends on the dtype that the model is loaded in, as states do.

    Args:
        model: the model, with its weights in memory.

    Raises:
        ConfigError: a weight is not in memory (a meta tensor, such as a weight that accelerate has offloaded).

    Example:
        >>> import torch, kvlayers
        >>> one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> kvlayers.weights_id(one) == kvlayers.weights_id(other)
        False
    """
    weights = list(_weights(model))
    marks, probe = tuple(_mark(name, weight) for name, weight in weights), _probe(weights)
    with _models.lock(model):
        known = _models.get(model)
        if known is None or (known.marks, known.probe) != (marks, probe):
            known = _Known(marks, probe, SCHEME + _digest(weights))
            _models.put(model, known)
    return known.text


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and weights. Non-persistent buffers are left out, since some buffers of RoPE change with the length."""
    for name, weight in model.state_dict().items():
        if isinstance(weight, Tensor):
            yield from _plain(name, weight.detach())


def _plain(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of a weight: for example the codes and scales of a quantized weight."""
    if is_traceable_wrapper_subclass(weight):
        for part in weight.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{part}", attrgetter(part)(weight))
    elif weight.is_meta:
        raise ConfigError(f"The weights must be in memory, but {name} is a meta tensor: pass your own `weights_id`.")
    else:
        yield name, weight


def _mark(name: str, weight: Tensor) -> Mark:
    writes = None if weight.is_inference() else weight._version
    return name, weight.data_ptr(), writes, weight.shape, weight.dtype


def _probe(weights: list[tuple[str, Tensor]]) -> bytes:
    """A few elements of each weight, with one transfer for each device and without copying a whole weight."""
    probes: dict[torch.device, list[Tensor]] = {}
    for _, weight in weights:
        places = tuple(slice(None, None, max(-(-size // PROBED), 1)) for size in weight.shape)
        probes.setdefault(weight.device, []).append(weight[places].reshape(-1).double())
    return b"".join(torch.cat(each).cpu().numpy().tobytes() for each in probes.values())


def _digest(weights: list[tuple[str, Tensor]]) -> str:
    total = hashlib.sha256()
    seen: dict[tuple[Any, ...], bytes] = {}
    for name, weight in weights:
        total.update(f"\n{name} {weight.dtype} {list(weight.shape)} ".encode())
        # Tied weights are read once.
        place = (weight.device, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)
        if place not in seen:
            seen[place] = _block_sums(weight).cpu().numpy().tobytes()
        total.update(seen[place])
    return total.hexdigest()


def _block_sums(weight: Tensor) -> Tensor:
    """A weighted sum for each 32 KiB of a weight, int64 `[blocks]`; each word has its own factor.

    Sums of integers are exact, so they are the same in any order, on any device, and for any number of threads. One
    changed word always changes its sum. Several changed words in one block leave it unchanged once in 2^64 times, or
    once in 2^33 times if only their highest bits changed.
    """
    words = _words(weight)
    factors = _factors().to(words.device)
    whole = words.numel() // BLOCK
    sums = []
    for begin in range(0, whole, BLOCKS_AT_ONCE):
        blocks = words[begin * BLOCK : min(begin + BLOCKS_AT_ONCE, whole) * BLOCK].view(-1, BLOCK)
        sums.append(_weighted(blocks, factors))
    rest = words[whole * BLOCK :]
    if rest.numel():
        sums.append(_weighted(rest[None], factors[: rest.numel()]))
    return torch.cat(sums) if sums else words


def _weighted(blocks: Tensor, factors: Tensor) -> Tensor:
    # Mixes the upper half into the lower half, since multiplication would shift the upper half out of the word.
    mixed = blocks >> 32
    mixed ^= blocks
    mixed *= factors
    return mixed.sum(1)


def _words(weight: Tensor) -> Tensor:
    """The bytes of a weight as int64, padded with zeros."""
    data = weight.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    missing = -data.numel() % 8
    if missing or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(missing)])
    return data.view(torch.int64)


@functools.cache
def _factors() -> Tensor:
    """Pseudorandom odd numbers from splitmix64, int64 `[BLOCK]`, the same on every machine."""
    factors, mask = [], 2**64 - 1
    for index in range(1, BLOCK + 1):
        mixed = index * 0x9E3779B97F4A7C15 & mask
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
        mixed = (mixed ^ mixed >> 31) | 1
        factors.append(mixed - 2**64 if mixed >= 2**63 else mixed)
    with torch.inference_mode(False):
        return torch.tensor(factors, dtype=torch.int64)
