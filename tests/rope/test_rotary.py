"""Keys that were rotated by a model are moved to other positions exactly as if the model had put them there."""

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import CONFIG_MAPPING

import kvlayers
import versions
from kvlayers.rope.from_config import HALVES, PAIRS, rotaries
from kvlayers.rope.rotary import Layout, Rotary
from kvlayers.upstream import model_layers
from models import COMMON, WINDOW, prompt
from turned_by_hand import turned_by_hand

FREQUENCIES = torch.tensor([1.0, 0.1, 0.01, 0.0], dtype=torch.float64)
CPU = torch.device("cpu")
LAYOUTS: tuple[Layout, ...] = ("halves", "pairs")


def plain_keys(batch: int = 2, head_dim: int = 8, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(batch, 3, 5, head_dim, dtype=dtype)


def moved(rotary: Rotary, keys: torch.Tensor, distance: int | torch.Tensor) -> torch.Tensor:
    return rotary.rotated(keys, rotary.partner(keys), distance)


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_moved_keys_are_those_of_the_later_positions(layout: Layout, first: int) -> None:
    rotary = Rotary(FREQUENCIES, layout, first)
    keys, positions = plain_keys(head_dim=14), torch.arange(5)
    rotated = turned_by_hand(keys, positions[:, None] * FREQUENCIES, layout, first)
    for distance in (0, 1, 7, -3, 1_000_000):
        expected = turned_by_hand(keys, (positions[:, None] + distance) * FREQUENCIES, layout, first)
        # float64 holds an angle of a million radians to 1e-10.
        assert (moved(rotary, rotated, distance) - expected).abs().max() < (1e-12 if distance < 10 else 1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_each_sequence_may_move_by_a_distance_of_its_own(layout: Layout, dtype: torch.dtype) -> None:
    rotary, keys = Rotary(FREQUENCIES, layout, 1), plain_keys(3, 10, dtype)
    distances = torch.tensor([0, 5, 1_000_000])
    together = moved(rotary, keys, distances)
    assert together.dtype == dtype
    for row, distance in enumerate(distances.tolist()):
        assert torch.equal(together[row], moved(rotary, keys[row : row + 1], distance)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_dimensions_and_those_of_frequency_zero_are_not_touched(layout: Layout) -> None:
    rotary, keys = Rotary(FREQUENCIES, layout, 2), plain_keys(head_dim=13, dtype=torch.float32)
    untouched = [0, 1, 10, 11, 12, *((5, 9) if layout == "halves" else (8, 9))]
    cos, sin = rotary.turn(99, 13, torch.float32, CPU)
    assert cos.shape == sin.shape == (1, 1, 1, 13)
    assert (cos[..., untouched] == 1).all()
    assert (sin[..., untouched] == 0).all()
    assert torch.equal(moved(rotary, keys, 99)[..., untouched], keys[..., untouched])
    assert (rotary.partner(keys)[..., [0, 1, 10, 11, 12]] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_million_tokens_lose_nothing(dtype: torch.dtype) -> None:
    rotary, keys = Rotary(FREQUENCIES.float(), "halves"), plain_keys(dtype=dtype)
    exact = turned_by_hand(keys.double(), 1_000_000 * FREQUENCIES.float().double(), "halves")
    # One rounding to the dtype of the keys, after some in float32.
    error = (moved(rotary, keys, 1_000_000).double() - exact).abs().max()
    assert error < 4 * torch.finfo(dtype).eps * exact.abs().max()
    assert rotary.partner(keys).dtype == torch.float32


def test_the_last_turn_is_remembered_and_no_other() -> None:
    rotary = Rotary(FREQUENCIES, "halves")
    first = rotary.turn(5, 8, torch.float32, CPU)
    assert rotary.turn(5, 8, torch.float32, CPU)[0] is first[0]
    for distance in range(100):
        rotary.turn(distance, 8, torch.float32, CPU)
        rotary.turn(torch.tensor([distance]), 8, torch.float32, CPU)
    assert len(rotary._turns) == 1
    assert torch.equal(rotary.turn(5, 8, torch.float32, CPU)[0], first[0])
    assert rotary.turn(5, 8, torch.float64, CPU)[0].dtype == torch.float64


def test_copies_are_whole_and_start_without_memories() -> None:
    rotary, keys = Rotary(FREQUENCIES, "pairs", 2), plain_keys(head_dim=10)
    expected = moved(rotary, keys, 3)
    for twin in (copy.copy(rotary), copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary))):
        assert (twin.layout, twin.first, twin._turns) == ("pairs", 2, {})
        assert torch.equal(twin.inv_freq, FREQUENCIES)
        assert torch.equal(moved(twin, keys, 3), expected)
    layers = copy.deepcopy([rotary, rotary])
    assert layers[0] is layers[1]


def test_inference_mode_leaves_nothing_behind_that_gradients_stumble_over() -> None:
    keys = plain_keys()
    with torch.inference_mode():
        rotary = Rotary(FREQUENCIES.clone(), "halves")
        expected = moved(rotary, keys, 4)
    with torch.no_grad():
        assert torch.equal(moved(rotary, keys, 4), expected)
    wanting = keys.clone().requires_grad_()
    result = moved(rotary, wanting, 4)
    assert torch.equal(result, expected)
    weights = torch.randn_like(result)
    (result * weights).sum().backward()
    # The gradient of a rotation is the rotation back.
    assert (wanting.grad - moved(rotary, weights, -4)).abs().max() < 1e-12


def test_the_frequencies_are_a_copy() -> None:
    theirs = FREQUENCIES.float()
    rotary = Rotary(theirs, "halves")
    theirs.zero_()
    assert rotary.inv_freq.dtype == torch.float64
    assert torch.equal(rotary.inv_freq, FREQUENCIES.float().double())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0, 0.1], "halves"), kvlayers.OptionError, "floating-point tensor"),
        ((torch.arange(4), "halves"), kvlayers.OptionError, "floating-point tensor"),
        ((torch.ones(4, device="meta"), "halves"), kvlayers.OptionError, "floating-point tensor"),
        ((FREQUENCIES, "thirds"), kvlayers.OptionError, "one of halves, pairs"),
        ((FREQUENCIES, "halves", -1), kvlayers.OptionError, "from 0 on"),
        ((FREQUENCIES, "halves", 1.0), kvlayers.OptionError, "from 0 on"),
        ((FREQUENCIES[:0], "halves"), kvlayers.errors.ConfigError, "at least one pair"),
        ((FREQUENCIES[None], "halves"), kvlayers.errors.ConfigError, r"shape \[pairs\]"),
        ((FREQUENCIES / 0, "halves"), kvlayers.errors.ConfigError, "finite"),
    ],
)
def test_bad_arguments_are_named(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"must .*{message}.* got"):
        Rotary(*arguments)


