"""Checksums of tensors, by runs of tokens, so that the first tokens can be checked without reading the others."""

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from kvlayers.persistence.safetensors_header import DTYPES, TensorEntry

RUN_TOKENS = 512
"""Tokens of keys or values that have one digest."""

DIGEST_BYTES = 32

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def runs(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """First and last of the tokens that have a digest of their own; the whole of a tensor that has no tokens."""
    tokens = shape[2] if len(shape) == 4 else 0
    if tokens <= RUN_TOKENS:
        yield 0, tokens
    else:
        for start in range(0, tokens, RUN_TOKENS):
            yield start, min(start + RUN_TOKENS, tokens)


def run_count(shape: tuple[int, ...]) -> int:
    """How many there are, without going through them: a header may claim any number of tokens."""
    return max(-(-shape[2] // RUN_TOKENS), 1) if len(shape) == 4 else 1


def digest_of(states: Tensor, start: int, end: int) -> bytes:
    """The SHA-256 of a run of `states`, on the host, whose bytes are taken in the order of its dimensions."""
    run = states[:, :, start:end] if states.dim() == 4 else states
    return hashlib.sha256(run.contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()


def digest_table(tensors: Mapping[str, Tensor]) -> Tensor:
    """Digests of all tensors, by their sorted names and then by runs: uint8 `[digests, 32]`."""
    rows = [digest_of(tensors[name], *run) for name in sorted(tensors) for run in runs(tuple(tensors[name].shape))]
    if not rows:
        return torch.empty(0, DIGEST_BYTES, dtype=torch.uint8)
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(-1, DIGEST_BYTES)


def first_rows(tensors: Mapping[str, TensorEntry]) -> dict[str, int]:
    """For each tensor the row of its first digest, and under no name how many rows there are."""
    rows: dict[str, int] = {}
    count = 0
    for name in sorted(tensors):
        rows[name] = count
        count += run_count(tensors[name].shape)
    return {**rows, "": count}


def checksum(description: str, tensors: Mapping[str, TensorEntry], digests: Tensor) -> str:
    """One SHA-256 of all that a file holds: the description, what each tensor looks like, and the digests of all."""
    total = hashlib.sha256(description.encode("utf-8", "surrogatepass"))
    for name in sorted(tensors):
        entry = tensors[name]
        total.update(f"\n{name} {_NAMES[entry.dtype]} {list(entry.shape)}".encode("utf-8", "surrogatepass"))
    total.update(b"\n" + digests.numpy().tobytes())
    return total.hexdigest()
