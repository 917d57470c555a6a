"""Quantizers, which turn states into codes. Each backend has its own file."""

from kvlayers.quantizers.contract import (
    Backend,
    CodeFormat,
    QuantizedGroups,
    Quantizer,
    Side,
    SideOptions,
    channel_group,
)
from kvlayers.quantizers.dequantize import dequantize
from kvlayers.quantizers.fp8 import Fp8Backend, Fp8Quantizer
from kvlayers.quantizers.hqq import HQQBackend, HQQQuantizer
from kvlayers.quantizers.native import NativeBackend, NativeQuantizer
from kvlayers.quantizers.quanto import QuantoBackend, QuantoQuantizer
from kvlayers.quantizers.registry import backend, quantizer_names, register_quantizer, unregister_quantizer

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
