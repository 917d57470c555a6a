"""Directories of tiny models with their tokenizers, as commands load them, and text for them to read."""

import random
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from models import fresh_model

WORDS = ["<unk>", "<s>", "</s>", "the", "sea", "a", "of", "is", "to", "and", "."]


def word_tokenizer() -> transformers.PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(WORDS + [f"w{index}" for index in range(97 - len(WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def save_model(directory: Path, family: str) -> Path:
    """A random model of a family."""
    return save_with_tokenizer(directory, fresh_model(family))


def save_with_tokenizer(directory: Path, model: Any) -> Path:
    model.save_pretrained(directory)
    word_tokenizer().save_pretrained(directory)
    return directory


def random_text(words: int, seed: int = 0) -> str:
    """Words that each are one token, eight a line."""
    chosen = random.Random(seed).choices(word_tokenizer().convert_ids_to_tokens(range(3, 97)), k=words)
    return "\n".join(" ".join(chosen[start : start + 8]) for start in range(0, words, 8))
