"""Text in, text out: pipelines and streamers have the same text from our caches as from those of transformers."""

import threading
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

import kvlayers
from matrix import once
from models import fresh_model, prompt, tiny_model, under_install

FIRST_CHARACTER = 0x4E00
"""Token 0. A streamer writes Chinese characters as they come, and withholds others until the next space."""


def as_text(*tokens: int) -> str:
    return "".join(chr(FIRST_CHARACTER + token) for token in tokens)


PROMPTS = [as_text(3, 4, 5), as_text(17, 4, 5, 88, 23, 9, 41), as_text(64)]


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One that has a character for each token."""
    padding = as_text(0)
    characters = Tokenizer(models.WordLevel({as_text(token): token for token in range(97)}, unk_token=padding))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token=padding, unk_token=padding, padding_side="left"
    )


@pytest.fixture(scope="module")
def pipe(tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.Pipeline:
    return transformers.pipeline("text-generation", model=fresh_model("mistral"), tokenizer=tokenizer)


def texts(pipe: transformers.Pipeline, prompts: list[str], **options: Any) -> list[str]:
    options = {"max_new_tokens": 12, "do_sample": False, "batch_size": len(prompts), **options}
    return [answers[0]["generated_text"] for answers in pipe(prompts, **options)]


@pytest.mark.parametrize(
    ("name", "batch_size"),
    once(["dynamic", "static", "offloaded", "offloaded_static", "hybrid", "sliding_window"], [1, len(PROMPTS)]),
)
def test_a_pipeline_writes_the_same_text_by_any_name(pipe: transformers.Pipeline, name: str, batch_size: int) -> None:
    expected = texts(pipe, PROMPTS, batch_size=batch_size)
    assert len({text[-1] for text in expected}) > 1
    assert under_install(texts, pipe, PROMPTS, batch_size=batch_size, cache_implementation=name) == expected


def test_a_chat_goes_on_in_the_cache_that_a_pipeline_was_given(pipe: transformers.Pipeline) -> None:
    cache, chat, expected = kvlayers.DynamicCache(config=pipe.model.config), PROMPTS[0], PROMPTS[0]
    for question in ("", as_text(11, 12), as_text(90)):
        (expected,) = texts(pipe, [expected + question])
        (chat,) = texts(pipe, [chat + question], past_key_values=cache)
        assert chat == expected
        assert cache.get_seq_length() == len(chat) - 1


@pytest.mark.parametrize("name", ["static", "int8"])
def test_text_arrives_from_a_thread_while_it_is_generated(
    tokenizer: transformers.PreTrainedTokenizerFast, name: str, installed: None
) -> None:
    model, ids, has_read = tiny_model("llama"), prompt(), threading.Event()
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": name}
    whole = tokenizer.decode(model.generate(ids, **options)[0, ids.shape[1] :])

    def wait_for_the_reader(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert tokens.shape[1] < ids.shape[1] + 6 or has_read.wait(timeout=60)
        return scores

    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    arguments = {**options, "streamer": streamer, "logits_processor": [wait_for_the_reader]}
    thread = threading.Thread(target=model.generate, args=(ids,), kwargs=arguments)
    thread.start()
    pieces = []
    for piece in streamer:
        pieces.append(piece)
        has_read.set()
    thread.join()
    assert "".join(pieces) == whole
    assert len(pieces) >= 12
