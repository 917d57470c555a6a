"""A model where a config is asked for, and numbers and dtypes as people write them: one meaning everywhere."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers as tf

import kvlayers
import kvlayers_lab
import versions
from kvlayers.upstream import model_types
from models import COMMON, WINDOW, prompt, read, tiny_model
from named_factories import registered

MISTRAL = tf.MistralConfig(**COMMON, sliding_window=WINDOW)

TAKE_A_CONFIG: dict[str, Any] = {
    "DynamicCache": lambda config: kvlayers.DynamicCache(config=config),
    "from_legacy_cache": lambda config: kvlayers.DynamicCache.from_legacy_cache(config=config),
    "OffloadedCache": lambda config: kvlayers.OffloadedCache(config=config),
    "StaticCache": lambda config: kvlayers.StaticCache(config, 32),
    "OffloadedStaticCache": lambda config: kvlayers.OffloadedStaticCache(config, 32),
    "HybridCache": lambda config: kvlayers.HybridCache(config, 32),
    "HybridChunkedCache": lambda config: kvlayers.HybridChunkedCache(config, 32),
    "SlidingWindowCache": lambda config: kvlayers.SlidingWindowCache(config, 32),
    "QuantizedCache": lambda config: kvlayers.QuantizedCache(config=config),
    "make_cache": lambda config: kvlayers.make_cache("hybrid", config, length_hint=32),
}
ARE_OF_OTHER_MODELS: dict[str, tuple[str, Any]] = {
    "SinkCache": ("llama", lambda config: kvlayers.SinkCache(32, config=config)),
    "MambaCache": ("mamba", kvlayers.MambaCache),
    "HybridMambaAttentionDynamicCache": ("jamba", kvlayers.HybridMambaAttentionDynamicCache),
}


def what_it_is(cache: Any) -> Any:
    return repr(cache), cache.offloading, getattr(cache, "compiled", None)


@pytest.fixture(scope="module")
def mistral() -> Any:
    return tf.MistralForCausalLM(MISTRAL).eval()


@pytest.mark.parametrize("kind", TAKE_A_CONFIG)
def test_a_model_stands_for_its_config(mistral: Any, kind: str) -> None:
    make = TAKE_A_CONFIG[kind]
    assert what_it_is(make(mistral)) == what_it_is(make(mistral.config))
    for wrong in ("mistral", torch.nn.Linear(1, 1), 5):
        with pytest.raises(kvlayers.errors.ConfigError, match="must be a model or its config .*pass the model itself"):
            make(wrong)
    with pytest.raises(kvlayers.errors.ConfigError, match="got a tokenizer: pass the model itself"):
        make(tf.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({}))))


@pytest.mark.parametrize(("family", "make"), ARE_OF_OTHER_MODELS.values(), ids=ARE_OF_OTHER_MODELS)
def test_a_model_stands_for_its_config_where_it_is_of_one_kind(family: str, make: Any) -> None:
    if family != "llama" and versions.kvlayers_recurrent_layers.args[0]:
        pytest.skip("models of this transformers make a cache of their own for recurrent states")
    model = tiny_model(family)
    assert what_it_is(make(model)) == what_it_is(make(model.config))


def test_a_model_that_is_wrapped_is_one_too(mistral: Any) -> None:
    assert model_types.config_of(torch.compile(mistral)) is mistral.config
    assert repr(kvlayers.DynamicCache(config=torch.compile(mistral))) == repr(kvlayers.DynamicCache(config=MISTRAL))


def test_alibi_is_seen_in_a_model_as_in_its_config() -> None:
    bloom = tf.BloomForCausalLM(tf.BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4))
    falcon = tf.FalconConfig(num_hidden_layers=2, alibi=True)
    for given, name in ((bloom, "BloomConfig"), (bloom.config, "BloomConfig"), (falcon, "FalconConfig")):
        with pytest.raises(kvlayers.errors.ConfigError, match=f"got a {name}, whose alibi"):
            kvlayers.StaticCache(given, 32, compiled=True)


def test_a_model_in_the_place_of_states_is_told_where_it_belongs(mistral: Any) -> None:
    for wrong in (mistral, mistral.config):
        with pytest.raises(kvlayers.OptionError, match=f"got a {type(wrong).__name__}: pass it as `config`"):
            kvlayers.DynamicCache(wrong)


def test_a_file_and_a_store_take_a_model(tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), prompt(1, 12)
    cache, _ = read(model, ids, kvlayers.DynamicCache(config=model))
    kvlayers.save_cache(cache, tmp_path / "a", config=model)
    kvlayers.save_cache(cache, tmp_path / "b", config=model.config)
    one, other = (kvlayers.inspect_cache(tmp_path / name) for name in ("a", "b"))
    assert (one.fingerprint, one.model) == (other.fingerprint, other.model)
    assert kvlayers.load_cache(tmp_path / "a", config=model).get_seq_length() == 12
    store = kvlayers.PrefixStore(max_bytes="1MiB")
    assert store.insert(ids[0], cache, config=model)
    assert store.lookup(ids[0], config=model.config).covered == 11


def test_a_plan_takes_what_people_write(mistral: Any) -> None:
    expected = kvlayers.plan(MISTRAL, 2048, 2, torch.bfloat16, 2**30)
    assert kvlayers.plan(mistral, "2k", 2, "bfloat16", "1GiB") == expected
    assert kvlayers.plan(mistral, "2K", 2, "torch.bfloat16", "1 g") == expected
    t5 = tf.T5Config(num_layers=2)
    with_text = kvlayers.plan(t5, "1k", names=["dynamic"], encoder_length="2k")
    assert with_text == kvlayers.plan(t5, 1024, names=["dynamic"], encoder_length=2048)


def test_caches_take_tokens_as_people_write_them() -> None:
    llama = tf.LlamaConfig(**COMMON)
    reserving = [
        kvlayers.StaticCache(llama, "2k"),
        kvlayers.OffloadedStaticCache(llama, "2k"),
        kvlayers.make_cache("static", llama, length_hint="2k"),
        kvlayers.make_cache("static", llama, max_cache_len="2k"),
    ]
    assert {cache.layers[0].max_cache_len for cache in reserving} == {2048}
    growing = [
        kvlayers.DynamicCache(config=llama, length_hint="2k"),
        kvlayers.QuantizedCache(config=llama, length_hint="2k"),
        kvlayers.make_cache("dynamic_full", llama, length_hint="2k"),
    ]
    assert {cache.layers[0].store.length_hint for cache in growing} == {2048}
    assert kvlayers.SinkCache("1k", config=llama).window_length == 1024


def test_what_generate_is_given_is_read_alike() -> None:
    with kvlayers.installed():
        output = tiny_model("llama").generate(
            prompt(1, 5),
            max_new_tokens=2,
            cache_implementation="static",
            cache_config={"max_cache_len": "1k"},
            return_dict_in_generate=True,
        )
        assert output.past_key_values.get_max_length() == 1024
        tiny_model("llama").generate(
            prompt(1, 5), max_new_tokens=2, cache_implementation="auto", cache_config={"memory": "1MiB"}
        )


def test_dtypes_go_by_their_names() -> None:
    request: dict[str, Any] = {}

    def noting(asked: kvlayers.CacheRequest) -> Any:
        request.update(vars(asked))
        return kvlayers.DynamicCache(config=asked.config)

    with registered(noting=noting):
        kvlayers.make_cache("noting", MISTRAL, dtype="bfloat16", device="cpu")
    assert (request["dtype"], request["device"]) == (torch.bfloat16, torch.device("cpu"))
    kvlayers.StaticCache(MISTRAL, 8, dtype="float16")
    for wrong in ("int4", "bfloat", "nn", "int8", torch.int8):
        with pytest.raises(kvlayers.OptionError, match="floating-point torch.dtype or its name"):
            kvlayers.make_cache("dynamic", MISTRAL, dtype=wrong)


def test_budgets_are_bytes_as_people_write_them() -> None:
    assert kvlayers_lab.BytesBudget("4.5KiB") == kvlayers_lab.BytesBudget(4608)
    store = kvlayers.PrefixStore("1.5 GiB")
    assert repr(store) == "PrefixStore(0 entries, 0 B of 1.50 GiB)"
    assert store.evict("1k") == 0


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("max_cache_len` must be a number of tokens", lambda: kvlayers.StaticCache(MISTRAL, "2q")),
        ("length_hint` must be a number of tokens", lambda: kvlayers.DynamicCache(length_hint="many")),
        ("length_hint` must be a number of tokens", lambda: kvlayers.QuantizedCache(length_hint="1GiB")),
        ("length_hint` must be a number of tokens", lambda: kvlayers.make_cache("dynamic", MISTRAL, length_hint="")),
        ("window_length` must be a number of tokens", lambda: kvlayers.SinkCache("wide")),
        ("max_bytes` must be a number of bytes with its unit", lambda: kvlayers.PrefixStore("lots")),
        (
            "directory_max_bytes` must be a number of bytes with its unit",
            lambda: kvlayers.PrefixStore(1, directory_max_bytes="-1k"),
        ),
        ("nbytes` must be a number of bytes with its unit", lambda: kvlayers.PrefixStore(1).evict("all")),
        ("bytes_per_token` must be a number of bytes with its unit", lambda: kvlayers_lab.BytesBudget("4 kay")),
        (
            "memory` must be a number of bytes with its unit",
            lambda: kvlayers.make_cache("auto", MISTRAL, length_hint=8, memory="x"),
        ),
    ],
)
def test_what_is_no_number_is_an_error_that_names_the_argument(name: str, call: Any) -> None:
    with pytest.raises(kvlayers.OptionError, match=f"`{name}, such as .*, got '"):
        call()


def test_errors_say_bytes_as_people_read_them() -> None:
    with pytest.raises(kvlayers.CapacityError, match=r"at least \d+\.?\d* [KM]iB \(\d+ bytes\) for .* 1000 bytes"):
        kvlayers.plan(MISTRAL, 4096, memory=1000)
    store, cache = kvlayers.PrefixStore("1k"), kvlayers.DynamicCache()
    cache.update(torch.zeros(1, 2, 60, 8), torch.zeros(1, 2, 60, 8), 0)
    with pytest.raises(kvlayers.CapacityError, match=r"max_bytes of 1\.00 KiB \(1024 bytes\), .* \d+\.\d KiB \(\d+ b"):
        store.insert(torch.arange(60), cache, model="a")


def test_a_layer_that_was_appended_by_hand_is_found_from_the_end() -> None:
    cache = kvlayers.DynamicCache()
    cache.layers.append(kvlayers.DynamicLayer())
    assert cache.get_seq_length(-1) == 0
    assert cache.get_mask_sizes(1, -1) == (1, 0)
