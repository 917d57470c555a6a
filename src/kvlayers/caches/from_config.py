"""Makes the layers of a cache from a model's config. This is the one place where the kinds of layers are chosen."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from kvlayers.errors import ConfigError, UnsupportedLayerError
from kvlayers.eviction.for_model import rotaries_for
from kvlayers.eviction.settings import found_rule
from kvlayers.layers.dynamic import DynamicLayer
from kvlayers.layers.evicting_config import EvictingConfig
from kvlayers.layers.hybrid import HybridLayer
from kvlayers.layers.linear.checkpoints import Checkpoints
from kvlayers.layers.linear.layer import LinearAttentionLayer
from kvlayers.layers.offloaded import OffloadedLayer
from kvlayers.layers.quantized import quantized_layer
from kvlayers.layers.recall import Recall, RecallLayer
from kvlayers.layers.sink import SinkConfig
from kvlayers.layers.sliding import SlidingLayer, window_room
from kvlayers.layers.static import StaticLayer, StaticSlidingLayer
from kvlayers.layers.token_layer import TokenLayer
from kvlayers.layers.upstream_adapter.adapter import adapted
from kvlayers.offload.prefetcher import Prefetcher
from kvlayers.rope.from_config import rotaries
from kvlayers.rope.rotary import Rotary
from kvlayers.stores.quantization import Quantization, QuantizationOfLayers, check_count
from kvlayers.stores.quantized import QuantizedStore
from kvlayers.stores.slots import Buckets, MaskExtent
from kvlayers.upstream import compat, model_layers, model_types
from kvlayers.upstream.model_layers import LayerSpec
from kvlayers.upstream.model_types import attention_scale

WINDOWED = ("sliding_attention", "chunked_attention")
"""Layer types that attend to a fixed number of tokens. For a cache they are one kind: only their masks differ."""

FULL = "full_attention"
"""The layer type that attends to every token."""

RECURRENT = ("linear_attention", "conv")
"""Layer types that have states of a fixed size and do not attend."""

HYBRID = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
"""Layer types that have states of a fixed size and attend, with the layer type of their attention."""

Factory = Callable[[LayerSpec], Any]
CheckpointOptions = Checkpoints | Mapping[str, int | None] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    """The memory that the layers of a static cache reserve, and how compiled code reads it; see `StaticLayer`."""

    max_cache_len: int
    max_batch_size: int | None = None
    buckets: Buckets | None = None
    grow: bool = False

    def options(self) -> dict[str, Any]:
        """The fields as arguments of a `StaticLayer`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def dynamic_layers(
    config: object,
    length_hint: int | None = None,
    checkpoints: CheckpointOptions = None,
    recall: Recall | None = None,
) -> list[Any]:
    """A layer that grows for each layer of a model; transformers' layer if kvlayers has no kind for the layer type.

    Args:
        config: config of the model.
        length_hint: the most tokens that are expected, if known.
        checkpoints: see `Checkpoints`, for layers with recurrent states.
        recall: how single queries choose the pages that they attend to in layers of full attention, if they do.
    """
    kinds: dict[str, Factory] = {
        "full_attention": lambda spec: full_attention_layer(length_hint, recall),
        **dict.fromkeys(WINDOWED, lambda spec: SlidingLayer(spec.options["sliding_window"])),
    }
    return _layers(config, kinds, checkpoints)


def full_attention_layer(length_hint: int | None = None, recall: Recall | None = None) -> DynamicLayer:
    """A layer that keeps every token in full precision; single queries choose pages of it if `recall` is given."""
    return DynamicLayer(length_hint) if recall is None else RecallLayer(recall, length_hint)


def packed_attention_layer(
    quantization: Quantization, length_hint: int | None = None, recall: Recall | None = None
) -> DynamicLayer:
    """As `full_attention_layer`, with most tokens in packed codes."""
    if recall is None:
        return quantized_layer(quantization, length_hint)
    return RecallLayer(recall, store=QuantizedStore(quantization, length_hint))


def every_token_layers(
    config: object, length_hint: int | None = None, checkpoints: CheckpointOptions = None
) -> list[Any]:
    """As `dynamic_layers`, but layers with a window hold every token, and leave the window to the mask."""
    kinds: dict[str, Factory] = dict.fromkeys(
        ("full_attention", *WINDOWED), lambda spec: DynamicLayer(length_hint=length_hint)
    )
    return _layers(config, kinds, checkpoints)


