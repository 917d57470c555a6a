"""Which tokens a layer keeps. One file a kind of layer."""

from .base import CacheLayer, LayerState
from .checkpoints import Checkpoints
from .dynamic import DynamicLayer
from .hybrid import HybridLayer
from .layer_operations import LayerOperations
from .linear_attention import LinearAttentionLayer
from .offloaded import OffloadedLayer
from .quantized import QuantizedLayer
from .registry import layer_names, register_layer, unregister_layer
from .sink import SinkLayer
from .sliding import SlidingLayer
from .static import StaticLayer
from .static_sliding import StaticSlidingLayer
from .token_layer import TokenLayer
from .transformers_layer import TransformersLayer

__all__ = [
    "CacheLayer",
    "Checkpoints",
    "DynamicLayer",
    "HybridLayer",
    "LayerOperations",
    "LayerState",
    "LinearAttentionLayer",
    "OffloadedLayer",
    "QuantizedLayer",
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
