"""Plans: equal to what caches that were really filled hold, for every name and every family."""

import pathlib
from typing import Any

import pytest
import torch
import transformers as tf
from torch.nn.functional import scaled_dot_product_attention

import every_causal_model
import families
import kvlayers
import versions
from kvlayers.eviction import BUILTIN_RULES
from kvlayers.generation import cache_by_name
from kvlayers.generation.cache_by_name import named_cache
from kvlayers.upstream import cache_argument, model_layers
from matrix import once, product
from models import COMMON, CONFIGS, WINDOW, fresh_model, prompt
from named_factories import registered
from rounds import NIGHTLY

UNKNOWN = ("minimax",)
"""Families whose models have states of a form of their own."""

COUNTS_BY_VERSION = ("deepseek_v32",)
"""Families with layers of transformers' own, whose counters are among their states in some versions."""


def filled(model: Any, name: str, inputs: dict[str, torch.Tensor]) -> Any:
    """A cache made by its name, that has read a prompt."""
    read = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    request = kvlayers.CacheRequest(
        model.config,
        batch_size=read.shape[0],
        length_hint=read.shape[1],
        dtype=model.dtype,
        encoder_length=encoder_length(model, inputs),
    )
    cache = cache_by_name.cache_for(name, request)
    with torch.no_grad():
        model(**inputs, **{cache_argument.name_for(model): cache}, use_cache=True)
    return cache


def encoder_length(model: Any, inputs: dict[str, torch.Tensor]) -> int | None:
    if not model.config.is_encoder_decoder:
        return None
    return model.config.max_source_positions if "input_features" in inputs else inputs["input_ids"].shape[1]


def model_and_inputs(family: str, batch: int, tokens: int) -> tuple[Any, dict[str, torch.Tensor]]:
    if family in CONFIGS:
        model, inputs = fresh_model(family), {"input_ids": prompt(batch, tokens)}
    else:
        model, inputs = families.model_and_inputs(family)
        inputs = inputs if "input_features" in inputs else {"input_ids": prompt(batch, tokens)}
    if model.config.is_encoder_decoder:
        batch = next(iter(inputs.values())).shape[0]
        inputs["decoder_input_ids"] = prompt(batch, tokens + 1)
    return model, inputs


