"""A pass that is interrupted at any call of any layer's update: made again it is right, or it is refused by name."""

import io
import pathlib
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor

import families
import fresh_process
import kvlayers
from kvlayers.errors import InterruptedPassError, KVLayersError, UnsupportedLayerError
from matrix import once, some
from models import given, prompt, tiny_model
from versions import need_recurrent_layers

UPDATES = ("update", "update_conv_state", "update_recurrent_state")
END = 13

KINDS: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: kvlayers.DynamicCache(config=config),
    "static": lambda config: kvlayers.StaticCache(config, max_cache_len=32),
    "int4": lambda config: kvlayers.QuantizedCache(config=config, nbits=4, residual_length=32),
    "evicting": lambda config: kvlayers.EvictingCache(config, rule="knorm", budget=8, sink_tokens=2, recent_tokens=4),
    "sinks": lambda config: kvlayers.SinkCache(config=config, window_length=10, num_sink_tokens=2),
}

PASSES: dict[str, list[tuple[int, int]]] = {
    "prompt": [(0, 6)],
    "first step": [(0, 6), (6, 7)],
    "step": [(0, 6), (6, 7), (7, 8)],
    "chunk": [(0, 6), (6, 7), (7, 10)],
}
"""Tokens of each pass. The last one is interrupted."""


UNREADY = (InterruptedPassError, UnsupportedLayerError)
"""Layers that take one token at a time say that they have seen tokens."""


class Interrupted(BaseException):
    """As KeyboardInterrupt, which would end the tests where they fail."""


