"""What caches cost, by arithmetic: nothing is allocated, and no weights are needed."""

from .planner import plan
from .planned_cache import Plan, PlannedCache

__all__ = ["Plan", "PlannedCache", "plan"]
