"""A package that is not kvlayers: a layer, a store and a quantizer, made of public names alone."""

import torch
from torch import Tensor

import kvlayers
from kvlayers.quantizers import Backend, CodeFormat, QuantizedGroups, Quantizer, SideOptions
from other_package.recent_layer import RecentLayer

__all__ = ["HalvesBackend", "RecentLayer", "SteppedStore", "register", "unregister"]


class SteppedStore(kvlayers.stores.DenseStore):
    """A dense store that grows by `step` tokens at a time, however long it is."""

    described = ("step",)
    hints = ()

    def __init__(self, step: int = 16) -> None:
        super().__init__(growth_divisor=2**62, minimum_growth=step)
        self.step = step


class HalvesQuantizer(Quantizer):
    """Rounds a state to the nearer end of its group's range: one bit."""

    def quantize(self, states: Tensor) -> QuantizedGroups:
        low, high = states.amin(-1, keepdim=True), states.amax(-1, keepdim=True)
        codes = (states > (low + high) / 2).to(torch.uint8)
        return QuantizedGroups(codes, high - low, low)


class HalvesBackend(Backend):
    """Two codes for each group: the least state of it, or the greatest."""

    name = "halves"
    widths = (1,)

    def quantizer(self, options: SideOptions, head_dim: int) -> Quantizer:
        return HalvesQuantizer(CodeFormat(1, 1, head_dim))


def register() -> None:
    """Register every kind, as an import of such a package does."""
    kvlayers.layers.register_layer(RecentLayer)
    kvlayers.stores.register_store(SteppedStore)
    kvlayers.quantizers.register_quantizer("halves")(HalvesBackend)


def unregister() -> None:
    """Take the names back."""
    kvlayers.layers.unregister_layer("RecentLayer")
    kvlayers.stores.unregister_store("SteppedStore")
    kvlayers.quantizers.unregister_quantizer("halves")
