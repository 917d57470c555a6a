"""Multi-head latent attention: the logits of transformers' DynamicCache, from latents that are never expanded."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch.nn.functional import linear, scaled_dot_product_attention

import kvlayers
from kvlayers.kernels.attention.absorption import COPY, by_products
from kvlayers.kernels.attention.latents import DeferredStates, LatentStates, NewKeys, as_latents
from kvlayers.kernels.attention.packed_tensor import PackedStates
from kvlayers.upstream import compat
from matrix import once, product
from models import COMMON, prompt, with_larger_weights
from spies import Operators

if not compat.CACHES_LATENTS:
    pytest.skip("this version of transformers caches the keys and values of all heads", allow_module_level=True)

HEADS, NOPE, ROPE, VALUE, RANK = 4, 16, 8, 12, 32
SIZES = {
    **{name: value for name, value in COMMON.items() if name != "head_dim"},
    "num_key_value_heads": HEADS,
    "q_lora_rank": 16,
    "kv_lora_rank": RANK,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    "max_position_embeddings": 512,
}
EXPERTS = {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2Config", {**EXPERTS, "first_k_dense_replace": 1}),
    "deepseek_v3": ("DeepseekV3Config", {**EXPERTS, "first_k_dense_replace": 1}),
    "minicpm3": ("MiniCPM3Config", {}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**EXPERTS, "mlp_layer_types": ["dense", "sparse"]}),
    "youtu": ("YoutuConfig", {}),
}
NEAR = {"rtol": 1e-4, "atol": 1e-4}


@functools.cache
def model_of(family: str = "deepseek_v3", implementation: str = "sdpa") -> Any:
    name, changes = CONFIGS[family]
    if getattr(tf, name, None) is None:
        pytest.skip(f"this version of transformers has no {name}")
    torch.manual_seed(0)
    config = getattr(tf, name)(**SIZES, **changes)
    return with_larger_weights(tf.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval())


@torch.no_grad()
def read(model: Any, cache: Any, ids: torch.Tensor, chunks: tuple[int, ...], padding: int = 0) -> torch.Tensor:
    """Logits of chunks of tokens that follow those that the cache has seen; the first sequence is padded."""
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    seen, found = cache.get_seq_length(), []
    for chunk in chunks:
        end = seen + chunk
        out = model(ids[:, seen:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        found.append(out.logits[:, -1])
        seen = end
    return torch.stack(found)


class WidestProduct(Operators):
    """Notes for how many tokens the keys and values of all heads are computed."""

    def __init__(self) -> None:
        super().__init__(self._note_product)
        self.tokens = 0

    def _note_product(self, operator: Any, arguments: Any, out: Any) -> None:
        of_all_heads = HEADS * (NOPE + VALUE)
        if "mm" in str(operator) and isinstance(out, torch.Tensor) and out.shape[-1] == of_all_heads:
            self.tokens = max(self.tokens, out.numel() // of_all_heads)


CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: kvlayers.DynamicCache(config=config),
    "without a config": lambda config: kvlayers.DynamicCache(),
    "offloaded": lambda config: kvlayers.DynamicCache(config=config, offloading=True),
    "static": lambda config: kvlayers.StaticCache(config=config, max_cache_len=200),
}


@pytest.mark.parametrize(("family", "implementation", "padding"), product(CONFIGS, ["sdpa", "eager"], [0, 7]))
def test_steps_and_chunks_give_the_logits_of_transformers(family: str, implementation: str, padding: int) -> None:
    model, ids = model_of(family, implementation), prompt(2, 120)
    chunks = (90, 1, 1, 5, 1, 20, 1, 1)
    expected = read(model, tf.DynamicCache(config=model.config), ids, chunks, padding)
    seen = read(model, kvlayers.DynamicCache(config=model.config), ids, chunks, padding)
    torch.testing.assert_close(seen, expected, **NEAR)


@pytest.mark.parametrize("name", CACHES)
def test_every_cache_decodes_without_expanding_its_latents(name: str) -> None:
    model, ids = model_of(), prompt(2, 120)
    with WidestProduct() as of_transformers:
        expected = read(model, tf.DynamicCache(config=model.config), ids, (100, 1, 4, 1), 3)
    cache = CACHES[name](model.config)
    first = read(model, cache, ids, (100,), 3)
    with WidestProduct() as products:
        later = read(model, cache, ids, (1, 4, 1), 3)
    torch.testing.assert_close(torch.cat([first, later]), expected, **NEAR)
    assert products.tokens == 0 < of_transformers.tokens


@pytest.mark.parametrize(
    ("options", "implementation"),
    once([{"nbits": 4}, {"nbits": 8}, {"nbits": 2}, {"backend": "fp8"}, {"backend": "turboquant"}], ["sdpa", "eager"]),
)
def test_packed_latents_are_read_as_if_in_full_precision(
    options: dict[str, Any], implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = model_of(implementation=implementation), prompt(2, 300)
    cache = kvlayers.QuantizedCache(config=model.config, residual_length=16, **options)
    read(model, cache, ids, (250,), 5)
    twin = copy.deepcopy(cache)
    with WidestProduct() as products:
        few = read(model, cache, ids, (1, 3, 1), 5)
    assert products.tokens == 0
    seen = torch.cat([few, read(model, cache, ids, (30, 1), 5)])
    with monkeypatch.context() as patched:
        # What a linear layer of transformers makes of the states in full precision.
        patched.setattr(kvlayers.core.cache, "_are_latents", lambda keys, values: False)
        expected = read(model, twin, ids, (1, 3, 1, 30, 1), 5)
    torch.testing.assert_close(seen, expected, **NEAR)
    # What is read is near to what was packed: 0.02 of it, with codes of 2 bits or of a codebook. Without the rotation
    # of a side it would be 0.7.
    exact = read(model, tf.DynamicCache(config=model.config), ids, (250, 1, 3, 1, 30, 1), 5)[1:]
    assert (seen - exact).norm() < 0.05 * exact.norm()
    if implementation == "sdpa":
        paths = cache.layers[0].attention_paths
        assert paths[COPY] >= 4
        assert not any("in full precision" in path for path in paths)


def test_a_row_that_sees_no_token_of_packed_latents_is_zero() -> None:
    keys, values = torch.randn(2, 1, 200, RANK), torch.randn(2, 1, 200, ROPE)
    layer = kvlayers.QuantizedLayer(kvlayers.Quantization(residual_length=16))
    layer.update(keys, values)
    held = layer.update(keys[:, :, :1], values[:, :, :1])
    query, weight = torch.randn(2, HEADS, 1, NOPE + ROPE), torch.randn(HEADS * (NOPE + VALUE), RANK)
    mask = torch.ones(2, 1, 1, 201, dtype=torch.bool)
    mask[0] = False
    out = scaled_dot_product_attention(query, *expanded(*as_latents(*held), weight), attn_mask=mask)
    dense = [states.dense() if isinstance(states, PackedStates) else states for states in held]
    expected = scaled_dot_product_attention(query, *expanded(*dense, weight), attn_mask=mask)
    torch.testing.assert_close(out[1], expected[1], **NEAR)
    assert (out[0] == 0).all()


def test_forks_share_latents_and_go_their_own_ways() -> None:
    model, ids, others = model_of(), prompt(2, 130), prompt(2, 130, seed=1)
    others[:, :100] = ids[:, :100]
    cache = kvlayers.DynamicCache(config=model.config)
    read(model, cache, ids, (100,))
    fork = cache.fork()
    for twin, given in ((cache, ids), (fork, others), (fork.fork(), others)):
        upstream = tf.DynamicCache(config=model.config)
        seen = twin.get_seq_length()
        read(model, upstream, given, (100, *(1,) * (seen - 100)))
        with WidestProduct() as products:
            found = read(model, twin, given, (1, 3, 1))
        torch.testing.assert_close(found, read(model, upstream, given, (1, 3, 1)), **NEAR)
        assert products.tokens == 0


def test_gradients_flow_through_an_expansion() -> None:
    model, ids = copy.deepcopy(model_of()), prompt(1, 20)
    weight = model.model.layers[0].self_attn.kv_b_proj.weight
    gradients = []
    for cache in (kvlayers.DynamicCache(config=model.config), tf.DynamicCache(config=model.config)):
        model.zero_grad()
        model(ids[:, :15], past_key_values=cache)
        model(ids[:, 15:], past_key_values=cache).logits.square().sum().backward()
        gradients.append(weight.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1], **NEAR)


# The expansion itself


def expanded(latents: torch.Tensor, rotated: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all heads, as transformers writes it."""
    batch, _, tokens, _ = latents.shape
    states = linear(latents, weight).view(batch, tokens, -1, NOPE + VALUE).transpose(1, 2)
    own, values = torch.split(states, [NOPE, VALUE], dim=-1)
    rotated = rotated.expand(-1, own.shape[1], -1, -1)
    keys = states.new_empty(*states.shape[:-1], NOPE + ROPE)
    keys[..., :NOPE].copy_(own)
    keys[..., NOPE:].copy_(rotated)
    return keys, values


