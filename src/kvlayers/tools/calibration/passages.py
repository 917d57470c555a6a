"""The tokens that a calibration reads."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.errors import OptionError

Text = str | Tensor


def passages_of(model: Any, texts: Sequence[Text], tokenizer: Any | None, tokens: int, most: int) -> list[Tensor]:
    """Passages of `tokens` tokens each, taken from all texts in turn, each text from its beginning.

    Args:
        model: the passages are put on its device.
        texts: texts, or token ids `[tokens]` or `[1, tokens]`.
        tokenizer: the model's tokenizer. By default it is loaded by the name of the model, if `texts` has texts.
        tokens: tokens of a passage.
        most: the most passages to return.

    Returns:
        Token ids `[1, tokens]` each.

    Raises:
        OptionError: `texts` is empty, has other objects than texts, or all texts are too short.
    """
    if isinstance(texts, str | Tensor) or not isinstance(texts, Sequence) or not texts:
        raise OptionError(
            f"`texts` must be a list of texts or of token ids, got {_shown(texts)}: pass texts of the kind that the "
            "model will read."
        )
    if tokenizer is not None and not callable(tokenizer):
        raise OptionError(f"`tokenizer` must be a tokenizer of transformers, got a {type(tokenizer).__name__}.")
    if tokenizer is None and any(isinstance(text, str) for text in texts):
        tokenizer = _tokenizer_of(model)
    ids = [_ids(text, tokenizer) for text in texts]
    longest = max(each.shape[0] for each in ids)
    cut = [torch.split(each, tokens) for each in ids]
    found = []
    # One passage of each text in turn, so that few passages still come from many texts.
    for index in range(max(map(len, cut))):
        found += [parts[index] for parts in cut if index < len(parts) and parts[index].shape[0] == tokens]
    if not found:
        raise OptionError(
            f"`texts` must have a text of {tokens} tokens or more, but the longest has {longest}: pass longer texts, "
            "or a smaller `context_length` or `scored_tokens`."
        )
    return [passage[None].to(model.device) for passage in found[:most]]


def _ids(text: Text, tokenizer: Any) -> Tensor:
    if isinstance(text, str):
        # Without `verbose=False` the tokenizer warns about long texts, which are cut here.
        found: Tensor = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
        return found
    if isinstance(text, Tensor) and text.dtype == torch.int64 and text.squeeze().dim() == 1:
        return text.reshape(-1)
    raise OptionError(f"`texts` must be texts, or token ids [tokens] of torch.int64, got {_shown(text)}.")


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    return "an empty list" if isinstance(value, list) and not value else f"a {type(value).__name__}"


def _tokenizer_of(model: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model.config.name_or_path)
    except (OSError, ValueError, TypeError) as error:
        raise OptionError(
            f"`tokenizer` is missing, and it cannot be loaded by the name of the model, "
            f"{model.config.name_or_path!r}: pass it, or pass token ids as `texts`."
        ) from error
