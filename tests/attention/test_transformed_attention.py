"""Attention while torch changes what is computed: autocast, `torch.func`, forward-mode derivatives, inference mode."""

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from kvlayers import CacheLayer, Quantization, QuantizedLayer

LAYERS: dict[str, Callable[[], CacheLayer]] = {
    "dynamic": kvlayers.DynamicLayer,
    "packed": lambda: QuantizedLayer(Quantization(nbits=8)),
}
TOKENS = 2050  # So many that the kernel takes attention to states in full precision, too.


def some_states(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    shape = 1, 4, tokens, 32
    return torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)


def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, keys, values, enable_gqa=True)


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> CacheLayer:
    torch.manual_seed(0)
    return LAYERS[request.param]()


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("computed", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_decides_the_dtype_of_the_result(
    layer: CacheLayer, dtype: torch.dtype, computed: torch.dtype, queries: int
) -> None:
    layer.update(*some_states(TOKENS, dtype))
    with torch.no_grad(), torch.autocast("cpu", computed):
        returned = layer.update(*some_states(queries, dtype))
        assert attend(torch.randn(1, 8, queries, 32, dtype=dtype), *returned).dtype == computed


def test_vmap_gives_what_a_loop_gives(layer: CacheLayer) -> None:
    layer.update(*some_states(TOKENS))
    returned = layer.update(*some_states(1))
    queries = torch.randn(3, 1, 8, 1, 32)
    seen = torch.func.vmap(lambda query: attend(query, *returned))(queries)
    expected = torch.stack([attend(query, *returned) for query in queries])
    # Sums of 2,000 tokens in another order.
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)


def test_forward_derivatives_are_those_of_states_in_full_precision(layer: CacheLayer) -> None:
    layer.update(*some_states(TOKENS))
    returned = layer.update(*some_states(1))
    query, direction = torch.randn(1, 8, 1, 32), torch.randn(1, 8, 1, 32)

    def tangent(keys: Tensor, values: Tensor) -> Tensor:
        # The only backend of torch that has forward derivatives.
        with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
            attended = attend(forward_ad.make_dual(query, direction), keys, values)
            found: Tensor = forward_ad.unpack_dual(attended).tangent
            return found.clone()

    torch.testing.assert_close(tangent(*returned), tangent(*(states.clone() for states in returned)))


def test_a_layer_that_was_unpickled_in_inference_mode_goes_on_outside(layer: CacheLayer) -> None:
    layer.update(*some_states(TOKENS))
    with torch.inference_mode():
        copied = pickle.loads(pickle.dumps(layer))
    for each in (layer, copied):
        each.crop(TOKENS - 3)
    states = some_states(1)
    with torch.no_grad():
        for seen, expected in zip(copied.update(*states), layer.update(*states), strict=True):
            assert torch.equal(seen.clone(), expected.clone())