@pytest.mark.parametrize("tokens", [60, 3000])
def test_vmap_over_queries_of_latents_gives_what_a_loop_gives(tokens: int) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, tokens, RANK), torch.randn(2, 1, tokens, ROPE)
    queries, weight = torch.randn(3, 2, HEADS, 1, NOPE + ROPE), torch.randn(HEADS * (NOPE + VALUE), RANK)

    def attend(query: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, *expanded(*as_latents(keys, values), weight))

    seen = torch.func.vmap(attend)(queries)
    torch.testing.assert_close(seen, torch.stack([attend(query) for query in queries]), **NEAR)


def latents_and_weight() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 1, 30, RANK), (2, 1, 30, ROPE), (HEADS * (NOPE + VALUE), RANK))
    keys, values, weight = (torch.randn(shape, generator=generator) for shape in shapes)
    return keys, values, weight


READS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sums": lambda keys, values: (keys.sum(), values.sum()),
    "shifted": lambda keys, values: (keys + 1, 1 + values),
    "in-place": lambda keys, values: (keys.mul_(2), keys * 1, values.add_(1), values * 1),
    "written": lambda keys, values: (keys[..., 3:5].fill_(7), keys * 1),
    "swapped": lambda keys, values: (keys.transpose(2, 3) * 1, values.mT * 1),
    "numpy": lambda keys, values: (torch.from_numpy(keys.numpy()) * 1, torch.tensor(values.tolist())),
    "in another dtype": lambda keys, values: (keys.to(torch.float64), values.double()),
    "long": lambda keys, values: scaled_dot_product_attention(torch.ones(2, HEADS, 500, NOPE + ROPE), keys, values),
    "values of another": lambda keys, values: scaled_dot_product_attention(
        torch.ones(2, HEADS, 1, NOPE + ROPE), keys, values * 2
    ),
    "few queries, causal": lambda keys, values: scaled_dot_product_attention(
        torch.ones(2, HEADS, 3, NOPE + ROPE), keys, values, is_causal=True, scale=0.1
    ),
    "read, then attended to": lambda keys, values: (
        values.mul_(3).sum(),
        scaled_dot_product_attention(torch.ones(2, HEADS, 1, NOPE + ROPE), keys, values),
    ),
}


