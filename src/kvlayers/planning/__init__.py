"""What caches cost, by arithmetic: nothing is allocated, and no weights are needed."""

from .planned_cache import Plan, PlannedCache
from .planner import plan

__all__ = ["Plan", "PlannedCache", "plan"]
