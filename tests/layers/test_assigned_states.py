"""Keys and values of another length that are assigned to a layer, as libraries do that evict tokens after a prefill."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

import kvlayers
from agreement import check_at_rest, step
from layer_kinds import KINDS
from matrix import once
from models import prompt, tiny_model
from oracle import states


@torch.no_grad()
def test_layers_that_are_pruned_to_other_lengths_as_the_prompt_passes_decode_as_those_of_transformers() -> None:
    """As libraries do with a hook behind each attention layer. One query at a time needs no mask."""
    model = copy.deepcopy(tiny_model("llama"))
    model.set_attn_implementation("sdpa")
    logits = []
    for cache in (kvlayers.DynamicCache(config=model.config), tf.DynamicCache()):

        def prune(attention: Any, *_: Any, cache: Any = cache) -> None:
            layer, places = cache.layers[attention.layer_idx], [0, 2, 3, 5, 8, 9, 11][: 7 - 3 * attention.layer_idx]
            layer.keys, layer.values = layer.keys[:, :, places], layer.values[:, :, places]

        hooks = [layer.self_attn.register_forward_hook(prune) for layer in model.model.layers]
        model(prompt(1, 12), past_key_values=cache)
        for hook in hooks:
            hook.remove()
        assert [layer.get_seq_length() for layer in cache.layers] == [7, 4]
        # At the positions that they have in the text.
        tokens = enumerate(prompt(1, 5, seed=1).split(1, dim=1), start=12)
        steps = [model(token, past_key_values=cache, position_ids=torch.tensor([[at]])).logits for at, token in tokens]
        logits.append(torch.cat(steps, dim=1))
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


def test_masks_of_a_pruned_window_are_those_of_what_is_left(generator: torch.Generator) -> None:
    layer = kvlayers.SlidingLayer(8)
    layer.update(*states(1, 20, generator))
    keys, values = layer.keys[:, :, [0, 3, 4]], layer.values[:, :, [0, 3, 4]]
    layer.keys, layer.values = keys, values
    for held in (3, 4, 5, 6, 7, 7):
        seen = layer.length
        assert layer.mask_sizes(1) == (held + 1, seen - held)
        new = states(1, 1, generator)
        attended = layer.update(*new)
        keys, values = torch.cat([keys, new[0]], dim=2), torch.cat([values, new[1]], dim=2)
        assert all(map(torch.equal, attended, (keys[:, :, -held - 1 :], values[:, :, -held - 1 :])))
    with pytest.raises(kvlayers.errors.RollbackError):
        layer.crop(-8)


FULL = ["dynamic", "static", "static that grows", "offloaded", "offloaded static"]


@pytest.mark.parametrize("kind", FULL)
@pytest.mark.parametrize("half", ["keys", "values"])
def test_a_layer_goes_on_from_what_was_assigned(kind: str, half: str, generator: torch.Generator) -> None:
    """In either order, from views of its own states or from others, and behind forks that keep theirs."""
    layer, oracle = KINDS[kind]()
    step(layer, oracle, 12, generator)
    fork, fork_oracle = layer.fork(), oracle.copy()
    for chosen in (slice(2, None), [0, 1, 5, 8], slice(0, 3)):
        for side in ("keys", "values") if half == "keys" else ("values", "keys"):
            setattr(layer, side, getattr(layer, side)[:, :, chosen])
        oracle.keys, oracle.values = oracle.keys[:, :, chosen].clone(), oracle.values[:, :, chosen].clone()
        check_at_rest(layer, oracle)
        for tokens in (1, 2):
            step(layer, oracle, tokens, generator)
    layer.crop(-2)
    oracle.truncate(oracle.length - 2)
    step(layer, oracle, 3, generator)
    step(fork, fork_oracle, 1, generator)


def test_packed_layers_pack_what_was_assigned(generator: torch.Generator) -> None:
    quantization = kvlayers.Quantization(nbits=8, residual_length=4, sink_tokens=2)
    layer = kvlayers.QuantizedLayer(quantization)
    layer.update(*(torch.randn(1, 2, 300, 64, generator=generator) for _ in range(2)))
    chosen = torch.arange(0, 300, 2)
    keys, values = layer.keys[:, :, chosen], layer.values[:, :, chosen]
    layer.keys, layer.values = keys, values
    assert layer.length == 150
    # Rounded once more, to 8 bits.
    torch.testing.assert_close(layer.keys.clone(), keys, rtol=0, atol=0.05)
    torch.testing.assert_close(layer.values.clone(), values, rtol=0, atol=0.05)
    assert layer.update(*(torch.randn(1, 2, 1, 64, generator=generator) for _ in range(2)))[0].shape[2] == 151


USES = {
    "update": lambda cache: cache.update(*states(2, 1, torch.Generator().manual_seed(0)), 0),
    "masks": lambda cache: cache.get_mask_sizes(1, 0),
    "crop": lambda cache: cache.crop(-1),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "fork": lambda cache: cache.fork(),
    "state": lambda cache: cache.state(),
    "tuples": lambda cache: cache.to_legacy_cache(),
}


@pytest.mark.parametrize(("kind", "use"), once([*FULL, "sliding over a long window", "quantized"], USES, times=2))
def test_halves_that_do_not_match_are_noticed_at_the_next_use(kind: str, use: str, generator: torch.Generator) -> None:
    layer, oracle = KINDS[kind]()
    cache = kvlayers.Cache(layers=[layer])
    step(layer, oracle, 7, generator)
    layer.keys = oracle.keys[:, :, 2:5]
    assert torch.equal(layer.keys, oracle.keys[:, :, 2:5])
    assert layer.nbytes > 0
    with pytest.raises(
        kvlayers.errors.StateMismatchError, match=r"got keys \[2, 2, 3, 4\] and values \[2, 2, 7, 6\]: assign"
    ):
        USES[use](cache)
    # A debugger shows it all the same.
    assert "[2, 2, 3, 4] and values [2, 2, 7, 6]" in repr(cache)
    assert type(layer).__name__ in repr(layer)
    # What matches again is as if nothing had been assigned.
    layer.keys = oracle.keys
    step(layer, oracle, 1, generator)
    layer.values = oracle.values[:, :, 1:]
    with pytest.raises(kvlayers.errors.StateMismatchError, match=r"keys \[2, 2, 8, 4\] and values \[2, 2, 7, 6\]"):
        USES[use](cache)
    cache.reset()
    oracle.reset()
    step(layer, oracle, 4, generator)


def test_another_batch_size_can_be_assigned(generator: torch.Generator) -> None:
    layer, oracle = KINDS["dynamic"]()
    step(layer, oracle, 7, generator)
    layer.keys = layer.keys[:1]
    with pytest.raises(kvlayers.errors.StateMismatchError, match="the same batch size"):
        layer.update(*states(1, 1, generator))
    layer.values = layer.values[:1]
    oracle.select([0])
    step(layer, oracle, 1, generator)


def test_a_static_layer_keeps_its_address_and_takes_a_whole_reservation(generator: torch.Generator) -> None:
    """A tensor of the reservation's shape has the tokens in its first slots, as those of transformers have."""
    layer, oracle = KINDS["static"]()
    step(layer, oracle, 7, generator)
    address = layer.tensors()["keys"].data_ptr()
    whole = layer.tensors()["keys"] * 2, layer.tensors()["values"] * 3
    layer.keys, layer.values = whole
    oracle.keys, oracle.values = oracle.keys * 2, oracle.values * 3
    step(layer, oracle, 1, generator)
    layer.keys, layer.values = layer.keys[:, :, 5:], layer.values[:, :, 5:]
    assert layer.tensors()["keys"].data_ptr() == address
    assert int(layer.tensors()["position"]) == 3
    assert not layer.tensors()["keys"][:, :, 3:].any()
    oracle.keys, oracle.values = oracle.keys[:, :, 5:].clone(), oracle.values[:, :, 5:].clone()
    step(layer, oracle, 2, generator)


