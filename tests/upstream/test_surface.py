"""What user code can read from caches and layers of transformers, it can read from those of kvlayers.

What differs on purpose is listed here, and in the table of docs/migration.md. KVLAYERS_WRITE_DOCS=1 writes that table.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import transformers
from transformers import cache_utils as upstream

import kvlayers
import versions
from every_causal_model import model_of
from kvlayers.upstream import compat
from models import COMMON, prompt, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.*is from transformers 4")

BATCH, HEADS, HEAD_DIM, WINDOW, ROOM, KERNEL = 2, 2, 8, 8, 32, 4
STAGES: dict[str, int] = {"new": 0, "prompt": 5, "step": 1, "long": 10, "reset": 0}
"""What is done to a cache before it is read, with how many tokens it takes in."""

Make = Callable[[], Any]


def llama(*layer_types: str, sliding_window: int | None = None) -> Any:
    config = transformers.LlamaConfig(**{**COMMON, "num_hidden_layers": 1})
    config.update({"layer_types": [*layer_types], "sliding_window": sliding_window} if layer_types else {})
    return config


def dynamic(library: Any, config: Any) -> Make:
    return lambda: library.DynamicCache(config=config)


def static(library: Any, config: Any) -> Make:
    return lambda: library.StaticCache(config=config, max_cache_len=ROOM)


def quantized(backend: str) -> tuple[Make, Make]:
    # transformers recommends another axis than its default for hqq, and says that it takes no options for fp8.
    options = {} if backend == "fp8" else {"q_group_size": 8, "residual_length": 8}
    axes = {"axis_key": 1, "axis_value": 1} if backend == "hqq" else {}
    return (
        lambda: upstream.QuantizedCache(backend, llama(), **axes, **options),
        lambda: kvlayers.QuantizedCache(backend, llama(), **options, sink_tokens=0),
    )


FULL, SLIDING = llama(), transformers.MistralConfig(**{**COMMON, "num_hidden_layers": 1}, sliding_window=WINDOW)
KINDS: dict[str, tuple[Make, Make]] = {
    "full": (dynamic(upstream, FULL), dynamic(kvlayers, FULL)),
    "without a config": (upstream.DynamicCache, kvlayers.DynamicCache),
    "sliding": (dynamic(upstream, SLIDING), dynamic(kvlayers, SLIDING)),
    "static": (static(upstream, FULL), static(kvlayers, FULL)),
    "static sliding": (static(upstream, SLIDING), static(kvlayers, SLIDING)),
    # Layers of transformers are the same where they are offloaded, which it does on no CPU.
    "offloaded": (dynamic(upstream, FULL), lambda: kvlayers.OffloadedCache(config=FULL)),
    "offloaded static": (static(upstream, FULL), lambda: kvlayers.OffloadedStaticCache(FULL, max_cache_len=ROOM)),
    "quanto": quantized("quanto"),
    "hqq": quantized("hqq"),
    "fp8": quantized("fp8"),
}
RECURRENT = {
    "recurrent": "linear_attention",
    "convolution": "conv",
    "hybrid": "hybrid",
    "hybrid sliding": "hybrid_sliding",
}
for kind, layer_type in RECURRENT.items():
    described = llama(layer_type, sliding_window=WINDOW)
    KINDS[kind] = dynamic(upstream, described), dynamic(kvlayers, described)
    KINDS[f"static {kind}"] = static(upstream, described), static(kvlayers, described)

ALL = tuple(KINDS)
ATTEND = tuple(kind for kind in ALL if not kind.endswith(("recurrent", "convolution")))
HYBRID = tuple(kind for kind in ALL if "hybrid" in kind)
STATIC = tuple(kind for kind in ALL if "static" in kind and kind in ATTEND)
QUANTIZED = ("quanto", "hqq", "fp8")
FILLED = tuple(STAGES)[1:]


@dataclasses.dataclass(frozen=True)
class Difference:
    """What is read otherwise on purpose.

    Attributes:
        name: the attribute, of a cache or of a layer.
        kinds: kinds of caches.
        stages: when it is read.
        theirs: what transformers has.
        ours: what kvlayers has.
        why: the reason.
        is_there: whether the installed version of transformers has it.
    """

    name: str
    kinds: tuple[str, ...]
    stages: tuple[str, ...]
    theirs: str
    ours: str
    why: str
    is_there: bool = True


RELEASE = versions.TRANSFORMERS.release
DIFFERENCES = [
    Difference(
        "cache.batch_size", ALL, FILLED, "-1 for caches that are not static", "the batch size",
        "every cache answers in the same way", compat.RENAMED_MAXIMA,
    ),
    Difference(
        "cache.max_batch_size", ALL, FILLED, "-1 for caches that are not static", "the batch size",
        "as `cache.batch_size`, whose former name it is", (5, 13) <= RELEASE < (5, 23),
    ),
    Difference(
        "cache.max_cache_len", HYBRID, tuple(STAGES), "-1 for static or sliding hybrid layers", "their capacity",
        "every cache answers in the same way", (5, 13) <= RELEASE < (5, 23),
    ),
    Difference(
        "cache.is_initialized", (*ATTEND,), ("reset",), "from 5.18 on false after `reset()`", "true",
        "`reset()` keeps the memory for states of the same form", RELEASE >= (5, 18),
    ),
    Difference(
        "cache.is_initialized", HYBRID, FILLED, "from 5.13 on always false", "true once there are states",
        "the attention of a hybrid layer can reserve memory", compat.MODELS_PASS_COLUMNS,
    ),
    Difference(
        "cache.is_linear", HYBRID, tuple(STAGES), "true for hybrid layers that are static or sliding", "false",
        "hybrid layers attend; transformers itself says so for the other hybrid layers",
        compat.MODELS_PASS_COLUMNS and RELEASE < (5, 24),
    ),
    Difference(
        "cache.is_compileable", ALL, tuple(STAGES), "true for static and recurrent layers",
        "true if the cache was made with `compiled=True`, or if there is an accelerator",
        "without `compiled=True`, eager code reads the tokens that are held, not the reservation",
    ),
    Difference(
        "layer.is_compileable", ALL, tuple(STAGES), "true for static layers", "the same as `cache.is_compileable`",
        "the same reason",
    ),
    Difference(
        "cache.is_croppable", ALL, tuple(STAGES), "false for static layers", "true", "they can be cropped",
        RELEASE >= (5, 17),
    ),
    Difference(
        "layer.is_croppable", ALL, tuple(STAGES), "false for static layers", "true", "they can be cropped",
        RELEASE >= (5, 17),
    ),
    Difference(
        "layer.is_initialized", ATTEND, ("reset",), "from 5.18 on false after `reset()`", "true",
        "the same reason as for the cache", RELEASE >= (5, 18),
    ),
    Difference(
        "layer.keys, layer.values", STATIC, FILLED, "the whole reservation", "the tokens that are held",
        "free slots hold no states; `layer.tensors()` of a static layer has the whole reservation",
    ),
    Difference(
        "layer.keys, layer.values", QUANTIZED, FILLED, "the residual in full precision, or an empty tensor",
        "all tokens, including quantized ones", "the layer holds all of them",
    ),
    Difference(
        "layer.keys, layer.values", ALL, ("reset",), "after `reset()` `None` (before 5.18 zeros)", "no tokens",
        "`reset()` keeps the memory",
    ),
    Difference(
        "layer.cumulative_length", STATIC, tuple(STAGES), "from 5.4 on a tensor that keeps counting",
        "an `int`, to which a smaller number can be assigned",
        "a number does not change after it is read; writing to a tensor in place would change an unused count",
        RELEASE >= (5, 4),
    ),
    Difference(
        "layer.record_past", tuple(kind for kind in ALL if kind not in ATTEND or kind in HYBRID), tuple(STAGES),
        "false, until `activate_past_recording()`", "true; `is_recording` has the meaning of transformers' attribute",
        "models then pass the states of every token to the layer, which counts them", compat.MODELS_PASS_COLUMNS,
    ),
    Difference(
        "layer.supports_early_init", HYBRID, tuple(STAGES), "false", "true",
        "the attention of a hybrid layer can reserve memory", compat.MODELS_PASS_COLUMNS,
    ),
    Difference(
        "layer.qtype, layer.optimizer, layer.quantizer", ("quanto", "hqq"), tuple(STAGES), "objects of the packages",
        "missing", "these objects are made for each block",
    ),
]  # fmt: skip


def shown(value: Any) -> str:
    """What is compared of a value: shapes and dtypes of tensors, numbers of scalars, and no addresses."""
    if isinstance(value, torch.Tensor):
        return f"tensor {list(value.shape)} of {value.dtype}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(shown, value))})"
    if isinstance(value, bool | int | float | str | torch.dtype | torch.device | None):
        return repr(value)
    return "callable" if callable(value) else "an object"


ABSTRACT = (compat.ATTENTION_LAYER, compat.LINEAR_LAYER, compat.QUANTO_LAYER, compat.HQQ_LAYER, compat.FP8_LAYER)


def readable(thing: Any) -> dict[str, str]:
    """Every public attribute that can be read, as it is shown, and which classes of transformers it is of."""
    found = {f"is a {base.__name__}": str(isinstance(thing, base)) for base in ABSTRACT}
    for name in dir(thing):
        # Layers themselves are compared one by one.
        if not name.startswith("_") and name != "layers":
            try:
                found[name] = shown(getattr(thing, name))
            except (AttributeError, IndexError, ValueError):
                continue
    return found


def take_in(cache: Any, kind: str, tokens: int) -> None:
    torch.manual_seed(tokens)
    if any(recurrent in kind for recurrent in RECURRENT):
        cache.update_conv_state(torch.randn(BATCH, 6, tokens), 0, conv_kernel_size=KERNEL)
        if "convolution" not in kind:
            cache.update_recurrent_state(torch.randn(BATCH, 3, 5), 0)
    if kind in ATTEND:
        states = torch.randn(2, BATCH, HEADS, tokens, HEAD_DIM)
        seen = int(cache.get_seq_length())
        told = (
            {"cache_kwargs": {"cache_position": torch.arange(seen, seen + tokens)}}
            if compat.UPDATES_BY_CACHE_POSITION
            else {}
        )
        cache.update(*states, 0, **told)


def need(kind: str) -> None:
    layer_type = RECURRENT.get(kind.removeprefix("static "))
    if layer_type is not None and not compat.MODELS_PASS_COLUMNS:
        pytest.skip(versions.kvlayers_recurrent_layers.kwargs["reason"])
    known = "STATIC_LAYER_TYPE_MAPPING" if kind.startswith("static ") else "DYNAMIC_LAYER_TYPE_MAPPING"
    if layer_type is not None and layer_type not in getattr(upstream, known):
        pytest.skip(f"transformers {transformers.__version__} has no layers of the kind '{kind}'")
    if kind in ("quanto", "hqq"):
        pytest.importorskip({"quanto": "optimum.quanto", "hqq": "hqq"}[kind], reason=f"it computes the codes of {kind}")
    if kind == "fp8":
        versions.need_since("5.23", "fp8 layers")


def differing(theirs: Any, ours: Any) -> Iterator[tuple[str, str, str]]:
    """Names, with what both have, of all that user code can read otherwise from a cache and its layers."""
    pairs = [("cache", theirs, ours), *(("layer", *pair) for pair in zip(theirs.layers, ours.layers, strict=True))]
    for what, one, other in pairs:
        found = readable(other)
        for name, value in readable(one).items():
            if found.get(name) != value:
                yield f"{what}.{name}", value, found.get(name, "missing")


def differences(kind: str) -> Iterator[tuple[str, str, str, str]]:
    """Names and stages, with what both have, of all that user code can read otherwise from a kind of cache."""
    theirs, ours = (make() for make in KINDS[kind])
    for stage, tokens in STAGES.items():
        for cache in (theirs, ours):
            if stage == "reset":
                cache.reset()
            elif tokens:
                take_in(cache, kind, tokens)
        for name, one, other in differing(theirs, ours):
            # Those of transformers with which offloaded ones are compared are not.
            if name != "cache.offloading":
                yield name, stage, one, other


def on_purpose(name: str, kind: str, stage: str) -> list[Difference]:
    return [
        difference
        for difference in DIFFERENCES
        if name in difference.name.split(", ") and kind in difference.kinds and stage in difference.stages
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_read_from_transformers_can_be_read_from_kvlayers(kind: str) -> None:
    need(kind)
    unlisted = [found for found in differences(kind) if not on_purpose(found[0], kind, found[1])]
    assert unlisted == []


def test_every_difference_that_is_listed_is_there() -> None:
    seen = set()
    for kind in KINDS:
        try:
            need(kind)
        except pytest.skip.Exception:
            continue
        for name, stage, _, _ in differences(kind):
            seen.update(map(DIFFERENCES.index, on_purpose(name, kind, stage)))
    assert [d.name for index, d in enumerate(DIFFERENCES) if d.is_there and index not in seen] == []


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "migration.md"
HEADER = "| attribute | transformers | kvlayers | why |\n|---|---|---|---|\n"


def test_the_table_in_the_docs_has_every_difference() -> None:
    rows = (
        f"| {', '.join(f'`{name}`' for name in d.name.split(', '))} | {d.theirs} | {d.ours} | {d.why} |\n"
        for d in DIFFERENCES
    )
    page = PAGE.read_text()
    before, _, rest = page.partition(HEADER)
    after = rest[rest.index("\n\n") + 1 :]
    expected = before + HEADER + "".join(rows) + after
    if os.environ.get("KVLAYERS_WRITE_DOCS"):
        PAGE.write_text(expected)
        page = expected
    assert page == expected


# After generate()

LISTED = {name for difference in DIFFERENCES for name in difference.name.split(", ")}


def generated_by_both(model: Any, **how: Any) -> tuple[Any, Any]:
    """What `generate()` returns of transformers and of kvlayers, with the same tokens."""
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, **how}
    expected = model.generate(prompt(2, 12), **options)
    with kvlayers.installed():
        output = model.generate(prompt(2, 12), **options)
    assert torch.equal(output.sequences, expected.sequences)
    return expected.past_key_values, output.past_key_values


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("family", ["lfm2_moe", "qwen3_next", "falcon_h1", "zaya", "inkling_text"])
def test_what_generate_returns_of_recurrent_models_shows_what_transformers_shows(family: str, static: bool) -> None:
    versions.need_recurrent_layers("falcon_h1")
    how = {"cache_implementation": "static", "disable_compile": True} if static else {}
    theirs, ours = generated_by_both(model_of(family), **how)
    assert [found for found in differing(theirs, ours) if found[0] not in LISTED] == []
    recurrent = [layer for layer in ours.layers if isinstance(layer, compat.LINEAR_LAYER)]
    assert recurrent
    assert all(layer.conv_states[0].shape[0] == 2 for layer in recurrent)


def test_what_generate_returns_of_an_encoder_decoder_shows_what_transformers_shows() -> None:
    expected, pair = generated_by_both(tiny_model("bart"))
    assert readable(pair)["is_updated"] == readable(expected)["is_updated"]
    assert set(readable(expected)) <= set(readable(pair))
    # Cross-attention of kvlayers makes its layers as they are needed, that of transformers has them from the start.
    listed = {*LISTED, "cache.layer_class_to_replicate"}
    for name in ("self_attention_cache", "cross_attention_cache"):
        theirs, ours = getattr(expected, name), getattr(pair, name)
        assert [found for found in differing(theirs, ours) if found[0] not in listed] == []


# What user code sets


def both_go_on(layer: Any, twin: Any) -> None:
    for tokens in (1, 3, 1):
        states = torch.randn(2, BATCH, HEADS, tokens, HEAD_DIM)
        for seen, expected in zip(layer.update(*states), twin.update(*states), strict=True):
            assert torch.equal(seen, expected)


def filled(layer: Any, tokens: int) -> Any:
    torch.manual_seed(0)
    layer.update(*torch.randn(2, BATCH, HEADS, tokens, HEAD_DIM))
    return layer


COUNTED: dict[str, Callable[[], Any]] = {
    "static": lambda: kvlayers.StaticLayer(ROOM),
    "offloaded": lambda: kvlayers.OffloadedLayer(kvlayers.StaticLayer(ROOM)),
    "hybrid": lambda: kvlayers.HybridLayer(kvlayers.StaticLayer(ROOM), kvlayers.LinearAttentionLayer()),
    "window": lambda: kvlayers.SlidingLayer(WINDOW),
    "static window": lambda: kvlayers.StaticSlidingLayer(ROOM, WINDOW),
    "dynamic": kvlayers.DynamicLayer,
    "quantized": kvlayers.QuantizedLayer,
}
RESERVED = ("static", "offloaded", "hybrid")


@pytest.mark.parametrize(
    ("kind", "tokens", "counts", "error", "said"),
    [
        *(
            (kind, 9, (10, -1), kvlayers.errors.RollbackError, "`length` must be from 0 to the 9 tokens")
            for kind in RESERVED
        ),
        *(
            (kind, 12, (3, 0, -2), kvlayers.errors.StateMismatchError, "states that are held, 7, got {}: use crop")
            for kind in ("window", "static window")
        ),
        *(
            (kind, 5, counts, error, said)
            for kind in ("dynamic", "quantized")
            for counts, error, said in (
                ((4, 6), kvlayers.errors.StateMismatchError, "are held, 5, got {}"),
                ((1.5,), kvlayers.OptionError, "`cumulative_length` must be a whole number"),
            )
        ),
    ],
)
def test_a_count_is_one_that_the_states_can_be_of(
    kind: str, tokens: int, counts: tuple[float, ...], error: type[Exception], said: str
) -> None:
    layer = filled(COUNTED[kind](), tokens)
    for wrong in counts:
        with pytest.raises(error, match=said.format(wrong)):
            layer.cumulative_length = wrong
    layer.cumulative_length = tokens
    assert layer.cumulative_length == layer.get_seq_length() == tokens
    both_go_on(layer, filled(COUNTED[kind](), tokens))


@pytest.mark.parametrize("kind", RESERVED)
def test_a_smaller_count_of_a_static_layer_is_a_rollback(kind: str) -> None:
    layer, twin = filled(COUNTED[kind](), 9), filled(kvlayers.StaticLayer(ROOM), 9)
    layer.cumulative_length = torch.tensor(6)
    twin.truncate(6)
    assert layer.cumulative_length == layer.get_seq_length() == 6
    assert layer.max_cache_len == ROOM
    both_go_on(layer, twin)


@pytest.mark.parametrize("kind", ["window", "static window"])
def test_a_full_window_may_be_of_a_longer_sequence(kind: str) -> None:
    """Whose keys may have been put in place, as many as the window holds."""
    layer = filled(COUNTED[kind](), 12)
    layer.cumulative_length = 15
    assert layer.get_mask_sizes(1) == (WINDOW, 15 - 7)
    layer.cumulative_length = 12
    both_go_on(layer, filled(COUNTED[kind](), 12))


@pytest.mark.parametrize("kind", ["dynamic", *RESERVED])
def test_a_layer_that_is_said_not_to_be_initialized_is_reset(kind: str) -> None:
    layer = COUNTED[kind]()
    with pytest.raises(kvlayers.errors.StateMismatchError, match="got True on an empty layer"):
        layer.is_initialized = True
    filled(layer, 4)
    layer.is_initialized = True
    assert layer.get_seq_length() == 4
    layer.is_initialized = False
    assert layer.get_seq_length() == 0
    both_go_on(layer, COUNTED[kind]())


@versions.kvlayers_recurrent_layers
@pytest.mark.parametrize("at_once", [False, True], ids=["by index", "at once"])
def test_states_that_are_assigned_to_a_recurrent_layer_are_gone_on_from(at_once: bool) -> None:
    """As libraries do that keep the states of a prompt, and put them into the layer of the next cache."""
    config = llama("linear_attention", "hybrid")
    config.num_hidden_layers = 2

    def step(cache: kvlayers.DynamicCache, tokens: int, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        states = torch.randn(2, BATCH, HEADS, tokens, HEAD_DIM)
        seen = [
            cache.update_conv_state(torch.randn(BATCH, 6, tokens), index, conv_kernel_size=KERNEL) for index in (0, 1)
        ]
        for index in (0, 1):
            held = cache.get_recurrent_state(index)
            new = torch.randn(BATCH, 3, 5)
            seen.append(cache.update_recurrent_state(new if held is None else held * 0.5 + new, index))
        return torch.cat([each.flatten() for each in (*seen, *cache.update(*states, 1))])

    source, used, new = (kvlayers.DynamicCache(config=config) for _ in range(3))
    step(source, 7, 0)
    step(used, 5, 1)
    for cache in (used, new):
        cache.layers[1].attention.reset()
        cache.layers[1].attention.update(source.layers[1].keys, source.layers[1].values)
        for layer, held in zip(cache.layers, source.layers, strict=True):
            if at_once:
                layer.conv_states = {0: held.conv_states[0].clone()}
                layer.recurrent_states = {0: held.recurrent_states[0].clone()}
            else:
                layer.conv_states[0] = held.conv_states[0]
                layer.recurrent_states[0] = held.recurrent_states[0]
            assert layer.is_conv_states_initialized == layer.is_recurrent_states_initialized == {0: True}
            assert layer.has_previous_state == {0: True}
            with pytest.raises(kvlayers.errors.LayerIndexError, match="`state_idx` must be a whole number from 0 to 0"):
                layer.conv_states[1] = held.conv_states[0]
        # What the layer could be put back to is no past of these states.
        with pytest.raises(kvlayers.errors.RollbackError):
            cache.truncate(5)
    twin = kvlayers.DynamicCache(config=config)
    twin.load_state(new.state())
    caches = source, used, new, twin, used.fork()
    for seed, tokens in ((2, 1), (3, 4)):
        expected, *seen = (step(cache, tokens, seed) for cache in caches)
        assert all(torch.equal(each, expected) for each in seen)
    new.layers[0].recurrent_states[0] = None
    assert new.layers[0].is_recurrent_states_initialized == {0: False}
