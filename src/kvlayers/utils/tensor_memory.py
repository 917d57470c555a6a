"""The memory behind tensors, which several of them may share."""

from collections.abc import Iterable

from torch import Tensor

Storages = dict[int, int]
"""Bytes of each piece of memory, by its address."""


def storages_of(tensors: Iterable[Tensor]) -> Storages:
    """The memory that tensors keep alive, spare room behind views included.

    Example:
        >>> import torch
        >>> whole = torch.zeros(4)
        >>> sum(storages_of([whole, whole[:2], torch.zeros(1)]).values())
        20
    """
    found: Storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found
