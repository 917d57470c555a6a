"""How tokens are held. One file a kind of store."""

from kvlayers.stores.buckets import Buckets
from kvlayers.stores.contract import TokenStore
from kvlayers.stores.dense import DenseStore
from kvlayers.stores.quantization import Quantization
from kvlayers.stores.quantized import QuantizedStore
from kvlayers.stores.shared_prefix import SharedStore
from kvlayers.stores.static import StaticStore

__all__ = ["Buckets", "DenseStore", "StaticStore", "Quantization", "QuantizedStore", "SharedStore", "TokenStore"]
