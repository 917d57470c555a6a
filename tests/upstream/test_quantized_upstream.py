"""What the quantized caches of transformers get wrong must come out right here, under their names of 4 and of 5."""

import copy
import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import cache_utils as upstream

import kvlayers
from kvlayers import errors
from kvlayers.upstream import compat
from matrix import once
from models import COMMON, prompt

HEAD_DIM = 64
CONFIG = transformers.LlamaConfig(
    num_hidden_layers=1, hidden_size=2 * HEAD_DIM, num_attention_heads=2, num_key_value_heads=2, head_dim=HEAD_DIM
)

BACKENDS: dict[str, dict[str, Any]] = {
    "native": {},
    "fp8": {},
    "quanto": {},
    "quanto, axis -1": {"axis_key": -1, "axis_value": -1},
    "hqq": {},
    "hqq, axis 0": {"axis_key": 0, "axis_value": 0},
}
PACKAGES = {"quanto": "optimum.quanto", "hqq": "hqq"}


def needs(backend: str) -> str:
    """Name of a backend, whose package is there."""
    name = backend.split(",")[0]
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason=f"{PACKAGES[name]} computes the codes of {name}")
    return name


def cache_of(backend: str, config: Any = CONFIG, **options: Any) -> kvlayers.QuantizedCache:
    return kvlayers.QuantizedCache(needs(backend), config, **{**BACKENDS[backend], **options})


def states(tokens: int, batch: int = 1, head_dim: int = HEAD_DIM, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, heads, tokens, head_dim), torch.randn(batch, heads, tokens, head_dim)


def blocks(layer: Any) -> int:
    return len(layer.state().tensors.get("block_ends", [0])) - 1


# The public surface

UPSTREAM_CLASSES = {"quanto": compat.QUANTO_LAYER, "hqq": compat.HQQ_LAYER, "fp8": compat.FP8_LAYER}


@pytest.mark.parametrize("backend", UPSTREAM_CLASSES)
def test_layers_of_a_backend_are_instances_of_the_class_of_transformers_and_of_no_other(
    backend: str, tmp_path: pathlib.Path
) -> None:
    cache = cache_of(backend, residual_length=0, sink_tokens=0)
    bare = kvlayers.QuantizedCache(needs(backend), residual_length=0, sink_tokens=0)
    bits = kvlayers.QuantizedCache(backend, nbits=[max(bare.quantization.keys.nbits, 4)])
    pair = states(130)
    for each in (cache, bare):
        each.update(*pair, 0)
    kvlayers.save_cache(cache, tmp_path / "cache.safetensors")
    loaded = kvlayers.load_cache(tmp_path / "cache.safetensors")
    again = kvlayers.QuantizedCache(backend, CONFIG, residual_length=0, sink_tokens=0)
    again.load_state(cache.state())
    assert cache.state().layers[0].kind == "QuantizedLayer"
    new = states(1)
    expected = [attended + 0 for attended in copy.deepcopy(cache).update(*new, 0)]
    for each in (cache, bare, bits, cache.fork(), loaded, again):
        layer = each.layers[0]
        assert isinstance(layer, kvlayers.QuantizedLayer)
        assert [name for name, kind in UPSTREAM_CLASSES.items() if isinstance(layer, kind)] == [backend]
        if each is not bits:
            assert all(torch.equal(a + 0, b) for a, b in zip(each.update(*new, 0), expected, strict=True))
    native = kvlayers.QuantizedCache(config=CONFIG).layers[0]
    assert not isinstance(native, tuple(UPSTREAM_CLASSES.values()))


@pytest.mark.parametrize(
    ("backend", "axis", "head_dim", "asked", "used"), [("quanto", 0, 4, 8, 4), ("hqq", 1, 24, 16, 12)]
)
def test_generate_takes_a_group_size_that_does_not_divide_head_dim_as_transformers_does(
    backend: str, axis: int, head_dim: int, asked: int, used: int
) -> None:
    needs(backend)
    config = transformers.LlamaConfig(**{**COMMON, "hidden_size": 4 * head_dim, "head_dim": head_dim})
    model = transformers.LlamaForCausalLM(config).eval()

    def generated(size: int) -> Any:
        cache_config = {"backend": backend, "q_group_size": size, "axis_key": axis, "axis_value": axis}
        return model.generate(
            prompt(2, 12), max_new_tokens=4, do_sample=False, cache_implementation="quantized",
            cache_config=cache_config | {"residual_length": 0}, return_dict_in_generate=True,
        )  # fmt: skip

    generated(asked)
    with kvlayers.installed():
        with pytest.warns(UserWarning, match=f"got {asked}: groups of {used}") as seen:
            output = generated(asked)
        # Not the line of transformers that passes the states.
        assert {warning.filename for warning in seen} == {__file__}
        assert torch.equal(output.sequences, generated(used).sequences)
    assert isinstance(output.past_key_values.layers[0], UPSTREAM_CLASSES[backend])


def test_arguments_come_in_the_order_of_transformers() -> None:
    theirs = list(inspect.signature(upstream.QuantizedCache).parameters)
    assert list(inspect.signature(kvlayers.QuantizedCache).parameters)[: len(theirs)] == theirs


CACHES_OF_4 = {"quanto": kvlayers.QuantoQuantizedCache, "hqq": kvlayers.HQQQuantizedCache}


