"""Which tokens a layer keeps. One file a kind of layer."""

from .base import CacheLayer, LayerState
from .dynamic import DynamicLayer
from .offloaded import OffloadedLayer
from .quantized import QuantizedLayer
from .sliding import SlidingLayer
from .static import StaticLayer
from .static_sliding import StaticSlidingLayer
from .token_layer import TokenLayer
from .transformers_layer import TransformersLayer

__all__ = [
    "CacheLayer",
    "DynamicLayer",
    "LayerState",
    "OffloadedLayer",
    "QuantizedLayer",
    "SlidingLayer",
    "StaticLayer",
    "StaticSlidingLayer",
    "TokenLayer",
    "TransformersLayer",
]
