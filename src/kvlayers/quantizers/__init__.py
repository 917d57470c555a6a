"""Quantizers, which turn states into codes. Each backend has its own file."""

from kvlayers.quantizers.codebook import NF4Backend, NF4Quantizer, TurboQuantBackend, TurboQuantizer
from kvlayers.quantizers.contract import (
    Backend,
    CodeFormat,
    QuantizedGroups,
    Quantizer,
    Side,
    SideOptions,
    backend,
    channel_group,
    quantizer_names,
    register_quantizer,
    unregister_quantizer,
)
from kvlayers.quantizers.fp8 import Fp8Backend, Fp8Quantizer
from kvlayers.quantizers.groups import dequantize
from kvlayers.quantizers.native import KiviBackend, KiviQuantizer, NativeBackend, NativeQuantizer
from kvlayers.quantizers.other_packages import HQQBackend, HQQQuantizer, QuantoBackend, QuantoQuantizer

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