@pytest.mark.parametrize(
    "distance", [1.5, "1", None, True, torch.tensor(1), torch.tensor([1.0]), torch.ones(1, 1).long()]
)
def test_a_distance_is_a_whole_number_or_one_for_each_sequence(distance: Any) -> None:
    with pytest.raises(kvlayers.OptionError, match="`distance` must .* got"):
        Rotary(FREQUENCIES, "halves").turn(distance, 8, torch.float32, CPU)


def test_keys_that_are_too_small_are_named() -> None:
    rotary = Rotary(FREQUENCIES, "halves", 2)
    with pytest.raises(kvlayers.errors.StateMismatchError, match="at least 10 dimensions.* got head_dim 9"):
        rotary.partner(plain_keys(head_dim=9))
    with pytest.raises(kvlayers.errors.StateMismatchError, match="at least 10 dimensions.* got head_dim 9"):
        rotary.turn(1, 9, torch.float32, CPU)


# The families: what a model caches is compared with what it caches of the same tokens at later positions.

BASE: dict[str, Any] = {
    **COMMON,
    "hidden_size": 64,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "sliding_window": WINDOW,
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
"""Options of every family. A config takes no notice of those that its model has no use for."""

DERIVED = object()
"""Value of an option that a config computes, and does not take."""

BOTH = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
GATED_DELTA = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SHARED_KV = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
}
GPTJ = {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 256, "rotary_dim": 8}

