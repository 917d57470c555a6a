"""A forward pass that was interrupted is noticed by the next one, and repaired by a crop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as tf

import kvlayers
from kvlayers import InterruptedPassError, RollbackError
from kvlayers.stores.buffer import TokenBuffer
from models import COMMON, fresh_model, prompt
from test_families import model_and_inputs
from versions import need_recurrent_layers, need_since

LAYERS, SEEN = 3, 7

KINDS: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: kvlayers.DynamicCache(config=config),
    "made as needed": lambda config: kvlayers.DynamicCache(),
    "offloaded": lambda config: kvlayers.DynamicCache(config=config, offloading=True),
    "static": lambda config: kvlayers.StaticCache(config, max_cache_len=48),
    "packed": lambda config: kvlayers.QuantizedCache(config=config, residual_length=4),
    "sink": lambda config: kvlayers.SinkCache(config=config, window_length=32, num_sink_tokens=2),
}


class Interrupted(BaseException):
    """As KeyboardInterrupt, which would end the tests where they fail."""


@contextmanager
def interrupted_at(module: torch.nn.Module) -> Iterator[None]:
    """Interrupt the forward pass where it comes to a module."""

    def interrupt(*_: Any) -> None:
        raise Interrupted

    hook = module.register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        hook.remove()


@contextmanager
def interrupted_write(number: int) -> Iterator[list[int]]:
    """Interrupt what is done within at the write to a buffer of such a number, if it comes so far. Counts writes."""
    writes, write = [0], TokenBuffer.write

    def interrupting(self: TokenBuffer, start: int, states: torch.Tensor) -> None:
        writes[0] += 1
        if writes[0] == number:
            raise Interrupted
        write(self, start, states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenBuffer, "write", interrupting)
        try:
            yield writes
        except Interrupted:
            pass


def model_of(family: str, **changes: Any) -> Any:
    if family == "llama":
        changes = {"num_hidden_layers": LAYERS, **changes}
    return fresh_model(family, **changes)


@torch.no_grad()
def passed(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of ids that are passed to a model, `[batch, tokens, vocabulary]`."""
    logits: torch.Tensor = model(ids, past_key_values=cache, use_cache=True).logits
    return logits


def decoded(model: Any, cache: Any, ids: torch.Tensor, begin: int) -> torch.Tensor:
    """Logits of what follows `begin` tokens, one by one."""
    return torch.cat([passed(model, cache, token) for token in ids[:, begin:].split(1, dim=1)], dim=1)


def begun(model: Any, make: Callable[[Any], Any], ids: torch.Tensor) -> Any:
    """A cache that has seen `SEEN` tokens: a prompt and one token more."""
    cache = make(model.config)
    passed(model, cache, ids[:, : SEEN - 1])
    passed(model, cache, ids[:, SEEN - 1 : SEEN])
    return cache


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_step_is_noticed_and_cropped_away(kind: str) -> None:
    model, ids = model_of("llama"), prompt(2, 14)
    expected = decoded(model, begun(model, KINDS[kind], ids), ids, SEEN)
    for layer in range(1, LAYERS):
        cache = begun(model, KINDS[kind], ids)
        with interrupted_at(model.model.layers[layer]):
            passed(model, cache, ids[:, SEEN : SEEN + 1])
        shown = r": 8, layers? [12 to]+: 7\): crop\(7\) the cache"
        with pytest.raises(InterruptedPassError, match=shown):
            cache.get_seq_length()
        with pytest.raises(InterruptedPassError, match=r"crop\(7\) the cache"):
            passed(model, cache, ids[:, SEEN : SEEN + 1])
        with pytest.raises(InterruptedPassError):
            passed(model, cache, ids[:, SEEN : SEEN + 1])
        cache.crop(SEEN)
        assert cache.get_seq_length() == SEEN
        torch.testing.assert_close(decoded(model, cache, ids, SEEN), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_prefill_is_noticed_and_reset(kind: str) -> None:
    model, ids = model_of("llama"), prompt(2, 12)
    expected = decoded(model, begun(model, KINDS[kind], ids), ids, SEEN)
    for layer in range(1, LAYERS):
        cache = KINDS[kind](model.config)
        with interrupted_at(model.model.layers[layer]):
            passed(model, cache, ids[:, : SEEN - 1])
        with pytest.raises(InterruptedPassError, match=r"reset\(\) the cache") as raised:
            passed(model, cache, ids[:, : SEEN - 1])
        assert "crop(0)" not in str(raised.value)
        cache.reset()
        passed(model, cache, ids[:, : SEEN - 1])
        passed(model, cache, ids[:, SEEN - 1 : SEEN])
        torch.testing.assert_close(decoded(model, cache, ids, SEEN), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_chunk_is_noticed_and_truncated_away(kind: str) -> None:
    model, ids = model_of("llama"), prompt(1, 16)
    chunk, rest = ids[:, SEEN : SEEN + 5], SEEN + 5
    whole = begun(model, KINDS[kind], ids)
    passed(model, whole, chunk)
    expected = decoded(model, whole, ids, rest)
    cache = begun(model, KINDS[kind], ids)
    with interrupted_at(model.model.layers[1]):
        passed(model, cache, chunk)
    with pytest.raises(InterruptedPassError):
        passed(model, cache, ids[:, rest : rest + 1])
    # Tokens that the residual has packed by then are packed for good: other codes than if they had come later.
    assert cache.truncate(SEEN) == 0
    passed(model, cache, chunk)
    torch.testing.assert_close(
        decoded(model, cache, ids, rest), expected, rtol=0, atol=0.5 if kind == "packed" else 0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_of_an_update_that_was_interrupted_does_not_count(kind: str) -> None:
    model, ids = model_of("llama"), prompt(1, 20)
    expected = decoded(model, begun(model, KINDS[kind], ids), ids, SEEN)
    with interrupted_write(0) as writes:
        decoded(model, begun(model, KINDS[kind], ids), ids, SEEN)
    for number in range(1, writes[0] + 1, 3):
        cache, logits = KINDS[kind](model.config), []
        with interrupted_write(number):
            begin = 0
            for end in (SEEN - 1, *range(SEEN, 21)):
                logits.append(passed(model, cache, ids[:, begin:end]))
                begin = end
        if begin == 20:
            continue
        seen = begin
        if not seen:
            cache.reset()
        else:
            cache.crop(seen)
        for end in (*((SEEN - 1,) if not seen else ()), *range(max(seen + 1, SEEN), 21)):
            logits.append(passed(model, cache, ids[:, seen:end]))
            seen = end
        torch.testing.assert_close(torch.cat(logits, dim=1)[:, SEEN:], expected, rtol=0, atol=0)
