"""A forward pass that was interrupted anywhere: made again it is right, or an error says what to do."""

import io
import itertools
import pathlib
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as tf
from torch import Tensor

import kvlayers
from families import model_of
from kvlayers.core.buffer import TokenBuffer
from kvlayers.errors import InterruptedPassError, KVLayersError, RollbackError, UnsupportedLayerError
from matrix import once
from models import COMMON, bare, fresh_model, given, prompt, tiny_model

LAYERS = 3
UPDATES = ("update", "update_conv_state", "update_recurrent_state")
END = 13
SEEN = 7
BEGUN = [(0, 6), (6, 7)]
"""Passes that have taken in `SEEN` tokens."""

KINDS: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: kvlayers.DynamicCache(config=config),
    "made as needed": lambda config: kvlayers.DynamicCache(),
    "offloaded": lambda config: kvlayers.DynamicCache(config=config, offloading=True),
    "static": lambda config: kvlayers.StaticCache(config, max_cache_len=48),
    "int4": lambda config: kvlayers.QuantizedCache(config=config, nbits=4, residual_length=4),
    "sinks": lambda config: kvlayers.SinkCache(config=config, window_length=32, num_sink_tokens=2),
    "evicting": lambda config: kvlayers.EvictingCache(config, rule="knorm", budget=8, sink_tokens=2, recent_tokens=4),
    "sinks before a full window": lambda config: kvlayers.SinkCache(config=config, window_length=10, num_sink_tokens=2),
}
WITH_ALL_TOKENS = list(KINDS)[:6]

PASSES: dict[str, list[tuple[int, int]]] = {
    "prompt": [(0, 6)],
    "first step": [(0, 6), (6, 7)],
    "step": [*BEGUN, (7, 8)],
    "chunk": [*BEGUN, (7, 10)],
}
"""Tokens of each pass. The last one is interrupted."""

UNREADY = (InterruptedPassError, UnsupportedLayerError)
"""Layers that take one token at a time say that they have seen tokens."""


class Interrupted(BaseException):
    """As KeyboardInterrupt, which would end the tests where they fail."""


@contextmanager
def interrupted(cache: Any, number: int, after: bool = False) -> Iterator[list[str]]:
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

    with ExitStack() as patches:
        for part, name in itertools.product([part for layer in cache.layers for part in layer.parts], UPDATES):
            if hasattr(part, name):
                patches.enter_context(mock.patch.object(part, name, interrupting(name, getattr(part, name))))
        with suppress(Interrupted):
            yield calls


@contextmanager
def interrupted_write(number: int) -> Iterator[list[int]]:
    """Interrupt what is done within at the write to a buffer of such a number, if it comes so far. Counts writes."""
    writes = [0]

    def interrupting(method: Callable[..., Any]) -> Callable[..., Any]:
        def interrupted(self: TokenBuffer, *arguments: Any) -> Any:
            writes[0] += 1
            if writes[0] == number:
                raise Interrupted
            return method(self, *arguments)

        return interrupted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("write", "slots"):
            patch.setattr(TokenBuffer, name, interrupting(getattr(TokenBuffer, name)))
        with suppress(Interrupted):
            yield writes


@torch.no_grad()
def passed(model: Any, cache: Any, ids: Tensor) -> Tensor:
    """Logits of the last of some tokens that are passed to a model, `[batch, vocabulary]`."""
    logits: Tensor = model(ids, **given(cache, model), use_cache=True).logits
    return logits[:, -1]


def begun(model: Any, kind: str, ids: Tensor, passes: Sequence[tuple[int, int]] = BEGUN) -> Any:
    cache = KINDS[kind](model.config)
    for begin, end in passes:
        passed(model, cache, ids[:, begin:end])
    return cache


def decoded(model: Any, cache: Any, ids: Tensor, begin: int) -> Tensor:
    """Logits of what follows `begin` tokens, one by one."""
    return torch.stack([passed(model, cache, token) for token in ids[:, begin:].split(1, dim=1)])


Change = Callable[[Any], Any]


def same(cache: Any) -> Any:
    return cache


def rows(cache: Any) -> Any:
    return kvlayers.merge([cache.extract(row) for row in range(2)])


def mended(cache: Any, error: KVLayersError, begin: int) -> int:
    """Do what an error says, or forget all where that is refused. Returns how many tokens the cache has seen then."""
    if isinstance(error, InterruptedPassError):
        how = "truncate" if any(layer.traits.is_recurrent for layer in cache.layers) else "crop"
        # Where nothing was seen before, there is nothing to go back to.
        said = rf"{how}\(({begin})?\) the cache" if begin else rf"({how}|reset)\(\) the cache"
        assert re.search(said, str(error))
        if "another thread" in str(error):
            assert str(error).index("an error") < str(error).index("another thread")
        try:
            if f"{how}(" in str(error):
                seen = begin - int(getattr(cache, how)(begin) or 0)
                assert cache.get_seq_length() == seen
                return seen
        except RollbackError as refused:
            # What has left a full window, or was evicted, does not come back.
            if not re.search("window|evict", str(refused)):
                raise
    cache.reset()
    return 0


