"""A press of kvpress as a rule of eviction."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.errors import OptionError
from kvlayers.eviction.rule import ALL_QUERIES, EvictionRule

TRIED = (1, 1, 1024, 8)
"""Shape of the random keys and values with which a press is tried. It is more tokens than a press wants at least."""


def is_press(rule: object) -> bool:
    """Whether `rule` is a press of kvpress that scores tokens. Nobody has one who has not imported kvpress."""
    kvpress: Any = sys.modules.get("kvpress")
    return kvpress is not None and isinstance(rule, kvpress.ScorerPress)


@dataclass(frozen=True)
class PressRule(EvictionRule):
    """The scores of a press of kvpress (a `ScorerPress`) as a rule. `rule=press` makes one.

    A press computes queries from hidden states. Here attention has shown the queries, rotated as they are, so the press
    is given an attention that neither projects nor rotates. Queries that nobody has shown are zeros, which prefer no
    token. If a press asserts that there are more tokens, all have the same score.

    Args:
        press: the press. Without `keep` and `budget`, the part that its `compression_ratio` leaves is kept.

    Raises:
        OptionError: the press needs more of the model than keys, values and queries.
    """

    press: Any

    def __post_init__(self) -> None:
        states = torch.randn(TRIED, generator=torch.Generator().manual_seed(0))
        try:
            self._score(states, states, None)
        except Exception:
            object.__setattr__(self, "queries", ALL_QUERIES)
        try:
            self._score(states, states, states if self.queries else None)
        except Exception as error:
            raise OptionError(
                f"`rule` must be a press that scores tokens by keys, values and queries, got a "
                f"{type(self.press).__name__} ({type(error).__name__}: {error}): use it with kvpress itself, over a "
                "DynamicCache."
            ) from error

    @property
    def keep(self) -> float:  # type: ignore[override]
        """Part of the tokens that the press keeps."""
        return 1 - float(self.press.compression_ratio)

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        try:
            return self._score(keys, values, queries)
        except AssertionError:
            return keys.new_zeros(keys.shape[:3])

    def _score(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        batch, kv_heads, tokens, head_dim = keys.shape
        heads, hidden = kv_heads, None
        if queries is not None:
            heads = queries.shape[1]
            padded = torch.nn.functional.pad(queries, (0, 0, tokens - queries.shape[2], 0))
            hidden = padded.transpose(1, 2).reshape(batch, tokens, heads * head_dim)
        attention = SimpleNamespace(
            config=SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads),
            head_dim=head_dim,
            q_proj=torch.nn.Identity(),
        )
        unrotated = keys.new_ones(batch, tokens, head_dim), keys.new_zeros(batch, tokens, head_dim)
        scores: Tensor = self.press.score(attention, hidden, keys, values, None, {"position_embeddings": unrotated})
        return scores
