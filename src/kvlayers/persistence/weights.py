"""Which weights a model has."""

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
"""What ids begin with: they are made of all bytes. Ids of earlier versions, of a few elements, are digests alone."""

BLOCK = 4096
"""Words of 8 bytes that are summed up to one."""

BLOCKS_AT_ONCE = 64
"""Blocks that are summed up at once: what is computed on the way stays in a processor's cache, or is 2 MiB."""

PROBED = 3
"""Places that are looked at in each dimension of a weight, to see whether it is what it was."""

Mark = tuple[str, int, int | None, torch.Size, torch.dtype]
"""Name, address, count of writes, shape and dtype of a weight: what changes where the weight does, nearly always."""


class _Known(NamedTuple):
    """An id, and what the weights looked like when it was made."""

    marks: tuple[Mark, ...]
    probe: bytes
    text: str


class _Models:
    """Ids that were made, for as long as their models live, and a lock for each, so that no id is made twice."""

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
    """An id of a model's weights: the same for the same ones, another where one element of one of them differs.

    Two models may have equal configs and other weights, and the states of the one mean nothing to the other. The id is
    made of every byte of every weight, on the device that the weight is on, once for a model: a second call looks at
    the addresses of the weights, at torch's counts of writes to them and at a few elements of each. (A write through
    `.data` to single elements may escape that.) It depends on the dtype that the model is loaded in, as states do.

    Args:
        model: the model, with weights that are in memory.

    Raises:
        ConfigError: weights are not in memory (meta tensors, as those that accelerate has offloaded).

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
    """Names and weights. Not the buffers that a model makes anew: some of RoPE change with the length."""
    for name, weight in model.state_dict().items():
        if isinstance(weight, Tensor):
            yield from _plain(name, weight.detach())


def _plain(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a weight is made of: of a quantized one that is a class of its own, codes and scales."""
    if is_traceable_wrapper_subclass(weight):
        for part in weight.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{part}", attrgetter(part)(weight))
    elif weight.is_meta:
        raise ConfigError(
            f"expected weights in memory, but {name} is a meta tensor: pass a weights_id of your own choice."
        )
    else:
        yield name, weight


def _mark(name: str, weight: Tensor) -> Mark:
    writes = None if weight.is_inference() else weight._version
    return name, weight.data_ptr(), writes, weight.shape, weight.dtype


def _probe(weights: list[tuple[str, Tensor]]) -> bytes:
    """A few elements of each weight: in one transfer for each device, without a copy of a weight."""
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
    """A sum for each 32 KiB of a weight, int64 `[blocks]`, in which each word counts by a factor of its own.

    Sums of integers are exact, and so the same in any order, on any device, and for any number of threads. A word that
    has changed changes its sum for certain; several in one block do not once in 2^64 times, or in 2^33 where no more
    than their highest bits have changed.
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
    # What differs in the upper half of a word alone would be multiplied out of it.
    mixed = blocks >> 32
    mixed ^= blocks
    mixed *= factors
    return mixed.sum(1)


def _words(weight: Tensor) -> Tensor:
    """The bytes of a weight as int64, with zeros behind the last ones."""
    data = weight.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    missing = -data.numel() % 8
    if missing or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(missing)])
    return data.view(torch.int64)


@functools.cache
def _factors() -> Tensor:
    """Odd numbers as if at random, int64 `[BLOCK]`: those of splitmix64, which are the same everywhere."""
    factors, mask = [], 2**64 - 1
    for index in range(1, BLOCK + 1):
        mixed = index * 0x9E3779B97F4A7C15 & mask
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
        mixed = (mixed ^ mixed >> 31) | 1
        factors.append(mixed - 2**64 if mixed >= 2**63 else mixed)
    with torch.inference_mode(False):
        return torch.tensor(factors, dtype=torch.int64)
