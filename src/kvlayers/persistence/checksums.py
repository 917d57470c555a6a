"""Checksums of tensors in runs of tokens, so that the first tokens can be verified without reading the others."""

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from kvlayers.persistence.safetensors_header import DTYPE_NAMES, TensorEntry

RUN_TOKENS = 512
"""Tokens of keys or values that share one digest."""

DIGEST_BYTES = 32


def runs(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Start and end of each run of tokens; a tensor without a token dimension is one run."""
    tokens = shape[2] if len(shape) == 4 else 0
    if tokens <= RUN_TOKENS:
        yield 0, tokens
    else:
        for start in range(0, tokens, RUN_TOKENS):
            yield start, min(start + RUN_TOKENS, tokens)


def run_count(shape: tuple[int, ...]) -> int:
    """The number of `runs`, without iterating over them, since a header may claim any number of tokens."""
    return max(-(-shape[2] // RUN_TOKENS), 1) if len(shape) == 4 else 1


def digest_of(states: Tensor, start: int, end: int) -> bytes:
    """SHA-256 of a run of `states` on the host, in the order of its dimensions."""
    run = states[:, :, start:end] if states.dim() == 4 else states
    return hashlib.sha256(run.contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()


def digest_table(tensors: Mapping[str, Tensor]) -> Tensor:
    """Digests of all tensors, uint8 `[digests, 32]`, sorted by name and then by run."""
    rows = [digest_of(tensors[name], *run) for name in sorted(tensors) for run in runs(tuple(tensors[name].shape))]
    if not rows:
        return torch.empty(0, DIGEST_BYTES, dtype=torch.uint8)
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(-1, DIGEST_BYTES)


def first_rows(tensors: Mapping[str, TensorEntry]) -> dict[str, int]:
    """For each tensor, the row of its first digest; for the name "", the number of rows."""
    rows: dict[str, int] = {}
    count = 0
    for name in sorted(tensors):
        rows[name] = count
        count += run_count(tensors[name].shape)
    return {**rows, "": count}


def checksum(description: str, tensors: Mapping[str, TensorEntry], digests: Tensor) -> str:
    """SHA-256 of a whole file: of its description, and of the dtype, shape and digests of each tensor."""
    total = hashlib.sha256(description.encode("utf-8", "surrogatepass"))
    for name in sorted(tensors):
        entry = tensors[name]
        total.update(f"\n{name} {DTYPE_NAMES[entry.dtype]} {list(entry.shape)}".encode("utf-8", "surrogatepass"))
    total.update(b"\n" + digests.numpy().tobytes())
    return total.hexdigest()
