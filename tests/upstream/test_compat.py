"""What is read of a version of transformers is what that version does itself; what it lacks is found at import.

What its caches get wrong comes out right here, and nothing of what they offer is left to them.
"""

import contextlib
from typing import Any

import pytest
import torch
import transformers
from transformers import cache_utils as upstream

import fresh_process
import kvlayers
import versions
from families import model_of
from kvlayers.quantized import quantized_layer
from kvlayers.upstream import compat, model_layers, model_types, supported
from kvlayers.upstream.supported import NEWEST_TESTED, check_supported
from models import COMMON, CONFIGS, prompt, tiny_model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "import transformers; transformers.__version__ = '4.56.2'",
            "transformers must be >=4.57, got 4.56.2: install",
        ),
        ("import torch; torch.__version__ = '2.5.1+cu124'", "torch must be >=2.6, got 2.5.1+cu124: install"),
        (
            "import transformers; from transformers import cache_utils; transformers.__version__ = '9.1.0'\n"
            "del cache_utils.StaticLayer; cache_utils.DynamicCache.__init__ = lambda self, states: None",
            "transformers 9.1.0 lacks what kvlayers relies on "
            "(transformers.cache_utils.DynamicCache(..., config=), transformers.cache_utils.StaticLayer): install a "
            f"version that kvlayers was tested with ('transformers>=4.57,<={NEWEST_TESTED}'), or a newer kvlayers.",
        ),
    ],
    ids=["transformers is too old", "torch is too old", "an unknown version lacks something"],
)
def test_a_version_that_does_not_do_is_refused_at_import(change: str, message: str) -> None:
    run = fresh_process.run(f"{change}\nimport kvlayers; kvlayers.DynamicCache")
    assert run.stderr.strip().splitlines()[-1].startswith(f"ImportError: {message}")


def test_an_unknown_version_that_lacks_nothing_is_used_with_one_line_in_the_log() -> None:
    versions.need_since("5.24", "what a version newer than any other has")
    script = (
        "import transformers; transformers.__version__ = '9.1.0'\n"
        "import kvlayers; kvlayers.DynamicCache(); kvlayers.install(); print('used')"
    )
    run = fresh_process.run(script)
    assert run.stdout.strip() == "used", run.stderr
    lines = [line for line in run.stderr.splitlines() if "kvlayers" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"transformers 9.1.0 is newer than {NEWEST_TESTED}")


def test_this_version_lacks_nothing() -> None:
    supported.check((*supported.OF_CACHES, *supported.OF_GENERATE), compat.TRANSFORMERS)


@pytest.mark.parametrize("version", ["4.57.0", "4.57.6", "5.0.0rc1", "5.24.0", "6.0.0.dev0"])
def test_versions_in_the_range_are_taken(version: str) -> None:
    assert check_supported("transformers", version).release[0] in (4, 5, 6)


def test_layers_that_hold_nothing_of_their_own_have_no_spec() -> None:
    versions.need_model_class("Gemma3nTextConfig")
    for shared in (0, 2):
        config = transformers.Gemma3nTextConfig(num_hidden_layers=4, num_kv_shared_layers=shared)
        holding = [spec for spec in model_layers.layer_specs(config) if spec.layer_type != "dummy"]
        assert len(holding) == 4 - shared


CONFIGS_OF_OWN_CACHES = {
    "mamba": "MambaConfig",
    "jamba": "JambaConfig",
    "olmo_hybrid": "OlmoHybridConfig",
    "qwen3_5_text": "Qwen3_5TextConfig",
    "minimax": "MiniMaxConfig",
    "reformer": "ReformerConfig",
    "xlstm": "xLSTMConfig",
}


@pytest.mark.parametrize("model_type", CONFIGS_OF_OWN_CACHES)
def test_a_model_that_makes_its_own_cache_is_refused(model_type: str) -> None:
    """By its config alone it would be taken for one of attention, and decode with other logits or not at all."""
    versions.need_model_class(CONFIGS_OF_OWN_CACHES[model_type])
    config = getattr(transformers, CONFIGS_OF_OWN_CACHES[model_type])()
    since = model_layers.TAKES_CACHES_SINCE[model_type]
    assert config.get_text_config(decoder=True).model_type == model_type
    if since is not None and since <= versions.TRANSFORMERS:
        assert len(model_layers.layer_specs(config)) == config.num_hidden_layers
        return
    way_out = r"leave it to generate\(\)" + ("" if since is None else f", or use transformers {since} or newer") + r"\."
    with pytest.raises(kvlayers.errors.ConfigError, match=f"make a cache of their own: {way_out}"):
        kvlayers.DynamicCache(config=config)


