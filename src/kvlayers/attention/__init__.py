"""How attention reads what a layer returns."""

from .single_query import attended_by_one_query

__all__ = ["attended_by_one_query"]
