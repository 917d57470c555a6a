"""Names that `--help` shows. This module imports nothing."""

KVLAYERS = "kvlayers"
TRANSFORMERS = "transformers"

TRANSFORMERS_CACHES = ("dynamic", "static", "quanto", "hqq")
"""Caches of transformers. `quanto` and `hqq` are its quantized caches, of 4 bits."""

DEMO_MODEL = "SmolLM2-135M-Instruct"
HUB_NAME = f"HuggingFaceTB/{DEMO_MODEL}"
"""The model that commands use if none is named."""
