"""Which ways attention went, and why not a faster one: counted, to be told when somebody asks."""

from collections import Counter


class PathCounter:
    """How often attention on what a store holds went which way.

    Attributes:
        counts: by the words for a way.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, way: str) -> None:
        """Attention went this way once."""
        self.counts[way] += 1
