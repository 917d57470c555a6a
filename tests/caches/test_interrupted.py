"""A forward pass that was interrupted is noticed by the next one, and repaired by a crop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
import transformers as tf

import kvlayers
from families import model_and_inputs
from kvlayers.core.buffer import TokenBuffer
from kvlayers.errors import InterruptedPassError, RollbackError
from matrix import once
from models import COMMON, bare, fresh_model, given, prompt
from versions import need_recurrent_layers

LAYERS, SEEN = 3, 7
END = 28
"""Tokens after which a window of 8 has moved to the front of its memory once."""

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


def model_of(family: str, **changes: Any) -> Any:
    if family == "llama":
        changes = {"num_hidden_layers": LAYERS, **changes}
    return fresh_model(family, **changes)


@torch.no_grad()
def passed(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of ids that are passed to a model, `[batch, tokens, vocabulary]`."""
    logits: torch.Tensor = model(ids, **given(cache), use_cache=True).logits
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


PASSES: dict[str, tuple[list[int], str, Callable[[Any], object]]] = {
    "prompt": ([SEEN - 1], r"reset\(\) the cache", lambda cache: cache.reset()),
    "step": ([SEEN - 1, 1, 1], r"crop\(7\) the cache", lambda cache: cache.crop(SEEN)),
    "chunk": ([SEEN - 1, 1, 5], r"crop\(7\) the cache", lambda cache: cache.truncate(SEEN)),
}
"""New tokens of each pass, of which the last one is interrupted; what is said then; and how it is mended."""


@pytest.mark.parametrize(("kind", "which"), once(KINDS, PASSES))
def test_an_interrupted_pass_is_noticed_and_taken_back(kind: str, which: str) -> None:
    model, ids, whole = model_of("llama"), prompt(2, 16), KINDS[kind](model_of("llama").config)
    (*before, last), words, take_back = PASSES[which]
    seen = sum(before)
    for part in ids[:, : seen + last].split([*before, last], dim=1):
        passed(model, whole, part)
    expected = decoded(model, whole, ids, seen + last)
    for layer in range(1, LAYERS):
        cache = KINDS[kind](model.config)
        for part in ids[:, :seen].split(before, dim=1) if before else ():
            passed(model, cache, part)
        with interrupted_at(model.model.layers[layer]):
            passed(model, cache, ids[:, seen : seen + last])
        if before:
            with pytest.raises(InterruptedPassError, match=rf": {seen + last}, layers? [12 to]+: 7\)"):
                cache.get_seq_length()
        for _ in range(2):
            with pytest.raises(InterruptedPassError, match=words) as raised:
                passed(model, cache, ids[:, seen : seen + last])
            assert "crop(0)" not in str(raised.value)
            assert str(raised.value).index("an error") < str(raised.value).index("another thread")
        take_back(cache)
        assert cache.get_seq_length() == seen
        passed(model, cache, ids[:, seen : seen + last])
        # Tokens that the residual has packed by then are packed for good: other codes than if they had come later.
        rounded = 0.5 if (kind, which) == ("packed", "chunk") else 0
        torch.testing.assert_close(decoded(model, cache, ids, seen + last), expected, rtol=0, atol=rounded)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_of_an_update_that_was_interrupted_does_not_count(kind: str) -> None:
    tokens = 14
    model, ids = model_of("llama"), prompt(1, tokens)
    expected = decoded(model, begun(model, KINDS[kind], ids), ids, SEEN)
    with interrupted_write(0) as writes:
        decoded(model, begun(model, KINDS[kind], ids), ids, SEEN)
    # A pass writes six times: steps of 7 interrupt each of the six in turn.
    for number in range(1, writes[0] + 1, 7):
        cache, logits = KINDS[kind](model.config), []
        with interrupted_write(number):
            begin = 0
            for end in (SEEN - 1, *range(SEEN, tokens + 1)):
                logits.append(passed(model, cache, ids[:, begin:end]))
                begin = end
        if begin == tokens:
            continue
        seen = begin
        if not seen:
            cache.reset()
        else:
            cache.crop(seen)
        for end in (*((SEEN - 1,) if not seen else ()), *range(max(seen + 1, SEEN), tokens + 1)):
            logits.append(passed(model, cache, ids[:, seen:end]))
            seen = end
        torch.testing.assert_close(torch.cat(logits, dim=1)[:, SEEN:], expected, rtol=0, atol=0)


def test_a_window_is_cropped_while_it_holds_every_token_and_refuses_by_name_after() -> None:
    model, ids = model_of("gemma3"), prompt(1, 20)
    for kind in ("dynamic", "static", "packed"):
        cache = begun(model, KINDS[kind], ids[:, 3:])
        with interrupted_at(model.model.layers[2]):
            passed(model, cache, ids[:, 10:11])
        with pytest.raises(RollbackError, match="window"):
            cache.crop(SEEN)
        cache.reset()
        again = begun(model, KINDS[kind], ids)
        passed(model, cache, ids[:, : SEEN - 1])
        passed(model, cache, ids[:, SEEN - 1 : SEEN])
        assert torch.equal(decoded(model, cache, ids, SEEN), decoded(model, again, ids, SEEN))

        early, whole = KINDS[kind](model.config), KINDS[kind](model.config)
        for started in (early, whole):
            passed(model, started, ids[:, :4])
        with interrupted_at(model.model.layers[3]):
            passed(model, early, ids[:, 4:5])
        with pytest.raises(InterruptedPassError):
            early.get_seq_length()
        early.crop(4)
        assert torch.equal(decoded(model, early, ids, 4), decoded(model, whole, ids, 4))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dynamic", "static", "packed"])
