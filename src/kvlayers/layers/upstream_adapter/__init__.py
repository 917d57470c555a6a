"""How a layer of transformers takes part in a cache of kvlayers: an adapter with the whole contract of a layer."""