def static_layers(config: object, reserved: Reservation, checkpoints: CheckpointOptions = None) -> list[Any]:
    """A layer with a fixed reservation for each layer of a model; transformers' layers as in `dynamic_layers`."""
    # If one layer must refuse a token, the windows before it must refuse it too: an update that only some layers have
    # taken in could not be taken back.
    attending = [HYBRID.get(spec.layer_type, spec.layer_type) for spec in model_layers.layer_specs(config)]
    token_limit = reserved.max_cache_len if any(kind not in WINDOWED for kind in attending) else None

    def window(spec: LayerSpec) -> StaticSlidingLayer:
        return StaticSlidingLayer(
            sliding_window=spec.options["sliding_window"], token_limit=token_limit, **reserved.options()
        )

    kinds: dict[str, Factory] = {
        "full_attention": lambda spec: StaticLayer(**reserved.options()),
        **dict.fromkeys(WINDOWED, window),
    }
    return _layers(config, kinds, checkpoints, reserved.max_cache_len)


def _layers(
    config: object, kinds: Mapping[str, Factory], checkpoints: CheckpointOptions, max_cache_len: int | None = None
) -> list[Any]:
    """A layer for each layer of a model.

    Args:
        config: config of the model.
        kinds: for each layer type that attends, a function that makes the layer.
        checkpoints: see `Checkpoints`, for layers with recurrent states.
        max_cache_len: tokens that transformers' layers reserve, `None` for layers that grow.
    """
    policy, tokens_at_once = Checkpoints.of(checkpoints), model_types.tokens_at_once(config)

    def recurrent(spec: LayerSpec) -> LinearAttentionLayer:
        return LinearAttentionLayer(spec.options.get("number_of_states", 1), policy, tokens_at_once)

    every = dict(kinds)
    if compat.MODELS_PASS_COLUMNS:
        every |= dict.fromkeys(RECURRENT, recurrent)
        every |= dict.fromkeys(HYBRID, lambda spec: HybridLayer(kinds[HYBRID[spec.layer_type]](spec), recurrent(spec)))
    return [
        every[spec.layer_type](spec) if spec.layer_type in every else model_layers.upstream_layer(spec, max_cache_len)
        for spec in model_layers.layer_specs(config)
    ]


def placed(layer: Any, prefetcher: Prefetcher | None, only_non_sliding: bool) -> Any:
    """A layer of a cache: wrapped so that its states are held elsewhere, if the cache offloads and that is worth it.

    Recurrent states are small, and stay on the device.

    Args:
        layer: a layer of kvlayers or of transformers.
        prefetcher: the prefetcher of the cache, `None` if it does not offload.
        only_non_sliding: leave layers that attend within a window on the device.

    Raises:
        OptionError: it is no layer.
        UnsupportedLayerError: it attends, and its states cannot be moved.
    """
    known = adapted(layer)
    if prefetcher is None:
        return layer
    attention, *recurrent = known.parts
    if isinstance(attention, TokenLayer):
        stays = only_non_sliding and attention.is_sliding
        wrapped: Any = attention if stays else OffloadedLayer(attention, prefetcher)
        return HybridLayer(wrapped, cast("LinearAttentionLayer", recurrent[0])) if recurrent else wrapped
    if attention.attends:
        raise UnsupportedLayerError(
            f"expected layers that can be offloaded, but a {type(attention.original).__name__} holds tokens in a way "
            "of its own: leave out offloading."
        )
    return layer


def share_mask_extents(layers: Iterable[Any]) -> None:
    """Let the static layers of a cache agree on what attention reads, so that one mask serves all layers of a kind.

    Args:
        layers: all layers of the cache.
    """
    attending = [adapted(layer).parts[0] for layer in layers]
    reserved = [(layer.unwrapped, layer.unwrapped.reserved) for layer in attending]
    fixed = [(layer, store) for layer, store in reserved if store is not None]
    if not fixed:
        return
    mode = fixed[0][1].mask_extent.mode
    mode.recording = any(layer.record_past for layer, _ in fixed)
    # One mask cannot be of a bucket for one layer and of the tokens that are there for another. If layers of a kind
    # differ, all masks are of the tokens that are there.
    mode.mixed = (
        any(layer.unwrapped is not layer for layer in attending)
        or any(layer.attends and store is None and not layer.is_upstream for layer, store in reserved)
        or len({layer.capacity for layer, _ in fixed if not layer.is_sliding}) > 1
    )
    extents: dict[object, MaskExtent] = {}
    for layer, store in fixed:
        store.mask_extent = extents.setdefault(layer.sliding_window, store.mask_extent)
        store.mask_extent.mode = mode


def fixed_layers(layers: Iterable[Any]) -> list[Any]:
    """The layers that attend over a reservation on the device that computes, also within a hybrid layer."""
    return list(iter_fixed_layers(layers))


def iter_fixed_layers(layers: Iterable[Any]) -> Iterator[Any]:
    """As `fixed_layers`, one at a time."""
    for layer in layers:
        part = adapted(layer).parts[0]
        if part.reserved is not None:
            yield part