OPTIONS: dict[str, dict[str, Any]] = {
    "afmoe": BOTH,
    "bamba": {**MAMBA, "attn_layer_indices": [0]},
    "codegen": GPTJ,
    "cohere2": BOTH,
    "cohere2_moe": {**BOTH, "mlp_layer_types": ["sparse", "sparse"]},
    "dbrx": {
        "d_model": 64,
        "n_layers": 1,
        "n_heads": 4,
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1},
    },
    "dots1": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "exaone4": BOTH,
    "exaone_moe": {**BOTH, "mlp_layer_types": ["dense", "sparse"]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "mamba_n_heads": 4},
    "falcon": {"head_dim": DERIVED},
    "flint": BOTH,
    "gemma2": BOTH,
    "gemma3_text": BOTH,
    "gemma3n_text": {**SHARED_KV, "altup_num_inputs": 2, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {**SHARED_KV, "global_head_dim": 32},
    "gemma4_unified_text": {**BOTH, "global_head_dim": 32},
    "gptj": GPTJ,
    "granite_swa": {**BOTH, "layer_rope_theta": [10000.0, 500000.0]},
    "granitemoehybrid": {
        **MAMBA,
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"],
        "position_embedding_type": "rope",
    },
    "granitemoe_swa": {**BOTH, "layer_rope_theta": [500000.0, 0]},
    "kolibri1": BOTH,
    "laguna": BOTH,
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention", "full_attention"]},
    "llama4_text": {
        "num_hidden_layers": 2,
        "no_rope_layers": [1, 0],
        "attn_temperature_tuning": False,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": WINDOW,
    },
    "mellum": BOTH,
    "mimo_v2_flash": BOTH,
    "modernbert-decoder": BOTH,
    "olmo3": BOTH,
    "olmo_hybrid": {**GATED_DELTA, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "qwen3_next": GATED_DELTA,
    "smollm3": {"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
    "zamba2": {
        "num_hidden_layers": 2,
        "layers_block_type": ["mamba", "hybrid"],
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "mamba_headdim": 8,
        "n_mamba_heads": 16,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "use_mem_rope": True,
        "adapter_rank": 4,
    },
}
"""Options of one family: a layer of each kind that it has, and what its config insists on."""


def tiny_config(model_type: str, **options: Any) -> Any:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {tf.__version__} has no {model_type}")
    versions.need_recurrent_layers(model_type)
    given = {**BASE, **OPTIONS.get(model_type, {}), **options}
    given |= versions.rope(**given.pop("rope_parameters")) if "rope_parameters" in given else {}
    return CONFIG_MAPPING[model_type](**{name: value for name, value in given.items() if value is not DERIVED})


def tiny(model_type: str, **options: Any) -> Any:
    """A random model of a type, with every weight, norm and bias of it drawn."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(tiny_config(model_type, **options)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=2 * weight.shape[-1] ** -0.5)
            else:
                weight.add_(torch.randn_like(weight), alpha=0.3)
    return model


STARTS = (3, 4, 10, 103)
"""Position of the first token of each sequence. All have the same tokens."""


def close(keys: torch.Tensor, expected: torch.Tensor) -> bool:
    # The model computes angles in float32, those of position 107 to 1e-5 radians.
    return bool((keys - expected).abs().max() < 1e-4 * expected.abs().max())


RUNS_SINCE = {
    "dbrx": "5.17",
    "ernie4_5_moe": "5.0",
    "jetmoe": "5.0",
    "phimoe": "5.0",
    "part of each key, scaled": "5.17",
    "a part that the model does not heed": "5.0",
}
"""Versions of the matrix from which on transformers' own models of some types, and variants, can be made and run."""


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
PARTIAL = {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}
FULL = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "yarn, which also scales keys": ("qwen3", {"rope_parameters": YARN}),
    "yarn, in pairs": ("cohere", {"rope_parameters": YARN}),
    "old names": ("llama", {"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_theta": 500000.0}),
    "part of each key": ("phi3", PARTIAL),
    "part of each key, scaled": ("stablelm", {"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}}),
    "part of each key, in pairs": ("glm4", {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.25}}),
    "a part that the model does not heed": ("llama", PARTIAL),
    "yarn for full attention alone": (
        "olmo3",
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT}},
    ),
    "linear for full attention alone": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": DEFAULT}},
    ),
    "proportional, with another head_dim": (
        "gemma4_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
                "sliding_attention": DEFAULT,
            }
        },
    ),
    "no windows, so all layers rotate": ("exaone4", {**FULL, "sliding_window": None}),
    "full attention that rotates in a dense layer": (
        "cohere2_moe",
        {**FULL, "mlp_layer_types": ["dense"], "prefix_dense_sliding_window_pattern": 1},
    ),
    "every layer rotates": ("llama4_text", {"no_rope_layers": [1, 1], "attn_temperature_tuning": True}),
}


