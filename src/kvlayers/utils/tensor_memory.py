"""The memory of tensors, which several tensors may share."""

from collections.abc import Iterable

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
