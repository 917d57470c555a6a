"""Packed stores on a device, and attention to what they hold by its definition, on a CPU."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kvlayers.kernels.attention.packed_tensor import as_dense
from kvlayers.stores import QuantizedStore
from kvlayers.utils.triton_support import TritonKernel

Pair = tuple[Tensor, Tensor]


def random_pair(
    batch: int, kv_heads: int, tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Pair:
    """Keys and values `[batch, kv_heads, tokens, head_dim]`, made on the device.

    Some channels of the keys are large, as in models.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shape = (batch, kv_heads, tokens, head_dim)
    keys, values = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(2))
    keys[..., :: max(head_dim // 4, 1)] *= 4
    return keys, values


def on_cpu(store: QuantizedStore) -> QuantizedStore:
    """A store on the CPU that holds the same codes."""
    twin = QuantizedStore(store.quantization)
    twin.load_state({name: tensor.cpu() for name, tensor in store.state().items()})
    return twin


def dense_states(store: QuantizedStore) -> Pair:
    """All states that a store holds, in full precision."""
    keys, values = store.newest(store.length)
    return as_dense(keys), as_dense(values)


def attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention by its definition, in float64."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = (states.double().repeat_interleave(groups, 1) for states in (keys, values))
    scores = query.double() @ keys.transpose(2, 3) * query.shape[3] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    return torch.softmax(scores, -1) @ values


def relative_error(seen: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to the norm of what is expected. Infinite if something is not a number."""
    seen, expected = seen.double(), expected.to(seen.device).double()
    error = float((seen - expected).norm() / expected.norm())
    return error if error == error else float("inf")


def equal_codes(one: dict[str, Tensor], other: dict[str, Tensor], bits: int) -> float:
    """The share of equal codes in two states of a store, whose codes of `bits` divide a byte."""
    slots = [
        (codes.cpu() ^ other[name].cpu()) >> shift & (1 << bits) - 1
        for name, codes in one.items()
        if codes.dtype == torch.uint8
        for shift in range(0, 8, bits)
    ]
    return sum(int((slot == 0).sum()) for slot in slots) / max(sum(slot.numel() for slot in slots), 1)


@contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """Counts the launches of Triton kernels in a block, by the name of the kernel."""
    counts: Counter[str] = Counter()
    launch = TritonKernel.launch

    def counting(kernel: TritonKernel, *args: Any, **kwargs: Any) -> None:
        counts[kernel.name] += 1
        launch(kernel, *args, **kwargs)

    with mock.patch.object(TritonKernel, "launch", counting):
        yield counts