KEYS = {**{model_type: (model_type, {}) for model_type in sorted(HALVES | PAIRS)}, **VARIANTS}


@pytest.mark.parametrize("case", KEYS)
def test_keys_are_moved_as_the_model_rotates_them(case: str) -> None:
    """Compare keys that are moved with those that the model caches at the later positions.

    The sequences differ in where they start and in nothing else. How tokens attend to one another depends on how far
    apart they are, so what goes into a layer is the same for all, and its keys differ by their own rotation alone.
    """
    versions.need_since(RUNS_SINCE.get(case, "4.57"), case)
    model_type, options = KEYS[case]
    model = tiny(model_type, **options)
    ids = prompt(1, 5).expand(len(STARTS), -1)
    positions = torch.tensor(STARTS)[:, None] + torch.arange(5)
    cache = tf.DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
    of_layers = rotaries(model.config)
    assert len(of_layers) == len(cache.layers)
    for rotary, layer in zip(of_layers, cache.layers, strict=True):
        keys = layer.keys if isinstance(layer, tf.cache_utils.CacheLayerMixin) else None
        if keys is None:
            assert rotary is None
            continue
        for start, expected in zip(STARTS, keys, strict=True):
            before, distance = keys[:1], start - STARTS[0]
            if rotary is None:
                assert close(before, expected)
                continue
            assert close(moved(rotary, before, distance), expected)
            other = Rotary(rotary.inv_freq, "pairs" if rotary.layout == "halves" else "halves", rotary.first)
            assert close(moved(other, before, distance), expected) is (distance == 0)
    assert any(of_layers)


@pytest.mark.parametrize(
    ("model_type", "rotated"),
    [
        ("afmoe", [True, False]),
        ("cohere2", [True, False]),
        ("cohere2_moe", [True, False]),
        ("exaone4", [True, False]),
        ("exaone_moe", [True, False]),
        ("flint", [True, False]),
        ("gemma3n_text", [True, True, False, False]),
        ("granitemoe_swa", [True, False]),
        ("kolibri1", [True, False]),
        ("lfm2", [False, True]),
        ("llama4_text", [True, False]),
        ("olmo_hybrid", [False, True]),
        ("qwen3_next", [False, True]),
        ("smollm3", [True, False]),
        ("zamba2", [False, True]),
    ],
)
def test_layers_without_positions_or_keys_have_no_rotary(model_type: str, rotated: list[bool]) -> None:
    found = [rotary is not None for rotary in rotaries(tiny_config(model_type))]
    # In older versions, layers that read the keys of others are not among those that have a cache.
    assert found == rotated[: len(found)]


