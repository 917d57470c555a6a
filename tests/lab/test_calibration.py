"""Bits for each layer: how they are taken, how they are chosen, and what is measured for it."""

import dataclasses
import itertools
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.utils import logging

import kvlayers
import kvlayers_lab
import versions
from kvlayers_lab.calibration import MeasuredSetting, Sensitivity
from kvlayers_lab.calibration.settings import DivergenceInUse, PartChoice, Settings, least_losses, passages_of
from models import COMMON, fresh_model, prompt, tiny_model

CONTEXT, SCORED = 320, 32
WIDTHS = (1, 2, 3, 4, 5, 6, 8)
SIZES = {**COMMON, "max_position_embeddings": 1024}


@pytest.fixture(autouse=True, scope="module")
def no_progress_bars() -> Any:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture(scope="module")
def model() -> Any:
    """Three layers, whose attention is sharp enough for keys to matter."""
    torch.manual_seed(0)
    made = tf.LlamaForCausalLM(tf.LlamaConfig(**{**SIZES, "num_hidden_layers": 3}))
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.q_proj.weight *= 20
            layer.self_attn.o_proj.weight *= 10
        made.lm_head.weight *= 20
    return made.eval()


@pytest.fixture(scope="module")
def ids(model: Any) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (2 * (CONTEXT + SCORED),), generator=torch.manual_seed(1))


def calibrated(model: Any, ids: Tensor, budget: Any, **options: Any) -> kvlayers_lab.Calibration:
    return kvlayers_lab.calibrate(
        model, [ids], budget, **{"context_length": CONTEXT, "scored_tokens": SCORED, "passages": 2, **options}
    )


@pytest.fixture(scope="module")
def calibration(model: Any, ids: Tensor) -> kvlayers_lab.Calibration:
    return calibrated(model, ids, kvlayers_lab.BytesBudget(_bytes(model, 3, 3)))


def _bytes(model: Any, key_nbits: int, value_nbits: int, itemsize: int = 4) -> float:
    """Bytes of a token with the same bits everywhere; 64 keys, or the values of a head, share two numbers."""
    config = model.config
    states = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return states * ((key_nbits + value_nbits) / 8 + 2 * itemsize * (1 / 64 + 1 / min(config.head_dim, 64)))


# Bits of each layer


def bits_of(cache: Any) -> list[tuple[int, int] | None]:
    """The bits of keys and values of each layer, if it is quantized."""
    quantized = [getattr(getattr(layer, "store", None), "quantization", None) for layer in cache.layers]
    return [found and (found.keys.nbits, found.values.nbits) for found in quantized]


def test_each_layer_has_its_bits(model: Any) -> None:
    windows = tiny_model("gemma3").config
    for cache, expected in (
        (kvlayers.QuantizedCache(config=model.config, key_nbits=[2, 4, 8], value_nbits=3), [(2, 3), (4, 3), (8, 3)]),
        (kvlayers.QuantizedCache(nbits=[2, None, 8]), [(2, 2), (4, 4), (8, 8)]),
        (
            kvlayers.QuantizedCache(config=windows, nbits=[2, 8, 4, 3], quantize_sliding=True),
            [(2, 2), (8, 8), (4, 4), (3, 3)],
        ),
        (kvlayers.QuantizedCache(nbits=[2, 8]).for_cross_attention(), [(2, 2), (8, 8)]),
    ):
        assert bits_of(cache) == expected


