"""What a prefix is found by: its tokens, the model that it is of, and whose it is."""

import hashlib

import numpy as np
import torch

from kvlayers.caches.base import Cache
from kvlayers.caches.encoder_decoder import EncoderDecoderCache
from kvlayers.errors import OptionError, StateMismatchError
from kvlayers.persistence.fingerprint import model_fields
from kvlayers.persistence.format import canonical
from kvlayers.prefix.radix_tree import Tokens

LABEL_PREFIX = "kvlayers.prefix:"
"""What the label of an entry begins with, so that files of a store can be told from others."""


def label_of(config: object | None, model: str | None, namespace: str) -> str:
    """The same text for the same model and namespace, and another one for any other.

    Args:
        config: config of the model.
        model: what the caller calls the model, or its weights.
        namespace: whose prefixes they are.

    Raises:
        OptionError: neither `config` nor `model` is given, or one of the texts is none.
        ConfigError: `config` is no model config.
    """
    if not isinstance(namespace, str):
        raise OptionError(f"expected namespace to be a text, but saw a {type(namespace).__name__}.")
    if model is not None and (not isinstance(model, str) or not model):
        raise OptionError(
            f"expected model to be a text, but saw {model!r}: pass kvlayers.weights_id(model), or a name of your own."
        )
    if config is None and model is None:
        raise OptionError(
            "expected to know the model, whose states mean nothing to another one, but saw neither config nor model: "
            "pass config=model.config."
        )
    fields = None if config is None else model_fields(config, is_pair=False)
    return LABEL_PREFIX + hashlib.sha256(canonical([fields, model, namespace]).encode()).hexdigest()


def tokens_of(input_ids: object) -> Tokens:
    """Token ids as the tree has them, int64 `[tokens]`, a copy.

    Raises:
        OptionError: they are no int64 tensor `[tokens]` or `[1, tokens]`, or there are none.
    """
    if not isinstance(input_ids, torch.Tensor):
        raise OptionError(f"expected input_ids to be a tensor, but saw a {type(input_ids).__name__}.")
    if input_ids.dtype != torch.int64:
        raise OptionError(f"expected input_ids of int64, but saw {input_ids.dtype}: pass what the tokenizer returned.")
    if input_ids.dim() not in (1, 2):
        raise OptionError(
            f"expected input_ids [tokens] or [1, tokens], but saw {list(input_ids.shape)}: pass one sequence."
        )
    if input_ids.dim() == 2 and input_ids.shape[0] != 1:
        raise OptionError(
            f"expected input_ids of one sequence, but saw {input_ids.shape[0]}: pass one row, as input_ids[:1]."
        )
    if not input_ids.numel():
        raise OptionError("expected input_ids of at least one token, but saw none.")
    return np.array(input_ids.detach().reshape(-1).cpu().numpy(), dtype=np.int64)


def seen_by(cache: object, ids: Tokens) -> tuple[Cache, int]:
    """`cache`, and how many tokens it has seen, where it can be held for `ids`.

    Raises:
        OptionError: no cache of kvlayers, or one for a model with an encoder, whose input is not in `ids`.
        StateMismatchError: it has several sequences, has seen nothing, or other tokens than `ids`, or its layers have
            seen different numbers of them.
    """
    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        raise OptionError(
            f"expected a cache of kvlayers for a model without an encoder, but saw a {type(cache).__name__}: make one, "
            "for example with kvlayers.DynamicCache(config=model.config)."
        )
    length = cache.get_seq_length()
    if not length:
        raise StateMismatchError("expected a cache that has seen tokens, but saw an empty one: pass it them first.")
    if cache.batch_size != 1:
        raise StateMismatchError(
            f"expected a cache of one sequence, but saw {cache.batch_size}: insert a fork() of it, of which "
            "batch_select_indices() has selected one."
        )
    if length > len(ids):
        raise StateMismatchError(
            f"expected the ids of the {length} tokens that the cache has seen, but saw {len(ids)}: pass those of the "
            "whole sequence."
        )
    lengths = {layer.length for layer in cache.adapted_layers() if layer.length}
    if lengths - {length}:
        raise StateMismatchError(
            f"expected layers that have seen the same tokens, but saw {sorted(lengths)}: a forward pass broke off, so "
            f"crop the cache to {min(lengths)}."
        )
    return cache, length
