"""Passing tokens to a model behind those that its cache has seen."""

from typing import Any

import torch
from torch import Tensor

from kvlayers.caches.base import Cache
from kvlayers.errors import StateMismatchError
from kvlayers.upstream import compat, model_types

LONG_AS_THE_TOKENS = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
"""Arguments of a model that have an entry for each token, in their last dimension."""


def at_once(cache: Any) -> int | None:
    """The most tokens that a model can take in at once behind those that a cache holds, `None` for any number."""
    parts = cache.recurrent_parts() if isinstance(cache, Cache) else []
    limits = [part.tokens_at_once for part in parts if part.tokens_at_once is not None]
    return min(limits, default=None)


def cut(model_kwargs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Arguments for all tokens but the last `tokens`."""
    cuttable = {
        name: value[..., : value.shape[-1] - tokens]
        for name, value in model_kwargs.items()
        if tokens and name in LONG_AS_THE_TOKENS and isinstance(value, Tensor) and value.shape[-1] > tokens
    }
    return {**model_kwargs, **cuttable}


@torch.no_grad()
def pass_tokens(
    model: Any, input_ids: Tensor, model_kwargs: dict[str, Any], cache: Cache, start: int, most: int | None = None
) -> Any:
    """Pass the tokens from `start` on to a model, and return what its last forward pass returns.

    Args:
        model: the model, with the methods that `generate()` calls.
        input_ids: `[batch, tokens]`, of which the cache has seen those before `start`.
        model_kwargs: what `generate()` passes on, for all of `input_ids`, the cache included.
        cache: that cache.
        start: the first token to pass.
        most: tokens to pass at once, as many as the model can take where not given.
    """
    end = input_ids.shape[1]
    limit = at_once(cache) if most is None else most
    step = end - start if limit is None else limit
    output = None
    for begin in range(start, end, step):
        stop = min(begin + step, end)
        inputs = compat.model_inputs(model, input_ids[:, :stop], stop - begin, cut(model_kwargs, end - stop))
        output = model(**inputs, return_dict=True)
    if any(layer.is_recording for layer in cache.adapted_layers()):
        # What comes next may be taken back to here.
        cache.activate_past_recording()
    return output


def check_no_padding(mask: Tensor | None, tokens: int) -> None:
    """Raise `StateMismatchError` where some of the newest `tokens` are padding, which the model would take for tokens.

    Args:
        mask: `[batch, tokens]`, 0 for padding; `None` for none.
        tokens: how many come behind others.
    """
    if mask is not None and tokens > 0 and bool((mask[:, -tokens:] == 0).any()):
        raise StateMismatchError(
            "expected tokens that are no padding behind those that a recurrent model has seen, as it looks at the mask "
            "of a first pass alone, but the attention_mask has zeros there: pad on the left of the first pass, give an "
            "attention_mask of ones where the pad token is meant as text, or use one cache for each sequence."
        )


def prefill_in_steps(model: Any, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
    """What transformers' prefill returns, for a prompt that its one forward pass would get wrong; `None` for others.

    There are two: tokens behind those that a cache has seen, to a model whose scan over several tokens begins from
    zero; and all tokens of a sequence, to a model whose cache is no `past_key_values`, of which transformers does not
    ask how many it has seen.
    """
    name = model_types.cache_argument(model)
    cache = model_kwargs.get(name)
    mask = model_kwargs.get("attention_mask")
    odd = model_kwargs.get("inputs_embeds") is not None or (isinstance(mask, Tensor) and mask.dim() != 2)
    if not isinstance(cache, Cache) or odd or not cache.recurrent_parts():
        return None
    limit, chunk, tokens = at_once(cache), generation_config.prefill_chunk_size, input_ids.shape[1]
    seen = cache.get_seq_length()
    if seen == 0:
        if chunk is not None and isinstance(mask, Tensor):
            # One by one, these models do not look at the mask: padding must be in the pass that does.
            chunk = max(chunk, int(mask.ne(0).to(torch.int8).argmax(dim=1).max()) + 1)
        if chunk is None or limit is None or chunk >= tokens or name == "cache_params":
            return None
        check_no_padding(mask, tokens - chunk)
        pass_tokens(model, input_ids[:, :chunk], cut(model_kwargs, tokens - chunk), cache, 0, chunk)
        return pass_tokens(model, input_ids, model_kwargs, cache, chunk)
    is_whole = mask is None or mask.shape[1] == tokens
    start = seen if is_whole else 0
    if limit is not None or name == "cache_params":
        check_no_padding(mask, tokens - start)
    fits_in_one = limit is None or tokens - start <= limit
    if start >= tokens or (fits_in_one and name != "cache_params"):
        return None
    return pass_tokens(model, input_ids, model_kwargs, cache, start)
