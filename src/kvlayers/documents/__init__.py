"""Contexts that are concatenated from parts that were computed apart."""

from kvlayers.documents.joining import Joined, concatenate, joined, moved, recompute_amount, replace_tokens

__all__ = ["Joined", "concatenate", "joined", "moved", "recompute_amount", "replace_tokens"]
