"""The slow reference of `RecentLayer`."""

from oracle import Oracle


class RecentOracle(Oracle):
    """What a `RecentLayer` must be equal to: the tokens from `held_from` on.

    Args:
        most: tokens that are kept until there is one more.
        kept: tokens that are left then.
    """

    def __init__(self, most: int, kept: int) -> None:
        super().__init__()
        self.most, self.kept = most, kept
        self.evicted_at = 0

    def first_attended(self, length: int) -> int:
        return self.held_from

    def first_needed(self, length: int) -> int:
        if length - self.held_from <= self.most:
            return self.held_from
        self.evicted_at = length
        return length - self.kept

    @property
    def exact_from(self) -> int:
        return self.held_from

    def can_truncate(self, length: int) -> bool:
        return length == 0 or self.evicted_at <= length <= self.length

    def truncate(self, length: int) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]
        if length:
            self.held_from = self.first_needed(length)
        else:
            self.held_from = self.evicted_at = 0

    def reset(self) -> None:
        super().reset()
        self.evicted_at = 0

    def empty(self) -> "RecentOracle":
        return RecentOracle(self.most, self.kept)
