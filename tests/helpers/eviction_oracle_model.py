"""A model that attends by eviction oracles, in place of a cache that evicts."""

import copy
from typing import Any

import torch
import transformers as tf
from torch import Tensor

from eviction_oracle import EvictionOracle
from kvlayers.eviction import eviction_rule

NAME = "eviction_oracle"


class OracleCache(tf.Cache):
    """Holds nothing: attention gets the new states, and each layer has an oracle for those before.

    Args:
        layers: attention layers of the model.
        rule: name of the rule.
        **options: those of an oracle.
    """

    def __init__(self, layers: int, rule: str, **options: Any) -> None:
        super().__init__(layers=[])
        self.oracles = [EvictionOracle(eviction_rule(rule), **options) for _ in range(layers)]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.oracles[layer_idx].seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.oracles[layer_idx].seen + query_length, 0


def oracle_model(model: Any) -> Any:
    """A copy of a llama that attends as the oracles of the cache in `model.oracles` say."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
        attended = copied.oracles[module.layer_idx].step(query, key, value)
        return attended.transpose(1, 2).contiguous(), None

    tf.AttentionInterface.register(NAME, attend)
    copied = type(model)(copy.deepcopy(model.config)).to(model.dtype).eval()
    copied.load_state_dict(model.state_dict())
    copied.set_attn_implementation(NAME)
    return copied


@torch.no_grad()
def oracle_logits(model: Any, cache: OracleCache, ids: Tensor) -> Tensor:
    """Logits of the last of `ids`, `[batch, vocab]`, as the oracles in `cache` have it.

    Args:
        model: what `oracle_model` returned.
        cache: its oracles.
        ids: new tokens, int64 `[batch, new]`.
    """
    model.oracles = cache.oracles
    return model(ids, past_key_values=cache).logits[:, -1]


def oracle_tokens(model: Any, cache: OracleCache, ids: Tensor, tokens: int) -> Tensor:
    """A text of one sequence with `tokens` greedy tokens behind it, `[1, all tokens]`.

    Args:
        model: what `oracle_model` returned.
        cache: its oracles, which may have seen a part of the text.
        ids: the text.
        tokens: how many to append.
    """
    logits = oracle_logits(model, cache, ids[:, cache.get_seq_length() :])
    for number in range(tokens):
        token = logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, token], dim=1)
        if number < tokens - 1:
            logits = oracle_logits(model, cache, token)
    return ids
