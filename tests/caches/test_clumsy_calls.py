"""Likely mistakes end in an error of kvlayers that names the argument, and leave everything as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvlayers
from kvlayers import layers, stores
from models import prompt, tiny_model

STATES = torch.zeros(1, 2, 5, 8)
COLUMNS = torch.zeros(1, 2, 3)
NAN = float("nan")
FLOATS = torch.float32, "cpu"


def config() -> Any:
    return tiny_model("llama").config


def held() -> Any:
    return kvlayers.DynamicCache([(STATES, STATES), (STATES, STATES)])


def of_heads() -> Any:
    layer = layers.EvictingLayer("knorm", keep=0.5, sink_tokens=4, recent_tokens=8, per_head=True)
    layer.update(*torch.randn(2, 1, 2, 80, 8))
    return layer


def static() -> Any:
    return kvlayers.StaticCache(config(), 32)


def store() -> Any:
    return kvlayers.PrefixStore(max_bytes=10**6)


def many(prompts: Any, **options: Any) -> Any:
    return list(kvlayers.generate_many(tiny_model("llama"), prompts, **options))


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "a truth as a length": (lambda: held().truncate(True), "`length` must be a whole number, got True"),
    "more to remove than is held": (lambda: held().crop(-10), "within the 5 tokens .* got -10"),
    "half a length": (lambda: held().truncate(2.5), "`length` must be a whole number, got 2.5"),
    "a truth to crop to": (lambda: held().crop(True), "must be a whole number, got True"),
    "a length of a layer as a text": (lambda: held().layers[0].check_truncate("3"), "`length` must be a whole number"),
    "half a length of a layer": (lambda: held().layers[0].nearest_restorable(1.5), "`length` must be a whole number"),
    "one length for all rows": (lambda: held().crop_rows(3), "`lengths` must have one length for each row, got 3"),
    "a hint that is a truth": (lambda: kvlayers.DynamicCache(length_hint=True), "`length_hint` must be a whole number"),
    **{f"{n!r} forks": (lambda n=n: held().fork(n), "`n` must be") for n in (0, -1, 1.5, "two")},
    "half a hint": (lambda: kvlayers.DynamicCache(length_hint=1.5), "`length_hint` must be a whole number, got 1.5"),
    "disk without a place": (lambda: held().offload(device="disk"), "as `device` and `directory`"),
    "a place that is no memory": (lambda: held().offload(device="cuda"), "`offload_device` must be"),
    "bits that no code has": (lambda: held().pack(7), "must be one of 1, 2"),
    "a device that is a number": (lambda: kvlayers.make_cache("dynamic", config(), device=1.5), "`device` must be"),
    "one name to plan": (lambda: kvlayers.plan(config(), 100, names="int4"), r"pass \['int4'\]"),
    "a number to plan": (lambda: kvlayers.plan(config(), 100, names=5), "`names` must be a list .* got 5"),
    "a misspelt option of install": (
        lambda: kvlayers.install(strict_prompt=True),
        r"no option of install\(\): did you mean 'strict_prompts'",
    ),
    "a misspelt option of installed": (lambda: kvlayers.installed(chache="int4"), "did you mean 'cache'"),
    "a misspelt option of a plan": (lambda: kvlayers.plan(config(), 100, batch=2), "did you mean 'batch_size'"),
    "a plan without a length": (lambda: kvlayers.plan(config()), "missing a required argument: 'context_length'"),
    "a misspelt option of a file": (lambda: kvlayers.load_cache("x", lenght=3), "did you mean 'length'"),
    "a cache for no model": (lambda: kvlayers.make_cache("int4"), "missing a required argument: 'model_or_config'"),
    "a model before the name": (lambda: kvlayers.make_cache(tiny_model("llama"), "int4"), "must be the name of a"),
    "a misspelt argument of rows": (lambda: many([[5, 6]], max_row=3), "did you mean 'max_rows'"),
    "a misspelt option of a chat": (
        lambda: kvlayers.Chat(tiny_model("llama"), None, mesages=[]),
        "no option of Chat: did you mean 'messages'",
    ),
    "a model for the id of its weights": (
        lambda: store().lookup(prompt(1, 4), model=tiny_model("llama")),
        r"`model` must be a string that is not empty, got a LlamaForCausalLM: pass kvlayers.weights_id\(model\)",
    ),
    "a misspelt option of a saved file": (lambda: kvlayers.save_cache(held(), "x", tokens=3), "mean 'token_ids'"),
    "a misspelt option of rows": (lambda: kvlayers.Rows(cach=held()), "did you mean 'cache'"),
    "a misspelt option of documents": (lambda: kvlayers.concatenate([held()], None, recomputed=3), "mean 'recompute'"),
    "a misspelt option of a look-up": (
        lambda: store().lookup(prompt(1, 4), confg=config()),
        r"no option of PrefixStore.lookup\(\): did you mean 'config'",
    ),
    "bytes without their unit": (lambda: kvlayers.DynamicCache(max_bytes="100"), "with its unit.* got '100'"),
    "a store of bytes without their unit": (lambda: kvlayers.PrefixStore("100"), "with its unit.* got '100'"),
    "a model where a file has its device": (
        lambda: kvlayers.load_cache("x", device=tiny_model("llama")),
        "`device` must be .*a model goes by name, as in config=model.config",
    ),
    "a model behind the path of a file": (
        lambda: kvlayers.load_cache("x", tiny_model("llama")),
        r"Pass options by name, as in path=\.\.\., config=\.\.\.\.",
    ),
    "a directory where a store has its bytes": (
        lambda: kvlayers.PrefixStore("/tmp/x"),
        "a path .* goes by `directory`",
    ),
    "a model as the bytes of a store": (lambda: kvlayers.PrefixStore(tiny_model("llama")), r"got [\s\S]{60}: pass a"),
    "a model as a hint": (lambda: kvlayers.DynamicCache(length_hint=tiny_model("llama")), r"got [\s\S]{60}: pass an"),
    "one cache to merge": (lambda: kvlayers.merge(held()), r"pass \[cache, other\]"),
    "caches that autograd follows": (
        lambda: kvlayers.DynamicCache([(STATES.clone().requires_grad_(), STATES)]).pack(8),
        r"fill a DynamicCache under torch.no_grad\(\)",
    ),
    "a store that is misspelt": (
        lambda: kvlayers.generate(tiny_model("llama"), prompt(1, 4), prefixstore=store()),
        r"did you mean 'prefix_store' of kvlayers.generate\(\)",
    ),
    "a device that is misspelt": (lambda: kvlayers.make_cache("int4", config(), device="cdua"), "pass 'cpu'"),
    "an option of another library": (lambda: many([[5, 6]], max_tokens=3), "did you mean 'max_new_tokens'"),
    "one text as prompts": (lambda: many("a text"), r"pass \[text\] for one"),
    "zero as a cache": (lambda: many([[5, 6]], cache=0), "`cache` must be the name of a cache here"),
    "no name as a cache": (lambda: many([[5, 6]], cache=""), "unknown cache name ''"),
    "a model as a tokenizer": (lambda: many(["a"], tokenizer=tiny_model("llama")), "`tokenizer` must be a tokenizer"),
    "a batch to look up": (lambda: store().lookup({"input_ids": 1}, config=config()), "return_tensors='pt'"),
    "a name that is a list": (lambda: kvlayers.unregister(["int4"]), r"\['int4'\]"),
    "lengths without an order": (lambda: held().crop_rows({3}), "`lengths` must have one length for each row"),
    "a truth of torch as a length": (lambda: held().truncate(torch.tensor(True)), "`length` must be a whole number"),
    "a length without data": (
        lambda: held().truncate(torch.tensor(3, device="meta")),
        "`length` must be a whole number",
    ),
    "a row without data": (lambda: held().extract(torch.tensor(0, device="meta")), "`row` must be a whole number"),
    "rows of a sparse list": (
        lambda: held().keep_rows(torch.tensor([0]).to_sparse()),
        "`indices` must be a list",
    ),
    "queries as a text": (lambda: held().get_mask_sizes("3", 0), "`query_length` must be a whole number, got '3'"),
    "half a query": (lambda: held().get_mask_sizes(1.5, 0), "`query_length` must be a whole number, got 1.5"),
    "fewer queries than none": (lambda: held().get_mask_sizes(-1, 0), "`query_length` must be at least 0, got -1"),
    "a table of queries": (lambda: held().get_mask_sizes(torch.zeros(2, 2), 0), "`query_length` must be a whole"),
    "keys of one dimension": (lambda: held().update(torch.zeros(3), STATES, 0), r"must be \[batch, kv_heads, tokens"),
    "layers that are none": (lambda: held().replace_layers([None]), "`layers` must be layers of kvlayers"),
    "a layer for layers": (lambda: held().replace_layers(held()), "`layers` must be layers of kvlayers"),
    "a prefix shared with a number": (lambda: held().share_prefix(3, 3), "`other` must be a cache of kvlayers"),
    "a shared prefix as a text": (lambda: held().share_prefix(held(), "3"), "`tokens` must be a whole number"),
    "a layer made ready for nothing": (lambda: layers.DynamicLayer().lazy_initialization(None), "must be tensors"),
    "packed, no states": (lambda: layers.QuantizedLayer().update(None, None), "must be tensors"),
    "heads of different lengths, no states": (lambda: of_heads().update(None, STATES), "must be tensors"),
    "a cache, no keys": (lambda: held().update(None, STATES, 0), "must be tensors"),
    "an index as a text": (
        lambda: held().update(STATES, STATES, "0"),
        "`layer_idx` must be a whole number from 0 to 1",
    ),
    "no index": (lambda: held().update(STATES, STATES, None), "`layer_idx` must be .* got None"),
    "a float as an index": (lambda: held().update(STATES, STATES, 1.0), "`layer_idx` must be .* got 1.0"),
    "a layer by a text": (lambda: held()["a"], "`layer_idx` must be .* got 'a'"),
    "a store that is a number": (lambda: layers.DynamicLayer(store=3), "`store` must be a TokenStore, got 3"),
    "a store by name": (lambda: layers.SlidingLayer(8, store="dense"), "`store` must be a TokenStore, got 'dense'"),
    "no state": (lambda: layers.DynamicLayer().load_state(None), "`state` must be a LayerState, got a NoneType"),
    "a text as a state": (lambda: layers.StaticLayer(8).load_state("x"), "`state` must be a LayerState, got a str"),
    "no recurrent state": (
        lambda: layers.LinearAttentionLayer().load_state(None),
        "`state` must be a LayerState, got a NoneType",
    ),
    "a hybrid layer, no state": (
        lambda: layers.HybridLayer(layers.DynamicLayer(), layers.LinearAttentionLayer()).load_state(None),
        "`state` must be a LayerState",
    ),
    "a reservation that no model fills": (lambda: layers.StaticLayer(10**30), "`max_cache_len` must be .* to 16777216"),
    "a window's huge reservation": (lambda: layers.StaticSlidingLayer(10**30, 8), "`max_cache_len` must be"),
    "a limit as a text": (lambda: layers.StaticSlidingLayer(8, 4, token_limit="x"), "`token_limit` must be"),
    "a negative limit": (lambda: layers.StaticSlidingLayer(8, 4, token_limit=-1), "`token_limit` must be"),
    "a limit that is no number": (lambda: layers.StaticSlidingLayer(8, 4, token_limit=NAN), "`token_limit` must be"),
    "rotary by a number": (lambda: layers.SinkLayer(8, 4, rotary=3), "`rotary` must be"),
    "a prefetcher by a number": (lambda: layers.OffloadedLayer(layers.DynamicLayer(), 3), "`prefetcher` must be"),
    "no columns": (
        lambda: layers.LinearAttentionLayer().update_conv_state(None),
        "Convolution inputs must be a tensor",
    ),
    "a scalar as columns": (
        lambda: layers.LinearAttentionLayer().update_conv_state(torch.tensor(1.0)),
        r"must be \[batch, channels, new\]",
    ),
    "a kernel that is true": (
        lambda: layers.LinearAttentionLayer().update_conv_state(COLUMNS, 0, conv_kernel_size=True),
        "a kernel of at least 1, got .* True",
    ),
    "no recurrent states": (
        lambda: layers.LinearAttentionLayer().update_recurrent_state(None),
        "recurrent state must be a tensor, got a NoneType",
    ),
    "a quantization by name": (lambda: layers.QuantizedLayer("int4"), "`quantization` must be .* got 'int4'"),
    "a quantization by bits": (lambda: stores.QuantizedStore(4), "`quantization` must be .* got 4"),
    "a misspelt option of quantization": (lambda: stores.Quantization(nbit=4), "did you mean 'nbits'"),
    "a misspelt option of buckets": (lambda: stores.Buckets(minumum=4), "did you mean 'minimum'"),
    "a misspelt option of checkpoints": (lambda: layers.Checkpoints(evry=4), "did you mean 'every'"),
    "a bucket of a truth": (lambda: stores.Buckets(8).sizes(True), "`capacity` must be a whole number"),
    "sequences as a text": (lambda: stores.StaticStore(8, max_batch_size="a"), "`max_batch_size` must be"),
    "grow by a number": (lambda: stores.StaticStore(8, grow=3), "`grow` must be True or False, got 3"),
    "a whole bucket from a text": (lambda: stores.StaticStore(8, whole_from="x"), "`whole_from` must be"),
    "a prompt without data": (
        lambda: store().lookup(prompt(1, 4).to("meta"), config=config()),
        "`input_ids` must hold data, got a tensor on the meta device",
    ),
    "a policy by name": (
        lambda: kvlayers.PrefixStore(max_bytes=10**6, policy="lru"),
        "`policy` must have .* got 'lru'",
    ),
    "weights of a config": (lambda: kvlayers.weights_id(config()), "`model` must be a model"),
    "weights of a class": (lambda: kvlayers.weights_id(torch.nn.Linear), "`model` must be a model"),
    "weights of nothing": (lambda: kvlayers.weights_id(None), "`model` must be a model, got a NoneType"),
    "an exported config": (
        lambda: kvlayers.ExportableDecoder(config(), 8),
        "`model` must be a model, got a LlamaConfig",
    ),
    "an exported nothing": (lambda: kvlayers.ExportableDecoder(None, 8), "`model` must be a model, got a NoneType"),
    "a cache by name for a text of sequences": (
        lambda: kvlayers.make_cache("int4", config(), batch_size="x"),
        "`batch_size` must be a whole number of sequences",
    ),
    "a cache by name for no sequences": (
        lambda: kvlayers.make_cache("dynamic", config(), batch_size=-1),
        "`batch_size` must be .* got -1",
    ),
    "room for a text of sequences": (lambda: static().early_initialization("a", 2, 8, *FLOATS), "`batch_size` must be"),
    "room for half a sequence": (lambda: static().early_initialization(NAN, 2, 8, *FLOATS), "`batch_size` must be"),
    "room for no heads": (
        lambda: static().early_initialization(1, None, 8, *FLOATS),
        "`num_heads` and `head_dim` must",
    ),
    "room for negative heads": (lambda: static().early_initialization(1, 2, -8, *FLOATS), "`head_dim` must be"),
    "room for no dtype": (lambda: static().early_initialization(1, 2, 8, None, "cpu"), "`dtype` must be"),
    "room for a misspelt dtype": (lambda: static().early_initialization(1, 2, 8, "flaot", "cpu"), "`dtype` must be"),
    "room on a misspelt device": (
        lambda: static().early_initialization(1, 2, 8, torch.float32, "cdua"),
        "`device` must be a device of torch, got 'cdua'",
    ),
}


BY_INDEX: dict[str, Callable[[Any, Any], Any]] = {
    "get_seq_length": lambda cache, index: cache.get_seq_length(index),
    "get_query_offset": lambda cache, index: cache.get_query_offset(index),
    "get_mask_sizes": lambda cache, index: cache.get_mask_sizes(1, index),
    "get_max_length": lambda cache, index: cache.get_max_length([index] if index is None else index),
    "get_usable_length": lambda cache, index: cache.get_usable_length(1, index),
    "offload": lambda cache, index: cache.offload([index] if index is None else index),
    "prefetch": lambda cache, index: cache.prefetch(index),
    "is_recording_past": lambda cache, index: cache.is_recording_past(index),
    "has_previous_state": lambda cache, index: cache.has_previous_state([index] if index is None else index),
    "update_indexer": lambda cache, index: cache.update_indexer(STATES, index),
    "update": lambda cache, index: cache.update(STATES, STATES, index),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", BY_INDEX)
@pytest.mark.parametrize(
    "index",
    ["0", None, 1.5, [0], (1, 2), torch.tensor([0, 1]), -9, 2.0, float("inf"), torch.tensor(0, device="meta")],
    ids=repr,
)
def test_an_index_that_no_layer_has_is_named(name: str, index: Any) -> None:
    with pytest.raises(kvlayers.errors.LayerIndexError, match="`layer_idx` must be a whole number from 0 to 1"):
        BY_INDEX[name](held(), index)


@pytest.mark.parametrize(("call", "words"), CALLS.values(), ids=CALLS)
def test_a_mistake_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(kvlayers.errors.KVLayersError, match=words):
        call()
