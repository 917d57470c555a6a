"""Which tokens a layer keeps. One file a kind of layer."""

from kvlayers.core.cache_layer import (
    CacheLayer,
    LayerState,
    LayerTraits,
    adapted,
    layer_names,
    register_layer,
    unregister_layer,
)
from kvlayers.core.from_config import Checkpoints
from kvlayers.core.token_layer import DynamicLayer, SlidingLayer, TokenLayer
from kvlayers.eviction.evicting_layer import EvictingLayer
from kvlayers.interop.adapter import TransformersLayer
from kvlayers.kernels.attention.packed_ops import observed, observer_of
from kvlayers.kernels.attention.packed_tensor import as_dense
from kvlayers.offload.offloaded_layer import OffloadedLayer
from kvlayers.quantized.quantized_layer import QuantizedLayer
from kvlayers.recall.recall_layer import Recall, RecallLayer
from kvlayers.recurrent.hybrid_layer import HybridLayer
from kvlayers.recurrent.linear_layer import LinearAttentionLayer
from kvlayers.sinks.sink_layer import SinkLayer
from kvlayers.static.static_layer import StaticLayer, StaticSlidingLayer

__all__ = [
    "CacheLayer",
    "Checkpoints",
    "DynamicLayer",
    "EvictingLayer",
    "HybridLayer",
    "LayerState",
    "LayerTraits",
    "LinearAttentionLayer",
    "OffloadedLayer",
    "QuantizedLayer",
    "Recall",
    "RecallLayer",
    "SinkLayer",
    "SlidingLayer",
    "StaticLayer",
    "StaticSlidingLayer",
    "TokenLayer",
    "TransformersLayer",
    "adapted",
    "as_dense",
    "layer_names",
    "observed",
    "observer_of",
    "register_layer",
    "unregister_layer",
]
