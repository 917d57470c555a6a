"""Which tokens a layer keeps. One file a kind of layer."""

from kvlayers.layers.contract import CacheLayer
from kvlayers.layers.dynamic import DynamicLayer
from kvlayers.layers.evicting import EvictingLayer
from kvlayers.layers.hybrid import HybridLayer
from kvlayers.layers.linear.checkpoints import Checkpoints
from kvlayers.layers.linear.layer import LinearAttentionLayer
from kvlayers.layers.offloaded import OffloadedLayer
from kvlayers.layers.operations import LayerOperations, LayerState
from kvlayers.layers.quantized import QuantizedLayer
from kvlayers.layers.recall import Recall, RecallLayer
from kvlayers.layers.registry import layer_names, register_layer, unregister_layer
from kvlayers.layers.sink import SinkLayer
from kvlayers.layers.sliding import SlidingLayer
from kvlayers.layers.static import StaticLayer, StaticSlidingLayer
from kvlayers.layers.token_layer import TokenLayer
from kvlayers.layers.upstream_adapter.adapter import TransformersLayer

__all__ = [
    "CacheLayer",
    "Checkpoints",
    "DynamicLayer",
    "EvictingLayer",
    "HybridLayer",
    "LayerOperations",
    "LayerState",
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
    "layer_names",
    "register_layer",
    "unregister_layer",
]
