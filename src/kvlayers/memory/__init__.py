"""How a cache takes less memory in place: rounded to fewer bits, or placed elsewhere, by hand or within a budget."""

from kvlayers.memory.steps import LADDER

__all__ = ["LADDER"]
