"""Keeps the first tokens and a window, with keys that are rotated to new positions (StreamingLLM)."""

from kvlayers.sinks import sink_cache, sink_layer

__all__ = ["sink_cache", "sink_layer"]