def test_a_move_of_a_window_that_was_interrupted_loses_no_token_silently(kind: str) -> None:
    model, ids = model_of("mistral"), prompt(1, END)
    make = KINDS[kind]
    expected = decoded(model, begun(model, make, ids), ids, SEEN)
    with interrupted_write(0) as writes:
        decoded(model, begun(model, make, ids), ids, SEEN)
    lost = 0
    for number in range(writes[0] * 3 // 5, writes[0] + 1, 3):
        cache, logits, seen = begun(model, make, ids), [], SEEN
        with interrupted_write(number):
            for seen in range(SEEN, END):
                logits.append(passed(model, cache, ids[:, seen : seen + 1]))
        if len(logits) == END - SEEN:
            continue
        try:
            logits.append(passed(model, cache, ids[:, seen : seen + 1]))
        except InterruptedPassError:
            lost += 1
            continue
        # The first layer was interrupted before it had changed.
        logits.extend(passed(model, cache, token) for token in ids[:, seen + 1 :].split(1, dim=1) if token.numel())
        assert torch.equal(torch.cat(logits, dim=1), expected)
    assert lost


@pytest.mark.parametrize("family", ["jamba", "qwen3_next", "falcon_h1"])
def test_recurrent_layers_are_put_back_to_a_checkpoint(family: str) -> None:
    need_recurrent_layers(family)
    model = model_of(family) if family == "jamba" else model_and_inputs(family)[0]
    ids = prompt(1, 14)
    for kind in ("dynamic", "static"):
        cache = begun(model, KINDS[kind], ids)
        with interrupted_at(model.model.layers[1]):
            passed(model, cache, ids[:, SEEN : SEEN + 1])
        with pytest.raises(InterruptedPassError, match=r"truncate\(7\) the cache"):
            passed(model, cache, ids[:, SEEN : SEEN + 1])
        again = cache.truncate(SEEN)
        whole = KINDS[kind](model.config)
        passed(model, whole, ids[:, : SEEN - 1])
        expected = decoded(model, whole, ids, SEEN - 1)[:, -3:]
        torch.testing.assert_close(decoded(model, cache, ids, SEEN - again)[:, -3:], expected, rtol=1e-4, atol=1e-5)


def test_a_layer_with_both_parts_is_looked_at_where_it_is_the_first() -> None:
    need_recurrent_layers("falcon_h1")
    model, ids = model_and_inputs("falcon_h1")[0], prompt(1, 14)
    cache = begun(model, KINDS["dynamic"], ids)
    with interrupted_at(model.model.layers[0].self_attn):
        passed(model, cache, ids[:, SEEN : SEEN + 1])
    with pytest.raises(InterruptedPassError):
        passed(model, cache, ids[:, SEEN : SEEN + 1])
    cache.truncate(SEEN)
    assert cache.layers[0].linear.length == cache.layers[0].attention.length


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_the_decoder_of_a_pair_is_cropped_and_its_encoder_read_anew_after_a_reset(family: str) -> None:
    model, ids, encoder_ids = fresh_model(family), prompt(1, 9), prompt(1, 8, seed=1)
    decoder = model.get_decoder()
    blocks = decoder.block if family == "t5" else decoder.layers

    @torch.no_grad()
    def step(cache: Any, begin: int, end: int) -> torch.Tensor:
        logits: torch.Tensor = model(
            input_ids=encoder_ids, decoder_input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True
        ).logits
        return logits

    def pair() -> kvlayers.EncoderDecoderCache:
        return kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), kvlayers.DynamicCache())

    whole, cache = pair(), pair()
    expected = torch.cat([step(whole, 0, 4), step(whole, 4, 5), step(whole, 5, 6)], dim=1)
    with interrupted_at(blocks[1]):
        step(cache, 0, 4)
    with pytest.raises(InterruptedPassError, match=r"reset\(\) the cache"):
        step(cache, 0, 4)
    cache.reset()
    logits = [step(cache, 0, 4)]
    with interrupted_at(blocks[1]):
        step(cache, 4, 5)
    with pytest.raises(InterruptedPassError):
        cache.get_seq_length()
    with pytest.raises(InterruptedPassError, match=r"crop\(4\) the cache"):
        step(cache, 4, 5)
    cache.crop(4)
    assert torch.equal(torch.cat([*logits, step(cache, 4, 5), step(cache, 5, 6)], dim=1), expected)


