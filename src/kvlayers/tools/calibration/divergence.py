"""The passages that a calibration reads, and how much a model's predictions change with a cache."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.caches.dynamic import DynamicCache
from kvlayers.errors import OptionError
from kvlayers.tools.measuring.predictions import mean_divergence, newest_logits
from kvlayers.upstream import model_types

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


def read(model: Any, ids: Tensor, cache: Any, scored: int) -> Tensor:
    """Read tokens with a cache, and predict the token after each of the newest tokens.

    Args:
        model: in eval mode.
        ids: the next tokens, int64 `[1, tokens]`.
        cache: holds the tokens before them.
        scored: the number of newest tokens.

    Returns:
        Log-probabilities `[scored, vocab]`, float64.
    """
    at_once = model_types.tokens_at_once(model.config) if cache.get_seq_length() else None
    parts = torch.split(ids, at_once or ids.shape[1], dim=1)
    logits = [newest_logits(model, part, cache, min(scored, part.shape[1])) for part in parts]
    return torch.cat(logits)[-scored:].double().log_softmax(-1)


class DivergenceInUse:
    """Measures caches as they are used: passages are read in chunks, and each chunk attends to rounded states.

    The states that a chunk adds depend on the rounding before it, so errors add up as they do in decoding.

    Args:
        model: in eval mode.
        passages: token ids `[1, tokens]`.
        scored: newest tokens of a passage that are scored, and tokens of a chunk.
    """

    def __init__(self, model: Any, passages: Sequence[Tensor], scored: int) -> None:
        self._model, self._passages, self._scored = model, passages, scored
        self._exact = [self._predictions(ids, DynamicCache(config=model.config)) for ids in passages]

    def of(self, make_cache: Callable[[], Any]) -> float:
        """Mean KL divergence of the predictions from full precision, in nats.

        Args:
            make_cache: makes an empty cache; called for each passage.
        """
        found = [
            mean_divergence(exact, self._predictions(ids, make_cache()))
            for ids, exact in zip(self._passages, self._exact, strict=True)
        ]
        return sum(found) / len(found)

    def _predictions(self, ids: Tensor, cache: Any) -> Tensor:
        for part in torch.split(ids[:, : -self._scored], self._scored, dim=1):
            read(self._model, part, cache, 1)
        return read(self._model, ids[:, -self._scored :], cache, self._scored)