def planned(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> kvlayers.planning.Plan:
    read = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    return kvlayers.plan(
        model.config,
        read.shape[1],
        read.shape[0],
        model.dtype,
        encoder_length=encoder_length(model, inputs),
        **options,
    )


PLANNED = [*CONFIGS, *(family for family in families.FAMILIES if family not in UNKNOWN)]


@pytest.mark.slow
@pytest.mark.parametrize("family", PLANNED)
def test_a_plan_is_what_each_cache_of_each_family_holds(family: str) -> None:
    model, inputs = model_and_inputs(family, batch=2, tokens=WINDOW + 3)
    if family == "recurrent_gemma" and model_layers.layer_specs(model.config)[0].layer_type != "linear_attention":
        with pytest.raises(kvlayers.errors.ConfigError, match="recurrent_gemma"):
            planned(model, inputs)
        pytest.skip(f"a config of transformers {versions.TRANSFORMERS} does not say which layers of {family} recur")
    plan = planned(model, inputs)
    assert {*(cache.name for cache in plan.caches), *plan.left_out} == set(kvlayers.cache_names()) - {"auto"}
    assert "dynamic" not in plan.left_out
    # In the gate each family has some of them, with the fewest bytes and the most, and each of them some families.
    for cache in plan.caches if NIGHTLY else plan.caches[PLANNED.index(family) % 3 :: 3]:
        expected = pytest.approx(cache.nbytes, rel=0.01) if family in COUNTS_BY_VERSION else cache.nbytes
        assert filled(model, cache.name, inputs).nbytes == expected, cache.name
    # What is left out cannot be made either.
    for name in plan.left_out:
        with pytest.raises(kvlayers.KVLayersError):
            filled(model, name, inputs)


@pytest.mark.skipif("dory" not in tf.CONFIG_MAPPING, reason="this transformers has no model with loops")
def test_layers_that_a_model_runs_again_hold_states_of_each_loop(tmp_path: pathlib.Path) -> None:
    """The model itself appends layers to a cache that has one for each of its own."""
    model = every_causal_model.model_of("dory")
    cache, theirs = kvlayers.make_cache("int8", model, length_hint=20), tf.DynamicCache(config=model.config)
    layers = len(cache.layers)
    with torch.no_grad():
        for made in (cache, theirs):
            model(prompt(2, 20), use_cache=True, cache=made)
    assert layers == len(cache.layers) == len(theirs.layers) == 6
    assert kvlayers.plan(model, 20, 2)["int8"].nbytes == cache.nbytes
    kvlayers.save_cache(cache, tmp_path / "looped.kv", config=model)
    assert len(kvlayers.load_cache(tmp_path / "looped.kv", config=model).layers) == layers


@pytest.mark.parametrize("family", ["mamba", "jamba", *versions.RECURRENT_FAMILIES])
def test_recurrent_states_are_in_float32_whatever_the_dtype_of_the_model(family: str) -> None:
    model, inputs = model_and_inputs(family, batch=1, tokens=5)
    model = model.to(torch.bfloat16)
    assert filled(model, "dynamic", inputs).nbytes == planned(model, inputs, names=["dynamic"])["dynamic"].nbytes


LLAMA = tf.LlamaConfig(**COMMON)
LONG = tf.LlamaConfig(num_hidden_layers=2, num_key_value_heads=8)
WINDOWED = tf.Gemma2Config(**{**COMMON, "num_hidden_layers": 4}, sliding_window=100)
HEAD = 8


def fed(name: str, config: Any, tokens: int, batch: int, dtype: torch.dtype) -> Any:
    """A cache that was given states without a model, whose layers are all of the form in `COMMON`."""
    cache = kvlayers.make_cache(name, config, batch_size=batch, length_hint=tokens, dtype=dtype)
    states = torch.randn(batch, 2, tokens, HEAD, dtype=dtype)
    for index in range(config.num_hidden_layers):
        # Some rules of eviction wait for the queries.
        scaled_dot_product_attention(states, *cache.update(states, states, index))
    return cache


def check_plan(config: Any, tokens: int, batch: int, dtype: torch.dtype, **options: Any) -> None:
    """Planned bytes are those held: within 3 % if heads keep different numbers of tokens, as states decide."""
    for cache in kvlayers.plan(config, tokens, batch, dtype, **options).caches:
        about = pytest.approx(cache.nbytes, rel=0.03 if cache.name in ("evicting", *BUILTIN_RULES) else 0, abs=0)
        assert fed(cache.name, config, tokens, batch, dtype).nbytes == about, cache.name


LENGTHS = [(1, 1), (99, 2), (125, 1), (207, 1), (209, 3), (500, 2), (1000, 1)]
"""Tokens, and sequences."""


@pytest.mark.parametrize(
    ("tokens", "batch", "family", "dtype"), product(LENGTHS, ["llama", "gemma2"], [torch.float32, torch.bfloat16])
)
def test_a_plan_is_what_caches_hold_at_every_length(tokens: int, batch: int, family: str, dtype: torch.dtype) -> None:
    check_plan(LLAMA if family == "llama" else WINDOWED, tokens, batch, dtype)


@pytest.mark.parametrize("tokens", [1000, 1300, 1249, 3000])
def test_a_long_window_keeps_the_spare_room_that_its_growth_left(tokens: int) -> None:
    config = tf.MistralConfig(**COMMON, sliding_window=1000)
    check_plan(config, tokens, 1, torch.float32, names=["dynamic", "static", "offloaded", "sliding_window"])


def quantized(**options: Any) -> Any:
    return lambda request: kvlayers.QuantizedCache(
        config=request.config, **{"length_hint": request.length_hint, **options}
    )


def static(**options: Any) -> Any:
    return lambda request: kvlayers.StaticCache(request.config, **{"max_cache_len": request.length_hint, **options})


def sink(**options: Any) -> Any:
    return lambda request: kvlayers.SinkCache(config=request.config, **options)


@pytest.mark.filterwarnings("ignore:The group size must divide")
def test_caches_of_other_options_are_planned_by_a_name_of_their_own() -> None:
    own = {
        "three_bits": quantized(nbits=3, q_group_size=4, residual_length=32, sink_tokens=0),
        "no_hint": quantized(length_hint=None),
        "bits_of_layers": quantized(nbits=[2, 8, 4, 3], quantize_sliding=True, residual_length=16),
        "quantized_windows": quantized(quantize_sliding=True, residual_length=16, key_nbits=8),
        "quanto": quantized(backend="quanto", nbits=2, axis_key=-1, q_group_size=7),
        "hqq": quantized(backend="hqq", nbits=1),
        "unhinted": lambda request: kvlayers.DynamicCache(config=request.config),
        "of_its_own": static(max_cache_len=2000),
        "growing": static(max_cache_len=100, grow=True),
        "roomier": lambda request: kvlayers.StaticCache(request.config, max_cache_len=request.length_hint + 512),
        "for_more": static(max_batch_size=4),
        "sinks": sink(window_length=160, num_sink_tokens=8),
        "quantized_sinks": sink(window_length=400, quantization={"nbits": 4, "residual_length": 16}),
        "on_disk": lambda request: kvlayers.DynamicCache(config=request.config, offloading=True),
    }
    with registered(**own) as names:
        for tokens in (50, 450):
            check_plan(WINDOWED, tokens, 2, torch.bfloat16, names=names)


def test_a_name_with_options_is_planned_as_the_cache_of_these_options() -> None:
    written, given = "sink:window_length=160,num_sink_tokens=8", {"window_length": 160, "num_sink_tokens": 8}
    plan = kvlayers.plan(WINDOWED, 450, 2, torch.bfloat16, names=[written, "sink", "dynamic"])
    with registered(short=sink(**given)) as names:
        same = kvlayers.plan(WINDOWED, 450, 2, torch.bfloat16, names=names)["short"]
    assert (plan[written].nbytes, plan[written].fidelity) == (same.nbytes, "evicting")
    assert plan[written].nbytes < plan["sink"].nbytes
    assert plan.recommended.name == "dynamic"
    with pytest.raises(kvlayers.OptionError, match="`window` is no option of"):
        kvlayers.plan(WINDOWED, 450, names=["sink:window=3"])


WIDE = tf.LlamaConfig(
    **{**COMMON, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
)


@pytest.mark.parametrize(
    ("name", "tolerance", "tokens"),
    once(
        [
            ("knorm:keep=0.5", 0.03),
            ("knorm:keep=0.5,per_head=false", 0.01),
            ("knorm:keep=0.5,per_head=false,quantization.nbits=4", 0),
            ("knorm:keep=0.5,quantization.nbits=4", 0.03),
            ("knorm:budget=800,quantization.nbits=2", 0.03),
            ("snapkv:budget=800", 0.03),
            ("snapkv:keep=0.25,per_head=false", 0.01),
            ("h2o:budget=2k", 0.03),
            ("recall:recall.pages=8", 0.001),
        ],
        [1000, 2048],
    ),
)
def test_a_plan_of_many_tokens_is_what_is_held_after_the_first_decoded_one(
    name: str, tolerance: float, tokens: int
) -> None:
    generator, named = torch.Generator().manual_seed(0), named_cache(name)
    request = kvlayers.CacheRequest(WIDE, named.options, length_hint=tokens, dtype=torch.float32)
    cache = cache_by_name.cache_for(named.name, request)
    heads = torch.tensor([0.6, 0.9, 1.1, 1.4])[:, None, None]
    for layer in range(WIDE.num_hidden_layers):
        for count in (tokens - 1, 1):
            keys, values = (torch.randn(1, 4, count, 64, generator=generator) for _ in range(2))
            query = torch.randn(1, 8, count, 64, generator=generator)
            states = cache.update(keys * heads, values, layer)
            if named.name in ("snapkv", "h2o"):
                scaled_dot_product_attention(query, *states, enable_gqa=True)
    planned = kvlayers.plan(WIDE, tokens, 1, torch.float32, names=[name, "dynamic"])[name]
    assert planned.nbytes == pytest.approx(cache.nbytes, rel=tolerance)


@pytest.mark.parametrize(("share", "name"), [("100%", "dynamic"), ("60%", "int8"), (" 30.5 %", "int4")])
def test_memory_is_a_share_of_full_precision(share: str, name: str) -> None:
    config = tf.LlamaConfig(num_hidden_layers=2)
    names = ["dynamic", "int8", "int4"]
    full = kvlayers.plan(config, "8k", dtype="bfloat16")["dynamic"].device_bytes
    plan = kvlayers.plan(config, "8k", dtype="bfloat16", memory=share, names=names)
    assert (plan.recommended.name, plan.memory) == (name, int(float(share.strip(" %")) * full / 100))
    with pytest.raises(kvlayers.CapacityError):
        kvlayers.plan(config, "8k", dtype="bfloat16", memory="5%", names=names)


@pytest.mark.parametrize("memory", [None, "1GiB", "40MiB"])
def test_what_forgets_or_leaves_out_is_never_recommended_as_exact(memory: str | None) -> None:
    plan = kvlayers.plan(LONG, "8k", dtype="bfloat16", memory=memory)
    recommended = plan.recommended
    assert recommended.fidelity != "evicting"
    assert {plan[rule].fidelity for rule in (*BUILTIN_RULES, "evicting", "sink")} == {"evicting"}
    assert plan["recall"].fidelity == "partial"
    assert (recommended.name == "dynamic") == plan["dynamic"].fits
    assert "evicts tokens" in plan["snapkv"].reason
    if plan["dynamic"].fits:
        assert "changes what attention computes" in plan["recall"].reason
    exact = kvlayers.plan(LONG, "8k", names=["recall:recall.pages=all", "recall"])
    assert [cache.is_exact for cache in exact.caches] == [True, False]
    assert exact.recommended is exact.caches[0]


def test_an_offloaded_cache_has_two_layers_on_the_device() -> None:
    config = tf.LlamaConfig(**{**COMMON, "num_hidden_layers": 6})
    plan = kvlayers.plan(config, 300)
    assert plan["offloaded"].nbytes == plan["offloaded"].host_bytes == plan["dynamic"].nbytes
    assert plan["offloaded"].device_bytes == plan["dynamic"].nbytes // 6 * 2
    # Of two layers that follow one another, one is a window here.
    one, other = fed("dynamic", WINDOWED, 300, 1, torch.float32).layers[:2]
    assert one.nbytes != other.nbytes
    assert kvlayers.plan(WINDOWED, 300)["offloaded"].device_bytes == one.nbytes + other.nbytes
    # Windows stay where only those of full attention travel.
    one, other = fed("static", WINDOWED, 300, 1, torch.float32).layers[:2]
    plan = kvlayers.plan(WINDOWED, 300, dtype=torch.float32)
    assert (one.is_sliding, other.is_sliding) == (True, False)
    assert plan["offloaded_static"].host_bytes == 2 * other.nbytes
    assert plan["offloaded_static"].device_bytes == 2 * one.nbytes + 2 * other.nbytes


def test_a_token_costs_what_its_keys_and_values_take() -> None:
    plan = kvlayers.plan(LLAMA, 500, 3, torch.bfloat16)
    of_a_token = 2 * 3 * 2 * HEAD * 2 * LLAMA.num_hidden_layers
    assert plan["dynamic"].bytes_per_token == plan["static"].bytes_per_token == of_a_token
    assert plan["sink"].bytes_per_token == 0
    assert plan["int4"].bytes_per_token == pytest.approx(of_a_token * plan["int4"].bits / 16)


BUDGET = 300_000


def test_the_longest_context_is_the_last_one_that_fits() -> None:
    plan = kvlayers.plan(LLAMA, 100, dtype=torch.float32, memory=BUDGET)
    for cache in plan.caches:
        if cache.longest_context is None:
            assert cache.name == "sink"
            continue
        at_most, beyond = (
            kvlayers.plan(LLAMA, tokens, dtype=torch.float32, names=[cache.name])[cache.name].device_bytes
            for tokens in (cache.longest_context, cache.longest_context + 1)
        )
        assert at_most <= BUDGET < beyond, cache.name
    assert plan["dynamic"].longest_context == BUDGET // (2 * 2 * 2 * HEAD * 4)


def test_a_reservation_of_its_own_is_the_longest_context() -> None:
    # One token is what a plan asks for to see whether a cache follows the length hint.
    for reserved in (128, 1):
        with registered(reserved=static(max_cache_len=reserved)) as names:
            assert kvlayers.plan(LLAMA, 1, memory=2**30, names=names)["reserved"].longest_context == reserved
            with pytest.raises(kvlayers.CapacityError, match=f"at most {reserved} tokens?, .*{reserved + 1} new"):
                kvlayers.plan(LLAMA, reserved + 1, names=names)


FEW = ("dynamic", "static", "offloaded", "int8", "fp8", "int4", "quantized", "int2", "sink", "snapkv")
"""Names of caches of each kind. Plans within a budget look for the longest context of each cache, which takes long."""


def test_what_is_recommended_is_the_most_faithful_that_fits() -> None:
    tokens = 4000
    costs = {cache.name: cache for cache in kvlayers.plan(LLAMA, tokens, dtype=torch.float32).caches}
    expected = {None: "dynamic"}
    for name in ("dynamic", "int8", "fp8", "int4", "int2"):
        expected[costs[name].device_bytes] = name
    for memory, name in expected.items():
        plan = kvlayers.plan(LLAMA, tokens, dtype=torch.float32, memory=memory, names=FEW)
        assert plan.recommended is plan[plan.recommended.name]
        # "quantized" is int4 by another name.
        assert plan.recommended.name in (name, {"int4": "quantized"}.get(name)), memory
        assert plan.recommended.fits
        assert plan.recommended.is_exact is (name == "dynamic")
        assert f"\nUse {plan.recommended.name!r}: {plan.recommended.reason}" in repr(plan)


def test_the_host_is_for_what_has_four_bits_and_fits_nowhere_else() -> None:
    config = tf.LlamaConfig(hidden_size=256, num_attention_heads=4, num_hidden_layers=40)
    costs = kvlayers.plan(config, 4000, dtype=torch.bfloat16)
    assert costs["offloaded"].device_bytes < costs["int2"].device_bytes < costs["int4"].device_bytes
    for memory in (costs["int2"].device_bytes - 1, costs["int4"].device_bytes - 1):
        plan = kvlayers.plan(config, 4000, dtype=torch.bfloat16, memory=memory, names=FEW)
        assert plan.recommended.name == "offloaded"
        assert "host" in plan.recommended.reason
    assert "offloaded' keeps more" in plan["int2"].reason


def test_a_budget_that_nothing_fits_says_the_least_that_is_needed() -> None:
    least = min(
        (cache for cache in kvlayers.plan(LLAMA, 4000, names=FEW).caches if cache.fidelity != "evicting"),
        key=lambda cache: cache.device_bytes,
    )
    with pytest.raises(kvlayers.CapacityError, match=rf"at least .* \({least.device_bytes} bytes\) for 4000 tokens"):
        kvlayers.plan(LLAMA, 4000, memory=least.device_bytes - 1, names=FEW)
    plan = kvlayers.plan(LLAMA, 4000, memory=least.device_bytes, names=FEW)
    assert plan.recommended.device_bytes == least.device_bytes
    with pytest.raises(kvlayers.CapacityError, match="at most [0-9]+ tokens, with"):
        kvlayers.plan(LLAMA, 4000, memory=100_000, names=FEW)


def test_nothing_is_allocated() -> None:
    """A model of a trillion weights, and a context of a hundred million tokens."""
    config = tf.LlamaConfig(hidden_size=2**15, num_hidden_layers=200, num_attention_heads=256, vocab_size=2**20)
    plan = kvlayers.plan(config, 10**8, 64, torch.bfloat16, memory=10**18, names=["static", "int4", "sink"])
    assert plan["static"].nbytes == 2 * 200 * 64 * 2**15 * 10**8 * 2 + 200 * 16


class Refusing(tf.PretrainedConfig):
    model_type = "refusing"
    num_hidden_layers = 2


@pytest.mark.parametrize(
    ("config", "options", "error", "words"),
    [
        (LLAMA, {"context_length": 0}, kvlayers.OptionError, "context_length.*at least 1, got 0"),
        (LLAMA, {"context_length": 10.5}, kvlayers.OptionError, "context_length.*10.5"),
        (LLAMA, {"context_length": True}, kvlayers.OptionError, "context_length.*True"),
        (LLAMA, {"batch_size": -1}, kvlayers.OptionError, "batch_size.*sequences"),
        (LLAMA, {"memory": "24 gigs"}, kvlayers.OptionError, "memory` must be a number of bytes.*24 gigs"),
        (LLAMA, {"context_length": "32q"}, kvlayers.OptionError, "context_length` must be a number of tokens.*32q"),
        (LLAMA, {"memory": "150%"}, kvlayers.OptionError, "a share of full precision up to 100%.* got '150%'"),
        (LLAMA, {"memory": 0}, kvlayers.OptionError, "memory.*bytes"),
        *(
            (LLAMA, {"memory": number}, kvlayers.OptionError, "`memory` must be a whole number")
            for number in (1.5, float("inf"), float("nan"))
        ),
        (LLAMA, {"dtype": "bfloat"}, kvlayers.OptionError, "torch.bfloat16 or 'bfloat16'"),
        (LLAMA, {"dtype": torch.int8}, kvlayers.OptionError, "floating-point"),
        (LLAMA, {"encoder_length": 5}, kvlayers.OptionError, "without an encoder"),
        (LLAMA, {"names": ["dinamic"]}, kvlayers.errors.RegistryError, "did you mean 'dynamic'"),
        (LLAMA, {"names": []}, kvlayers.OptionError, "at least one cache"),
        (LLAMA, {"names": ["int4", "auto"]}, kvlayers.OptionError, "without 'auto'"),
        (LLAMA, {"names": "dynamic"}, kvlayers.OptionError, "`names` must be a list"),
        (tf.T5Config(), {}, kvlayers.OptionError, "encoder_length"),
        ("llama", {}, kvlayers.errors.ConfigError, r"a model or its config.*AutoConfig.from_pretrained\(name\)"),
        (tf.OpenAIGPTConfig(), {}, kvlayers.errors.ConfigError, "openai-gpt"),
        (Refusing(), {}, kvlayers.errors.ConfigError, "num_attention_heads|hidden_size"),
    ],
)
def test_bad_input_is_refused(config: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        kvlayers.plan(config, **{"context_length": 100, **options})


@versions.kvlayers_recurrent_layers
def test_states_of_an_unknown_form_are_refused() -> None:
    class_name, options = families.FAMILIES["minimax"]
    with pytest.raises(kvlayers.errors.ConfigError, match="minimax"):
        kvlayers.plan(getattr(tf, class_name)(**options), 100)


def test_layers_of_others_are_left_out_with_the_reason() -> None:
    with registered(foreign=lambda request: tf.DynamicCache(config=request.config)):
        plan = kvlayers.plan(LLAMA, 100)
    assert "not a cache of kvlayers" in plan.left_out["foreign"]
    with pytest.raises(kvlayers.errors.RegistryError, match="foreign.*not a cache of kvlayers"):
        plan["foreign"]


def test_a_layer_that_reads_the_numbers_of_its_states_is_left_out_with_the_reason() -> None:
    class Reading(kvlayers.DynamicLayer):
        def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.largest = key_states.max().item()
            return super().update(key_states, value_states)

    def reading(request: kvlayers.CacheRequest) -> kvlayers.Cache:
        return kvlayers.Cache(layers=[Reading()])

    with registered(reading=reading) as names:
        assert "`Reading` cannot be planned" in kvlayers.plan(LLAMA, 10).left_out["reading"]
        with pytest.raises(kvlayers.errors.UnsupportedLayerError, match="which have no numbers"):
            kvlayers.plan(LLAMA, 10, names=names)
