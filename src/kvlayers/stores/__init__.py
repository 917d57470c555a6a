"""How tokens are held. One file a kind of store."""

from .base import TokenStore
from .dense import DenseStore
from .fixed import FixedStore

__all__ = ["DenseStore", "FixedStore", "TokenStore"]