@pytest.mark.parametrize(
    ("model_type", "options", "kinds"),
    [
        ("llama", {"num_hidden_layers": 3}, [0, 0, 0]),
        ("qwen3", {**BOTH, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, [0, 0, 0]),
        (
            "gemma3_text",
            {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            [0, 1, 0],
        ),
        ("granite_swa", {}, [0, 1]),
    ],
)
def test_layers_that_rotate_alike_share_one_rotary(model_type: str, options: dict[str, Any], kinds: list[int]) -> None:
    of_layers = rotaries(tiny_config(model_type, **options))
    distinct = list(dict.fromkeys(of_layers))
    assert [distinct.index(rotary) for rotary in of_layers] == kinds


def test_frequencies_are_the_float32_of_the_model() -> None:
    model = tiny("llama", rope_parameters=LLAMA3)
    expected = model.model.rotary_emb.inv_freq.double()
    with torch.device("meta"):
        assert torch.equal(rotaries(model.config)[0].inv_freq, expected)
    with torch.inference_mode():
        assert not rotaries(model.config)[0].inv_freq.is_inference()


def test_the_config_of_a_model_with_images_is_that_of_its_text() -> None:
    text = tiny_config("gemma3_text")
    whole = tf.Gemma3Config(text_config=text.to_dict())
    for ours, theirs in zip(rotaries(whole), rotaries(text), strict=True):
        assert torch.equal(ours.inv_freq, theirs.inv_freq)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "learned positions": ("gpt2", {}, "'gpt2'.*RoPE"),
    "alibi": ("bloom", {}, "'bloom'.*RoPE"),
    "alibi, by a switch": ("falcon", {"alibi": True, "head_dim": DERIVED}, "'falcon'.*RoPE"),
    "learned positions, with an offset": ("opt", {}, "'opt'.*RoPE"),
    "relative biases": ("t5", {}, "'t5'.*RoPE"),
    "no positions": ("jamba", {}, "'jamba'.*RoPE"),
    "no positions, by default": ("granitemoehybrid", {"position_embedding_type": None}, "'granitemoehybrid'.*RoPE"),
    "no positions, by a switch": ("zamba2", {"use_mem_rope": False}, "'zamba2'.*RoPE"),
    "dynamic NTK": (
        "llama",
        {"rope_parameters": {**LINEAR, "rope_type": "dynamic"}},
        "same for every length.* 'dynamic'",
    ),
    "longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 64,
            }
        },
        "every length.* 'longrope'",
    ),
    "axes, in the config": (
        "qwen2_vl_text",
        {"rope_parameters": {**DEFAULT, "mrope_section": [2, 3, 3]}},
        "'qwen2_vl_text' have several axes.*: .*pass rotary=kvlayers.rope.rotary.Rotary",
    ),
    "axes, in the code": (
        "qwen3_5_text",
        GATED_DELTA,
        "'qwen3_5_text' have several axes.*: .*pass rotary=kvlayers.rope.rotary.Rotary",
    ),
    "a norm after the rotation": (
        "hunyuan_v1_dense",
        {},
        "'hunyuan_v1_dense' scales each dimension of a key after its rotation",
    ),
    "temperature": ("llama4_text", {"attn_temperature_tuning": True}, r"'llama4_text'.*\(attn_temperature_tuning\)"),
    "temperature, with RoPE": ("ministral3", {}, r"'ministral3'.*\(llama_4_scaling_beta\)"),
    "temperature, in the code": ("beam", BOTH, "'beam' scales queries"),
    "latent attention": (
        "deepseek_v3",
        {"head_dim": DERIVED, "qk_rope_head_dim": 8},
        "'deepseek_v3' has multi-head latent attention",
    ),
    "a layout that nobody has looked at": ("moshi", {}, "'moshi' .*: pass rotary=kvlayers.rope.rotary.Rotary"),
}


class StripedLlamaConfig(tf.LlamaConfig):
    """A model that comes with code of its own."""

    model_type = "stripedllama"


class NotThatLlamaConfig(tf.LlamaConfig):
    """A model that comes with code of its own, under a name that is known."""


@pytest.mark.parametrize(("model_type", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_models_whose_keys_cannot_be_moved_are_refused(model_type: str, options: dict[str, Any], message: str) -> None:
    if model_type in model_layers.MODELS_WITH_OWN_CACHE:
        pytest.skip(f"models of type {model_type} make a cache of their own on this version, and are refused for that")
    config = tiny_config(model_type, **options)
    with pytest.raises(kvlayers.errors.ConfigError, match=message):
        rotaries(config)


@pytest.mark.parametrize("kind", [StripedLlamaConfig, NotThatLlamaConfig])
def test_code_from_elsewhere_is_unknown_whatever_its_name(kind: Any) -> None:
    expected = rf"'\w+' \({kind.__name__}\): pass rotary=kvlayers\.rope\.rotary\.Rotary"
    with pytest.raises(kvlayers.errors.ConfigError, match=expected):
        rotaries(kind(**BASE))


def test_what_is_no_config_is_named() -> None:
    with pytest.raises(kvlayers.errors.ConfigError, match="its config .* got a dict"):
        rotaries({})


def test_no_type_has_two_layouts() -> None:
    assert not HALVES & PAIRS
