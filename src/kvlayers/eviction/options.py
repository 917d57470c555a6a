"""How tokens are evicted: by which rule, how many of them, and what each layer of a cache keeps."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor
from typing_extensions import Self

from kvlayers.core.preparation import padding_of
from kvlayers.errors import OptionError
from kvlayers.eviction.press_rule import PressRule, is_press
from kvlayers.eviction.rule import ALL_QUERIES, RULES, EvictionRule, eviction_rule, eviction_rule_names
from kvlayers.quantized.quantization import Quantization
from kvlayers.utils.options import check_whole_number

MOST_TOKENS = 2**24
"""More tokens than any text has. The largest share of a layer is still a number that a file of a cache may have."""

LayerBudgets = str | Sequence[float]
""""uniform", "pyramid", or a weight for each layer."""

STEEPNESS = 20
"""The part of an average layer's tokens that the last layer of a pyramid keeps is 1 / this number."""


@dataclass(frozen=True, eq=False)
class EvictionOptions:
    """How a layer evicts, or how the layers of a cache do. Either `keep` or `budget` is given.

    Attributes:
        rule: says which tokens are evicted first.
        rule_name: name that the rule is registered by; `None` for a rule without a name.
        keep: part of the tokens that an average layer keeps, larger than 0 and at most 1.
        budget: tokens that an average layer keeps.
        sink_tokens: first tokens of each sequence that are always kept.
        recent_tokens: newest tokens of each sequence that an eviction always keeps.
        per_head: whether KV heads keep different numbers of tokens.
        layer_budgets: how tokens are divided among the layers of a cache; see `layer_keeps`.
        quantization: how kept tokens are held in packed codes, `None` for full precision.
        left_padding: tokens of padding before each sequence of a cache, int64 `[batch]`; `None` without padding.

    Raises:
        OptionError: an option has a wrong value, or both `keep` and `budget` are given.
    """

    rule: EvictionRule
    rule_name: str | None
    keep: float | None = None
    budget: int | None = None
    sink_tokens: int = 4
    recent_tokens: int = 64
    per_head: bool = True
    layer_budgets: LayerBudgets = "uniform"
    quantization: Quantization | None = None
    left_padding: Tensor | None = None

    @classmethod
    def of(cls, rule: object, keep: float | None = None, budget: int | None = None, **options: Any) -> Self:
        """Options with a rule that is given as its name, as a rule, or as a press of kvpress.

        Args:
            rule: the rule, which says how many tokens are kept if neither `keep` nor `budget` does.
            keep: see `EvictionOptions`.
            budget: likewise.
            options: likewise.
        """
        found, name = _found_rule(rule)
        return cls(found, name, found.keep if keep is None and budget is None else keep, budget, **options)

    def __post_init__(self) -> None:
        for name, number in (("sink_tokens", self.sink_tokens), ("recent_tokens", self.recent_tokens)):
            check_whole_number(number, f"`{name}`", 1, MOST_TOKENS)
        keep, budget = self.keep, self.budget
        if keep is not None and budget is not None:
            raise OptionError(
                "Either `keep` or `budget` must be given, got both: pass keep=0.5 to keep half of the tokens, or "
                "budget=4096 to keep as many, whatever the length of the text."
            )
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1):
            raise OptionError(
                f"`keep` must be a number larger than 0 and at most 1, got {keep!r}: pass a share, such as 0.5."
            )
        if budget is not None:
            check_whole_number(
                budget,
                "`budget`",
                self.protected,
                MOST_TOKENS,
                of="tokens",
                advice=f": pass another budget, protect fewer tokens than the {self.protected} sinks and recent tokens "
                f"(sink_tokens={self.sink_tokens}, recent_tokens={self.recent_tokens}), or pass a share as keep=0.5",
            )
        if not isinstance(self.per_head, bool):
            raise OptionError(f"`per_head` must be True or False, got {self.per_head!r}: pass one of them.")
        check_whole_number(
            self.rule.queries,
            f"`queries` of the rule {type(self.rule).__name__}",
            # It stands for those of all tokens.
            ALL_QUERIES,
            advice=": correct the rule",
        )
        check_layer_budgets(self.layer_budgets)
        for side in () if self.quantization is None else (self.quantization.keys, self.quantization.values):
            # An eviction puts the blocks of all heads together.
            if len(side.scales) > 1:
                raise OptionError(
                    f"`quantization` of a cache that evicts tokens must have one scale for all KV heads, got "
                    f"{len(side.scales)} for the {side.side}: pass one number, such as the largest."
                )

    def facts(self) -> dict[str, Any]:
        """The options as plain values, from which `from_facts` makes equal ones.

        Raises:
            OptionError: the rule has no name.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "rule_name"}
        return {
            **values,
            "rule": self.registered_name,
            "quantization": None if self.quantization is None else self.quantization.facts(),
            "left_padding": None if self.left_padding is None else self.left_padding.tolist(),
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Options from what `facts` returned.

        Raises:
            OptionError: a fact has a value that the cache does not take.
        """
        values = {field.name: facts[field.name] for field in fields(cls) if field.name != "rule_name"}
        made = {
            "quantization": Quantization.of(facts["quantization"]),
            "left_padding": padding_of(facts["left_padding"]),
        }
        return cls.of(**values | made)

    @property
    def rule_shown(self) -> str:
        """The rule, as messages name it."""
        return type(self.rule).__name__ if self.rule_name is None else repr(self.rule_name)

    @property
    def registered_name(self) -> str:
        """The name that the rule is registered by.

        Raises:
            OptionError: the rule has no name, so that what has it can be neither saved nor described.
        """
        # It may have been registered since.
        name = RULES.name_of(self.rule) if self.rule_name is None else self.rule_name
        if name is None:
            raise OptionError(
                f"`rule` must be registered by a name to be described or saved, but no name stands for {self.rule!r}: "
                "register a function that makes it, such as "
                "kvlayers.eviction.register_eviction_rule('name')(lambda: rule)."
            )
        return name

    @property
    def protected(self) -> int:
        """Tokens that an eviction always keeps."""
        return self.sink_tokens + self.recent_tokens

    @property
    def heads_differ(self) -> bool:
        """Whether KV heads may keep different numbers of tokens."""
        return self.per_head and not self.rule.shares_heads

    def retained_queries(self, tokens: int) -> int:
        """Tokens whose queries a layer holds after it took in `tokens` tokens at once."""
        if self.budget is None or (tokens > self.budget and self.rule.queries == ALL_QUERIES):
            return 0
        return tokens if self.rule.queries == ALL_QUERIES else min(tokens, self.rule.queries)

    def allowed(self, tokens: int) -> int:
        """Tokens that an average KV head keeps of `tokens` tokens of a sequence."""
        if self.budget is not None:
            return self.budget
        return max(math.ceil((1.0 if self.keep is None else self.keep) * tokens), self.protected)


