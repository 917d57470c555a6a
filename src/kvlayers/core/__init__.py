"""The core: a cache, the contracts of a layer and of a store, and the kinds that keep every token or a window."""
