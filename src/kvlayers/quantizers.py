"""Quantizers, which turn states into codes. Each backend has its own file."""

from kvlayers.kernels.codes.groups import dequantize
from kvlayers.kernels.codes.quantizer_contract import (
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
from kvlayers.quantized.packed_blocks import SIDES, block_nbytes
from kvlayers.quantized.quantization import block_tokens
from kvlayers.quantized.quantizers.codebook import NF4Backend, NF4Quantizer, TurboQuantBackend, TurboQuantizer
from kvlayers.quantized.quantizers.fp8 import Fp8Backend, Fp8Quantizer
from kvlayers.quantized.quantizers.native import KiviBackend, KiviQuantizer, NativeBackend, NativeQuantizer
from kvlayers.quantized.quantizers.other_packages import HQQBackend, HQQQuantizer, QuantoBackend, QuantoQuantizer

__all__ = [
    "SIDES",
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
    "block_nbytes",
    "block_tokens",
    "channel_group",
    "dequantize",
    "quantizer_names",
    "register_quantizer",
    "unregister_quantizer",
]
