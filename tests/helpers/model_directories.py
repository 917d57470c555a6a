"""Directories of tiny models with their tokenizers, as commands load them, and text for them to read."""

import random
from pathlib import Path
from typing import Any

import torch
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


def save_sharp_model(directory: Path, queries: float = 1, logits: float = 1, **options: Any) -> Path:
    """A random llama with larger queries or logits, so that attention tells keys apart, and rounding is seen."""
    model = fresh_model("llama", **options)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(queries)
        model.lm_head.weight.mul_(logits)
    return save_with_tokenizer(directory, model)


def save_with_tokenizer(directory: Path, model: Any) -> Path:
    model.save_pretrained(directory)
    word_tokenizer().save_pretrained(directory)
    return directory


def random_text(words: int, seed: int = 0) -> str:
    """Words that each are one token, eight a line."""
    chosen = random.Random(seed).choices(word_tokenizer().convert_ids_to_tokens(range(3, 97)), k=words)
    return "\n".join(" ".join(chosen[start : start + 8]) for start in range(0, words, 8))
