"""Keeps every token; a query reads the pages whose bounds promise most (Quest)."""

from kvlayers.recall import recall_layer

__all__ = ["recall_layer"]
