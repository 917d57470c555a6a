"""From what a model config says to the layers of a cache: the one table."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvlayers.errors import ConfigError, UnsupportedLayerError
from kvlayers.layers.dynamic import DynamicLayer
from kvlayers.layers.hybrid import HybridLayer
from kvlayers.layers.linear.checkpoints import Checkpoints
from kvlayers.layers.linear.layer import LinearAttentionLayer
from kvlayers.layers.offloaded import OffloadedLayer
from kvlayers.layers.quantized import quantized_layer
from kvlayers.layers.sink_config import SinkConfig
from kvlayers.layers.sliding import SlidingLayer, window_room
from kvlayers.layers.static import StaticLayer
from kvlayers.layers.static_sliding import StaticSlidingLayer
from kvlayers.layers.token_layer import TokenLayer
from kvlayers.offload.prefetcher import Prefetcher
from kvlayers.rope.from_config import rotaries
from kvlayers.rope.rotary import Rotary
from kvlayers.stores.buckets import Buckets
from kvlayers.stores.layerwise_quantization import QuantizationOfLayers, check_count
from kvlayers.stores.masking import MaskExtent
from kvlayers.stores.quantized import QuantizedStore
from kvlayers.upstream import compat, model_layers, model_types
from kvlayers.upstream.model_layers import LayerSpec

WINDOWED = ("sliding_attention", "chunked_attention")
"""Layer types that look back a fixed number of tokens. For a cache they are one kind: only their masks differ."""

RECURRENT = ("linear_attention", "conv")
"""Layer types that have states of a fixed size, and do not attend."""

HYBRID = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
"""Layer types that have such states and attend, and how they attend."""

Factory = Callable[[LayerSpec], Any]
CheckpointOptions = Checkpoints | Mapping[str, int | None] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    """What the layers of a static cache reserve, and how compiled code reads it; see `StaticLayer`."""

    max_cache_len: int
    max_batch_size: int | None = None
    buckets: Buckets | None = None
    grow: bool = False

    def options(self) -> dict[str, Any]:
        """The arguments that it was made of, which are those of a `StaticLayer`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def dynamic_layers(config: object, length_hint: int | None = None, checkpoints: CheckpointOptions = None) -> list[Any]:
    """Layers that grow, for each layer of a model; transformers' own where kvlayers has no kind for the type.

    Args:
        config: config of the model.
        length_hint: the most tokens that are expected, where known.
        checkpoints: of layers with recurrent states, see `Checkpoints`.
    """
    kinds: dict[str, Factory] = {
        "full_attention": lambda spec: DynamicLayer(length_hint=length_hint),
        **dict.fromkeys(WINDOWED, lambda spec: SlidingLayer(spec.options["sliding_window"])),
    }
    return _layers(config, kinds, checkpoints)


def every_token_layers(
    config: object, length_hint: int | None = None, checkpoints: CheckpointOptions = None
) -> list[Any]:
    """As `dynamic_layers`, but what attends within a window holds every token, and leaves the window to its mask."""
    kinds: dict[str, Factory] = dict.fromkeys(
        ("full_attention", *WINDOWED), lambda spec: DynamicLayer(length_hint=length_hint)
    )
    return _layers(config, kinds, checkpoints)


def static_layers(config: object, reserved: Reservation, checkpoints: CheckpointOptions = None) -> list[Any]:
    """Layers with a fixed reservation, for each layer of a model; transformers' own as in `dynamic_layers`."""
    # Where one layer must refuse a token, the windows before it must too: an update that some layers have taken in and
    # others have not could not be taken back.
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
    """A layer for each layer of a model: by `kinds` where it attends, and with a recurrent state where it has one."""
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


def attention_part(layer: Any) -> Any:
    """The layer that attends within a hybrid one; else the layer itself."""
    return layer.attention if isinstance(layer, HybridLayer) else layer


def recurrent_part(layer: Any) -> LinearAttentionLayer | None:
    """The layer of ours that has the recurrent states of a layer, where there is one."""
    part = layer.linear if isinstance(layer, HybridLayer) else layer
    return part if isinstance(part, LinearAttentionLayer) else None


def fixed_layers(layers: Iterable[Any]) -> list[StaticLayer | StaticSlidingLayer]:
    """Those of the layers that attend over a fixed reservation, hybrid ones included."""
    return [layer for layer in map(attention_part, layers) if isinstance(layer, StaticLayer | StaticSlidingLayer)]