@pytest.mark.parametrize("name", READS)
def test_whatever_reads_an_expansion_reads_what_transformers_computes(name: str) -> None:
    keys, values, weight = latents_and_weight()
    deferred = expanded(*as_latents(keys, values), weight)
    assert all(isinstance(states, DeferredStates) for states in deferred)
    assert [isinstance(states.memory, NewKeys) for states in deferred] == [True, False]
    expected = READS[name](*expanded(keys, values, weight))
    torch.testing.assert_close(READS[name](*deferred), expected, rtol=1e-5, atol=1e-5)


def test_a_view_of_the_right_shape_with_other_axes_is_computed() -> None:
    latents, rotated, weight = (
        states[:, :, :HEADS] if states.dim() == 4 else states for states in latents_and_weight()
    )

    def attended(latents: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
        by_token = linear(latents, weight).view(2, HEADS, HEADS, NOPE + VALUE)
        by_head = by_token.transpose(1, 2)
        keys = by_head.new_empty(2, HEADS, HEADS, NOPE + ROPE)
        keys[..., :NOPE].copy_(by_head[..., :NOPE])
        keys[..., NOPE:].copy_(rotated.expand(-1, HEADS, -1, -1))
        # As many tokens as heads, and nobody swaps their axes.
        values = by_token[..., NOPE:]
        return scaled_dot_product_attention(torch.ones(2, HEADS, 1, NOPE + ROPE), keys, values)

    torch.testing.assert_close(attended(*as_latents(latents, rotated)), attended(latents, rotated), **NEAR)


def test_products_are_attention() -> None:
    keys, _, _ = latents_and_weight()
    query, mask = torch.randn(2, 1, 6, RANK), torch.randn(2, 1, 6, 30)
    mask[:, :, :, :4], mask[0, :, 2] = -torch.inf, -torch.inf
    seen = by_products(query, keys, keys, mask, scale=0.2)
    torch.testing.assert_close(seen, scaled_dot_product_attention(query, keys, keys, mask, scale=0.2))


def test_a_layer_with_a_bias_expands_at_once() -> None:
    keys, values, weight = latents_and_weight()
    latents, _ = as_latents(keys, values)
    bias = torch.randn(len(weight))
    assert isinstance(latents, LatentStates)
    seen = linear(latents, weight, bias)
    assert type(seen) is torch.Tensor
    assert torch.equal(seen, linear(keys, weight, bias))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no products in bfloat16 here")
def test_bfloat16_is_as_near_to_float64_as_an_expansion() -> None:
    keys, values, weight = (states.bfloat16() for states in latents_and_weight())
    query = torch.randn(2, HEADS, 1, NOPE + ROPE).bfloat16()
    exact = scaled_dot_product_attention(query.double(), *expanded(keys.double(), values.double(), weight.double()))
    seen = scaled_dot_product_attention(query, *expanded(*as_latents(keys, values), weight))
    upstream = scaled_dot_product_attention(query, *expanded(keys, values, weight))
    assert (seen - exact).abs().mean() <= 1.5 * (upstream - exact).abs().mean()
