"""Memory that several caches hold, of which each piece counts once."""

from collections.abc import Iterable

from kvlayers.utils.tensor_memory import Storages


class MemoryAccount:
    """Who holds which memory, by its address.

    Args:
        held: what each of the first holders holds.

    Attributes:
        nbytes: bytes that are held by anybody.

    Example:
        >>> ledger = MemoryAccount([{1: 100, 2: 50}, {2: 50, 3: 7}])
        >>> ledger.nbytes
        157
        >>> ledger.remove({1: 100, 2: 50})
        >>> ledger.nbytes
        57
    """

    def __init__(self, held: Iterable[Storages] = ()) -> None:
        self.nbytes = 0
        self._holders: dict[int, int] = {}
        for storages in held:
            self.add(storages)

    def add(self, storages: Storages) -> None:
        """Count another holder."""
        for address, size in storages.items():
            holders = self._holders.get(address, 0)
            self._holders[address] = holders + 1
            if not holders:
                self.nbytes += size

    def remove(self, storages: Storages) -> None:
        """Count one holder less."""
        for address, size in storages.items():
            holders = self._holders.pop(address) - 1
            if holders:
                self._holders[address] = holders
            else:
                self.nbytes -= size
