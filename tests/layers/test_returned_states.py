"""The states that an update returns are those of its tokens, and stay so while the cache and its forks go on."""

import random
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from kvlayers import CacheLayer, Quantization, QuantizedLayer, SlidingLayer
from kvlayers.errors import StaleStatesError
from kvlayers.kernels.attention.packed_tensor import PackedStates, as_dense
from kvlayers.stores import QuantizedStore
from matrix import product, seeds

Pair = tuple[torch.Tensor, torch.Tensor]


def some_states(tokens: int) -> Pair:
    return torch.randn(2, 1, tokens, 8), torch.randn(2, 1, tokens, 8)


def packed_store(residual_length: int) -> QuantizedStore:
    return QuantizedStore(Quantization(nbits=8, residual_length=residual_length, sink_tokens=0))


@pytest.mark.parametrize(
    ("window", "residual_length", "with_gradients"), product([20, 50, 100, 150], [8, 64, 128], [False, True])
)
def test_a_packed_window_takes_in_any_number_of_tokens(window: int, residual_length: int, with_gradients: bool) -> None:
    random.seed(window)
    torch.manual_seed(window)
    packed, exact = SlidingLayer(window, store=packed_store(residual_length)), SlidingLayer(window)
    with torch.set_grad_enabled(with_gradients):
        for _ in range(100):
            keys, values = some_states(random.choice([1, 2, 5, 30]))
            keys.requires_grad_(with_gradients)
            for seen, expected in zip(packed.update(keys, values), exact.update(keys, values), strict=True):
                # A code of 8 bits is at most half of a 255th of its group's range away.
                torch.testing.assert_close(as_dense(seen), expected, rtol=0, atol=0.05)


def test_a_forked_window_returns_new_states_if_those_before_are_held() -> None:
    torch.manual_seed(0)
    layer, (keys, values) = SlidingLayer(300), some_states(299)
    layer.update(keys, values)
    # It takes the slots behind the tokens, so that the window goes on in another tail.
    layer.fork().update(*some_states(1))
    held = []
    for _ in range(4):
        new_keys, new_values = some_states(1)
        keys, values = torch.cat([keys, new_keys], 2), torch.cat([values, new_values], 2)
        held.append(layer.update(new_keys, new_values))
        for seen, expected in zip(held[-1], (keys, values), strict=True):
            assert torch.equal(seen.clone(), expected[:, :, -300:])


LAYERS: dict[str, Callable[[], CacheLayer]] = {
    "dynamic": kvlayers.DynamicLayer,
    "sliding": lambda: SlidingLayer(random.choice([5, 20, 50, 150])),
    "packed": lambda: QuantizedLayer(Quantization(nbits=4, residual_length=random.choice([8, 64]))),
    "packed sliding": lambda: SlidingLayer(random.choice([20, 50, 150, 400]), store=packed_store(8)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("seed", seeds(2, 12))
def test_packed_states_stay_as_they_were_or_are_refused_while_forks_come_and_go(kind: str, seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    layer, forks = LAYERS[kind](), list[CacheLayer]()
    held: list[tuple[Pair, list[torch.Tensor]]] = []
    for _ in range(80):
        returned = layer.update(*some_states(random.choice([1, 1, 1, 1, 2, 5, 30])))
        if isinstance(returned[0], PackedStates):
            held = [*held[-20:], (returned, [states.clone() for states in returned])]
        chance = random.random()
        if chance < 0.1:
            forks.append(layer.fork())
        elif chance < 0.16 and forks:
            forks.pop(random.randrange(len(forks)))
        elif chance < 0.26 and forks:
            random.choice(forks).update(*some_states(3))
        elif chance < 0.3 and "sliding" not in kind and layer.length > 3:
            layer.crop(layer.length - random.choice([1, 3]))
        for returned, copies in random.sample(held, min(3, len(held))):
            try:
                now = [states.clone() for states in returned]
            except StaleStatesError:
                continue
            assert all(torch.equal(states, copy) for states, copy in zip(now, copies, strict=True))


@pytest.mark.parametrize("end", ["packs", "is deleted"])
def test_nobody_writes_to_what_returned_states_read_when_their_layer(end: str) -> None:
    torch.manual_seed(0)
    layer = QuantizedLayer(Quantization(nbits=4, residual_length=16, sink_tokens=0))
    layer.update(*some_states(100))
    fork = layer.fork()
    returned = layer.update(*some_states(1))
    copies = [states.clone() for states in returned]
    if end == "packs":
        layer.update(*some_states(300))
    else:
        del layer
    fork.update(*some_states(1))
    assert all(torch.equal(states.clone(), copy) for states, copy in zip(returned, copies, strict=True))


def test_keys_and_values_of_two_dtypes_are_never_read_as_one() -> None:
    layer, (keys, values) = kvlayers.DynamicLayer(), some_states(1300)
    layer.update(keys, values.half())
    layer.fork().update(keys[:, :, :1], values[:, :, :1].half())
    for _ in range(2):
        returned = layer.update(keys[:, :, :1], values[:, :, :1].half())
        assert [states.dtype for states in returned] == [torch.float32, torch.float16]
        with pytest.raises(RuntimeError, match="same dtype"):
            scaled_dot_product_attention(torch.randn(2, 4, 1, 8), *returned, enable_gqa=True)