@contextmanager
def interrupted(cache: Any, number: int, after: bool) -> Iterator[list[str]]:
    """Interrupt what is done within at the call of an update with such a number: before it, or as it returns."""
    calls: list[str] = []

    def interrupting(name: str, update: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            is_it = len(calls) == number
            if is_it and not after:
                raise Interrupted
            result = update(*arguments, **options)
            if is_it:
                raise Interrupted
            return result

        return called

    parts = [part for layer in cache.layers for part in layer.parts]
    for part in parts:
        for name in UPDATES:
            if hasattr(part, name):
                vars(part)[name] = interrupting(name, getattr(part, name))
    try:
        with suppress(Interrupted):
            yield calls
    finally:
        for part in parts:
            for name in UPDATES:
                vars(part).pop(name, None)


@torch.no_grad()
def passed(model: Any, cache: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, **given(cache), use_cache=True).logits
    return logits[:, -1]


def begun(model: Any, kind: str, ids: Tensor, passes: list[tuple[int, int]]) -> Any:
    cache = KINDS[kind](model.config)
    for begin, end in passes:
        passed(model, cache, ids[:, begin:end])
    return cache


def decoded(model: Any, cache: Any, ids: Tensor, begin: int) -> Tensor:
    return torch.stack([passed(model, cache, ids[:, token : token + 1]) for token in range(begin, END)])


def model_of(family: str) -> Any:
    need_recurrent_layers(family)
    return families.model_and_inputs(family)[0] if family in families.FAMILIES else tiny_model(family)


def calls_of(model: Any, kind: str, ids: Tensor, passes: list[tuple[int, int]], before: Callable[[Any], Any]) -> int:
    cache, (begin, end) = before(begun(model, kind, ids, passes[:-1])), passes[-1]
    with interrupted(cache, 0, False) as calls:
        passed(model, cache, ids[:, begin:end])
    return len(calls)


Change = Callable[[Any], Any]


def same(cache: Any) -> Any:
    return cache


def rows(cache: Any) -> Any:
    return kvlayers.merge([cache.extract(row) for row in range(2)])


def check(family: str, kind: str, part: str, sequences: int = 1, before: Change = same, between: Change = same) -> int:
    """Interrupt each call in turn, do something with the cache before and after it, and go on as its length says.

    Returns:
        How often an error said that the pass was interrupted.
    """
    model, ids, passes = model_of(family), prompt(sequences, END), PASSES[part]
    (begin, end), errors = passes[-1], 0
    expected = decoded(model, begun(model, kind, ids, passes), ids, end)
    count = calls_of(model, kind, ids, passes, before)
    assert count >= len(begun(model, kind, ids, passes).layers)
    for number in range(1, count + 1):
        for after in (False, True):
            cache = before(begun(model, kind, ids, passes[:-1]))
            with interrupted(cache, number, after):
                passed(model, cache, ids[:, begin:end])
            try:
                cache = between(cache)
                seen = cache.get_seq_length()
                if seen == begin:
                    passed(model, cache, ids[:, begin:end])
                else:
                    assert seen == end
                logits = decoded(model, cache, ids, end)
            except UNREADY:
                errors += 1
            else:
                torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
    return errors


ATTENDING = ("llama", "mistral", "gemma3")
RECURRENT = ("mamba2", "mamba", "falcon_h1", "jamba", "qwen3_next")


@pytest.mark.parametrize(("family", "part"), once([*ATTENDING, *RECURRENT], ["prompt", "first step", "step"]))
def test_a_pass_that_is_made_again_is_right_or_refused(family: str, part: str) -> None:
    assert check(family, "dynamic", part) > 0


@pytest.mark.parametrize("family", ["llama", "mamba2", "falcon_h1"])
def test_a_chunk_that_is_passed_again_is_right_or_refused(family: str) -> None:
    assert check(family, "dynamic", "chunk", sequences=2) > 0


@pytest.mark.parametrize(("kind", "family"), once(["static", "int4", "evicting", "sinks"], ["llama", "falcon_h1"]))
def test_so_it_is_in_other_caches(kind: str, family: str) -> None:
    assert check(family, kind, "first step") > 0


@pytest.mark.parametrize(("family", "kind"), once(["llama", "mamba2", "falcon_h1"], ["dynamic", "static"]))
def test_so_it_is_in_rows(family: str, kind: str) -> None:
    assert check(family, kind, "first step", 2, before=rows) > 0


@pytest.mark.parametrize("family", some(["llama", "mamba2", "falcon_h1"], ["mamba2"]))
def test_another_process_notices_it(family: str, tmp_path: pathlib.Path) -> None:
    model, ids = model_of(family), prompt(1, END)
    cache = begun(model, "dynamic", ids, [(0, 6), (6, 7)])
    # The last convolution of mamba2 has its columns, and in the others the last layer lacks the token.
    count, after = calls_of(model, "dynamic", ids, PASSES["step"], same), family == "mamba2"
    with interrupted(cache, count, after):
        passed(model, cache, ids[:, 7:8])
    torch.save((model, cache, ids), tmp_path / "sent")
    found = fresh_process.run(f"""
import kvlayers, torch
model, cache, ids = torch.load({str(tmp_path / "sent")!r}, weights_only=False)
try:
    with torch.no_grad():
        for token in (7, 8):
            model(ids[:, token : token + 1], {next(iter(given(cache)))}=cache, use_cache=True)
except kvlayers.errors.InterruptedPassError:
    print("noticed")
""")
    assert found.stdout.strip().endswith("noticed"), found.stdout + found.stderr


def beams(cache: Any) -> Any:
    cache.reorder_cache(torch.tensor([0, 1]))
    return cache


def loaded(cache: Any) -> Any:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


BETWEEN: dict[str, Callable[[Any], Any]] = {
    "fork": lambda cache: cache.fork(),
    "beams": beams,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "torch.save": loaded,
    "rows": rows,
}


@pytest.mark.parametrize(("between", "family"), once(BETWEEN, ["llama", "mamba2", "falcon_h1"]))
def test_no_copy_forgets_it(family: str, between: str) -> None:
    try:
        errors = check(family, "dynamic", "first step", 2, between=BETWEEN[between])
    except KVLayersError as error:
        pytest.fail(f"{type(error).__name__} where an interruption was to be named: {error}")
    assert errors > 0


@pytest.mark.parametrize(("family", "part"), once(["mamba2", "mamba", "falcon_h1", "qwen3_next"], ["prompt", "step"]))
def test_a_scan_that_is_missing_is_put_back_and_in_no_store_or_file(
    family: str, part: str, tmp_path: pathlib.Path
) -> None:
    model, ids, passes = model_of(family), prompt(1, END), PASSES[part]
    expected = decoded(model, begun(model, "dynamic", ids, passes), ids, passes[-1][1])
    begin, end = passes[-1]
    cache = begun(model, "dynamic", ids, passes[:-1])
    last = max(index for index, layer in enumerate(cache.layers) if layer.traits.is_recurrent)
    with interrupted(cache, 0, False) as calls:
        passed(model, cache, ids[:, begin:end])
    cache = begun(model, "dynamic", ids, passes[:-1])
    # The last convolution has seen the tokens, and what comes behind it has not.
    with interrupted(cache, 1 + max(n for n, name in enumerate(calls) if name == "update_conv_state"), True):
        passed(model, cache, ids[:, begin:end])
    assert cache.layers[last].is_interrupted
    for refused in (
        lambda: kvlayers.save_cache(cache, tmp_path / "cache.safetensors", config=model.config),
        lambda: kvlayers.PrefixStore().insert(ids, cache.fork(), model="m"),
        lambda: passed(model, cache.fork(), ids[:, begin:end]),
    ):
        with pytest.raises(KVLayersError, match="interrupted|an empty one|one by one"):
            refused()
    again = cache.truncate(begin)
    seen = begin - again
    if seen < begin:
        passed(model, cache, ids[:, seen:begin])
    passed(model, cache, ids[:, begin:end])
    torch.testing.assert_close(decoded(model, cache, ids, end), expected, rtol=0, atol=2e-5)