def calls_of(model: Any, kind: str, ids: Tensor, passes: Sequence[tuple[int, int]], before: Change = same) -> list[str]:
    """The updates of the last pass."""
    cache, (begin, end) = before(begun(model, kind, ids, passes[:-1])), passes[-1]
    with interrupted(cache, 0) as calls:
        passed(model, cache, ids[:, begin:end])
    return calls


def beams(cache: Any) -> Any:
    cache.reorder_cache(torch.tensor([0, 1]))
    return cache


def loaded(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, tuple[int, Change, Change]] = {
    "alone": (1, same, same),
    "two sequences": (2, same, same),
    "rows": (2, rows, same),
    "then a fork": (2, same, lambda cache: cache.fork()),
    "then a pickle": (2, same, lambda cache: pickle.loads(pickle.dumps(cache))),
    "then beams": (2, same, beams),
    "then a file of torch": (2, same, loaded),
    "then rows": (2, same, rows),
}
"""How many sequences there are, and what is done with the cache before it is interrupted and after."""
ATTENDING = ("llama", "mistral", "gemma3")
RECURRENT = ("mamba2", "mamba", "falcon_h1", "jamba", "qwen3_next")
FEW = ("llama", "mamba2", "falcon_h1")


@pytest.mark.parametrize(
    ("family", "kind", "part", "way"),
    [
        *once([*ATTENDING, *RECURRENT], [("dynamic", part, "alone") for part in ("prompt", "first step", "step")]),
        *((family, "dynamic", "chunk", "two sequences") for family in FEW),
        *once(["llama", "falcon_h1"], [(kind, "first step", "alone") for kind in list(KINDS)[2:]]),
        ("llama", "made as needed", "first step", "alone"),
        # Before windows are full, and after.
        *(("gemma3", kind, part, "alone") for kind in ("static", "int4") for part in ("first step", "step")),
        *once(FEW, [(kind, "first step", "rows") for kind in ("dynamic", "static")]),
        *once(FEW, [("dynamic", "first step", way) for way in WAYS if way.startswith("then")]),
    ],
)
def test_a_pass_that_is_made_again_is_right_or_refused(family: str, kind: str, part: str, way: str) -> None:
    """Each call is interrupted in turn, and the cache goes on as its length says.

    If an error says that the pass was interrupted, what it says is done, and what the cache has not seen is passed.
    """
    sequences, before, between = WAYS[way]
    model, ids, passes = model_of(family), prompt(sequences, END), PASSES[part]
    (*earlier, (begin, end)), errors = passes, 0
    expected = decoded(model, begun(model, kind, ids, passes), ids, end)
    count = len(calls_of(model, kind, ids, passes, before))
    # An update that returns leaves what the next one finds.
    for number, after in (*((number, False) for number in range(1, count + 1)), (count, True)):
        cache = before(begun(model, kind, ids, earlier))
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
        except UNREADY as error:
            errors += 1
            seen = mended(cache, error, begin)
            again = [(token, token + 1) for token in range(seen, begin)] if seen else earlier
            for first, last in (*again, (begin, end)):
                passed(model, cache, ids[:, first:last])
            logits = decoded(model, cache, ids, end)
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
    assert errors


@pytest.mark.parametrize(("family", "part"), once(["mamba2", "mamba", "falcon_h1", "qwen3_next"], ["prompt", "step"]))
def test_a_scan_that_is_missing_is_in_no_store_or_file_and_is_put_back(
    family: str, part: str, tmp_path: pathlib.Path
) -> None:
    model, ids, (*earlier, (begin, end)) = model_of(family), prompt(1, END), PASSES[part]
    expected = decoded(model, begun(model, "dynamic", ids, PASSES[part]), ids, end)
    cache, calls = begun(model, "dynamic", ids, earlier), calls_of(model, "dynamic", ids, PASSES[part])
    last = max(index for index, layer in enumerate(cache.layers) if layer.traits.is_recurrent)
    # The last convolution has seen the tokens, and what comes behind it has not.
    with interrupted(cache, 1 + max(n for n, name in enumerate(calls) if name == "update_conv_state"), after=True):
        passed(model, cache, ids[:, begin:end])
    assert cache.layers[last].parts[-1].is_interrupted
    for refused in (
        lambda: kvlayers.save_cache(cache, tmp_path / "cache.safetensors", config=model.config),
        lambda: kvlayers.PrefixStore().insert(ids, cache.fork(), model="m"),
        lambda: passed(model, cache.fork(), ids[:, begin:end]),
    ):
        with pytest.raises(KVLayersError, match="interrupted|an empty one|one by one"):
            refused()
    seen = begin - int(cache.truncate(begin))
    for first, last in ((seen, begin), (begin, end)):
        if first < last:
            passed(model, cache, ids[:, first:last])
    torch.testing.assert_close(decoded(model, cache, ids, end), expected, rtol=0, atol=2e-5)


