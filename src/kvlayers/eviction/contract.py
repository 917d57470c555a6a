"""The contract of an eviction rule, which says how much the later tokens will need each token of a layer."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor
from typing_extensions import Self

from kvlayers.errors import StateMismatchError
from kvlayers.rope.rotary import Rotary

ALL_QUERIES = -1
"""A rule with this number of `queries` asks for those of every token since the last eviction."""


class EvictionRule(ABC):
    """Scores tokens; the tokens with the lowest scores are evicted first.

    A rule has no state: equal inputs give equal scores. The layer decides how many tokens are kept, and always keeps
    the sinks and the newest tokens; it never passes padding. A rule need not know any of that.

    Attributes:
        queries: how many queries `scores` needs: those of the newest tokens. 0 for a rule that looks at keys and values
            alone, `ALL_QUERIES` for one that needs those of all tokens since the last eviction.
        shares_heads: whether every KV head of a sequence gets the same scores, so that heads keep the same tokens.
        needs_rotary: whether the rule must know how keys are rotated. If kvlayers does not know it of a model, the rule
            is refused.
    """

    queries: int = 0
    shares_heads: ClassVar[bool] = False
    needs_rotary: ClassVar[bool] = False

    @abstractmethod
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        """How much later tokens will need each of these tokens.

        Args:
            keys: keys as the cache holds them, rotated, `[batch, kv_heads, tokens, head_dim]`.
            values: values, `[batch, kv_heads, tokens, value_head_dim]`.
            queries: queries of the newest tokens, rotated and not scaled, `[batch, heads, observed, head_dim]`;
                `heads` is a multiple of `kv_heads`, and `observed` at most `tokens`. The last query is that of the last
                token. `None` if the rule asks for no queries.

        Returns:
            `[batch, kv_heads, tokens]`, of any floating-point dtype. NaN counts as the lowest score.
        """

    def for_attention(self, rotary: Rotary | None, scale: float | None) -> Self:
        """The rule for layers that compute attention like this; `rules_for` of `for_model.py` calls it for a model.

        Args:
            rotary: how keys and queries are rotated by their positions, `None` if they are not, or if the rule does
                not need to know.
            scale: factor of the scores of attention, `None` for `1 / sqrt(head_dim)`.
        """
        return self


def check_scores(rule: EvictionRule, scores: object, keys: Tensor) -> Tensor:
    """The scores that a rule returned, after a check.

    Raises:
        StateMismatchError: they are not a floating-point tensor `[batch, kv_heads, tokens]` on the device of the keys.
    """
    expected = tuple(keys.shape[:3])
    if (
        not isinstance(scores, Tensor)
        or tuple(scores.shape) != expected
        or not scores.is_floating_point()
        or scores.device != keys.device
    ):
        got = (
            f"{list(scores.shape)} of {scores.dtype} on {scores.device}"
            if isinstance(scores, Tensor)
            else f"a {type(scores).__name__}"
        )
        raise StateMismatchError(
            f"`{type(rule).__name__}.scores` must return floating-point scores {list(expected)} on {keys.device}, got "
            f"{got}: correct the rule."
        )
    return scores
