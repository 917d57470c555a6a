"""Contexts that are concatenated from parts that were computed apart."""

from kvlayers.documents.joining import concatenate, moved, replace_tokens

__all__ = ["concatenate", "moved", "replace_tokens"]