@pytest.mark.parametrize(
    ("family", "with_config"),
    [("llama", True), ("llama", False), pytest.param("jamba", True, marks=versions.kvlayers_recurrent_layers)],
)
def test_a_saved_cache_goes_on_with_the_bits_of_its_layers(tmp_path: Path, family: str, with_config: bool) -> None:
    model, ids = tiny_model(family), prompt(1, 104)
    cache = kvlayers.QuantizedCache(
        config=model.config, nbits=[2, 8, 4, 3][: model.config.num_hidden_layers], residual_length=0, sink_tokens=0
    )
    with torch.no_grad():
        model(ids[:, :100], past_key_values=cache)
        kvlayers.save_cache(cache, tmp_path / "cache.kv")
        loaded = kvlayers.load_cache(tmp_path / "cache.kv", config=model.config if with_config else None)
        for part in ids[:, 100:].split(1, dim=1):
            expected = model(part, past_key_values=cache).logits
            assert torch.equal(model(part, past_key_values=loaded).logits, expected)
    assert (loaded.nbytes, loaded.quantization.facts()) == (cache.nbytes, cache.quantization.facts())
    assert bits_of(loaded) == bits_of(cache)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nbits": [4, 4]}, "3 layers of the model, got 2"),
        ({"nbits": [4, 7, 4]}, "got 7"),
        ({"nbits": []}, "0 in nbits"),
        ({"nbits": "444"}, "'444'"),
        ({"nbits": [4, 4, [4]]}, r"\[4\]"),
        ({"key_nbits": [4, 4, 4], "value_nbits": [4]}, "3 in key_nbits, 1 in value_nbits"),
        ({"residual_length": [1, 2, 3]}, "residual_length"),
    ],
)
def test_bits_that_are_none_are_refused(model: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(kvlayers.OptionError, match=said):
        kvlayers.QuantizedCache(config=model.config, **options)


# What is chosen


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1)), min_size=1, max_size=3), min_size=1, max_size=4),
    st.integers(1, 40),
    st.sampled_from([1, 3, 8]),
)
def test_what_is_chosen_loses_least_of_all_that_there_is(
    drawn: list[list[tuple[int, float]]], most: int, part_of_a_byte: int
) -> None:
    parts = [[PartChoice(Fraction(cost, part_of_a_byte), loss) for cost, loss in part] for part in drawn]
    budget = Fraction(most, part_of_a_byte)
    found = least_losses(parts, budget)
    every = [
        (sum(choice.cost for choice in chosen), sum(choice.loss for choice in chosen))
        for chosen in itertools.product(*parts)
    ]
    affordable = [loss for cost, loss in every if cost <= budget]
    assert bool(found) == bool(affordable)
    for chosen in found:
        cost = sum(part[index].cost for part, index in zip(parts, chosen, strict=True))
        loss = sum(part[index].loss for part, index in zip(parts, chosen, strict=True))
        assert cost <= budget
        assert loss == pytest.approx(min(other for price, other in every if price <= cost))
    if found:
        last = sum(part[index].loss for part, index in zip(parts, found[-1], strict=True))
        assert last == pytest.approx(min(affordable))


@given(
    st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=3), min_size=1, max_size=4),
    st.integers(1, 400),
    st.integers(1, 40),
)
def test_costs_that_are_counted_coarsely_stay_within_the_budget(drawn: list[list[int]], most: int, units: int) -> None:
    parts = [[PartChoice(Fraction(cost, 7), 1 / cost) for cost in part] for part in drawn]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvlayers_lab.calibration.settings.MOST_UNITS", units)
        found = least_losses(parts, Fraction(most, 7))
    for chosen in found:
        assert sum(part[index].cost for part, index in zip(parts, chosen, strict=True)) <= Fraction(most, 7)


def test_uniform_settings_are_all_that_are_within_the_budget() -> None:
    alike = [Sensitivity(layer, side, {2: 0.5, 4: 0.25}) for layer in (0, 2) for side in ("keys", "values")]
    costs = {(part.layer, part.side): {2: Fraction(2), 4: Fraction(4)} for part in alike}
    made = Settings(alike, costs, 3, kvlayers.Quantization())
    found = {
        (setting.bytes_per_token, *setting.cache_config["key_nbits"], *setting.cache_config["value_nbits"])
        for setting in made.uniform_within(12)
    }
    assert found == {(8, 2, None, 2, 2, None, 2), (12, 2, None, 2, 4, None, 4), (12, 4, None, 4, 2, None, 2)}
    assert [setting.bytes_per_token for setting in made.best_within(Fraction(12))] == [8, 10, 12]


def test_uniform_bits_of_as_many_thirds_of_a_byte_are_within_a_budget(model: Any, ids: Tensor) -> None:
    states = 3 * model.config.num_key_value_heads * model.config.head_dim
    everywhere = states * ((2 + 2) / 8 + 2 * 4 * (1 / 96 + 1 / model.config.head_dim))
    thirds: dict[str, Any] = {"quantization": kvlayers.Quantization(key_group_size=96), "context_length": 384}
    found = calibrated(model, ids, kvlayers_lab.BytesBudget(everywhere), widths=[2, 4], passages=1, **thirds)
    assert found.bytes_per_token == found.uniform.bytes_per_token == pytest.approx(everywhere)