@pytest.mark.parametrize("backend", CACHES_OF_4)
@pytest.mark.parametrize("kind", [kvlayers.QuantizedCacheConfig, dict])
def test_caches_of_a_backend_take_the_arguments_of_transformers_4_and_5(backend: str, kind: type) -> None:
    needs(backend)
    made = CACHES_OF_4[backend]
    sizes = {"nbits": 2, "q_group_size": 32, "residual_length": 24}
    without_effect = {} if kind is dict else {"compute_dtype": torch.float16, "device": "cpu"}
    config = kind(backend=backend, axis_key=0, axis_value=0, **sizes, **without_effect)
    calls: dict[str, Callable[[], Any]] = {
        "of 4, by name": lambda: made(cache_config=config),
        "of 4, by position": lambda: made(config),
        "of 5, by name": lambda: made(config=CONFIG, **sizes),
        "both": lambda: made(CONFIG, config),
        "both, by name": lambda: made(config=CONFIG, cache_config=config),
    }
    for name, call in calls.items():
        cache = call()
        assert isinstance(cache, transformers.QuantizedCache)
        for _ in range(3):
            seen, _ = cache.update(*states(100), 0)
        assert seen.dtype == torch.float32
        facts = cache.layers[0].describe()
        assert (facts["backend"], facts["key_nbits"], facts["value_nbits"]) == (backend, 2, 2), name
        assert (facts["key_group_size"], facts["residual_length"]) == (32, 24), name
        assert blocks(cache.layers[0]) > 0
        assert cache.get_seq_length() == 300


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: kvlayers.QuantizedCache(config=CONFIG, nbit=4), "did you mean 'nbits'"),
        (lambda: kvlayers.QuantizedCacheConfig(nbit=4), "did you mean 'nbits'"),
        (lambda: kvlayers.QuantoQuantizedCache(cache_config={"nbit": 4}), "did you mean 'nbits'"),
        (lambda: kvlayers.HQQQuantizedCache(CONFIG, nbit=4), "did you mean 'nbits'"),
        (lambda: kvlayers.make_cache("int4", CONFIG, nbit=4), "did you mean 'nbits'"),
        (lambda: kvlayers.QuantizedCache(CONFIG), "config="),
        (
            lambda: kvlayers.QuantoQuantizedCache(cache_config={"backend": "HQQ"}),
            r"quanto, got one for hqq: use QuantizedCache\('hqq'",
        ),
        (
            lambda: kvlayers.QuantoQuantizedCache(cache_config=[4]),
            "`cache_config` must be a QuantizedCacheConfig or a dict, got a list",
        ),
    ],
)
def test_wrong_options_are_refused_with_a_hint(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(kvlayers.OptionError, match=said):
        wrong()


def test_importing_and_using_changes_nothing_in_transformers() -> None:
    before = {
        (name, member): value
        for name, thing in vars(upstream).items()
        if isinstance(thing, type)
        for member, value in vars(thing).items()
        if not member.startswith("_abc")
    }
    cache_of("native").update(*states(300), 0)
    for (name, member), value in before.items():
        assert vars(getattr(upstream, name))[member] is value, (name, member)


# Wrong answers


@pytest.mark.parametrize(("backend", "removed"), once(BACKENDS, [1, 5, 90, 91, 200, 255, 283, 284, 290, 299]))
def test_a_crop_at_any_depth_leaves_what_was_held_before(backend: str, removed: int) -> None:
    cache = cache_of(backend, residual_length=16, sink_tokens=12)
    cache.update(*states(299), 0)
    cache.update(*states(1), 0)
    assert cache.is_croppable
    before = [side + 0 for side in cache[0]]
    cache.crop(-removed)
    left = 300 - removed
    assert cache.get_seq_length() == cache.layers[0].length == left
    assert cache.get_mask_sizes(1, 0) == (left + 1, 0)
    for tokens in (1, 3, 150):
        keys, values = states(tokens)
        held = cache.update(keys, values, 0)
        for seen, new, exact in zip(held, (keys, values), before, strict=True):
            assert seen.shape[2] == cache.get_seq_length()
            dense = seen + 0
            # What was packed before is read as it was, but for the order of a sum: where a block is read in pieces,
            # the rotation is undone in a product of another shape. What was not may have been packed since.
            packed_then = max(min(left, 12 + (300 - 12 - 16 - 1) // 64 * 64), 0)
            torch.testing.assert_close(dense[:, :, :packed_then], exact[:, :, :packed_then], rtol=1e-5, atol=1e-5)
            assert torch.equal(dense[:, :, -tokens:], new)
    assert cache.get_seq_length() == left + 154


# Wrong costs


class PackedUnrounded(upstream.QuantizedLayer):
    """A layer of transformers that packs tokens as those of its backends do, in codes that lose nothing."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return tensor.clone()

    def _dequantize(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.mark.parametrize("is_filled_before", [False, True])
def test_layers_of_transformers_go_on_when_all_their_tokens_are_packed(is_filled_before: bool) -> None:
    """They show no keys then, but an empty tensor of one dimension."""
    layers = [PackedUnrounded(residual_length=4) for _ in range(2)]
    passes = [states(count) for count in (9, 1, 1, 1, 1, 1, 6, 1)]
    if is_filled_before:
        for layer in layers:
            layer.update(*passes[0])
    cache = kvlayers.Cache(layers=layers)
    for taken in range(int(is_filled_before), len(passes)):
        for index in range(len(layers)):
            seen = cache.update(*passes[taken], index)
            for side in range(2):
                assert torch.equal(seen[side], torch.cat([each[side] for each in passes[: taken + 1]], 2))
        with pytest.raises(errors.LegacyFormatError, match="must hold every token"):
            cache.to_legacy_cache()