def share_mask_extents(layers: Sequence[Any]) -> None:
    """Let the static layers of a cache agree on what attention reads: a mask made for one of a kind is used by all."""
    attending = [attention_part(layer) for layer in layers]
    held = [layer.layer if isinstance(layer, OffloadedLayer) else layer for layer in attending]
    fixed = fixed_layers(held)
    if not fixed:
        return
    mode = fixed[0].reserved.mask_extent.mode
    mode.recording = any(isinstance(layer, StaticSlidingLayer) and layer.record_past for layer in fixed)
    # One mask cannot be of a bucket and of what is there: where layers of a kind differ, all are of what is there.
    mode.mixed = (
        any(isinstance(layer, OffloadedLayer) for layer in attending)
        or any(isinstance(layer, TokenLayer) and layer not in fixed for layer in attending)
        or len({layer.max_cache_len for layer in fixed if isinstance(layer, StaticLayer)}) > 1
    )
    extents: dict[object, MaskExtent] = {}
    for layer in fixed:
        kind = layer.sliding_window if isinstance(layer, StaticSlidingLayer) else None
        store = layer.reserved
        store.mask_extent = extents.setdefault(kind, store.mask_extent)
        store.mask_extent.mode = mode


def offloaded(layer: Any, prefetcher: Prefetcher, only_non_sliding: bool) -> Any:
    """A layer, its states at home elsewhere where that is worth it; recurrent states are small, and stay.

    Raises:
        UnsupportedLayerError: it holds tokens in a way of its own, which cannot be moved.
    """
    if isinstance(layer, HybridLayer):
        return HybridLayer(offloaded(layer.attention, prefetcher, only_non_sliding), layer.linear)
    if isinstance(layer, TokenLayer):
        return layer if only_non_sliding and layer.is_sliding else OffloadedLayer(layer, prefetcher)
    if isinstance(layer, compat.ATTENTION_LAYER):
        raise UnsupportedLayerError(
            f"expected layers that can be offloaded, but a {type(layer).__name__} holds tokens in a way of its own: "
            "leave out offloading."
        )
    return layer


def quantized_layers(
    config: object,
    quantization: QuantizationOfLayers,
    quantize_sliding: bool,
    length_hint: int | None = None,
    checkpoints: CheckpointOptions = None,
) -> list[Any]:
    """As `dynamic_layers`, with full attention quantized, and windows as well where `quantize_sliding` says so.

    Raises:
        OptionError: bits were given for another number of layers.
    """
    check_count(quantization, len(model_layers.layer_specs(config)))

    def window(spec: LayerSpec) -> SlidingLayer:
        return SlidingLayer(spec.options["sliding_window"])

    def quantized_window(spec: LayerSpec) -> SlidingLayer:
        # A window drops its oldest tokens, so that none of them stays for good.
        in_window = dataclasses.replace(quantization.of_layer(spec.index), sink_tokens=0)
        window = spec.options["sliding_window"]
        return SlidingLayer(window, QuantizedStore(in_window, window_room(window)))

    kinds: dict[str, Factory] = {
        "full_attention": lambda spec: quantized_layer(quantization.of_layer(spec.index), length_hint),
        **dict.fromkeys(WINDOWED, quantized_window if quantize_sliding else window),
    }
    return _layers(config, kinds, checkpoints)


def sink_layers(config: object, sinking: SinkConfig, rotary: Rotary | None = None) -> list[Any]:
    """As `dynamic_layers`, with sinks in full attention, and in windows that are longer than those of the sinks.

    Args:
        config: config of the model.
        sinking: how sink layers are made.
        rotary: how the keys of all layers are rotated, as the config says where not given.

    Raises:
        ConfigError: keys cannot be turned, or no layer attends to more than the window.
    """
    specs, turns = model_layers.layer_specs(config), None if rotary is not None else rotaries(config)
    layers, forgetful = dynamic_layers(config), True
    for index, spec in enumerate(specs):
        if not _attends_beyond(spec, sinking.window_length):
            continue
        forgetful = False
        if isinstance(layers[index], compat.LINEAR_LAYER) and recurrent_part(layers[index]) is None:
            raise ConfigError(
                f"expected layers whose recurrent states kvlayers holds, as from transformers 5.15 on, but saw a "
                f"{type(layers[index]).__name__}: use a DynamicCache, or a newer transformers."
            )
        attention = sinking.layer(rotary if turns is None else turns[index])
        linear = recurrent_part(layers[index])
        layers[index] = attention if linear is None else HybridLayer(attention, linear)
    if forgetful:
        raise ConfigError(
            f"expected a layer that attends to more than {sinking.window_length} tokens, but saw "
            f"{', '.join(sorted({spec.layer_type for spec in specs}))}: the model forgets by itself, so use a "
            "DynamicCache."
        )
    return layers


def _attends_beyond(spec: LayerSpec, tokens: int) -> bool:
    kind = HYBRID.get(spec.layer_type, spec.layer_type)
    return kind == "full_attention" or (kind == "sliding_attention" and spec.options["sliding_window"] > tokens)


def held_layer(layer: Any) -> Any:
    """The layer itself, without what moves it between devices."""
    return layer.layer if isinstance(layer, OffloadedLayer) else layer
