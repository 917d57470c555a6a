"""The tokens that a calibration reads."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.errors import OptionError

Text = str | Tensor


def passages_of(model: Any, texts: Sequence[Text], tokenizer: Any | None, tokens: int, most: int) -> list[Tensor]:
    """Passages of `tokens` tokens, taken from all texts in turn, from the beginning of each.

    Args:
        model: on whose device they are to be.
        texts: text, or token ids `[tokens]` or `[1, tokens]`.
        tokenizer: of the model, loaded by its name where not given and needed.
        tokens: of a passage.
        most: passages at most.

    Returns:
        Token ids `[1, tokens]` each.

    Raises:
        OptionError: no texts, something else than texts, or none that is long enough.
    """
    if isinstance(texts, str | Tensor) or not isinstance(texts, Sequence) or not texts:
        raise OptionError(
            f"expected a list of texts, or of token ids, but saw {_shown(texts)}: pass what the model will read."
        )
    if tokenizer is not None and not callable(tokenizer):
        raise OptionError(f"expected a tokenizer of transformers, but saw a {type(tokenizer).__name__}.")
    if tokenizer is None and any(isinstance(text, str) for text in texts):
        tokenizer = _tokenizer_of(model)
    ids = [_ids(text, tokenizer) for text in texts]
    longest = max(each.shape[0] for each in ids)
    cut = [torch.split(each, tokens) for each in ids]
    found = []
    # In turn, so that many texts are all heard, however few passages are read.
    for index in range(max(map(len, cut))):
        found += [parts[index] for parts in cut if index < len(parts) and parts[index].shape[0] == tokens]
    if not found:
        raise OptionError(
            f"expected a text of {tokens} tokens or more, but the longest has {longest}: pass longer texts, or a "
            "smaller context_length or scored_tokens."
        )
    return [passage[None].to(model.device) for passage in found[:most]]


def _ids(text: Text, tokenizer: Any) -> Tensor:
    if isinstance(text, str):
        # A tokenizer warns of texts beyond the model's context, and these are cut.
        found: Tensor = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
        return found
    if isinstance(text, Tensor) and text.dtype == torch.int64 and text.squeeze().dim() == 1:
        return text.reshape(-1)
    raise OptionError(f"expected a text, or token ids [tokens] of torch.int64, but saw {_shown(text)}.")


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    return "an empty list" if isinstance(value, list) and not value else f"a {type(value).__name__}"


def _tokenizer_of(model: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model.config._name_or_path)
    except (OSError, ValueError, TypeError) as error:
        raise OptionError(
            f"expected a tokenizer, as texts are given, but there is none by the name of the model "
            f"({model.config._name_or_path!r}): pass tokenizer=, or token ids."
        ) from error
