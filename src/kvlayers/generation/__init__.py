"""`generate()` with kvlayers' caches: installation, names of caches, prompts, prefix stores, running out of memory."""

from kvlayers.generation import registry

__all__ = ["registry"]
