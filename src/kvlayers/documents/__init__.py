"""Contexts that are concatenated from parts that were computed apart."""

from kvlayers.documents.joining import concatenate

__all__ = ["concatenate"]
