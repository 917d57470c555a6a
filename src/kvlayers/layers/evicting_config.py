"""How the evicting layers of a cache are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor
from typing_extensions import Self

from kvlayers.eviction import EvictionRule
from kvlayers.eviction.budgets import LayerBudgets, check_layer_budgets, layer_keeps, layer_tokens
from kvlayers.eviction.settings import check_amounts, name_of
from kvlayers.layers.evicting import EvictingLayer
from kvlayers.layers.sink_tokens import padding_of
from kvlayers.rope.rotary import Rotary
from kvlayers.stores.packed_eviction import check_evictable
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
        layer_budgets: how tokens are divided among layers; see `layer_keeps`.
        quantization: how kept tokens are held in packed codes, `None` for full precision.
        left_padding: tokens of padding before each sequence, int64 `[batch]`; `None` if there is no padding.

    Raises:
        OptionError: the quantization has more than one fixed scale for keys, or for values.
    """

    rule: str | EvictionRule
    keep: float | None = None
    budget: int | None = None
    sink_tokens: int = 4
    recent_tokens: int = 64
    per_head: bool = True
    layer_budgets: LayerBudgets = "uniform"
    quantization: Quantization | None = None
    left_padding: Tensor | None = None

    def __post_init__(self) -> None:
        if self.quantization is not None:
            check_evictable(self.quantization)

    def with_padding(self, padding: Tensor | None) -> "EvictingConfig":
        """The same behind other padding."""
        return replace(self, left_padding=padding)

    def facts(self) -> dict[str, Any]:
        """The fields as plain values, from which `from_facts` makes an equal config.

        Raises:
            OptionError: the rule has no name.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            **values,
            "rule": name_of(self.rule),
            "quantization": None if self.quantization is None else self.quantization.facts(),
            "left_padding": None if self.left_padding is None else self.left_padding.tolist(),
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """A config from what `facts` returned.

        Raises:
            OptionError: a fact has a value that the cache does not take.
        """
        values = {field.name: facts[field.name] for field in fields(cls)}
        quantization, padding = Quantization.of(facts["quantization"]), padding_of(facts["left_padding"])
        config = cls(**{**values, "quantization": quantization, "left_padding": padding})
        check_amounts(config.keep, config.budget, config.sink_tokens, config.recent_tokens)
        check_layer_budgets(config.layer_budgets)
        return config

    def layers(self, rotaries: Sequence[Rotary | None], scale: float | None) -> list[EvictingLayer]:
        """A layer for each layer of full attention of a model.

        Args:
            rotaries: how each of these layers rotates its keys, if the rule needs to know.
            scale: factor of the scores of attention, `None` for `1 / sqrt(head_dim)`.

        Raises:
            OptionError: an argument has a wrong value.
        """
        count = len(rotaries)
        keeps: list[float | None] = [None] * count
        budgets: list[int | None] = [None] * count
        if self.budget is None:
            keeps = [*layer_keeps(self.layer_budgets, count, 1.0 if self.keep is None else self.keep)]
        else:
            budgets = [*layer_tokens(self.layer_budgets, count, self.budget, self.sink_tokens + self.recent_tokens)]
        return [self._layer(*of_layer, scale) for of_layer in zip(keeps, budgets, rotaries, strict=True)]

    def _layer(
        self, keep: float | None, budget: int | None, rotary: Rotary | None, scale: float | None
    ) -> EvictingLayer:
        return EvictingLayer(
            self.rule,
            keep,
            budget,
            self.sink_tokens,
            self.recent_tokens,
            self.per_head,
            rotary,
            scale,
            None if self.quantization is None else QuantizedStore(self.quantization),
            self.left_padding,
        )