REFUSED = {
    "nothing": ("dynamic", lambda keys: None, "got a NoneType: pass a tensor, or use reset"),
    "a matrix": ("dynamic", lambda keys: keys[0, 0], r"got \[12, 4\]: pass a tensor"),
    "more than a window has seen": (
        "sliding",
        lambda keys: torch.cat([keys, keys], 2)[:, :, :13],
        "12 tokens that were",
    ),
    "less than a static window attends to": ("static sliding", lambda keys: keys[:, :, :6], "at least the 7 tokens"),
    "more than a static layer holds": ("static", lambda keys: torch.cat([keys, keys], 2), "most the 12 tokens"),
    "fewer among sinks": (
        "sink over a long window",
        lambda keys: keys[:, :, 1:],
        "all 12 tokens, since keys are rotated",
    ),
    "sinks after eviction": ("sink", lambda keys: keys, "one that has evicted some"),
}


@pytest.mark.parametrize(("kind", "of", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_kind_cannot_go_on_from_is_refused_before_anything_changes(
    kind: str, of: Callable[[Any], Any], message: str, generator: torch.Generator
) -> None:
    layer, oracle = KINDS[kind]()
    step(layer, oracle, 12, generator)
    for side in ("keys", "values"):
        with pytest.raises(kvlayers.errors.StateMismatchError, match=message if side == "keys" else None):
            setattr(layer, side, of(getattr(oracle, side)))
    step(layer, oracle, 1, generator)


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("static sliding", 60),
        ("static sliding over a long window", 60),
        ("sink", 5),
        ("sink of padded sequences", 5),
        ("offloaded", 60),
    ],
)
def test_other_states_of_as_many_tokens_are_taken(kind: str, tokens: int, generator: torch.Generator) -> None:
    layer, oracle = KINDS[kind]()
    step(layer, oracle, tokens, generator)
    step(layer, oracle, 1, generator)
    if "static" not in kind:
        # A copy.
        layer.keys.zero_()
    layer.keys, layer.values = layer.keys * 2, layer.values * 3
    oracle.keys, oracle.values = oracle.keys * 2, oracle.values * 3
    for new in (1, 1, 5, *[1] * 20):
        step(layer, oracle, new, generator)
