"""Caches in files: safetensors, written at once or not at all, and checked before anything is believed."""

from kvlayers.persistence.inspect import CacheFile, inspect_cache
from kvlayers.persistence.load import load_cache
from kvlayers.persistence.save import save_cache
from kvlayers.persistence.weights import weights_id

__all__ = ["CacheFile", "inspect_cache", "load_cache", "save_cache", "weights_id"]
