"""Batches as sets of rows: sequences that join, leave, and go back each by itself."""

from kvlayers.rows.operations import Rows, merge

__all__ = ["Rows", "merge"]
