"""The text that measurements read, and its token ids; the line of an error that they show."""

import itertools
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from kvlayers.errors import OptionError
from kvlayers.models import decoder_config

CHARACTERS_PER_TOKEN = 12
"""More than any text needs. A longer text is cut before it is tokenized, since tokenizers are slow on long text."""


def default_text() -> str:
    """The topics of Python's help: 700 kB of English that every Python has."""
    return "\n\n".join(text for _, text in sorted(topics.items()))


def check_known(config: object, ids: Tensor) -> None:
    """Raise `OptionError` if a token id is outside the model's vocabulary."""
    vocab_size = decoder_config(config).vocab_size
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise OptionError(
            f"The model has token ids from 0 to {vocab_size - 1}, got {int(ids.min())} to {int(ids.max())}: use the "
            "tokenizer of the model."
        )


def passages(tokenizer: Any, text: str, count: int, tokens: int) -> list[Tensor]:
    """Passages of a text, `count` tensors of token ids, int64 `[1, tokens]`, each from the beginning of a line.

    They are spread evenly over the text.

    Raises:
        OptionError: the text is too short.
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
                f"The text must have {count} passages of {tokens} tokens, but one has only {ids.shape[1]}: use a "
                "longer text, or fewer or shorter passages."
            )
        found.append(ids)
    return found


def rows(tokenizer: Any, text: str, count: int, tokens: int) -> Tensor:
    """A batch of token ids, int64 `[count, tokens]`, whose rows are spread evenly over a text and may overlap.

    Raises:
        OptionError: the text is shorter than one row.
    """
    ids = tokenizer(text[: CHARACTERS_PER_TOKEN * tokens * count]).input_ids
    if len(ids) < tokens:
        raise OptionError(
            f"The text must have at least {tokens} tokens, got {len(ids)}: use a longer text, or read fewer tokens."
        )
    starts = [(len(ids) - tokens) * row // max(count - 1, 1) for row in range(count)]
    return torch.tensor([ids[start : start + tokens] for start in starts], dtype=torch.int64)
