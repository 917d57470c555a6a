"""Real text for a model to continue, of which every Python has some 700 kB."""

import itertools
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from kvlayers.errors import ConfigError, OptionError
from kvlayers.upstream.model_types import most_positions


def real_text_ids(tokenizer: Any, tokens: int) -> list[int]:
    """The first `tokens` token ids of Python's documentation, from the beginning again where it ends.

    Raises:
        ConfigError: the tokenizer makes no tokens of English.
    """
    ids: list[int] = []
    for index, topic in enumerate(itertools.cycle(topics.values())):
        if len(ids) >= tokens:
            break
        if index == len(topics) and not ids:
            raise ConfigError("expected a tokenizer for English text, but it makes no tokens of it.")
        ids += tokenizer(topic, add_special_tokens=False).input_ids
    return ids[:tokens]


def input_ids(tokenizer: Any, prompt: str, context: int) -> Tensor:
    """Token ids, int64 `[1, tokens]`: what the tokenizer begins with, `context` tokens of real text, and the prompt.

    Raises:
        OptionError: there is neither a prompt nor a context.
        ConfigError: as `real_text_ids`.
    """
    ids = real_text_ids(tokenizer, context)
    if prompt:
        ids += tokenizer(f"\n\n{prompt}" if context else prompt, add_special_tokens=False).input_ids
    if not ids:
        raise OptionError("expected a prompt or --context of at least one token, but saw neither.")
    with_special = tokenizer(prompt or "a").input_ids
    begins_with_bos = tokenizer.bos_token_id is not None and with_special[:1] == [tokenizer.bos_token_id]
    return torch.tensor([[tokenizer.bos_token_id, *ids] if begins_with_bos else ids])


def check_length(config: Any, tokens: int) -> None:
    """Raise `OptionError` where a model has no positions for `tokens` tokens."""
    most = most_positions(config)
    if most is not None and tokens > most:
        raise OptionError(
            f"expected at most {most} tokens, as the model has positions for, but saw {tokens} of context, prompt and "
            "continuation together: pass a smaller --context or --tokens."
        )
