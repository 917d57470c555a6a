"""How tokens are held. One file a kind of store."""

from .base import TokenStore
from .buckets import Buckets
from .dense import DenseStore
from .fixed import FixedStore
from .quantization import Quantization
from .quantized import QuantizedStore

__all__ = ["Buckets", "DenseStore", "FixedStore", "Quantization", "QuantizedStore", "TokenStore"]
