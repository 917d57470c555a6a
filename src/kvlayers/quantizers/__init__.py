"""What turns states into codes. One file a backend."""

from .base import Backend, CodeFormat, QuantizedGroups, Quantizer, Side, SideOptions, channel_group
from .dequantize import dequantize
from .fp8 import Fp8Backend, Fp8Quantizer
from .hqq import HQQBackend, HQQQuantizer
from .native import NativeBackend, NativeQuantizer
from .quanto import QuantoBackend, QuantoQuantizer
from .registry import backend, quantizer_names, register_quantizer, unregister_quantizer

__all__ = [
    "Backend",
    "CodeFormat",
    "Fp8Backend",
    "Fp8Quantizer",
    "HQQBackend",
    "HQQQuantizer",
    "NativeBackend",
    "NativeQuantizer",
    "QuantizedGroups",
    "Quantizer",
    "QuantoBackend",
    "QuantoQuantizer",
    "Side",
    "SideOptions",
    "backend",
    "channel_group",
    "dequantize",
    "quantizer_names",
    "register_quantizer",
    "unregister_quantizer",
]
