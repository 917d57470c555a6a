"""Stores: how the tokens of a layer are held. Each kind of store has its own file."""

from kvlayers.stores.buffer import StateForm
from kvlayers.stores.contract import TokenStore, register_store, store_names, unregister_store
from kvlayers.stores.dense import DenseStore
from kvlayers.stores.description import DescriptionContext
from kvlayers.stores.quantization import Quantization
from kvlayers.stores.quantized import QuantizedStore
from kvlayers.stores.ragged import RaggedStore
from kvlayers.stores.slots import Buckets
from kvlayers.stores.static import StaticStore

__all__ = [
    "Buckets",
    "DenseStore",
    "DescriptionContext",
    "Quantization",
    "QuantizedStore",
    "RaggedStore",
    "StateForm",
    "StaticStore",
    "TokenStore",
    "register_store",
    "store_names",
    "unregister_store",
]
