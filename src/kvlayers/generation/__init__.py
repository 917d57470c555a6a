"""`generate()` with kvlayers' caches: installation, names of caches, prompts, prefix stores, running out of memory."""

from kvlayers.generation import cache_by_name

__all__ = ["cache_by_name"]
