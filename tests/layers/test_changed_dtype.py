"""States whose dtype changes between passes: promoted as by `torch.cat`, or refused if attention cannot read them."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import kvlayers
from kvlayers.eviction.held_tokens import held_tokens
from layer_kinds import KINDS
from matrix import once, product
from ragged_reference import of_head

CONFIG = transformers.LlamaConfig(num_hidden_layers=1)
CHANGES = list(itertools.permutations((torch.bfloat16, torch.float16, torch.float32), 2))


EXACT = {
    "dynamic": lambda: kvlayers.DynamicCache(config=CONFIG),
    "sliding": lambda: kvlayers.DynamicCache(config=transformers.MistralConfig(num_hidden_layers=1, sliding_window=24)),
    "offloaded": lambda: kvlayers.OffloadedCache(config=CONFIG),
    "to be packed": lambda: kvlayers.QuantizedCache(config=CONFIG, nbits=4, residual_length=128),
}


def states(tokens: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 2, tokens, 32, generator=generator).to(dtype) for _ in range(2))  # type: ignore[return-value]


def attended(pair: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    return [side + 0 for side in pair]


@pytest.mark.parametrize(("first", "then"), CHANGES, ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_tokens_are_promoted_as_concatenation_does(name: str, first: torch.dtype, then: torch.dtype) -> None:
    cache, expected = EXACT[name](), [torch.zeros(2, 2, 0, 32, dtype=first)] * 2
    for index, (tokens, dtype) in enumerate([(9, first), (1, first), (3, then), (1, then), (1, first), (30, then)]):
        if index == 2:
            fork, before = cache.fork(), expected
        new = states(tokens, dtype, index)
        expected = [torch.cat(sides, dim=2) for sides in zip(expected, new, strict=True)]
        for side, whole in zip(attended(cache.layers[0].update(*new)), expected, strict=True):
            assert side.dtype == whole.dtype == (torch.promote_types(first, then) if index > 1 else first)
            assert torch.equal(side, whole[:, :, whole.shape[2] - side.shape[2] :])
        assert cache.get_seq_length() == expected[0].shape[2]
    if name != "sliding":
        cache.crop(12)
        assert torch.equal(cache.layers[0].keys + 0, expected[0][:, :, :12])
    # A fork from before the change goes on in the dtype that it was in.
    more = states(1, first, 6)
    expected = [torch.cat(sides, dim=2) for sides in zip(before, more, strict=True)]
    torch.testing.assert_close(attended(fork.layers[0].update(*more)), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("first", "then", "nbits", "forked"), product(CHANGES, [2, 4, 8], [False, True]))
def test_packed_tokens_stay_what_they_are(first: torch.dtype, then: torch.dtype, nbits: int, forked: bool) -> None:
    cache = kvlayers.QuantizedCache(config=CONFIG, nbits=nbits, residual_length=8, sink_tokens=4)
    cache.layers[0].update(*states(200, first))
    before = attended((cache.layers[0].keys, cache.layers[0].values))
    original, cache = cache, cache.fork() if forked else cache
    new, promoted = states(5, then, 1), torch.promote_types(first, then)
    close = {"rtol": 4 * torch.finfo(first).eps, "atol": 4 * torch.finfo(first).eps}
    for side, old, added in zip(attended(cache.layers[0].update(*new)), before, new, strict=True):
        # Codes are turned to numbers in the dtype, so the old ones are rounded less than they were.
        torch.testing.assert_close(side[:, :, :200], old.to(promoted), **close)
        assert torch.equal(side[:, :, 200:], added.to(promoted))
    # Blocks are packed, and saved, as ever.
    more = states(150, then, 2)
    keys = cache.layers[0].update(*more)[0] + 0
    torch.testing.assert_close(keys[:, :, -8:], more[0][:, :, -8:].to(promoted), rtol=0, atol=0)
    twin = cache.fork()
    twin.crop(-3)
    assert (twin.get_seq_length(), cache.get_seq_length()) == (352, 355)
    if forked:
        held = attended((original.layers[0].keys, original.layers[0].values))
        torch.testing.assert_close(held, before, rtol=0, atol=0)


def test_gradients_go_through_what_is_promoted() -> None:
    cache = kvlayers.DynamicCache(config=CONFIG)
    first = [side.requires_grad_() for side in states(4, torch.bfloat16)]
    cache.update(*first, 0)
    keys, values = cache.update(*states(2, torch.float32, 1), 0)
    (keys.sum() + 2 * values.sum()).backward()
    assert torch.equal(first[0].grad, torch.ones_like(first[0]))
    assert torch.equal(first[1].grad, 2 * torch.ones_like(first[1]))


@pytest.mark.parametrize(("first", "then"), CHANGES, ids=str)
def test_pages_are_found_by_promoted_keys(first: torch.dtype, then: torch.dtype) -> None:
    layer = kvlayers.RecallLayer(kvlayers.layers.Recall(pages=4, page_tokens=16, sink_tokens=0, recent_tokens=1))
    # As if all had come in the wider dtype.
    promoted = torch.promote_types(first, then)
    expected = kvlayers.RecallLayer(kvlayers.layers.Recall(pages=4, page_tokens=16, sink_tokens=0, recent_tokens=1))
    for index, (tokens, dtype) in enumerate([(200, first), (200, then), (1, then)]):
        new = states(tokens, dtype, index)
        seen, wanted = layer.update(*new), expected.update(*(side.to(promoted) for side in new))
    query = torch.randn(2, 2, 1, 32).to(promoted)
    attend = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(attend(query, *seen), attend(query, *wanted))


@pytest.mark.parametrize(
    ("name", "first", "then", "rows", "message"),
    [
        *(
            ("static", *change, 2, rf"dtype {change[0]}.*got dtype {change[1]}: .*all passes under autocast")
            for change in CHANGES
        ),
        ("dynamic", torch.float32, torch.float8_e4m3fn, 2, "must have dtype torch.float32"),
        ("dynamic", torch.float32, torch.int8, 2, "must have dtype torch.float32"),
        ("dynamic", torch.float32, torch.bfloat16, 1, "batch size 2, like the 9 held tokens"),
    ],
    ids=str,
)
def test_what_is_not_promoted_is_refused(
    name: str, first: torch.dtype, then: torch.dtype, rows: int, message: str
) -> None:
    cache = EXACT["dynamic"]() if name == "dynamic" else kvlayers.StaticCache(CONFIG, max_cache_len=32)
    cache.update(*states(9, first), 0)
    with pytest.raises(kvlayers.errors.StateMismatchError, match=message):
        cache.update(*(side[:rows].to(then) for side in states(1, torch.float32, 1)), 0)
    assert cache.get_seq_length() == 9
    assert torch.equal(cache.layers[0].keys, states(9, first)[0])


class Attending(torch.nn.Module):
    """A model of two layers that attends as models do: with queries of the dtype of its new keys."""

    def forward(self, cache: Any, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        for index in range(2):
            attended = cache.update(keys, values, index)
            values = torch.nn.functional.scaled_dot_product_attention(keys, *attended)[:, :, -keys.shape[2] :]
        return values


OTHER_STATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "narrower": lambda states: states.to(torch.bfloat16),
    "of another device": lambda states: states.to("meta"),
    "of no floating point": lambda states: states.to(torch.int32),
}

WHOLE_CACHES: dict[str, Callable[[], Any]] = {
    **{
        name: lambda make=make: kvlayers.Cache(layers=[make()[0], make()[0]])
        for name, make in KINDS.items()
        if "one token" not in name
    },  # type: ignore[misc]
    "layers of transformers": lambda: kvlayers.Cache(
        layers=[transformers.cache_utils.DynamicLayer() for _ in range(2)]
    ),
    "made as needed": lambda: kvlayers.DynamicCache(),
    "rows": lambda: kvlayers.merge([filled(kvlayers.DynamicCache(), 1), filled(kvlayers.DynamicCache(), 1)]),
    "within a budget": lambda: kvlayers.DynamicCache(max_bytes="64KiB"),
}


def filled(cache: Any, rows: int) -> Any:
    Attending()(cache, *(side[:rows] for side in states(3, torch.float32)))
    return cache


@pytest.mark.parametrize(("name", "change"), once(WHOLE_CACHES, OTHER_STATES))
def test_states_that_attention_cannot_read_are_refused_before_anything_changes(name: str, change: str) -> None:
    cache, model = WHOLE_CACHES[name](), Attending()
    model(cache, *states(7, torch.float32))
    model(cache, *states(1, torch.float32, 1))
    seen, nbytes, expected = cache.get_seq_length(), cache.nbytes, cache.fork()
    other = [OTHER_STATES[change](side) for side in states(40, torch.float32, 2)]
    for _ in range(2):
        with pytest.raises(kvlayers.errors.StateMismatchError, match=r"must have (dtype|device) .* got (dtype|device)"):
            model(cache, *other)
    assert (cache.get_seq_length(), cache.nbytes) == (seen, nbytes)
    for index in range(3):
        new = states(1, torch.float32, 3 + index)
        assert torch.equal(model(cache, *new), model(expected, *new))


def test_states_that_were_loaded_are_looked_at_again() -> None:
    model, cache = Attending(), kvlayers.DynamicCache()
    model(cache, *states(3, torch.bfloat16))
    cache.load_state(filled(kvlayers.DynamicCache(), 2).state())
    with pytest.raises(kvlayers.errors.StateMismatchError, match="dtype torch.float32, like the 3 held tokens"):
        model(cache, *states(1, torch.bfloat16))
    model(cache, *states(1, torch.float32))
    assert cache.get_seq_length() == 4


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32])
def test_packed_tokens_are_read_beside_those_of_another_dtype_after_an_eviction(
    first: torch.dtype, per_head: bool
) -> None:
    store = kvlayers.stores.QuantizedStore(kvlayers.Quantization(nbits=8, residual_length=32, sink_tokens=8))
    layer = kvlayers.EvictingLayer("knorm", budget=160, recent_tokens=16, per_head=per_head, store=store)
    layer.update(*states(150, first))
    held, new = held_tokens(layer.store), states(150, torch.float32 if first == torch.bfloat16 else torch.bfloat16, 1)
    query = torch.randn(2, 2, 150, 32)
    returned = layer.update(*new)
    keys, values = (torch.cat(sides, 2) for sides in zip((held.keys, held.values), new, strict=True))
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
    seen = torch.nn.functional.scaled_dot_product_attention(query, *returned)
    # Those that are held as bfloat16 are rounded to it when they are read apart: numbers up to 5 by 0.02.
    torch.testing.assert_close(seen, expected, atol=1e-4 if first == torch.float32 else 2e-2, rtol=1e-4)
    # What is left has the wider dtype, codes included.
    returned = layer.update(*states(1, torch.float32, 2))
    seen = torch.nn.functional.scaled_dot_product_attention(query[:, :, :1], *returned)
    held = held_tokens(layer.store)
    for row, head in itertools.product(range(2), range(2)):
        own = query[row : row + 1, head : head + 1, :1]
        expected = torch.nn.functional.scaled_dot_product_attention(own, *of_head(held, row, head))
        torch.testing.assert_close(seen[row : row + 1, head : head + 1], expected, atol=1e-4, rtol=1e-4)
