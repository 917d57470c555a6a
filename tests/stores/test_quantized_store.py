"""A quantized store holds what it says, in the memory it says, and refuses what it cannot hold."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from agreement import same_state
from kvlayers.core.buffer import TokenBuffer
from kvlayers.kernels.attention.packed_tensor import PackedStates
from kvlayers.kernels.attention.segments import Segment
from kvlayers.quantizers import CodeFormat, QuantizedGroups, Quantizer, dequantize
from kvlayers.stores import DenseStore, QuantizedStore
from matrix import once, product
from models import COMMON
from spies import spy

BLOCK = 64
SMALL = kvlayers.Quantization(nbits=4, residual_length=8, sink_tokens=4)


def some_states(
    tokens: int, batch: int = 1, kv_heads: int = 1, dims: tuple[int, int] = (8, 8), dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(batch, kv_heads, tokens, dim).to(dtype) for dim in dims)  # type: ignore[return-value]


def filled(quantization: kvlayers.Quantization, tokens: int, **options: Any) -> tuple[QuantizedStore, Tensor, Tensor]:
    store = QuantizedStore(quantization)
    keys, values = some_states(tokens, **options)
    store.take_in(keys, values)
    return store, keys, values


def held(store: QuantizedStore) -> tuple[Tensor, Tensor]:
    keys, values = store.newest(store.length)
    return keys.clone(), values.clone()


# What is held


def test_blocks_are_quantized_as_the_quantizer_does_each_alone() -> None:
    quantization = kvlayers.Quantization(nbits=3, residual_length=0, sink_tokens=5)
    store, keys, values = filled(quantization, 5 + 3 * BLOCK + 1, kv_heads=2, dims=(16, 24))
    assert store.state()["block_ends"].tolist() == [0, BLOCK, BLOCK, BLOCK]
    quantizers = quantization.quantizers(16, 24)
    smoothing = store.runs.in_order[0]
    for seen, states, side in zip(held(store), (smoothing.applied(keys), values), ("keys", "values"), strict=True):
        for start in (5, 5 + BLOCK, 5 + 2 * BLOCK):
            quantizer = quantizers[side]
            groups = quantizer.quantize(states[:, :, start : start + BLOCK])
            expected = dequantize(groups, quantizer.format, torch.float32)
            if side == "keys":
                expected = smoothing.restored(expected)
            # The rotation is undone in a product of another shape.
            torch.testing.assert_close(seen[:, :, start : start + BLOCK], expected, rtol=1e-5, atol=1e-5)


def test_a_rollback_within_the_residual_keeps_the_segments_before_it() -> None:
    store, *_ = filled(SMALL, 150)
    old = attended_segments(store)[:-1]
    assert len(old) == 2
    for length in (155, 153, store.old_tokens):
        store.take_in(*some_states(7))
        store.truncate(length)
        assert attended_segments(store)[:-1] == old
    # One token that is packed is dropped too.
    store.truncate(store.old_tokens - 1)
    assert attended_segments(store)[1] is not old[1]


def attended_segments(store: QuantizedStore) -> tuple[Segment, ...]:
    """The segments to which the next token attends."""
    attended = store.take_in(*some_states(1))
    assert isinstance(attended[0], PackedStates)
    return attended[0].snapshot.segments.in_order


# Memory


def block_bytes(nbits: int, head_dim: int, itemsize: int) -> tuple[int, int]:
    """Bytes of a block of one head of keys, and of values, for the native backend by default."""
    group_channels = max(size for size in range(1, 65) if head_dim % size == 0)
    keys = head_dim * (BLOCK * nbits // 8) + 2 * head_dim * itemsize
    # Rows are padded to whole bytes in every plane of bits: to 8 columns, but where a code is a byte already.
    columns = head_dim if nbits == 8 else math.ceil(head_dim / 8) * 8
    values = BLOCK * (columns * nbits // 8) + 2 * BLOCK * (head_dim // group_channels) * itemsize
    return keys, values


class Room:
    """Capacity of a buffer that grows only when it must, as the design says."""

    def __init__(self, divisor: int, minimum: int, hint: int | None = None) -> None:
        self.divisor, self.minimum, self.hint, self.capacity = divisor, minimum, hint, 0

    def take(self, needed: int) -> None:
        if needed > self.capacity:
            minimum = self.minimum if self.capacity else min(self.minimum, needed)
            grown = needed + max(needed // self.divisor, minimum)
            fits = self.hint is not None and needed <= self.hint
            self.capacity = min(grown, self.hint) if fits else grown  # type: ignore[type-var]


@pytest.mark.parametrize(("head_dim", "nbits", "hint"), once([64, 80, 12], [1, 2, 3, 4, 5, 6, 8], [None, 1012]))
def test_memory_is_that_of_the_specification(head_dim: int, nbits: int, hint: int | None) -> None:
    residual, sinks, batch, kv_heads = 32, 16, 2, 3
    store = QuantizedStore(kvlayers.Quantization(nbits=nbits, residual_length=residual, sink_tokens=sinks), hint)
    blocks = Room(128, 0, None if hint is None else math.ceil((hint - sinks - residual - BLOCK) / BLOCK))
    recent = Room(8, 128, sinks + residual + BLOCK)
    length = packed = 0
    # A hint is reached by single tokens, and passed by many.
    for tokens in (1, 50, 61, 1, 64, 65, 700, *[1] * 70, 1000):
        store.take_in(*some_states(tokens, batch, kv_heads, (head_dim, head_dim), torch.bfloat16))
        length += tokens
        wanted = max(math.ceil((length - sinks - residual - BLOCK) / BLOCK), 0)
        if wanted > packed:
            blocks.take(wanted)
            packed = wanted
            # No further than to the hint, as long as it holds.
            before = sinks + packed * BLOCK
            recent = Room(16, BLOCK // 2, residual + BLOCK)
            if hint is not None and hint >= length:
                recent.hint = min(residual + BLOCK, hint - before)
        recent.take(length - (packed * BLOCK + sinks if packed else 0))
        of_blocks = blocks.capacity * sum(block_bytes(nbits, head_dim, itemsize=2))
        of_tokens = (recent.capacity + (sinks if packed else 0)) * 2 * head_dim * 2
        factors = head_dim * 2 if packed else 0
        assert store.nbytes == batch * kv_heads * (of_blocks + of_tokens + factors)


def test_a_cleared_store_keeps_its_memory_and_takes_other_states() -> None:
    store, *_ = filled(SMALL, 300)
    store.clear()
    assert store.length == 0 < store.nbytes
    states = some_states(200, batch=2, kv_heads=3, dims=(16, 4))
    for seen, side in zip(store.take_in(*states), states, strict=True):
        assert torch.equal(seen[:, :, -8:], side[:, :, -8:])


# States that are not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("backend", ["native", "fp8", "nf4", "turboquant"])
def test_a_token_that_is_not_finite_harms_no_other(backend: str, side: str, bad: float) -> None:
    quantization = kvlayers.Quantization(backend, residual_length=8, sink_tokens=4)
    keys, values = some_states(300, kv_heads=2, dims=(16, 16))
    place, head = 100, 1
    broken = {"keys": keys.clone(), "values": values.clone()}
    broken[side][0, head, place, 5] = bad
    store = QuantizedStore(quantization)
    store.take_in(broken["keys"], broken["values"])
    assert store.length - 8 - BLOCK > place
    # Coded as zeros, it is as if zeros had been there.
    keys[0, head, place] = values[0, head, place] = 0
    other = QuantizedStore(quantization)
    other.take_in(keys, values)
    others = torch.ones(2, 300, dtype=torch.bool)
    others[head, place] = False
    for seen, expected in zip(held(store), held(other), strict=True):
        assert torch.equal(seen[0, others], expected[0, others])
        assert seen[0, others].isfinite().all()
    seen_keys, seen_values = (side[0, head, place] for side in held(store))
    assert seen_values.isnan().all()
    assert seen_keys.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("place", [2, 100, 298], ids=["sink", "packed", "newest"])
def test_attention_over_a_token_that_is_not_finite_is_not_finite(place: int, side: str, bad: float) -> None:
    keys, values = some_states(300, kv_heads=2, dims=(16, 16))
    broken = {"keys": keys.clone(), "values": values.clone()}
    broken[side][0, 1, place] = bad
    layer = kvlayers.QuantizedLayer(SMALL)
    layer.update(broken["keys"], broken["values"])
    new = some_states(1, kv_heads=2, dims=(16, 16))
    seen_keys, seen_values = layer.update(*new)
    query = torch.randn(1, 4, 1, 16).abs()
    result = scaled_dot_product_attention(query, seen_keys, seen_values, enable_gqa=True)
    assert not result[0, 2:].isfinite().any()
    assert result[0, :2].isfinite().all()
    by_hand = torch.softmax(query[:, 1::2] @ seen_keys.transpose(2, 3), -1) @ seen_values
    assert not by_hand[0, 1].isfinite().any()
    assert by_hand[0, 0].isfinite().all()
    # Where a mask hides the token, its values still count with the weight zero, and 0 * nan is nan: as in torch.
    if side == "values" and math.isnan(bad):
        mask = (torch.arange(301) != place).expand(1, 1, 1, -1)
        hidden = scaled_dot_product_attention(query, seen_keys, seen_values, mask, enable_gqa=True)
        dense = scaled_dot_product_attention(query, seen_keys.clone(), seen_values.clone(), mask, enable_gqa=True)
        assert torch.equal(hidden.isnan(), dense.isnan())


def test_values_grouped_along_tokens_are_not_numbers_in_the_whole_group_of_a_bad_token() -> None:
    pytest.importorskip("optimum.quanto")
    quantization = kvlayers.Quantization("quanto", axis_value=-1, value_group_size=16, residual_length=0, sink_tokens=0)
    keys, values = some_states(200, dims=(64, 64))
    values[0, 0, 20, 3] = math.nan
    store = QuantizedStore(quantization)
    store.take_in(keys, values)
    seen_keys, seen_values = held(store)
    assert seen_values[0, 0, 16:32].isnan().all()
    for others in (seen_keys, seen_values[0, 0, :16], seen_values[0, 0, 32:]):
        assert others.isfinite().all()


FIRST: dict[str, tuple[tuple[Tensor, Tensor], type[Exception]]] = {
    "batches that differ": ((torch.zeros(2, 1, 3, 8), torch.zeros(1, 1, 3, 8)), kvlayers.errors.StateMismatchError),
    "head counts that differ": ((torch.zeros(1, 2, 3, 8), torch.zeros(1, 1, 3, 8)), kvlayers.errors.StateMismatchError),
    "a dtype that is not quantized": ((torch.zeros(1, 1, 3, 8).double(),) * 2, kvlayers.errors.StateMismatchError),
    "no channels": ((torch.zeros(1, 1, 3, 0), torch.zeros(1, 1, 3, 8)), kvlayers.errors.StateMismatchError),
    "devices that differ": (
        (torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 3, 8, device="meta")),
        kvlayers.errors.StateMismatchError,
    ),
    "whole numbers": (
        (torch.zeros(1, 1, 3, 8).long(), torch.zeros(1, 1, 3, 8).long()),
        kvlayers.errors.StateMismatchError,
    ),
}


@pytest.mark.parametrize("case", FIRST)
def test_first_states_that_cannot_be_held_are_refused(case: str) -> None:
    states, error = FIRST[case]
    layer = kvlayers.QuantizedLayer(dataclasses.replace(SMALL, value_group_size=8))
    with pytest.raises(error, match="must .* got"):
        layer.update(*states)
    assert (layer.length, layer.nbytes, layer.batch_size) == (0, 0, None)
    layer.update(*some_states(3))
    assert layer.length == 3


# Saved states


def _changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, name: change(tensors[name])}


def _without(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


DAMAGES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "no keys": _without("keys"),
    "no values": _without("values"),
    "neither": _without("keys", "values"),
    "no codes": _without("keys_codes"),
    "no ends": _without("block_ends"),
    "no packed tokens": _without("keys_codes", "keys_parameters", "values_codes", "values_parameters", "block_ends"),
    "no sinks": _without("sink_keys", "sink_values"),
    "half of the sinks": _without("sink_values"),
    "something more": lambda tensors: {**tensors, "more": torch.zeros(1)},
    "short codes": _changed("values_codes", lambda t: t[..., :-1]),
    "fewer blocks": _changed("keys_codes", lambda t: t[:, :, :-1]),
    "codes of another batch": _changed("keys_codes", lambda t: t[:1]),
    "codes of another dtype": _changed("keys_codes", lambda t: t.int()),
    "codes of three dimensions": _changed("keys_codes", lambda t: t[0]),
    "parameters of another dtype": _changed("keys_parameters", lambda t: t.double()),
    "parameters of fewer heads": _changed("values_parameters", lambda t: t[:, :1]),
    "fewer ends": _changed("block_ends", lambda t: t[:-1]),
    "no end at all": _changed("block_ends", lambda t: t[:0]),
    "ends of a fraction": _changed("block_ends", lambda t: t + 0.5),
    "ends of two dimensions": _changed("block_ends", lambda t: t[None]),
    "a single number for ends": _changed("block_ends", lambda t: t[0]),
    "an end beyond its block": _changed("block_ends", lambda t: t + 1),
    "an end of zero": _changed("block_ends", lambda t: t * 0),
    "ends below zero": _changed("block_ends", lambda t: -t),
    "keys of another head_dim": _changed("keys", lambda t: t[..., :4]),
    "values of another head count": _changed("values", lambda t: t[:, :1]),
    "keys and values of another dtype": lambda tensors: {
        **tensors,
        "keys": tensors["keys"].half(),
        "values": tensors["values"].half(),
    },
    "keys and values of whole numbers": lambda tensors: {
        name: tensor.long() if name in ("keys", "values") else tensor for name, tensor in tensors.items()
    },
    "sinks of another head_dim": lambda tensors: {
        name: tensor[..., :4] if name.startswith("sink") else tensor for name, tensor in tensors.items()
    },
    "sinks of another batch": lambda tensors: {
        name: tensor[:1] if name.startswith("sink") else tensor for name, tensor in tensors.items()
    },
    "sinks of another dtype": lambda tensors: {
        name: tensor.double() if name.startswith("sink") else tensor for name, tensor in tensors.items()
    },
    "fewer keys": lambda tensors: {
        name: tensor[:, :, 1:] if name in ("keys", "values") else tensor for name, tensor in tensors.items()
    },
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused_and_changes_nothing(damage: str) -> None:
    source = kvlayers.QuantizedLayer(SMALL)
    source.update(*some_states(300, 2, 2))
    state = source.state()
    layer = kvlayers.QuantizedLayer(SMALL)
    layer.update(*some_states(250, 2, 2))
    before = layer.state()
    with pytest.raises(kvlayers.errors.StateMismatchError, match="must|are not"):
        layer.load_state(dataclasses.replace(state, tensors=DAMAGES[damage](state.tensors)))
    assert same_state(layer.state(), before)
    layer.load_state(state)
    assert same_state(layer.state(), state)


@pytest.mark.parametrize("change", [{"nbits": 8}, {"residual_length": 9}, {"sink_tokens": 0}, {"backend": "fp8"}])
def test_a_state_of_other_settings_is_refused(change: dict[str, Any]) -> None:
    source = kvlayers.QuantizedLayer(SMALL)
    source.update(*some_states(300))
    options = {"nbits": 8} if change == {"backend": "fp8"} else {}
    layer = kvlayers.QuantizedLayer(dataclasses.replace(SMALL, **options, **change))
    with pytest.raises(kvlayers.errors.StateMismatchError, match=f"`state` must have .*{next(iter(change))}="):
        layer.load_state(source.state())


# Options

PACKAGES = {"quanto": "optimum.quanto", "hqq": "hqq"}


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        ({"backend": "gptq"}, "fp8, hqq, kivi, native, nf4, quanto, turboquant"),
        ({"nbits": 7}, "2, 3, 4, 5, 6, 8"),
        ({"nbits": "4"}, "2, 3, 4, 5, 6, 8"),
        ({"nbits": 4.0}, "2, 3, 4, 5, 6, 8"),
        ({"nbits": True}, "2, 3, 4, 5, 6, 8"),
        ({"key_nbits": 7}, "1, 2, 3, 4, 5, 6, 8.*got 7 for keys"),
        ({"value_nbits": 16}, "2, 3, 4, 5, 6, 8.*got 16 for values"),
        ({"backend": "fp8", "nbits": 4}, "one of 8, got 4"),
        ({"backend": "quanto", "nbits": 8}, "`nbits` of the quanto backend must be one of 2, 4, got 8"),
        ({"backend": "hqq", "nbits": 6}, "`nbits` of the hqq backend must be one of 1, 2, 3, 4, 8, got 6"),
        ({"axis_key": 0}, "`axis_key` of the native backend must be left out"),
        ({"backend": "hqq", "axis_key": False}, "`axis_key` of the hqq backend must be one of 0, 1, got False"),
        ({"backend": "hqq", "axis_value": -1}, "`axis_value` of the hqq backend must be one of 0, 1, got -1"),
        ({"backend": "quanto", "axis_value": 1}, "`axis_value` of the quanto backend must be one of 0, -1, got 1"),
        ({"q_group_size": 0}, "at least 1, got 0"),
        ({"value_group_size": 1.5}, "at least 1, got 1.5 for values"),
        ({"residual_length": -1}, "at least 0, got -1"),
        ({"sink_tokens": True}, "`sink_tokens` must be a whole number of tokens"),
        ({"bits": 4}, "`bits` is no option of Quantized.*sink_tokens"),
        ({"key_bits": 4}, "`key_bits` is no option of Quantized.*sink_tokens"),
    ],
)
@pytest.mark.parametrize("make", [kvlayers.QuantizedCache, kvlayers.QuantizedCacheConfig])
def test_an_option_that_is_not_taken_is_refused_at_once(
    make: Callable[..., Any], options: dict[str, Any], listed: str
) -> None:
    if options.get("backend") in PACKAGES:
        pytest.importorskip(PACKAGES[options["backend"]])
    with pytest.raises(kvlayers.OptionError, match=listed):
        make(**options)


# Quantizers of others


class Failing(Quantizer):
    """Finds no codes, of which another one would find some."""

    def __init__(self, other: Quantizer) -> None:
        super().__init__(other.format)
        self.other = other

    def quantize(self, states: Tensor) -> QuantizedGroups:
        raise MemoryError("no memory for these codes")


def let_packing_fail(patch: pytest.MonkeyPatch, blocks: Any, where: str | int) -> None:
    """Where the values are quantized, after the keys, or where that side holds its blocks, at the end."""
    if where == "quantizing":
        patch.setitem(blocks._quantizers, "values", Failing(blocks._quantizers["values"]))
        return
    hold, calls = DenseStore.hold, itertools.count(1)

    def interrupted(store: DenseStore, tokens: int) -> None:
        if store in blocks.stores and next(calls) == where:
            raise KeyboardInterrupt
        hold(store, tokens)

    patch.setattr(DenseStore, "hold", interrupted)


@pytest.mark.parametrize(
    ("past", "tokens", "window", "where"),
    product([50, 70, 76, 140, 300], [1, 100], [None, 40, 120], ["quantizing", 1, 2]),
)
def test_a_packing_that_fails_leaves_the_layer_as_it_was(
    past: int, tokens: int, window: int | None, where: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantization = kvlayers.Quantization(q_group_size=2, residual_length=4, sink_tokens=4 if window is None else 0)
    layer = kvlayers.QuantizedLayer(quantization)
    if window is not None:
        layer = kvlayers.SlidingLayer(window, QuantizedStore(quantization))
    states = some_states(past + 400, kv_heads=2)
    layer.update(*(side[:, :, :past] for side in states))
    fork, twin, before = layer.fork(), layer.fork(), layer.state()
    with monkeypatch.context() as patch:
        let_packing_fail(patch, layer.store.blocks, where)
        for more in (tokens, 200):
            with contextlib.suppress(MemoryError, KeyboardInterrupt):
                layer.update(*(side[:, :, past : past + more] for side in states))
                twin.load_state(layer.state())
                before = layer.state()
            assert same_state(layer.state(), before)
    # Blocks that nobody came to hold are in slots that a fork may want, and that the layer wants again.
    for one in (fork, layer, twin):
        one.update(*(side[:, :, -200 - (one is fork) : past + 400 - (one is fork)] for side in states))
    for side in ("keys", "values"):
        assert torch.equal(getattr(layer, side) + 0, getattr(twin, side) + 0)


@pytest.mark.parametrize("backend", ["native", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_code(backend: str, dtype: torch.dtype) -> None:
    states = [torch.randn(1, 2, 300, 16).to(dtype) for _ in range(2)]
    plain, under = (kvlayers.QuantizedLayer(kvlayers.Quantization(backend, residual_length=4)) for _ in range(2))
    plain.update(*states)
    with torch.autocast("cpu", torch.bfloat16):
        under.update(*states)
        assert torch.equal(under.keys + 0, plain.keys + 0)
    assert same_state(under.state(), plain.state())


def test_a_default_device_is_not_that_of_states() -> None:
    states = [torch.randn(1, 2, 300, 16) for _ in range(2)]
    layer = kvlayers.QuantizedLayer(kvlayers.Quantization(residual_length=4))
    with torch.device("meta"):
        layer.update(*states)
        keys, values = layer.update(*(side[:, :, :1] for side in states))
    query = torch.randn(1, 4, 1, 16)
    attended = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    assert attended.isfinite().all()


WRONG_GROUPS: dict[str, Callable[[QuantizedGroups], QuantizedGroups]] = {
    "codes of another dtype": lambda groups: dataclasses.replace(groups, codes=groups.codes.long()),
    "codes of fewer heads": lambda groups: dataclasses.replace(groups, codes=groups.codes[:, :1]),
    "codes that are too large": lambda groups: dataclasses.replace(groups, codes=groups.codes + 200),
    "scales of another dtype": lambda groups: dataclasses.replace(groups, scale=groups.scale.double()),
    "scales of another shape": lambda groups: dataclasses.replace(groups, scale=groups.scale[..., :1]),
    "no zeros": lambda groups: dataclasses.replace(groups, zero=None),
}


@pytest.mark.parametrize("wrong", WRONG_GROUPS)
def test_a_quantizer_that_returns_something_else_is_refused(wrong: str) -> None:
    class Wrong(Failing):
        def quantize(self, states: Tensor) -> QuantizedGroups:
            return WRONG_GROUPS[wrong](self.other.quantize(states))

    layer = kvlayers.QuantizedLayer(kvlayers.Quantization(q_group_size=2, residual_length=4))
    layer.update(torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 8))
    blocks = layer.store.blocks
    blocks._quantizers["keys"] = Wrong(blocks._quantizers["keys"])
    with pytest.raises(kvlayers.errors.StateMismatchError, match="correct the quantizer"):
        layer.update(torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 8))
    assert layer.length == 50


@pytest.mark.parametrize("asked", [{"bits": 7}, {"group_tokens": 0}, {"group_tokens": 4, "group_channels": 4}])
def test_a_format_that_no_kernel_reads_is_refused(asked: dict[str, int]) -> None:
    with pytest.raises(kvlayers.OptionError, match="Codes must have"):
        CodeFormat(**{"bits": 4, "group_tokens": 1, "group_channels": 1, **asked})


# Beside a store in full precision

STORES: dict[type, Callable[[Any], Any]] = {DenseStore: lambda kind: kind(), QuantizedStore: lambda kind: kind(SMALL)}


@pytest.mark.parametrize("inherited", [False, True])
@pytest.mark.parametrize("method", ["validate", "append", "extend"])
@pytest.mark.parametrize("kind", STORES)
def test_what_a_subclass_overrides_sees_every_token(kind: type, method: str, inherited: bool) -> None:
    """Also a token that comes by the short way."""
    seen = []

    def overridden(store: Any, *arguments: Any) -> Any:
        seen.append(arguments)
        return getattr(super(subclass, store), method)(*arguments)

    subclass: Any = type("Overriding", (kind,), {method: overridden})
    store = STORES[kind](type("Inheriting", (subclass,), {}) if inherited else subclass)
    layer = kvlayers.DynamicLayer(store=store)
    for tokens in (5, 1, 1, 1, 1):
        layer.update(*some_states(tokens))
    assert len(seen) == 5


@pytest.mark.parametrize("tokens", [20, 150])
def test_attention_before_the_first_block_is_that_of_a_dense_store_to_the_last_bit(tokens: int) -> None:
    """With 150 tokens of 32 heads, the compiled kernel attends."""
    form = {"kv_heads": 32, "dims": (64, 64), "dtype": torch.bfloat16}
    passes = [some_states(count, **form) for count in (tokens, 1, 1)]
    query = torch.randn(1, 32, 1, 64, dtype=torch.bfloat16)
    found = []
    for store in (DenseStore(), QuantizedStore(kvlayers.Quantization(nbits=4))):
        layer = kvlayers.DynamicLayer(store=store)
        for states in passes:
            keys, values = layer.update(*states)
        found.append(scaled_dot_product_attention(query, keys, values))
        assert type(keys) is not Tensor
    assert torch.equal(*found)


# At any length it takes no more memory than a dense one, and pays little for growing

HEAD_DIM = 64
LONGEST = 300
TOLERANCE = 1.05
"""Of the bytes of a dense cache."""

QUANTIZATIONS = [
    *(kvlayers.Quantization(nbits=nbits) for nbits in (2, 3, 4, 6, 8)),
    kvlayers.Quantization("fp8"),
    *(kvlayers.Quantization("hqq", nbits=nbits) for nbits in (4, 8)),
    kvlayers.Quantization("quanto", nbits=4),
]


def zeros(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.zeros(1, 1, tokens, HEAD_DIM, dtype=dtype), torch.zeros(1, 1, tokens, HEAD_DIM, dtype=dtype)


def bytes_of(tokens: int, dtype: torch.dtype) -> int:
    return 2 * tokens * HEAD_DIM * dtype.itemsize


def check_beside_dense(packed: Any, dense: Any, updates: Iterable[int], dtype: torch.dtype) -> None:
    for tokens in updates:
        packed.update(*zeros(tokens, dtype))
        dense.update(*zeros(tokens, dtype))
        assert packed.nbytes <= TOLERANCE * dense.nbytes, packed.length


@pytest.mark.parametrize(("quantization", "dtype"), once(QUANTIZATIONS, [torch.bfloat16, torch.float32]))
def test_a_packed_layer_holds_no_more_than_a_dense_one(quantization: kvlayers.Quantization, dtype: torch.dtype) -> None:
    # A hint within the first block, one within the second, and one that is passed.
    for hint in (150, 230, LONGEST):
        packed, dense = kvlayers.QuantizedLayer(quantization, hint), kvlayers.DynamicLayer(hint)
        check_beside_dense(packed, dense, [1] * LONGEST, dtype)
    # A dense layer is full, without spare room, 128 tokens after its prompt.
    for prompt in (1, 72, 81, 113, 145, 208, 209):
        check_beside_dense(kvlayers.QuantizedLayer(quantization), kvlayers.DynamicLayer(), [prompt, *[1] * 128], dtype)
    # Once packed, it takes the bytes of its tokens at most, without the spare room that a dense layer has besides.
    packed, dense = kvlayers.QuantizedLayer(quantization), kvlayers.DynamicLayer()
    for length in range(1, LONGEST + 1):
        check_beside_dense(packed, dense, [1], dtype)
        assert length <= 208 or packed.nbytes <= TOLERANCE * bytes_of(length, dtype), length


LLAMA = transformers.LlamaConfig(**{**COMMON, "head_dim": HEAD_DIM})
PACKED = {"nbits": 8, "residual_length": 32}


def of_windows(window: int) -> tuple[Any, Any]:
    config = transformers.MistralConfig(**COMMON, sliding_window=window)
    packed = kvlayers.QuantizedCache(config=config, quantize_sliding=True, **PACKED)
    return packed, kvlayers.DynamicCache(config=config)


def of_sinks(window: int) -> tuple[Any, Any]:
    options = {"config": LLAMA, "window_length": window, "num_sink_tokens": 4}
    return kvlayers.SinkCache(**options, quantization=PACKED), kvlayers.SinkCache(**options)


def offloaded(_: int) -> tuple[Any, Any]:
    options = {"config": LLAMA, "offloading": True}
    return kvlayers.QuantizedCache(nbits=8, **options), kvlayers.DynamicCache(**options)


@pytest.mark.parametrize(
    ("make", "window"), [*itertools.product([of_windows, of_sinks], [40, 160, 400]), (offloaded, LONGEST)]
)
def test_a_packed_cache_holds_no_more_than_a_dense_one(make: Callable[[int], tuple[Any, Any]], window: int) -> None:
    packed, dense = (cache.layers[0] for cache in make(window))
    assert packed.bits == (8, 8)
    check_beside_dense(packed, dense, [1] * LONGEST, torch.bfloat16)


def loaded(make: Callable[[], kvlayers.CacheLayer], layer: kvlayers.CacheLayer) -> kvlayers.CacheLayer:
    twin = make()
    twin.load_state(layer.state())
    return twin


CHANGES: dict[str, Callable[[Callable[[], kvlayers.CacheLayer], kvlayers.CacheLayer], kvlayers.CacheLayer | None]] = {
    "fork": lambda make, layer: layer.fork(),
    "load": loaded,
    "crop": lambda make, layer: layer.crop(30),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("prompt", [50, 150, 209])
def test_a_packed_layer_that_was_changed_holds_no_more_than_a_dense_one(prompt: int, change: str) -> None:
    layers = []
    for make in (lambda: kvlayers.QuantizedLayer(kvlayers.Quantization(nbits=6)), kvlayers.DynamicLayer):
        layer = make()
        layer.update(*zeros(prompt))
        layers.append(CHANGES[change](make, layer) or layer)
    check_beside_dense(*layers, [1] * 60, torch.bfloat16)


def test_growing_copies_a_few_tokens_for_each_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    spy(monkeypatch, TokenBuffer, "write", lambda buffer, start, tokens: copied.append(tokens.nbytes))
    layer = kvlayers.QuantizedLayer(kvlayers.Quantization(nbits=8))
    for _ in range(2048):
        layer.update(*zeros(1))
    # Of each block's 64 tokens: themselves, the residual of 129 when they are packed, and that of 161 when it grows;
    # and at 8 bits the blocks themselves, 29 in the end, in half of a dense block's bytes each.
    each = 1 + (129 + 161) / 64 + 29 / 2 * 0.54
    assert sum(copied) <= each * bytes_of(2048, torch.bfloat16)
