"""`generate()` with kvlayers' caches: installation, names of caches, prompts, prefix stores, running out of memory."""
