"""What caches cost, by arithmetic: nothing is allocated, and no weights are needed."""

from kvlayers.planning.planned_cache import Plan, PlannedCache
from kvlayers.planning.planner import plan

__all__ = ["Plan", "PlannedCache", "plan"]