@pytest.mark.skipif(not compat.INDEXERS_DEPEND_ON_CHUNKS, reason="from transformers 5.17 on, static indexers are right")
def test_a_static_indexer_that_is_wrong_is_not_made() -> None:
    versions.need_since("5.8", "indexers as layers of a cache")
    config = transformers.DeepseekV32Config(num_hidden_layers=2)
    with pytest.raises(kvlayers.errors.ConfigError, match="has a cache for"):
        kvlayers.StaticCache(config, max_cache_len=8)
    assert type(kvlayers.DynamicCache(config=config).layers[0]).__name__ == "DynamicIndexedLayer"


LAYERS = {
    "grows": lambda: upstream.DynamicLayer(),
    "window": lambda: upstream.DynamicSlidingWindowLayer(sliding_window=4),
    "static": lambda: upstream.StaticLayer(max_cache_len=16),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_of_transformers_is_asked_in_its_own_words(kind: str) -> None:
    """In a cache of ours it takes and returns what it does in one of theirs, however it is told where to write."""
    layer, states = LAYERS[kind](), torch.randn(1, 2, 9, 8)
    cache = kvlayers.Cache(layers=[layer])
    for begin, end in ((0, 3), (3, 4), (4, 9)):
        new = states[:, :, begin:end]
        kv_length, kv_offset = cache.get_mask_sizes(end - begin, 0)
        keys, values = cache.update(new, new + 1, 0)
        assert keys.shape[2] == values.shape[2] == kv_length
        at = end - kv_offset
        assert torch.equal(keys[:, :, at - (end - begin) : at], new)
    assert cache.get_seq_length() == 9
    assert cache.get_max_length(0) == (
        layer.max_cache_len if kind == "static" else layer.sliding_window if kind == "window" else -1
    )


@pytest.mark.parametrize("make", [kvlayers.DynamicCache, lambda: kvlayers.StaticCache(CONFIGS["llama"](), 32)])
def test_masks_are_asked_for_by_positions_or_by_their_number(make: Any) -> None:
    """Until transformers 5.4 models pass the positions, and decode loops written then still do."""
    cache = make()
    tiny_model("llama")(torch.ones(1, 5, dtype=torch.long), past_key_values=cache)
    assert cache.get_mask_sizes(torch.arange(5, 8), 0) == cache.get_mask_sizes(3, 0)


# Classes and members

NAMESAKES = {
    kvlayers.Cache: upstream.Cache,
    kvlayers.DynamicCache: upstream.DynamicCache,
    kvlayers.StaticCache: upstream.StaticCache,
    kvlayers.SlidingWindowCache: upstream.StaticCache,
    kvlayers.HybridCache: upstream.StaticCache,
    kvlayers.EncoderDecoderCache: upstream.EncoderDecoderCache,
    kvlayers.DynamicLayer: upstream.CacheLayerMixin,
    kvlayers.SlidingLayer: upstream.CacheLayerMixin,
    kvlayers.StaticLayer: upstream.CacheLayerMixin,
    kvlayers.StaticSlidingLayer: upstream.CacheLayerMixin,
    kvlayers.HybridLayer: upstream.CacheLayerMixin,
    kvlayers.LinearAttentionLayer: compat.LINEAR_LAYER,
    kvlayers.MambaCache: upstream.DynamicCache,
    kvlayers.HybridMambaAttentionDynamicCache: upstream.DynamicCache,
    kvlayers.QuantizedCache: upstream.QuantizedCache,
    kvlayers.QuantoQuantizedCache: upstream.QuantizedCache,
    kvlayers.HQQQuantizedCache: upstream.QuantizedCache,
    kvlayers.QuantizedLayer: upstream.CacheLayerMixin,
    quantized_layer.QuantoQuantizedLayer: compat.QUANTO_LAYER,
    quantized_layer.HQQQuantizedLayer: compat.HQQ_LAYER,
    quantized_layer.Fp8QuantizedLayer: compat.FP8_LAYER,
}


NEVER_WORKED = {"EncoderDecoderCache.batch_split"}
"""What a version of transformers has, and what calls a method there that no cache has (4.57)."""


def members_left_to_transformers(ours: type, theirs: type) -> list[str]:
    """Public members of a class of transformers that a class of kvlayers inherits from transformers."""
    special = ("__init__", "__iter__", "__len__", "__getitem__", "__repr__", "__deepcopy__")
    names = {name for base in theirs.__mro__[:-1] for name in vars(base) if not name.startswith("_")} | set(special)
    # Nobody asks a layer for its `layer_type`, by which classes of transformers were listed.
    names -= {"register", "layer_type"}
    owners = {name: next((base for base in ours.__mro__ if name in vars(base)), object) for name in names}
    return [
        f"{owner.__name__}.{name}"
        for name, owner in owners.items()
        if not owner.__module__.startswith("kvlayers") and owner is not object
    ]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [*NAMESAKES.items(), (kvlayers.HybridLayer, compat.LINEAR_LAYER)],
    ids=lambda kind: kind.__name__,
)
def test_no_public_member_is_still_that_of_transformers(ours: type, theirs: type) -> None:
    """So that a release of transformers cannot change what a cache of kvlayers does."""
    assert issubclass(ours, theirs)
    assert set(members_left_to_transformers(ours, theirs)) <= NEVER_WORKED


