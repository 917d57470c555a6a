"""Rules of eviction by name, and their contract: how much the later tokens will need each token of a layer."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.errors import StateMismatchError
from kvlayers.rope.rotary import Rotary
from kvlayers.utils.registry import FactoryRegistry

ALL_QUERIES = -1
"""A rule with this number of `queries` asks for those of every token since the last eviction."""


class EvictionRule(ABC):
    """Scores tokens; the tokens with the lowest scores are evicted first.

    A rule has no state: equal inputs give equal scores. The layer decides how many tokens are kept, and always keeps
    the sinks and the newest tokens; it never passes padding. A rule need not know any of that.

    Attributes:
        queries: how many queries `scores` needs: those of the newest tokens. 0 for a rule that looks at keys and values
            alone, `ALL_QUERIES` for one that needs those of all tokens since the last eviction.
        keep: part of the tokens that a cache keeps which is given neither `keep` nor `budget`.
        shares_heads: whether every KV head of a sequence gets the same scores, so that heads keep the same tokens.
        needs_rotary: whether the rule must know how keys are rotated. If kvlayers does not know it of a model, the rule
            is refused.
    """

    queries: int = 0
    keep: float = 0.5
    shares_heads: ClassVar[bool] = False
    needs_rotary: ClassVar[bool] = False

    @abstractmethod
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        """How much later tokens will need each of these tokens. Nothing is written to the arguments.

        Args:
            keys: keys as the cache holds them, rotated, `[batch, kv_heads, tokens, head_dim]`, in the order of the
                text. After an eviction they are those of the tokens that are left, whose positions nobody tells.
            values: values, `[batch, kv_heads, tokens, value_head_dim]`.
            queries: queries of the newest tokens, rotated and not scaled, `[batch, heads, observed, head_dim]`;
                `heads` is a multiple of `kv_heads`, and `observed` at most `tokens`. The last query is that of the last
                token. `None` if the rule asks for no queries.

        Returns:
            `[batch, kv_heads, tokens]`, of any floating-point dtype. NaN counts as the lowest score.
        """

    def for_attention(self, rotary: Rotary | None, scale: float | None) -> Self:
        """The rule for layers that compute attention like this. A layer calls it when it is made.

        Args:
            rotary: how keys and queries are rotated by their positions, `None` if they are not, or if the rule does
                not need to know.
            scale: factor of the scores of attention, `None` for `1 / sqrt(head_dim)`.
        """
        return self


ENTRY_POINT_GROUP = "kvlayers.eviction_rules"
"""Entry points in this group are rules of other packages. The entry point's name is the rule's name."""

RULES: FactoryRegistry[EvictionRule] = FactoryRegistry(
    "eviction rule", ENTRY_POINT_GROUP, "unregister_eviction_rule", EvictionRule
)
"""The rules by their names."""


register_eviction_rule = RULES.register
"""Decorator that registers a factory, a class or function that returns an `EvictionRule`, as the rule of a name.

It raises `RegistryError` if the name is empty or taken, or if the factory can make nothing.
"""

unregister_eviction_rule = RULES.remove
"""Remove the rule of a name. It raises `RegistryError` if the name is not registered."""

eviction_rule_names = RULES.names
"""All names of rules, including those of entry points in other packages."""

eviction_rule = RULES.make
"""The rule of a name: `eviction_rule("knorm")`. It raises `OptionError` if no rule has this name."""


def scores_of(
    rule: EvictionRule, keys: Tensor, values: Tensor, queries: Tensor | None, counts: Tensor, observed: Tensor
) -> Tensor:
    """The scores that a rule gives to tokens. The rule never sees a place without a token.

    Args:
        rule: the rule.
        keys: `[batch, kv_heads, tokens, key_head_dim]`.
        values: `[batch, kv_heads, tokens, value_head_dim]`.
        queries: `[batch, heads, observed, key_head_dim]`, `None` if the rule asks for none.
        counts: for each sequence and KV head how many of the last places have a token that is scored, int64 `[batch,
            kv_heads]` on the host.
        observed: how many of the last queries are a sequence's own, int64 `[batch]` on the host, or `[1]`.

    Returns:
        Floating-point scores `[batch, kv_heads, tokens]`, minus infinity where no token is scored.

    Raises:
        StateMismatchError: the rule returned something else, or wrote to the states.
    """
    with torch.no_grad():
        tokens = keys.shape[2]
        if bool((counts == tokens).all()) and observed.shape[0] == 1:
            return _scores(rule, keys, values, queries)
        group = 1 if queries is None else queries.shape[1] // keys.shape[1]
        result = torch.full(keys.shape[:3], -torch.inf, dtype=torch.float32, device=keys.device)
        numbers = zip(counts.tolist(), observed.expand(counts.shape[0]).tolist(), strict=True)
        for sequence, (of_heads, own_queries) in enumerate(numbers):
            row = slice(sequence, sequence + 1)
            heads = len(of_heads)
            # Heads with the same number of tokens are passed together, as a rule may compare heads.
            runs = [slice(0, heads)] if len(set(of_heads)) == 1 else [slice(head, head + 1) for head in range(heads)]
            for run in runs:
                count = of_heads[run.start]
                if count:
                    first, newest = tokens - count, max(min(count, own_queries), 1)
                    # Of the query heads that read these KV heads.
                    own = None if queries is None else queries[row, run.start * group : run.stop * group, -newest:]
                    result[row, run, first:] = _scores(
                        rule, keys[row, run, first:], values[row, run, first:], own
                    ).float()
        return result


def _scores(rule: EvictionRule, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
    """As `scores_of`, if every place has a token."""
    # Tensors of inference mode do not count what is written to them.
    given = [side for side in (keys, values, queries) if side is not None and not side.is_inference()]
    before = [side._version for side in given]
    scores: object = rule.scores(keys, values, queries)
    if [side._version for side in given] != before:
        raise StateMismatchError(
            f"`{type(rule).__name__}.scores` must not write to keys, values or queries, which attention reads: reset "
            "the cache, and let the rule compute with copies."
        )
    got, expected = f"a {type(scores).__name__}", tuple(keys.shape[:3])
    if isinstance(scores, Tensor):
        if scores.shape == expected and scores.is_floating_point() and scores.device == keys.device:
            return scores
        got = f"{list(scores.shape)} of {scores.dtype} on {scores.device}"
    raise StateMismatchError(
        f"`{type(rule).__name__}.scores` must return floating-point scores {list(expected)} on {keys.device}, got "
        f"{got}: correct the rule."
    )