def _found_rule(rule: object) -> tuple[EvictionRule, str | None]:
    """A rule, and the name that it is registered by.

    Raises:
        OptionError: it is neither a name, nor a rule, nor a press of kvpress, or no rule has this name.
    """
    if isinstance(rule, str):
        return eviction_rule(rule), rule
    if is_press(rule):
        return PressRule(rule), None
    if not isinstance(rule, EvictionRule):
        got = f"the class {rule.__name__}: pass an instance" if isinstance(rule, type) else f"a {type(rule).__name__}"
        raise OptionError(
            f"`rule` must be the name of a rule ({', '.join(eviction_rule_names())}), an EvictionRule, or a "
            f"ScorerPress of kvpress, got {got}: pass one of them."
        )
    return rule, RULES.name_of(rule)


# How the tokens that are kept are divided among the layers of a cache


def layer_tokens(layer_budgets: LayerBudgets, layers: int, budget: int, least: int = 1) -> list[int]:
    """How many tokens each layer keeps. Their mean is `budget`.

    Args:
        layer_budgets: as for `layer_keeps`.
        layers: layers that evict.
        budget: tokens that an average layer keeps, not below `least`.
        least: tokens that every layer keeps.

    Raises:
        OptionError: as for `layer_keeps`.
    """
    shares = layer_keeps(layer_budgets, layers, budget, least, math.inf)
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(layers), key=lambda layer: counts[layer] - shares[layer])
    for layer in by_remainder[: budget * layers - sum(counts)]:
        counts[layer] += 1
    return counts


def check_layer_budgets(layer_budgets: object) -> None:
    """Raise `OptionError` if this is not a way to divide tokens among layers, of whatever number."""
    is_named = isinstance(layer_budgets, str) and layer_budgets in ("uniform", "pyramid")
    are_weights = (
        isinstance(layer_budgets, Sequence)
        and len(layer_budgets) > 0
        and all(
            isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight <= sys.float_info.max
            for weight in layer_budgets
        )
    )
    if not is_named and not are_weights:
        raise OptionError(
            f"`layer_budgets` must be 'uniform' or 'pyramid', or positive numbers with one for each layer, got "
            f"{layer_budgets!r}: pass one of these."
        )


def layer_keeps(
    layer_budgets: LayerBudgets, layers: int, keep: float, least: float = 0.0, most: float = 1.0
) -> list[float]:
    """The part of its tokens that each layer keeps. Their mean is `keep`.

    Args:
        layer_budgets: "uniform" for the same part in each layer; "pyramid" for fewer tokens from layer to layer, as in
            Cai et al. 2024, "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling"
            (arXiv:2406.02069); or a positive weight for each layer, of which only the ratios matter, as far as no layer
            can keep more than all.
        layers: layers that evict.
        keep: part of the tokens that an average layer keeps, above 0 and at most 1; or their number.
        least: the least that a layer keeps, in the same unit.
        most: the most that it keeps.

    Raises:
        OptionError: there are not as many weights as layers.
    """
    if layer_budgets == "uniform":
        return [keep] * layers
    if isinstance(layer_budgets, str):
        return _pyramid(layers, keep, least, most)
    if len(layer_budgets) != layers:
        raise OptionError(
            f"`layer_budgets` must have a number for each of the {layers} layers that evict, got {len(layer_budgets)}: "
            "pass as many."
        )
    return _weighted(list(layer_budgets), keep, least, most)


def _pyramid(layers: int, average: float, least: float, most: float) -> list[float]:
    """Shares that fall by the same amount from layer to layer."""
    highest = min(2 * average - max(average / STEEPNESS, least), most)
    lowest = 2 * average - highest
    if layers == 1:
        return [average]
    step = (highest - lowest) / (layers - 1)
    # Rounding errors do not lead out of the bounds.
    return [min(max(highest - layer * step, least), most) for layer in range(layers)]


def _weighted(weights: list[float], average: float, least: float, most: float) -> list[float]:
    """Shares in the ratios of the weights. What a bound takes from a layer, or gives to it, the others share."""
    # The sum of the shares grows with the factor, so halving finds the one that gives the average.
    total, low, high = average * len(weights), 0.0, 1.0
    largest = max(weights)

    def shares(factor: float) -> list[float]:
        return [min(max(weight / largest * factor, least), most) for weight in weights]

    while sum(shares(high)) < total and high < 1e300:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if sum(shares(middle)) < total:
            low = middle
        else:
            high = middle
    return shares(low)
