"""Whole calls of `generate()` with and without kvlayers: samples of one prompt, and the second turn of a chat."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from kvlayers.generation.install import generate
from kvlayers.prefix import PrefixStore
from kvlayers.tools.measuring.nbytes import cache_nbytes
from kvlayers.tools.measuring.predictions import is_tie
from kvlayers.upstream import cache_argument

STORE_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Samples:
    """Several continuations of one prompt.

    Attributes:
        seconds: seconds of the whole call.
        nbytes: bytes that the cache held at the end.
        sequences: int64 `[samples, prompt + new]`.
    """

    seconds: float
    nbytes: int
    sequences: Tensor


@dataclass(frozen=True)
class Answer:
    """An answer to a chat.

    Attributes:
        seconds: seconds from the call to the first token.
        tokens: the new tokens.
    """

    seconds: float
    tokens: list[int]


class TokenClock(BaseStreamer):  # type: ignore[misc]
    """Records the time of each token. generate() copies each to the host first, so a GPU has finished computing it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Called with the prompt, and then with every new token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Called after the last token."""


def continue_text(model: Any, ids: Tensor, tokens: int, cache: Any, streamer: Any) -> None:
    """Continue a prompt, int64 `[1, tokens]`, greedily by up to `tokens` tokens with `cache`; `streamer` gets them."""
    ids = ids.to(model.device)
    model.generate(
        ids,
        **_options(ids, tokens),
        do_sample=False,
        streamer=streamer,
        **{cache_argument.name_in_generate(model): cache},
    )


def sample(model: Any, ids: Tensor, tokens: int, count: int, with_kvlayers: bool) -> Samples:
    """Sample continuations of a prompt, always with the same seed.

    Args:
        model: a causal language model.
        ids: the prompt, int64 `[1, tokens]`.
        tokens: tokens of each sample.
        count: the number of samples.
        with_kvlayers: whether `kvlayers.generate` or `model.generate` is called.
    """
    ids = ids.to(model.device)
    options = {**_options(ids, tokens), "min_new_tokens": tokens, "do_sample": True, "num_return_sequences": count}
    torch.manual_seed(0)
    begin = time.perf_counter()
    call = _with_kvlayers if with_kvlayers else _alone
    output = call(model, ids, **options, return_dict_in_generate=True)
    seconds = time.perf_counter() - begin
    return Samples(seconds, cache_nbytes(cache_argument.in_output(output)), output.sequences.cpu())


def second_turn(model: Any, first: Tensor, question: Tensor, tokens: int) -> tuple[Tensor, Answer, Answer]:
    """Answer the second turn of a chat with transformers, and with a prefix store that has the first turn.

    Args:
        model: a causal language model.
        first: the prompt of the first turn, int64 `[1, tokens]`.
        question: what the second turn adds, int64 `[1, tokens]`.
        tokens: tokens of each answer.

    Returns:
        The chat up to the second answer, int64 `[1, tokens]`, and the second answer of transformers and of kvlayers.
    """
    store = PrefixStore(max_bytes=STORE_BYTES)
    first = first.to(model.device)
    answered = _with_kvlayers(model, first, **_options(first, tokens), do_sample=False, prefix_store=store)
    chat = torch.cat([answered, question.to(model.device)], dim=1)
    options = {**_options(chat, tokens), "min_new_tokens": tokens, "do_sample": False}
    alone = _answer(_alone, model, chat, options)
    return chat, alone, _answer(_with_kvlayers, model, chat, {**options, "prefix_store": store})


def differs(model: Any, chat: Tensor, expected: list[int], seen: list[int]) -> bool:
    """Whether an answer differs from the expected one, unless their first different token is a tie."""
    pairs = zip(expected, seen, strict=True)
    index = next((index for index, (wanted, token) in enumerate(pairs) if wanted != token), None)
    if index is None:
        return False
    before = torch.cat([chat, torch.tensor([expected[:index]], dtype=chat.dtype)], dim=1).to(model.device)
    with torch.no_grad():
        logits = model(before).logits[0, -1].float()
    return not is_tie(logits, expected[index], seen[index], model.dtype)


def _alone(model: Any, ids: Tensor, **options: Any) -> Any:
    return model.generate(ids, **options)


def _with_kvlayers(model: Any, ids: Tensor, **options: Any) -> Any:
    return generate(model, ids, **options)


def _answer(call: Any, model: Any, chat: Tensor, options: dict[str, Any]) -> Answer:
    clock = TokenClock()
    begin = time.perf_counter()
    output = call(model, chat, **options, streamer=clock)
    _, first_token, *_ = clock.times
    return Answer(first_token - begin, output[0, chat.shape[1] :].tolist())


def _options(ids: Tensor, tokens: int) -> dict[str, Any]:
    return {
        "attention_mask": torch.ones_like(ids),
        "num_beams": 1,
        "max_new_tokens": tokens,
        # Otherwise generate() compiles for some caches and not for others.
        "disable_compile": True,
    }
