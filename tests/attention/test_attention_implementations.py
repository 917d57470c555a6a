"""Attention that reads states in full precision only: right with every cache, and said once."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import flash_stand_in
import kvlayers
from flash_stand_in import flash_attention as flash_attention
from kvlayers.kernels.attention import dispatch
from kvlayers.upstream import compat
from matrix import once
from models import fresh_model, given, prompt

QUANTIZATION = {"nbits": 4, "residual_length": 8}
WINDOW = {"window_length": 90, "num_sink_tokens": 4}

CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: kvlayers.DynamicCache(config=config),
    "offloaded": lambda config: kvlayers.DynamicCache(config=config, offloading=True),
    "static": lambda config: kvlayers.StaticCache(config, max_cache_len=160),
    "packed": lambda config: kvlayers.QuantizedCache(config=config, **QUANTIZATION),
    "packed, offloaded": lambda config: kvlayers.QuantizedCache(config=config, **QUANTIZATION, offloading=True),
    "packed windows": lambda config: kvlayers.QuantizedCache(config=config, **QUANTIZATION, quantize_sliding=True),
    "sinks": lambda config: kvlayers.SinkCache(config=config, **WINDOW),
    "packed sinks": lambda config: kvlayers.SinkCache(config=config, **WINDOW, quantization=QUANTIZATION),
}


@pytest.fixture(autouse=True)
def _not_warned_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "_warned", set())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The attention 'fl")
        yield


def logits(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """A prompt, single tokens, and a second turn."""
    parts = [(0, 110), *((step, step + 1) for step in range(110, 116)), (116, 122), (122, 123)]
    parts = [(start, end) for start, end in parts if end <= ids.shape[1]]
    with torch.no_grad():
        return torch.cat(
            [
                model(
                    ids[:, start:end],
                    **given(cache),
                    **({} if mask is None else {"attention_mask": mask[:, :end]}),
                ).logits
                for start, end in parts
            ],
            1,
        )


@pytest.mark.usefixtures("flash_attention")
@pytest.mark.parametrize(
    ("family", "kind", "padded"),
    once(
        [*(("llama", kind) for kind in CACHES), *(("mistral", kind) for kind in CACHES if "sinks" not in kind)],
        [False, True],
    ),
)
def test_flash_attention_attends_to_what_sdpa_does(family: str, kind: str, padded: bool) -> None:
    model = fresh_model(family, **({"sliding_window": 90} if family == "mistral" else {}))
    ids = prompt(2, 123)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    caches = [CACHES[kind](model.config) for _ in range(2)]
    if padded:
        for cache in caches:
            cache.prepare(model.config, mask[:, :110])
    expected = logits(model, caches[0], ids, mask if padded else None)
    flash_stand_in.use(model)
    seen = logits(model, caches[1], ids, mask if padded else None)
    shown = mask.bool() if padded else torch.ones_like(mask).bool()
    torch.testing.assert_close(seen[shown], expected[shown], rtol=1e-4, atol=1e-4)
    assert set(flash_stand_in.CALLS) == {torch.Tensor}


@pytest.mark.usefixtures("flash_attention")
@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn3"])
def test_copies_at_every_step_are_warned_about_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh_model("llama")
    flash_stand_in.use(model, name)
    import transformers

    mapping = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(mapping, name, mapping.get(name, mapping["flash_attention_2"]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            logits(model, CACHES["packed"](model.config), prompt(1, 123), None)
        logits(model, CACHES["dynamic"](model.config), prompt(1, 123), None)
    (warning,) = [each for each in caught if "full precision" in str(each.message)]
    assert str(warning.message).startswith(f"The attention {name!r} reads states in full precision only.")
    assert "set_attn_implementation('sdpa')" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_nothing_is_said_of_attention_that_reads_states_as_they_are_held(name: str) -> None:
    model = fresh_model("llama")
    model.set_attn_implementation(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = CACHES["packed"](model.config)
        logits(model, cache, prompt(1, 123), None)
        # Outside of a model nobody can be told what to set.
        assert cache.layers[0].keys.sum().isfinite()


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
@pytest.mark.skipif(
    not compat.COMPILES_TENSOR_SUBCLASSES, reason="TorchDynamo is known to trace packed states from torch 2.13"
)
def test_flex_attention_attends_to_what_sdpa_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers calls a compiled function; here its graph runs as it is, since only the arguments matter."""
    from transformers import masking_utils
    from transformers.integrations import flex_attention as flex

    make_mask = masking_utils.create_block_mask
    monkeypatch.setattr(
        masking_utils, "create_block_mask", lambda **options: make_mask(**{**options, "_compile": False})
    )
    compiled = torch.compile(flex.flex_attention, backend="eager")
    monkeypatch.setattr(flex.WrappedFlexAttention, "__init__", lambda self, training: None)
    monkeypatch.setattr(flex.WrappedFlexAttention, "_compiled_flex_attention", staticmethod(compiled))
    model = fresh_model("llama", head_dim=16, num_hidden_layers=1)
    ids = prompt(1, 115)
    expected = logits(model, CACHES["packed"](model.config), ids, None)
    flash_stand_in.use(model, "flex_attention")
    cache = CACHES["packed"](model.config)
    torch.testing.assert_close(logits(model, cache, ids, None), expected, rtol=1e-4, atol=1e-4)
    assert any("compiled code in full precision" in path for path in cache.explain().attention)
    assert "flex_attention" in dispatch._warned


def test_packed_states_have_no_address() -> None:
    """It would be that of a copy, whose memory is free again before a kernel reads it."""
    cache = kvlayers.QuantizedCache(**QUANTIZATION)
    keys, _ = cache.update(torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 8), 0)
    keys, _ = cache.update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8), 0)
    with pytest.raises(kvlayers.errors.UnsupportedLayerError, match=r"have no address: pass a clone\(\)"):
        keys.data_ptr()
    assert not hasattr(keys, "__cuda_array_interface__")
    assert keys.clone().data_ptr()
