"""Counts the memory of several caches, each shared piece once."""

from collections.abc import Iterable

from kvlayers.utils.tensor_memory import Storages


class MemoryAccount:
    """How many caches hold each piece of memory, by address.

    If a cache has given back a piece, and another one has got the same address before the first one was counted again,
    the size that was added last counts.

    Args:
        caches: the pieces of memory of each cache to start with.

    Attributes:
        nbytes: total bytes, each piece counted once.
        shared_bytes: bytes of the pieces that several caches hold, each piece counted once.

    Example:
        >>> account = MemoryAccount([{1: 100, 2: 50}, {2: 50, 3: 7}])
        >>> account.nbytes, account.shared_bytes
        (157, 50)
        >>> account.remove({1: 100, 2: 50})
        >>> account.nbytes, account.shared_bytes
        (57, 0)
    """

    def __init__(self, caches: Iterable[Storages] = ()) -> None:
        self.nbytes = self.shared_bytes = 0
        self._pieces: dict[int, tuple[int, int]] = {}
        for storages in caches:
            self.add(storages)

    def add(self, storages: Storages) -> None:
        """Add the memory of a cache."""
        for address, size in storages.items():
            holders, before = self._pieces.get(address, (0, 0))
            self._set(address, holders, before, holders + 1, size)

    def remove(self, storages: Storages) -> None:
        """Remove the memory of a cache that was added before."""
        for address in storages:
            holders, size = self._pieces[address]
            self._set(address, holders, size, holders - 1, size)

    def _set(self, address: int, holders_before: int, size_before: int, holders: int, size: int) -> None:
        self.nbytes += size * (holders > 0) - size_before * (holders_before > 0)
        self.shared_bytes += size * (holders > 1) - size_before * (holders_before > 1)
        if holders:
            self._pieces[address] = holders, size
        else:
            del self._pieces[address]