def quantized_layers(
    config: object,
    quantization: QuantizationOfLayers,
    quantize_sliding: bool,
    length_hint: int | None = None,
    checkpoints: CheckpointOptions = None,
    recall: Recall | None = None,
) -> list[Any]:
    """As `dynamic_layers`, with full attention quantized, and windows too if `quantize_sliding` is true.

    Raises:
        OptionError: bits were given for another number of layers.
    """
    check_count(quantization, len(model_layers.layer_specs(config)))

    def window(spec: LayerSpec) -> SlidingLayer:
        return SlidingLayer(spec.options["sliding_window"])

    def quantized_window(spec: LayerSpec) -> SlidingLayer:
        # A window drops its oldest tokens, so no token could stay as a sink.
        in_window = dataclasses.replace(quantization.of_layer(spec.index), sink_tokens=0)
        window = spec.options["sliding_window"]
        return SlidingLayer(window, QuantizedStore(in_window, window_room(window)))

    kinds: dict[str, Factory] = {
        "full_attention": lambda spec: packed_attention_layer(quantization.of_layer(spec.index), length_hint, recall),
        **dict.fromkeys(WINDOWED, quantized_window if quantize_sliding else window),
    }
    return _layers(config, kinds, checkpoints)


def sink_layers(config: object, sink_config: SinkConfig, rotary: Rotary | None = None) -> list[Any]:
    """As `dynamic_layers`, with sinks in full attention, and in windows that are longer than the sinks' window.

    Args:
        config: config of the model.
        sink_config: how sink layers are made.
        rotary: how the keys of all layers are rotated; as the config says if it is not given.

    Raises:
        ConfigError: the keys cannot be rotated, or no layer attends to more tokens than the sinks' window.
    """
    specs, rotations = model_layers.layer_specs(config), None if rotary is not None else rotaries(config)
    layers, forgetful = dynamic_layers(config), True
    for index, spec in enumerate(specs):
        if not _attends_beyond(spec, sink_config.window_length):
            continue
        forgetful = False
        sinks = sink_config.layer(rotary if rotations is None else rotations[index])
        layers[index] = _beside_recurrent(layers[index], sinks)
    if forgetful:
        raise ConfigError(
            f"expected a layer that attends to more than {sink_config.window_length} tokens, but saw "
            f"{', '.join(sorted({spec.layer_type for spec in specs}))}: the model forgets by itself, so use a "
            "DynamicCache."
        )
    return layers


def evicting_layers(config: object, evicting: EvictingConfig, rotary: Rotary | None = None) -> list[Any]:
    """As `dynamic_layers`, with full attention that evicts tokens. Layers with a window stay as they are.

    Args:
        config: config of the model.
        evicting: how evicting layers are made.
        rotary: how the keys of all layers are rotated; as the config says if it is not given.

    Raises:
        ConfigError: no layer has full attention, attention depends on the columns of tokens, the rule needs queries
            and the model caches latents, or the rule needs to know how keys are rotated, and kvlayers does not.
    """
    if model_types.goes_by_columns(config):
        raise ConfigError(
            f"The attention of '{model_types.decoder_config(config).model_type}' depends on how many tokens the cache "
            "holds before a token (ALiBi, relative positions, or local attention), so none of them may be evicted: use "
            "a DynamicCache."
        )
    specs, layers = model_layers.layer_specs(config), dynamic_layers(config)
    full = [index for index, spec in enumerate(specs) if HYBRID.get(spec.layer_type, spec.layer_type) == FULL]
    if not full:
        raise ConfigError(
            f"A cache evicts tokens of full attention, but the layers of the model are "
            f"{', '.join(sorted({spec.layer_type for spec in specs}))}: use a DynamicCache."
        )
    rule = found_rule(evicting.rule)[0]
    if rule.queries and model_types.caches_latents(config):
        raise ConfigError(
            f"The eviction rule {evicting.rule!r} needs queries, but '{model_types.decoder_config(config).model_type}' "
            "has multi-head latent attention, which caches latents and shows no queries that fit them: use a rule "
            "without queries, such as 'keydiff'."
        )
    rotations = rotaries_for(rule, config, rotary)
    made = evicting.layers([rotations[index] for index in full], attention_scale(config))
    for index, layer in zip(full, made, strict=True):
        layers[index] = _beside_recurrent(layers[index], layer)
    return layers


def _beside_recurrent(dynamic: Any, attention: TokenLayer) -> Any:
    """A layer with this attention, and with the recurrent part of `dynamic` if it has one.

    Raises:
        ConfigError: kvlayers does not hold the recurrent states of the layer.
    """
    layer = adapted(dynamic)
    if layer.is_recurrent and layer.is_upstream:
        raise ConfigError(
            f"expected layers whose recurrent states kvlayers holds, as from transformers 5.15 on, but saw a "
            f"{type(dynamic).__name__}: use a DynamicCache, or a newer transformers."
        )
    return HybridLayer(attention, dynamic.linear) if layer.is_recurrent else attention


def _attends_beyond(spec: LayerSpec, tokens: int) -> bool:
    kind = HYBRID.get(spec.layer_type, spec.layer_type)
    return kind == "full_attention" or (kind == "sliding_attention" and spec.options["sliding_window"] > tokens)
