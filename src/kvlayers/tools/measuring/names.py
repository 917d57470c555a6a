"""What the two libraries and their caches are called. Imports nothing, as `--help` names them."""

KVLAYERS = "kvlayers"
TRANSFORMERS = "transformers"

THEIR_NAMES = ("dynamic", "static", "quanto", "hqq")
"""Caches of transformers: `quanto` and `hqq` are its quantized caches of 4 bits."""
