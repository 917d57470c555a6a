"""The memory of tensors, which several tensors may share."""

from collections.abc import Iterable

import torch
from torch import Tensor

Storages = dict[int, int]
"""Bytes of each storage, by its address, or by a number of its own on the meta device."""


def storages_of(tensors: Iterable[Tensor]) -> Storages:
    """The storages that tensors keep alive, including the memory around views.

    Example:
        >>> import torch
        >>> whole = torch.zeros(4)
        >>> sum(storages_of([whole, whole[:2], torch.zeros(1)]).values())
        20
    """
    found: Storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # Storages without memory are all at address 0.
        found[storage.data_ptr() or -id(storage)] = storage.nbytes()
    return found


OUT_OF_MEMORY_PHRASES = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "alloc_failed",
)
"""Messages of a RuntimeError for lack of memory that has no class: MPS, the CPU's allocators, CUDA's libraries."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated.

    Example:
        >>> is_out_of_memory(RuntimeError("MPS backend out of memory")), is_out_of_memory(RuntimeError("bad shape"))
        (True, False)
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in OUT_OF_MEMORY_PHRASES)
    )
