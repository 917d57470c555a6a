"""How a layer evicts: its rule, how many tokens it keeps, and which tokens it always keeps."""

import math
from dataclasses import dataclass

from typing_extensions import Self

from kvlayers.errors import OptionError
from kvlayers.eviction.press_rule import PressRule, is_press
from kvlayers.eviction.rule import ALL_QUERIES, EvictionRule, eviction_rule, eviction_rule_name, eviction_rule_names
from kvlayers.rope.rotary import Rotary
from kvlayers.utils.options import check_whole_number

STEP = 64
"""While single tokens come, a layer with a budget holds up to this many tokens more before it evicts again."""

MOST_TOKENS = 2**48
"""More tokens than any text has. Torch counts in 64 bits."""


@dataclass(frozen=True)
class EvictionSettings:
    """How a layer evicts. Either `keep` or `budget` is given.

    Attributes:
        rule: says which tokens are evicted first.
        rule_name: name that the rule is registered by; `None` for a rule without a name.
        keep: part of the tokens that are kept, larger than 0 and at most 1.
        budget: tokens that are kept.
        sink_tokens: first tokens of each sequence that are always kept.
        recent_tokens: newest tokens of each sequence that an eviction always keeps.
        per_head: whether KV heads keep different numbers of tokens.
    """

    rule: EvictionRule
    rule_name: str | None
    keep: float | None = None
    budget: int | None = None
    sink_tokens: int = 4
    recent_tokens: int = 64
    per_head: bool = True

    @classmethod
    def of(
        cls,
        rule: str | EvictionRule,
        keep: float | None,
        budget: int | None,
        sink_tokens: int,
        recent_tokens: int,
        per_head: bool,
        rotary: Rotary | None,
        scale: float | None,
    ) -> Self:
        """Settings from the arguments of a layer.

        Raises:
            OptionError: an argument has a wrong value, or both or neither of `keep` and `budget` are given.
        """
        check_amounts(keep, budget, sink_tokens, recent_tokens)
        if not isinstance(per_head, bool):
            raise OptionError(f"`per_head` must be True or False, got {per_head!r}: pass one of them.")
        named, name = found_rule(rule)
        fitted = named.for_attention(rotary, scale)
        _check_queries(fitted)
        return cls(
            fitted,
            name,
            None if keep is None else float(keep),
            budget,
            sink_tokens,
            recent_tokens,
            per_head,
        )

    @property
    def rule_shown(self) -> str:
        """The rule, as messages name it."""
        return type(self.rule).__name__ if self.rule_name is None else repr(self.rule_name)

    @property
    def registered_name(self) -> str:
        """The name that the rule is registered by.

        Raises:
            OptionError: the rule has no name, so that the layer can be neither saved nor described.
        """
        return name_of(self.rule) if self.rule_name is None else self.rule_name

    @property
    def protected(self) -> int:
        """Tokens that an eviction always keeps."""
        return self.sink_tokens + self.recent_tokens

    @property
    def heads_differ(self) -> bool:
        """Whether KV heads may keep different numbers of tokens."""
        return self.per_head and not self.rule.shares_heads

    @property
    def keeps_queries(self) -> bool:
        """Whether the queries before an eviction are needed for the next one."""
        return self.budget is not None and self.rule.queries != ALL_QUERIES

    def retained_queries(self, tokens: int) -> int:
        """Tokens whose queries a layer holds after it took in `tokens` tokens at once."""
        if self.budget is None or (tokens > self.budget and not self.keeps_queries):
            return 0
        return tokens if self.rule.queries == ALL_QUERIES else min(tokens, self.rule.queries)

    def allowed(self, tokens: int) -> int:
        """Tokens that an average KV head keeps of `tokens` tokens of a sequence."""
        if self.budget is not None:
            return self.budget
        return max(math.ceil((1.0 if self.keep is None else self.keep) * tokens), self.protected)


def check_amounts(keep: object, budget: object, sink_tokens: object, recent_tokens: object) -> None:
    """Raise `OptionError` if these do not say how many tokens are kept."""
    for name, number in (("sink_tokens", sink_tokens), ("recent_tokens", recent_tokens)):
        check_whole_number(number, f"`{name}`", 1, MOST_TOKENS)
    if (keep is None) == (budget is None):
        raise OptionError(
            f"Either `keep` or `budget` must be given, got {'neither' if keep is None else 'both'}: pass keep=0.5 to "
            "keep half of the tokens, or budget=4096 to keep as many, whatever the length of the text."
        )
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1):
        raise OptionError(
            f"`keep` must be a number larger than 0 and at most 1, got {keep!r}: pass a share, such as 0.5."
        )
    if budget is not None:
        least = sink_tokens + recent_tokens  # type: ignore[operator]
        if not isinstance(budget, int) or isinstance(budget, bool) or not least <= budget <= MOST_TOKENS:
            raise OptionError(
                f"`budget` must be a whole number of at least the {least} sinks and recent tokens "
                f"(sink_tokens={sink_tokens}, recent_tokens={recent_tokens}) and at most {MOST_TOKENS}, got "
                f"{budget!r}: pass another budget, or protect fewer tokens."
            )


def _check_queries(rule: EvictionRule) -> None:
    """Raise `OptionError` if a rule does not say how many queries it needs."""
    number: object = rule.queries
    if not isinstance(number, int) or isinstance(number, bool) or number < ALL_QUERIES:
        raise OptionError(
            f"`queries` of the rule {type(rule).__name__} must be 0, the number of queries that it needs, or "
            f"ALL_QUERIES, got {number!r}: correct the rule."
        )


def found_rule(rule: object) -> tuple[EvictionRule, str | None]:
    """A rule, and the name that it is registered by.

    Args:
        rule: a name, a rule, or a press of kvpress.

    Raises:
        OptionError: it is neither, or no rule has this name.
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
    return rule, eviction_rule_name(rule)


def name_of(rule: str | EvictionRule) -> str:
    """The name of a rule.

    Raises:
        OptionError: the rule has no name, so that what has it can be neither saved nor described.
    """
    name = found_rule(rule)[1]
    if name is None:
        raise OptionError(
            f"`rule` must be registered by a name to be described or saved, but no name stands for {rule!r}: register "
            "a function that makes it, such as kvlayers.eviction.register_eviction_rule('name')(lambda: rule)."
        )
    return name
