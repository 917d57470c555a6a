"""Counts the memory of several caches, each shared piece once."""

from collections.abc import Iterable

from kvlayers.utils.tensor_memory import Storages


class MemoryAccount:
    """How many caches hold each piece of memory, by address.

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
        self._holders: dict[int, int] = {}
        for storages in caches:
            self.add(storages)

    def add(self, storages: Storages) -> None:
        """Add the memory of a cache."""
        for address, size in storages.items():
            holders = self._holders[address] = self._holders.get(address, 0) + 1
            if holders == 1:
                self.nbytes += size
            elif holders == 2:
                self.shared_bytes += size

    def remove(self, storages: Storages) -> None:
        """Remove the memory of a cache that was added before."""
        for address, size in storages.items():
            holders = self._holders.pop(address) - 1
            if holders:
                self._holders[address] = holders
            if holders == 1:
                self.shared_bytes -= size
            elif not holders:
                self.nbytes -= size

    def missing(self, storages: Storages) -> int:
        """Bytes by which the total would grow with another cache."""
        return sum(size for address, size in storages.items() if address not in self._holders)
