"""Contexts that are concatenated from parts that were computed apart."""

from kvlayers.documents.joining import Joined, concatenate, joined, recompute_amount

__all__ = ["Joined", "concatenate", "joined", "recompute_amount"]
