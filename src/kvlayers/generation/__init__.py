"""`generate()` with kvlayers' caches: installation, names of caches, prompts, prefix stores, running out of memory."""

# Registers the caches, so that whoever imports the registry finds them in it.
from kvlayers.generation import builtin_caches  # noqa: F401
