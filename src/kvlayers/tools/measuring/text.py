"""Text that caches are measured on, and the pieces of it that a model reads."""

import itertools
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from kvlayers.errors import ConfigError, OptionError
from kvlayers.upstream.model_types import decoder_config, most_positions

CHARACTERS_PER_TOKEN = 12
"""More than any passage needs: tokenisers are slow on long text."""


def default_text() -> str:
    """Some 700 kB of English that every Python has: the topics of its help."""
    return "\n\n".join(text for _, text in sorted(topics.items()))


def check_known(config: object, ids: Tensor) -> None:
    """Raise `OptionError` where a model has no embeddings for some token ids."""
    vocab_size = decoder_config(config).vocab_size
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise OptionError(
            f"expected token ids from 0 to {vocab_size - 1}, as the model has, but saw {int(ids.min())} to "
            f"{int(ids.max())}: use the tokenizer of the model."
        )


def passages(tokenizer: Any, text: str, count: int, tokens: int) -> list[Tensor]:
    """Token ids, int64 `[1, tokens]`, from `count` places spread over the text, each at the beginning of a line.

    Raises:
        OptionError: the text is too short for as many.
    """
    evenly = [len(text) * index // count for index in range(count + 1)]
    lines = [text.find("\n", begin, end) + 1 for begin, end in itertools.pairwise(evenly)]
    cuts = [0, *(line or begin for line, begin in zip(lines[1:], evenly[1:-1], strict=True)), len(text)]
    found = []
    for begin, end in itertools.pairwise(cuts):
        part = text[begin : min(end, begin + CHARACTERS_PER_TOKEN * tokens)]
        ids = torch.tensor([tokenizer(part).input_ids[:tokens]], dtype=torch.int64)
        if ids.shape[1] < tokens:
            raise OptionError(
                f"expected a text with {count} passages of {tokens} tokens, but saw one of {ids.shape[1]}: use a "
                "longer text, or fewer or shorter passages."
            )
        found.append(ids)
    return found


def rows(tokenizer: Any, text: str, count: int, tokens: int) -> Tensor:
    """Token ids, int64 `[count, tokens]`, that begin at places spread over a text and may overlap.

    Raises:
        OptionError: the text is shorter than one row.
    """
    # Beyond what all rows need there is no use in reading on.
    ids = tokenizer(text[: CHARACTERS_PER_TOKEN * tokens * count]).input_ids
    if len(ids) < tokens:
        raise OptionError(
            f"expected a text of at least {tokens} tokens, but saw {len(ids)}: use a longer text, or read less of it."
        )
    starts = [(len(ids) - tokens) * row // max(count - 1, 1) for row in range(count)]
    return torch.tensor([ids[start : start + tokens] for start in starts], dtype=torch.int64)


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
