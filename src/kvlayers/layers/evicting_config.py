"""How the evicting layers of a cache are made."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvlayers.eviction import EvictionRule
from kvlayers.layers.evicting import EvictingLayer
from kvlayers.rope.rotary import Rotary
from kvlayers.stores.quantization import Quantization
from kvlayers.stores.quantized import QuantizedStore


@dataclass(frozen=True, eq=False)
class EvictingConfig:
    """How the layers of an `EvictingCache` are made; see `EvictingLayer` for the arguments.

    Attributes:
        rule: which tokens are evicted first.
        keep: part of the tokens that an average layer keeps.
        budget: tokens that an average layer keeps.
        sink_tokens: first tokens that are always kept.
        recent_tokens: newest tokens that an eviction always keeps.
        per_head: whether KV heads keep different numbers of tokens.
        quantization: how kept tokens are held in packed codes, `None` for full precision.
        left_padding: tokens of padding before each sequence, int64 `[batch]`; `None` if there is no padding.
    """

    rule: str | EvictionRule
    keep: float | None = None
    budget: int | None = None
    sink_tokens: int = 4
    recent_tokens: int = 64
    per_head: bool = True
    quantization: Quantization | None = None
    left_padding: Tensor | None = None

    def layers(self, rotaries: Sequence[Rotary | None]) -> list[EvictingLayer]:
        """A layer for each layer of full attention of a model, whose keys are rotated like this.

        Raises:
            OptionError: an argument has a wrong value.
            ConfigError: the rule needs to know how keys are rotated, and cannot.
        """
        return [self._layer(rotary) for rotary in rotaries]

    def _layer(self, rotary: Rotary | None) -> EvictingLayer:
        return EvictingLayer(
            self.rule,
            self.keep,
            self.budget,
            self.sink_tokens,
            self.recent_tokens,
            self.per_head,
            rotary,
            None if self.quantization is None else QuantizedStore(self.quantization),
            self.left_padding,
        )
