"""Caches in files: safetensors, written at once or not at all, and checked before anything is believed."""

from .inspecting import CacheFile, inspect_cache
from .loading import load_cache
from .saving import save_cache
from .weights import weights_id

__all__ = ["CacheFile", "inspect_cache", "load_cache", "save_cache", "weights_id"]