def states(tokens: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 2, tokens, 8), torch.randn(batch, 2, tokens, 8)


LLAMA = transformers.LlamaConfig(**COMMON)
GEMMA = transformers.Gemma3TextConfig(**COMMON, sliding_window=8, layer_types=["sliding_attention", "full_attention"])


def test_a_cache_with_one_unbounded_layer_is_unbounded() -> None:
    assert kvlayers.DynamicCache(config=GEMMA).get_max_length() == -1
    assert kvlayers.DynamicCache(config=GEMMA).get_max_length(0) == 8


def test_an_encoder_decoder_cache_is_saved_before_there_is_an_encoder() -> None:
    cache = kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), kvlayers.DynamicCache())
    for index in range(2):
        cache.self_attention_cache.update(*states(3), index)
    again = kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), kvlayers.DynamicCache())
    again.load_state(cache.state())
    assert [len(part.layers) for part in (again.self_attention_cache, again.cross_attention_cache)] == [2, 0]
    assert again.is_updated == {}


@pytest.mark.parametrize("library", [upstream, kvlayers], ids=["transformers", "kvlayers"])
def test_what_is_caught_of_transformers_is_caught_of_kvlayers(library: Any) -> None:
    cache = library.StaticCache(config=LLAMA, max_cache_len=8)
    told = {"cache_kwargs": {"cache_position": torch.arange(9)}} if compat.UPDATES_BY_CACHE_POSITION else {}
    with pytest.raises((IndexError, RuntimeError)):
        cache.update(*states(9), 0, **told)
    with pytest.raises(ValueError, match="backend"):
        library.QuantizedCache("of nobody", LLAMA)
    pytest.importorskip("optimum.quanto", reason="it checks the options of quanto")
    model, ids = tiny_model("llama"), prompt()
    with contextlib.nullcontext() if library is upstream else kvlayers.installed():
        for wrong in ({"nbits": 60}, {"axis_key": 5}):
            with pytest.raises(ValueError, match="60|5"):
                model.generate(
                    ids, max_new_tokens=2, cache_implementation="quantized", cache_config={"backend": "quanto", **wrong}
                )
        with pytest.raises(ValueError, match="cache_implementation"):
            model.generate(
                ids, max_new_tokens=2, cache_implementation="quantized", past_key_values=library.DynamicCache()
            )


@pytest.mark.parametrize(("family", "positions"), [("llama", 0), ("gemma3n", 1), ("gemma4", 1)])
def test_a_pass_for_states_alone_asks_for_as_few_logits_as_saves_time(family: str, positions: int) -> None:
    model = model_of(family)
    asked = model_types.newest_logits_only(model, 0)["logits_to_keep"]
    # Given no number, models whose last layers read states of earlier ones pass them all tokens.
    assert isinstance(asked, int) == (positions == 1)
    with torch.no_grad():
        assert model(prompt(tokens=6), logits_to_keep=asked).logits.shape[1] == positions
