"""Scores of the tokens of a layer whose sequences and heads may hold different numbers of tokens."""

import torch
from torch import Tensor

from kvlayers.eviction.contract import EvictionRule, check_scores


def scores_of(rule: EvictionRule, keys: Tensor, values: Tensor, queries: Tensor | None, counts: Tensor) -> Tensor:
    """The scores that a rule gives to tokens. The rule never sees a place without a token.

    Args:
        rule: the rule.
        keys: `[batch, kv_heads, tokens, key_head_dim]`.
        values: `[batch, kv_heads, tokens, value_head_dim]`.
        queries: `[batch, heads, observed, key_head_dim]`, `None` if the rule asks for none.
        counts: for each sequence and KV head how many of the last places have a token, int64 `[batch, kv_heads]` on the
            host.

    Returns:
        Floating-point scores `[batch, kv_heads, tokens]`, minus infinity where there is no token.

    Raises:
        StateMismatchError: the rule returned something else.
    """
    with torch.no_grad():
        tokens = keys.shape[2]
        if bool((counts == tokens).all()):
            return _scores(rule, keys, values, queries)
        result = torch.full(keys.shape[:3], -torch.inf, dtype=torch.float32, device=keys.device)
        for sequence, of_heads in enumerate(counts.tolist()):
            row = slice(sequence, sequence + 1)
            heads = len(of_heads)
            # Heads with the same number of tokens are passed together, as a rule may compare heads.
            runs = [slice(0, heads)] if len(set(of_heads)) == 1 else [slice(head, head + 1) for head in range(heads)]
            for run in runs:
                count = of_heads[run.start]
                if count:
                    first = tokens - count
                    own = None if queries is None else _queries_of(queries[row], run, heads)[:, :, -count:]
                    result[row, run, first:] = _scores(
                        rule, keys[row, run, first:], values[row, run, first:], own
                    ).float()
        return result


def _queries_of(queries: Tensor, run: slice, kv_heads: int) -> Tensor:
    """The queries of the heads that read some KV heads."""
    group = queries.shape[1] // kv_heads
    return queries[:, run.start * group : run.stop * group]


def _scores(rule: EvictionRule, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
    return check_scores(rule, rule.scores(keys, values, queries), keys)
