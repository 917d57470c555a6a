"""Saves caches to safetensors files, atomically, and loads them after checking everything that a file says."""

from kvlayers.persistence.fingerprint import weights_id
from kvlayers.persistence.inspect import CacheFile, inspect_cache
from kvlayers.persistence.load import load_cache
from kvlayers.persistence.save import save_cache

__all__ = ["CacheFile", "inspect_cache", "load_cache", "save_cache", "weights_id"]
