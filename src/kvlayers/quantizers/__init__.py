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
from kvlayers.quantizers.kivi import KiviBackend, KiviQuantizer
from kvlayers.quantizers.native import NativeBackend, NativeQuantizer
from kvlayers.quantizers.nf4 import NF4Backend, NF4Quantizer
from kvlayers.quantizers.quanto import QuantoBackend, QuantoQuantizer
from kvlayers.quantizers.registry import backend, quantizer_names, register_quantizer, unregister_quantizer
from kvlayers.quantizers.turboquant import TurboQuantBackend, TurboQuantizer

__all__ = [
    "Backend",
    "CodeFormat",
    "Fp8Backend",
    "Fp8Quantizer",
    "HQQBackend",
    "HQQQuantizer",
    "KiviBackend",
    "KiviQuantizer",
    "NF4Backend",
    "NF4Quantizer",
    "NativeBackend",
    "NativeQuantizer",
    "QuantizedGroups",
    "Quantizer",
    "QuantoBackend",
    "QuantoQuantizer",
    "Side",
    "SideOptions",
    "TurboQuantBackend",
    "TurboQuantizer",
    "backend",
    "channel_group",
    "dequantize",
    "quantizer_names",
    "register_quantizer",
    "unregister_quantizer",
]