# What else an interrupt may leave


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_ALL_TOKENS)
def test_what_is_written_of_an_update_that_was_interrupted_does_not_count(kind: str) -> None:
    model, ids, writes_of_a_pass = fresh_model("llama", num_hidden_layers=LAYERS), prompt(1, END), 2 * LAYERS
    expected = decoded(model, begun(model, kind, ids), ids, SEEN)
    with interrupted_write(0) as writes:
        decoded(model, begun(model, kind, ids), ids, SEEN)
    # So steps of one more interrupt each of those of a pass in turn.
    for number in range(1, writes[0] + 1, writes_of_a_pass + 1):
        cache, logits, seen = KINDS[kind](model.config), [], 0
        passes = [(0, SEEN - 1), *((token, token + 1) for token in range(SEEN - 1, END))]
        with interrupted_write(number):
            for begin, end in passes:
                logits.append(passed(model, cache, ids[:, begin:end]))
                seen = end
        if seen == END:
            continue
        cache.crop(seen) if seen else cache.reset()
        logits += [passed(model, cache, ids[:, begin:end]) for begin, end in passes if begin >= seen]
        torch.testing.assert_close(torch.stack(logits)[2:], expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dynamic", "static", "int4"])
def test_a_move_of_a_window_that_was_interrupted_loses_no_token_silently(kind: str) -> None:
    # A window of 8 has moved to the front of its memory once by then.
    model, ids = tiny_model("mistral"), prompt(1, 28)
    expected = decoded(model, begun(model, kind, ids), ids, SEEN)
    with interrupted_write(0) as writes:
        decoded(model, begun(model, kind, ids), ids, SEEN)
    lost = 0
    # Layers that pack write more often.
    for number in range(writes[0] * 3 // 5, writes[0] + 1, max(3, writes[0] // 30)):
        cache, logits, seen = begun(model, kind, ids), [], SEEN
        with interrupted_write(number):
            for seen in range(SEEN, 28):
                logits.append(passed(model, cache, ids[:, seen : seen + 1]))
        if len(logits) == len(expected):
            continue
        try:
            logits.append(passed(model, cache, ids[:, seen : seen + 1]))
        except InterruptedPassError:
            lost += 1
            continue
        # The first layer was interrupted before it had changed.
        logits += [passed(model, cache, ids[:, token : token + 1]) for token in range(seen + 1, 28)]
        assert torch.equal(torch.stack(logits), expected)
    assert lost


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_the_decoder_of_a_pair_is_cropped_and_its_encoder_read_anew_after_a_reset(family: str) -> None:
    model, ids, encoder_ids = tiny_model(family), prompt(1, 9), prompt(1, 8, seed=1)

    @torch.no_grad()
    def step(cache: Any, begin: int, end: int) -> Tensor:
        return model(
            input_ids=encoder_ids, decoder_input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True
        ).logits

    whole = kvlayers.make_cache("dynamic", model)
    cache = kvlayers.EncoderDecoderCache(*(kvlayers.DynamicCache(config=model.config) for _ in range(2)))
    with interrupted(cache.cross_attention_cache, 2):
        step(cache, 0, 4)
    assert cache.is_updated == {0: True, 1: False}
    cache.truncate(0)
    parts = ((0, 4), (4, 5), (5, 6))
    for (begin, end), words in zip(parts, (r"reset\(\) the cache", r"crop\(4\) the", r"crop\(5\) the"), strict=True):
        with interrupted(cache.self_attention_cache, 2):
            step(cache, begin, end)
        with pytest.raises(InterruptedPassError, match=words):
            step(cache, begin, end)
        cache.crop(begin) if begin else cache.reset()
        assert torch.equal(step(cache, begin, end), step(whole, begin, end))


def test_a_pass_that_was_interrupted_is_noticed_by_all_that_ask() -> None:
    model, ids = tiny_model("llama"), prompt(1, 14)
    cache = begun(model, "dynamic", ids)
    with interrupted(cache, 2):
        passed(model, cache, ids[:, SEEN : SEEN + 1])
    with pytest.raises(InterruptedPassError, match=rf": {SEEN + 1}, layer 1: 7\)"):
        cache.get_seq_length()
    with pytest.raises(InterruptedPassError):
        model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
    shorter = cache.fork()
    # Removing the newest tokens of each layer does not hide it.
    shorter.crop(-1)
    for twin in (shorter, shorter.fork()):
        with pytest.raises(InterruptedPassError):
            passed(model, twin, ids[:, SEEN - 1 : SEEN])
    cache.crop(SEEN)
    generated = model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert torch.equal(generated, model.generate(ids, max_new_tokens=3, do_sample=False))


# What is no interrupted pass


class Layer(torch.nn.Module):
    """Gives a layer of a cache two tokens."""

    def forward(self, cache: Any, index: int) -> None:
        cache.update(*torch.randn(2, 1, 2, 2, 8), index)


@pytest.mark.parametrize("kind", WITH_ALL_TOKENS)
def test_loops_may_fill_layers_as_they_like(kind: str) -> None:
    """Also modules that are run one after the other over all chunks."""
    config = tf.LlamaConfig(**{**COMMON, "num_hidden_layers": LAYERS})
    cache, fresh = KINDS[kind](config), KINDS[kind](config)
    for layer in (0, 0, 0) if kind == "made as needed" else (0, 0, 0, 2, 1, 1):
        cache.get_mask_sizes(1, 0)
        cache.update(*torch.randn(2, 1, 2, 1, 8), layer)
        assert cache.get_seq_length() == cache.get_seq_length(0)
    modules = [Layer() for _ in range(LAYERS)]
    for held, updates in ((cache, [module.forward for module in modules]), (fresh, modules)):
        for layer in (0, 0, 0, 1, 1, 1, 2, 2, 2):
            updates[layer](held, layer)
    assert (cache.get_seq_length(), fresh.get_seq_length()) == (9, 6)


def test_a_model_may_leave_out_its_last_layers() -> None:
    ids = prompt(1, 14)
    whole, draft = tiny_model("llama"), fresh_model("llama")
    draft.model.layers = draft.model.layers[:1]
    draft.config.num_hidden_layers = 1
    for kind in WITH_ALL_TOKENS:
        cache = KINDS[kind](whole.config)
        for token in ids[:, :3].split(1, dim=1):
            passed(draft, cache, token)
            assert cache.get_seq_length()
        cache.reset()
        passed(whole, cache, ids[:, :SEEN])
        expected = passed(whole, cache.fork(), ids[:, SEEN : SEEN + 2])
        for token in ids[:, SEEN : SEEN + 2].split(1, dim=1):
            passed(draft, cache, token)
        cache.crop(SEEN)
        assert torch.equal(passed(whole, cache, ids[:, SEEN : SEEN + 2]), expected), kind


def test_asking_for_the_length_within_a_pass_is_no_news() -> None:
    model, ids = fresh_model("llama"), prompt(1, 14)
    for kind in KINDS:
        cache, lengths = begun(model, kind, ids), []

        def ask(*_: Any, cache: Any = cache, lengths: list[int] = lengths) -> None:
            lengths.append(cache.get_seq_length())

        hooks = [layer.register_forward_hook(ask) for layer in model.model.layers]
        decoded(model, cache, ids, SEEN)
        for hook in hooks:
            hook.remove()
        assert lengths == [length for length in range(SEEN + 1, 15) for _ in model.model.layers]


@pytest.mark.slow
def test_a_compiled_call_that_was_interrupted_is_repaired_by_a_crop_to_the_length() -> None:
    model, ids = bare(fresh_model("llama")), prompt(1, 12)
    fail_at = [-1]

    def interrupting(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        class Run(torch.fx.Interpreter):
            writes = 0

            def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
                if target == "index_copy_":
                    self.writes += 1
                    if self.writes == fail_at[0]:
                        raise Interrupted
                return super().call_method(target, args, kwargs)

        return lambda *inputs: Run(graph).run(*inputs)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=interrupting)
    expected = decoded(compiled, begun(model, "static", ids), ids, SEEN)
    cache = begun(model, "static", ids)
    passed(compiled, cache, ids[:, SEEN : SEEN + 1])
    # Layer 0 has written its keys and values, and layer 1 its keys.
    fail_at[0] = 4
    with pytest.raises(Interrupted):
        passed(compiled, cache, ids[:, SEEN + 1 : SEEN + 2])
    fail_at[0] = -1
    assert cache.get_seq_length() == SEEN + 1
    cache.crop(cache.get_seq_length())
    assert torch.equal(decoded(compiled, cache, ids, SEEN + 1), expected[1:])