def test_generate_refuses_a_cache_whose_last_pass_was_interrupted() -> None:
    model, ids = model_of("llama"), prompt(1, 14)
    cache = begun(model, KINDS["dynamic"], ids)
    with interrupted_at(model.model.layers[1]):
        passed(model, cache, ids[:, SEEN : SEEN + 1])
    with pytest.raises(InterruptedPassError):
        model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
    cache.crop(SEEN)
    generated = model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert torch.equal(generated, model.generate(ids, max_new_tokens=3, do_sample=False))


def test_removing_the_newest_tokens_of_each_layer_does_not_hide_it() -> None:
    model, ids = model_of("llama"), prompt(1, 14)
    cache = begun(model, KINDS["dynamic"], ids)
    with interrupted_at(model.model.layers[1]):
        passed(model, cache, ids[:, SEEN : SEEN + 1])
    cache.crop(-1)
    with pytest.raises(InterruptedPassError):
        passed(model, cache, ids[:, SEEN - 1 : SEEN])
    fork = cache.fork()
    with pytest.raises(InterruptedPassError):
        passed(model, fork, ids[:, SEEN - 1 : SEEN])


# What is no interrupted pass


def _states(tokens: int = 1) -> torch.Tensor:
    return torch.randn(1, 2, tokens, 8)


def test_loops_over_update_may_fill_layers_as_they_like() -> None:
    config = tf.LlamaConfig(**{**COMMON, "num_hidden_layers": LAYERS})
    for kind, make in KINDS.items():
        cache = make(config)
        for layer in (0, 0, 0) if kind == "made as needed" else (0, 0, 0, 2, 1, 1):
            cache.get_mask_sizes(1, 0)
            cache.update(_states(), _states(), layer)
            assert cache.get_seq_length() == cache.get_seq_length(0)
        for layer in range(LAYERS):
            for _ in range(3):
                cache.update(_states(2), _states(2), layer)
        assert cache.get_seq_length() == 9


def test_layers_that_are_run_one_after_the_other_over_all_chunks_are_left_alone() -> None:
    class Layer(torch.nn.Module):
        def forward(self, cache: Any, index: int) -> None:
            cache.update(_states(2), _states(2), index)

    layers = [Layer() for _ in range(LAYERS)]
    for make in (KINDS["dynamic"], KINDS["made as needed"]):
        cache = make(tf.LlamaConfig(**{**COMMON, "num_hidden_layers": LAYERS}))
        for index, layer in enumerate(layers):
            for _ in range(4):
                layer(cache, index)
        assert cache.get_seq_length() == 8


def test_a_model_may_leave_out_its_last_layers() -> None:
    ids = prompt(1, 14)
    whole, draft = model_of("llama"), model_of("llama")
    draft.model.layers = draft.model.layers[:1]
    draft.config.num_hidden_layers = 1
    for kind, make in KINDS.items():
        cache = make(whole.config)
        for token in ids[:, :3].split(1, dim=1):
            passed(draft, cache, token)
            assert cache.get_seq_length()
        cache.reset()
        passed(whole, cache, ids[:, :SEEN])
        expected = passed(whole, cache.fork(), ids[:, SEEN : SEEN + 3])
        for token in ids[:, SEEN : SEEN + 3].split(1, dim=1):
            passed(draft, cache, token)
        cache.crop(SEEN)
        assert torch.equal(passed(whole, cache, ids[:, SEEN : SEEN + 3]), expected), kind


def test_asking_for_the_length_within_a_pass_is_no_news() -> None:
    model, ids = model_of("llama"), prompt(1, 14)
    for make in KINDS.values():
        cache, lengths = begun(model, make, ids), []

        def ask(*_: Any, cache: Any = cache, lengths: list[int] = lengths) -> None:
            lengths.append(cache.get_seq_length())

        hooks = [layer.register_forward_hook(ask) for layer in model.model.layers]
        for token in ids[:, SEEN:].split(1, dim=1):
            passed(model, cache, token)
        for hook in hooks:
            hook.remove()
        assert lengths == [length for length in range(SEEN + 1, 15) for _ in range(LAYERS)]


@pytest.mark.slow
def test_a_compiled_call_that_was_interrupted_is_repaired_by_a_crop_to_the_length() -> None:
    model, ids = bare(model_of("llama", num_hidden_layers=2)), prompt(1, 12)
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
    whole = begun(model, KINDS["static"], ids)
    expected = decoded(compiled, whole, ids, SEEN)
    cache = begun(model, KINDS["static"], ids)
    passed(compiled, cache, ids[:, SEEN : SEEN + 1])
    # Layer 0 has written its keys and values, and layer 1 its keys.
    fail_at[0] = 4
    with pytest.raises(Interrupted):
        passed(compiled, cache, ids[:, SEEN + 1 : SEEN + 2])
    fail_at[0] = -1
    assert cache.get_seq_length() == SEEN + 1
    cache.crop(cache.get_seq_length())
    assert torch.equal(decoded(compiled, cache, ids, SEEN + 1), expected[:, 1:])
    torch._dynamo.reset()