def test_head_dims_that_suit_no_unit_have_a_setting_at_the_least_bytes() -> None:
    alike = [Sensitivity(layer, side, {8: 0.1, 2: 0.5}) for layer in range(40) for side in ("keys", "values")]
    costs = {(part.layer, part.side): {2: Fraction(7919, 3), 8: Fraction(10_007, 2)} for part in alike}
    made = Settings(alike, costs, 40, kvlayers.Quantization())
    least = 80 * Fraction(7919, 3)
    (only,) = made.best_within(least)
    assert only.bytes_per_token == least
    assert all(made.most_bits.cache_config[f"{kind}_nbits"] == 40 * [8] for kind in ("key", "value"))


def test_bits_that_turn_out_worse_than_uniform_ones_are_not_returned(
    model: Any, ids: Tensor, calibration: kvlayers_lab.Calibration
) -> None:
    by_loss = sorted(calibration.sensitivities, key=lambda part: part.divergence[2])
    lies = {(part.layer, part.side): other.divergence for part, other in zip(by_loss, reversed(by_loss), strict=True)}
    told = [Sensitivity(part.layer, part.side, lies[part.layer, part.side]) for part in calibration.sensitivities]
    budget = kvlayers_lab.BytesBudget(_bytes(model, 3, 3))
    found = calibrated(model, ids, budget, sensitivities=told)
    assert found.chosen == found.uniform


def test_passages_come_from_all_texts_in_turn(model: Any) -> None:
    texts = [torch.arange(10, 35), torch.arange(50, 60), torch.arange(3)]
    found = passages_of(model, texts, None, 10, 3)
    assert [ids[0, 0].item() for ids in found] == [10, 50, 20]
    assert all(ids.shape == (1, 10) for ids in found)


# What is measured


def test_a_sensitivity_is_that_of_one_side_rounded(
    model: Any, ids: Tensor, calibration: kvlayers_lab.Calibration
) -> None:
    passages = [ids[None, : CONTEXT + SCORED], ids[None, CONTEXT + SCORED :]]
    parts = iter(calibration.sensitivities)
    for layer, side in itertools.product(range(3), ("keys", "values")):
        part = next(parts)
        assert (part.layer, part.side, tuple(part.divergence)) == (layer, side, WIDTHS)
        for nbits in (2, 4):
            assert part.divergence[nbits] == pytest.approx(
                sum(_divergence_with_one_side_rounded(model, passage, layer, side, nbits) for passage in passages) / 2,
                rel=1e-3,
                # Sums of float32 in another order.
                abs=1e-7,
            )


def _divergence_with_one_side_rounded(model: Any, ids: Tensor, layer: int, side: str, nbits: int) -> float:
    """As slowly as can be: the newest tokens are read over plain tuples, one pair of which has a rounded side."""
    with torch.no_grad():
        held = tf.DynamicCache()
        model(ids[:, :CONTEXT], past_key_values=held)
        pairs = [[each.keys, each.values] for each in held.layers]
        exact = model(ids[:, CONTEXT:], past_key_values=_cache_of(pairs)).logits[0].log_softmax(-1)
        quantized = kvlayers.QuantizedLayer(kvlayers.Quantization(nbits=nbits))
        quantized.update(*pairs[layer])
        pairs[layer][side == "values"] = getattr(quantized, side)
        seen = model(ids[:, CONTEXT:], past_key_values=_cache_of(pairs)).logits[0].log_softmax(-1)
    return float((exact.exp() * (exact - seen)).sum(-1).mean())


def _cache_of(pairs: list[list[Tensor]]) -> tf.DynamicCache:
    cache = tf.DynamicCache()
    for index, (keys, values) in enumerate(pairs):
        cache.update(keys.clone(), values.clone(), index)
    return cache


