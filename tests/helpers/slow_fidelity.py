"""What a cache does to a tiny model's predictions, token by token and word by word of the vocabulary."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as tf
from torch import Tensor

from model_directories import random_text, word_tokenizer

WORDS = 600
"""Words of the text, eight a line."""


class SlowToken(NamedTuple):
    """One scored token."""

    position: int
    kl: float
    surprise: float
    surprise_in_full: float
    agrees: bool


def slow_tokens(
    directory: Path, make_cache: Callable[[Any], Any], context: int, scored: int, chunk: int
) -> list[list[SlowToken]]:
    """The scored tokens of the two passages of `random_text(600)`."""
    model = tf.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    lines = random_text(WORDS).splitlines()
    # Of 75 lines, the first passage begins at the first one, the second behind the middle of the text.
    halfway = next(index for index in range(75) if len("\n".join(lines[:index])) >= len("\n".join(lines)) // 2)
    found = []
    for begin in (0, halfway):
        words = " ".join(lines[begin:]).split()[: context + scored + 1]
        ids = torch.tensor([word_tokenizer().convert_tokens_to_ids(words)])
        full = log_probabilities(model, ids, None, chunk)[context:]
        seen = log_probabilities(model, ids, make_cache(model.config), chunk)[context:]
        found.append([_token(ids, context + index, full[index], seen[index]) for index in range(scored)])
    return found


def log_probabilities(model: Any, ids: Tensor, cache: Any, chunk: int) -> Tensor:
    """Of each position but the last, `[tokens, vocab]` in float64; without a cache in one pass, else in chunks."""
    with torch.no_grad():
        if cache is None:
            logits = model(ids[:, :-1], use_cache=False).logits
        else:
            parts = ids[:, :-1].split(chunk, dim=1)
            logits = torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)
    return logits[0].double().log_softmax(-1)


def _token(ids: Tensor, position: int, full: Tensor, seen: Tensor) -> SlowToken:
    chances = zip(full.tolist(), seen.tolist(), strict=True)
    kl = sum(math.exp(expected) * (expected - got) for expected, got in chances)
    came = int(ids[0, position + 1])
    return SlowToken(position, kl, -float(seen[came]), -float(full[came]), int(full.argmax()) == int(seen.argmax()))
