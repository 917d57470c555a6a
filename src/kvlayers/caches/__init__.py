"""A cache is a list of layers: the container, its operations, and the caches by name."""