@torch.no_grad()
def in_use(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """Log-probabilities of the newest tokens of a passage that is read in parts."""
    for part in ids[:, :CONTEXT].split(SCORED, dim=1):
        model(part, past_key_values=cache)
    return model(ids[:, CONTEXT:], past_key_values=cache).logits[0].log_softmax(-1)


def test_a_calibration_says_what_its_cache_does(model: Any, ids: Tensor, calibration: kvlayers_lab.Calibration) -> None:
    for measured in filter(None, (calibration.chosen, calibration.uniform)):
        found = []
        for passage in ids.view(2, 1, -1):
            exact = in_use(model, passage, tf.DynamicCache())
            seen = in_use(model, passage, kvlayers.QuantizedCache(config=model.config, **measured.cache_config))
            found.append(float((exact.exp() * (exact - seen)).sum(-1).mean()))
        assert measured.divergence == pytest.approx(sum(found) / 2, rel=1e-3, abs=1e-7)


def test_bits_of_a_budget_are_within_it_and_no_worse_than_any_uniform_ones(
    model: Any, ids: Tensor, calibration: kvlayers_lab.Calibration
) -> None:
    budget = _bytes(model, 3, 3)
    assert calibration.bytes_per_token <= budget
    in_half = kvlayers_lab.BytesBudget(_bytes(model, 2, 2, itemsize=2))
    fewest = calibrated(model, ids, in_half, sensitivities=calibration.sensitivities, dtype=torch.bfloat16)
    assert fewest.bytes_per_token == _bytes(model, 2, 2, itemsize=2)
    measure = DivergenceInUse(model, passages_of(model, [ids], None, CONTEXT + SCORED, 2), SCORED)
    for key_nbits, value_nbits in itertools.product((2, 3, 4), repeat=2):
        if _bytes(model, key_nbits, value_nbits) <= calibration.bytes_per_token:
            other = measure.of(
                lambda key_nbits=key_nbits, value_nbits=value_nbits: kvlayers.QuantizedCache(
                    config=model.config, key_nbits=key_nbits, value_nbits=value_nbits
                )
            )
            assert calibration.divergence <= other


def test_a_budget_of_divergence_is_kept_with_fewer_bytes_than_uniform_bits_need(
    model: Any, ids: Tensor, calibration: kvlayers_lab.Calibration
) -> None:
    budget = kvlayers_lab.DivergenceBudget(calibration.uniform.divergence)
    found = calibrated(model, ids, budget, sensitivities=calibration.sensitivities)
    assert found.divergence <= calibration.uniform.divergence
    assert found.bytes_per_token <= calibration.uniform.bytes_per_token


def test_sensitivities_serve_another_budget(
    model: Any, ids: Tensor, calibration: kvlayers_lab.Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = kvlayers_lab.BytesBudget(_bytes(model, 2, 3))
    few: dict[str, Any] = {"widths": [2, 4], "passages": 1}
    expected = calibrated(model, ids, budget, **few)
    measuring = "kvlayers_lab.calibration.calibrator.measure_sensitivities"
    monkeypatch.setattr(measuring, lambda *arguments: pytest.fail("measured again"))
    assert calibrated(model, ids, budget, sensitivities=expected.sensitivities, **few) == expected
    parts = calibration.sensitivities
    for others in (parts[1:], (), [Sensitivity(0, "keys", {2: 1.0})], [*parts, parts[0]]):
        with pytest.raises(kvlayers.OptionError, match="of the 6 parts"):
            calibrated(model, ids, budget, sensitivities=others)
    odd = Sensitivity(parts[0].layer, parts[0].side, dict.fromkeys(WIDTHS, math.nan))
    with pytest.raises(kvlayers.errors.StateMismatchError, match="keys of layer 0"):
        calibrated(model, ids, budget, sensitivities=[odd, *parts[1:]])


def test_a_budget_that_the_most_bits_keep_is_kept_where_noise_promises_more_of_fewer(
    model: Any, ids: Tensor, calibration: kvlayers_lab.Calibration
) -> None:
    noise = [
        Sensitivity(part.layer, part.side, {1: 5e-10, 2: 1e-9, 3: 2e-9, 4: 3e-9, 5: 3e-9, 6: 3e-9, 8: 4e-9})
        for part in calibration.sensitivities
    ]
    eight = DivergenceInUse(model, passages_of(model, [ids], None, CONTEXT + SCORED, 2), SCORED).of(
        lambda: kvlayers.QuantizedCache(config=model.config, nbits=8)
    )
    found = calibrated(model, ids, kvlayers_lab.DivergenceBudget(2 * eight), sensitivities=noise)
    assert found.divergence == pytest.approx(eight)
    with pytest.raises(kvlayers.CapacityError, match="most bits everywhere"):
        calibrated(model, ids, kvlayers_lab.DivergenceBudget(eight / 2), sensitivities=noise)


@versions.kvlayers_recurrent_layers
def test_models_that_take_tokens_one_by_one_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlayers_lab.calibration.calibrator.UNIFORM_MEASURED", 1)
    model = tiny_model("jamba").eval()
    ids = torch.randint(0, model.config.vocab_size, (136,), generator=torch.manual_seed(1))
    given = kvlayers.Quantization(sink_tokens=0, residual_length=0)
    found = kvlayers_lab.calibrate(
        model, [ids], kvlayers_lab.BytesBudget(1e6), quantization=given, context_length=128, scored_tokens=8,
        passages=1, widths=[2, 4],
    )  # fmt: skip
    assert [nbits is None for nbits in found.cache_config["key_nbits"]] == [
        not isinstance(layer, kvlayers.QuantizedLayer) for layer in kvlayers.QuantizedCache(config=model.config).layers
    ]


def test_a_calibration_in_a_file_is_the_same(calibration: kvlayers_lab.Calibration, tmp_path: Path) -> None:
    assert calibration.save(tmp_path) == tmp_path / "kvlayers_calibration.json"
    assert kvlayers_lab.Calibration.load(tmp_path) == calibration
    assert kvlayers_lab.Calibration.load(calibration.save(tmp_path / "new" / "other.json")) == calibration
    assert calibration.save(tmp_path / "model") == tmp_path / "model" / "kvlayers_calibration.json"
    with pytest.raises(kvlayers.OptionError, match="name another file"):
        calibration.save(tmp_path / "kvlayers_calibration.json" / "below a file")
    with pytest.raises(kvlayers.OptionError, match="pass a file that Calibration.save"):
        kvlayers_lab.Calibration.load(tmp_path / "none.json")


def test_saving_replaces_nothing_but_a_calibration(calibration: kvlayers_lab.Calibration, tmp_path: Path) -> None:
    calibration.save(calibration.save(tmp_path))
    for name in ("config.json", "cache.kv"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(kvlayers.OptionError, match="name another file"):
            calibration.save(tmp_path / name)
        assert (tmp_path / name).read_text() == "{}"


def test_a_calibration_says_what_it_came_to(calibration: kvlayers_lab.Calibration) -> None:
    assert str(calibration).startswith(f"Calibration: {calibration.bytes_per_token:g} bytes a token, divergence ")
    assert "; uniform bits: " in str(calibration)
    assert len(str(calibration)) < 150


@pytest.mark.parametrize("backend", ["quanto", "hqq"])
def test_other_backends_are_calibrated_by_their_own_bits(model: Any, ids: Tensor, backend: str) -> None:
    pytest.importorskip({"quanto": "optimum.quanto", "hqq": "hqq"}[backend], reason=f"needs the extra '{backend}'")
    given = kvlayers.Quantization(backend, residual_length=64)
    found = calibrated(model, ids, kvlayers_lab.BytesBudget(1e6), passages=1, quantization=given, widths=[2, 4])
    assert found.cache_config.items() >= {"backend": backend, "residual_length": 64}.items()


# Bad input


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"budget": 300}, kvlayers.OptionError, "`budget` must be a BytesBudget or a DivergenceBudget, got a int"),
        ({"budget": kvlayers_lab.BytesBudget(3)}, kvlayers.CapacityError, "`bytes_per_token` must be at least"),
        ({"budget": kvlayers_lab.DivergenceBudget(1e-12)}, kvlayers.CapacityError, "most bits everywhere"),
        (
            {"quantization": kvlayers.Quantization(backend="fp8", key_scales=(0.1,))},
            kvlayers.OptionError,
            "`quantization` must have no `key_scales`",
        ),
        ({"texts": []}, kvlayers.OptionError, "empty list"),
        ({"texts": "text"}, kvlayers.OptionError, "a list of texts"),
        ({"texts": ["text"]}, kvlayers.OptionError, "tokenizer"),
        ({"texts": [3]}, kvlayers.OptionError, "`texts` must be texts.*got a int"),
        ({"texts": [torch.zeros(400)]}, kvlayers.OptionError, "float32"),
        ({"texts": [torch.zeros(40, dtype=torch.int64)]}, kvlayers.OptionError, "longest has 40"),
        ({"texts": [torch.full((400,), 10**6)]}, kvlayers.OptionError, "1000000"),
        ({"context_length": 100}, kvlayers.OptionError, "`context_length` must be at least 272 tokens.*got 100"),
        ({"context_length": 0}, kvlayers.OptionError, "context_length"),
        ({"passages": 1.5}, kvlayers.OptionError, "passages"),
        ({"passages": 0}, kvlayers.OptionError, "`passages` must be at least 1, got 0"),
        ({"scored_tokens": 0}, kvlayers.OptionError, "`scored_tokens` must be at least 1, got 0"),
        ({"dtype": "bfloat"}, kvlayers.OptionError, "a floating-point torch.dtype"),
        ({"dtype": torch.int8}, kvlayers.OptionError, "a floating-point torch.dtype"),
        ({"quantization": {"nbits": 4}}, kvlayers.OptionError, "`quantization` must be .*got a dict"),
        ({"widths": [[2], [4]]}, kvlayers.OptionError, "2, 3, 4, 5, 6, 8"),
        ({"texts": [torch.tensor(5)]}, kvlayers.OptionError, "token ids"),
        ({"texts": ["text"], "tokenizer": 3}, kvlayers.OptionError, "`tokenizer` must be .*got a int"),
        ({"sensitivities": 3}, kvlayers.OptionError, "`sensitivities` must be .*got a int"),
        ({"sensitivities": [{"layer": 0}]}, kvlayers.OptionError, "sensitivities of a Calibration"),
        ({"widths": [4]}, kvlayers.OptionError, "`widths` must be two or more"),
        ({"widths": [4, 7]}, kvlayers.OptionError, "2, 3, 4, 5, 6, 8"),
        (
            {"quantization": kvlayers.Quantization("fp8"), "widths": None},
            kvlayers.OptionError,
            "`widths` must be two or more",
        ),
    ],
)
def test_what_cannot_be_calibrated_is_said(
    model: Any, ids: Tensor, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    texts = options.pop("texts", [ids])
    budget = options.pop("budget", kvlayers_lab.BytesBudget(300))
    given = {"context_length": CONTEXT, "scored_tokens": SCORED, "passages": 1, "widths": [2, 8], **options}
    with pytest.raises(error, match=said):
        kvlayers_lab.calibrate(model, texts, budget, **given)


def test_models_that_cannot_be_calibrated_are_refused(ids: Tensor) -> None:
    for refused, error, said in (
        ("a name", kvlayers.OptionError, "a str"),
        (tiny_model("t5"), kvlayers.errors.ConfigError, "encoder"),
        (fresh_model("llama").train(), kvlayers.OptionError, "eval"),
    ):
        with pytest.raises(error, match=said):
            calibrated(refused, ids, kvlayers_lab.BytesBudget(300))


@pytest.mark.parametrize("number", [0, -1, float("inf"), float("nan"), "four", True, None])
def test_a_budget_is_a_number_above_0(number: Any) -> None:
    for budget in (kvlayers_lab.BytesBudget, kvlayers_lab.DivergenceBudget):
        with pytest.raises(kvlayers.OptionError, match="above 0|a number of bytes"):
            budget(number)


SEVEN_BITS = kvlayers_lab.Calibration(MeasuredSetting({"key_nbits": [7, 7, 7]}, 100.0, 0.1), None, ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, "calibrate again") for text in ("[" * 100_000, "", "[]", "{}", "bits", '{"chosen": null}')),
        ('{"chosen": 3, "uniform": null, "sensitivities": []}', "calibrate again"),
        (json.dumps(dataclasses.asdict(SEVEN_BITS)), "got 7"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "kvlayers_calibration.json").write_text(text)
    with pytest.raises(kvlayers.OptionError, match=said):
        kvlayers_lab.Calibration.load(tmp_path)
