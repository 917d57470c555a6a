"""How tokens are held. One file a kind of store."""

from .base import TokenStore
from .buckets import Buckets
from .buffer import StateForm
from .dense import DenseStore
from .fixed import FixedStore
from .quantization import Quantization
from .quantized import QuantizedStore
from .registry import register_store, store_names, unregister_store
from .shared import SharedStore

__all__ = [
    "Buckets",
    "DenseStore",
    "FixedStore",
    "Quantization",
    "QuantizedStore",
    "SharedStore",
    "StateForm",
    "TokenStore",
    "register_store",
    "store_names",
    "unregister_store",
]
