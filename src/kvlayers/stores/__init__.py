"""How tokens are held. One file a kind of store."""

from kvlayers.stores.buckets import Buckets
from kvlayers.stores.contract import TokenStore
from kvlayers.stores.dense import DenseStore
from kvlayers.stores.quantization import Quantization
from kvlayers.stores.quantized import QuantizedStore
from kvlayers.stores.shared_prefix import SharedStore
from kvlayers.stores.static import FixedStore

__all__ = ["Buckets", "DenseStore", "FixedStore", "Quantization", "QuantizedStore", "SharedStore", "TokenStore"]
