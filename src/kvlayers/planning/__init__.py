"""What caches cost: their layers take in states without memory, so nothing is allocated, and no weights are needed."""

from kvlayers.planning import auto
from kvlayers.planning.planner import Plan, PlannedCache, plan

__all__ = ["Plan", "PlannedCache", "auto", "plan"]
