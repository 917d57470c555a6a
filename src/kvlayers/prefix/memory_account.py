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
        # By size as well: memory may have moved before its holder is counted again, and other memory be at its address.
        self._holders: dict[tuple[int, int], int] = {}
        for storages in caches:
            self.add(storages)

    def add(self, storages: Storages) -> None:
        """Add the memory of a cache."""
        for piece in storages.items():
            holders = self._holders[piece] = self._holders.get(piece, 0) + 1
            if holders == 1:
                self.nbytes += piece[1]
            elif holders == 2:
                self.shared_bytes += piece[1]

    def remove(self, storages: Storages) -> None:
        """Remove the memory of a cache that was added before."""
        for piece in storages.items():
            holders = self._holders.pop(piece) - 1
            if holders:
                self._holders[piece] = holders
            if holders == 1:
                self.shared_bytes -= piece[1]
            elif not holders:
                self.nbytes -= piece[1]
