"""Stores: how the tokens of a layer are held. Each kind of store has its own file."""

from kvlayers.core.buffer import LayerShape, StateForm, form_of
from kvlayers.core.dense_store import DenseStore
from kvlayers.core.description import DescriptionContext
from kvlayers.core.token_store import Fidelity, KVPair, TokenStore, register_store, store_names, unregister_store
from kvlayers.eviction.ragged_store import RaggedStore
from kvlayers.quantized.quantization import Quantization
from kvlayers.quantized.quantized_store import QuantizedStore
from kvlayers.static.slots import Buckets
from kvlayers.static.static_store import StaticStore
from kvlayers.utils.tensor_memory import storages_of

__all__ = [
    "Buckets",
    "DenseStore",
    "DescriptionContext",
    "Fidelity",
    "KVPair",
    "LayerShape",
    "Quantization",
    "QuantizedStore",
    "RaggedStore",
    "StateForm",
    "StaticStore",
    "TokenStore",
    "form_of",
    "register_store",
    "storages_of",
    "store_names",
    "unregister_store",
]
