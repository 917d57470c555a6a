"""The key of a prefix: its tokens, its model and its namespace."""

import hashlib

import numpy as np
import torch

from kvlayers.caches.base import Cache
from kvlayers.errors import OptionError, StateMismatchError
from kvlayers.persistence.fingerprint import model_fields
from kvlayers.persistence.format import canonical
from kvlayers.prefix.radix_tree import Tokens

LABEL_PREFIX = "kvlayers.prefix:"
"""What every label starts with, so that the files of a store can be recognized."""


def label_of(config: object | None, model: str | None, namespace: str) -> str:
    """A text that is the same for the same model and namespace, and differs for any others.

    Args:
        config: config of the model.
        model: the caller's name for the model, or an id of its weights.
        namespace: the namespace.

    Raises:
        OptionError: neither `config` nor `model` is given, or `model` or `namespace` is not a string.
        ConfigError: `config` is not a model config.
    """
    if not isinstance(namespace, str):
        raise OptionError(f"`namespace` must be a string, got a {type(namespace).__name__}.")
    if model is not None and (not isinstance(model, str) or not model):
        raise OptionError(
            f"`model` must be a string that is not empty, got {model!r}: pass kvlayers.weights_id(model), or a name."
        )
    if config is None and model is None:
        raise OptionError(
            "`config` or `model` is needed, since states of one model are useless to another, got neither: pass "
            "config=model.config."
        )
    fields = None if config is None else model_fields(config, is_pair=False)
    return LABEL_PREFIX + hashlib.sha256(canonical([fields, model, namespace]).encode()).hexdigest()


def tokens_of(input_ids: object) -> Tokens:
    """A copy of token ids as an array for the radix tree, int64 `[tokens]`.

    Raises:
        OptionError: `input_ids` is not an int64 tensor `[tokens]` or `[1, tokens]`, or is empty.
    """
    if not isinstance(input_ids, torch.Tensor):
        raise OptionError(f"`input_ids` must be a tensor, got a {type(input_ids).__name__}.")
    if input_ids.dtype != torch.int64:
        raise OptionError(f"`input_ids` must be int64, got {input_ids.dtype}: pass what the tokenizer returned.")
    if input_ids.dim() not in (1, 2):
        raise OptionError(
            f"`input_ids` must have shape [tokens] or [1, tokens], got {list(input_ids.shape)}: pass one sequence."
        )
    if input_ids.dim() == 2 and input_ids.shape[0] != 1:
        raise OptionError(
            f"`input_ids` must be one sequence, got {input_ids.shape[0]}: pass one row, such as input_ids[:1]."
        )
    if not input_ids.numel():
        raise OptionError("`input_ids` must have at least one token, got none.")
    return np.array(input_ids.detach().reshape(-1).cpu().numpy(), dtype=np.int64)


def checked_cache(cache: object, ids: Tokens) -> tuple[Cache, int]:
    """Check that `cache` can be stored for `ids`, and return it with the number of tokens that it has seen.

    Raises:
        OptionError: it is not a cache of kvlayers, or it is for a model with an encoder, whose input is not in `ids`.
        StateMismatchError: it has several sequences, is empty, has seen more tokens than `ids` has, or its layers have
            seen different numbers of tokens.
    """
    if not isinstance(cache, Cache) or cache.is_pair:
        raise OptionError(
            f"`cache` must be a cache of kvlayers for a model without an encoder, got a {type(cache).__name__}: make "
            "one, for example with kvlayers.DynamicCache(config=model.config)."
        )
    length = cache.get_seq_length()
    if not length:
        raise StateMismatchError("`cache` must have seen tokens, got an empty one: run the model with it first.")
    if cache.batch_size != 1:
        raise StateMismatchError(
            f"`cache` must have one sequence, got {cache.batch_size}: insert a fork() in which batch_select_indices() "
            "has selected one."
        )
    if length > len(ids):
        raise StateMismatchError(
            f"`input_ids` must cover the {length} tokens that the cache has seen, got {len(ids)}: pass the ids of the "
            "whole sequence."
        )
    lengths = {layer.length for layer in cache.adapted_layers() if layer.length}
    if lengths - {length}:
        raise StateMismatchError(
            f"the layers of `cache` must have seen the same tokens, got lengths {sorted(lengths)}: a forward pass was "
            f"interrupted, so crop the cache to {min(lengths)}."
        )
    return cache, length
