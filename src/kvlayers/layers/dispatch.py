"""From what a model config says to the layers of a cache: the one table."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from .. import compat
from ..compat import LayerSpec
from ..errors import UnsupportedLayerError
from ..offload.prefetcher import Prefetcher
from ..stores.buckets import Buckets
from ..stores.quantization import Quantization
from ..stores.quantized import QuantizedStore
from ..stores.reading import Reading
from .dynamic import DynamicLayer
from .offloaded import OffloadedLayer
from .quantized import QuantizedLayer
from .sliding import SlidingLayer
from .static import StaticLayer
from .static_sliding import StaticSlidingLayer
from .token_layer import TokenLayer

WINDOWED = ("sliding_attention", "chunked_attention")
"""Layer types that look back a fixed number of tokens. For a cache they are one kind: only their masks differ."""

DynamicFactory = Callable[[LayerSpec, int | None], Any]
StaticFactory = Callable[[LayerSpec, "Reservation", int | None], Any]


@dataclasses.dataclass(frozen=True)
class Reservation:
    """What the layers of a static cache reserve, and how compiled code reads it; see `StaticLayer`."""

    max_cache_len: int
    max_batch_size: int | None = None
    buckets: Buckets | None = None
    grow: bool = False


DYNAMIC: dict[str, DynamicFactory] = {
    "full_attention": lambda spec, length_hint: DynamicLayer(length_hint=length_hint),
    **dict.fromkeys(WINDOWED, lambda spec, length_hint: SlidingLayer(spec.options["sliding_window"])),
}
STATIC: dict[str, StaticFactory] = {
    "full_attention": lambda spec, reserved, token_limit: StaticLayer(**vars(reserved)),
    **dict.fromkeys(
        WINDOWED,
        lambda spec, reserved, token_limit: StaticSlidingLayer(
            sliding_window=spec.options["sliding_window"], token_limit=token_limit, **vars(reserved)
        ),
    ),
}


def dynamic_layers(config: object, length_hint: int | None = None) -> list[Any]:
    """Layers that grow, for each layer of a model; transformers' own where kvlayers has no kind for the type."""
    return [
        DYNAMIC[spec.layer_type](spec, length_hint) if spec.layer_type in DYNAMIC else compat.upstream_layer(spec)
        for spec in compat.layer_specs(config)
    ]


def static_layers(config: object, reserved: Reservation) -> list[Any]:
    """Layers with a fixed reservation, for each layer of a model; transformers' own as in `dynamic_layers`."""
    specs = compat.layer_specs(config)
    # Where one layer must refuse a token, the windows before it must too: an update that some layers have taken in and
    # others have not could not be taken back.
    holds_all = any(spec.layer_type not in WINDOWED for spec in specs)
    token_limit = reserved.max_cache_len if holds_all else None
    return [
        STATIC[spec.layer_type](spec, reserved, token_limit)
        if spec.layer_type in STATIC
        else compat.upstream_layer(spec, reserved.max_cache_len)
        for spec in specs
    ]


def share_readings(layers: Sequence[Any]) -> None:
    """Let the static layers of a cache agree on what attention reads: a mask made for one of a kind is used by all."""
    held = [layer.layer if isinstance(layer, OffloadedLayer) else layer for layer in layers]
    fixed = [layer for layer in held if isinstance(layer, StaticLayer | StaticSlidingLayer)]
    if not fixed:
        return
    mode = fixed[0].reserved.reading.mode
    mode.recording = any(isinstance(layer, StaticSlidingLayer) and layer.record_past for layer in fixed)
    # One mask cannot be of a bucket and of what is there: where layers of a kind differ, all are of what is there.
    mode.mixed = (
        any(isinstance(layer, OffloadedLayer) for layer in layers)
        or any(isinstance(layer, TokenLayer) and layer not in fixed for layer in layers)
        or len({layer.max_cache_len for layer in fixed if isinstance(layer, StaticLayer)}) > 1
    )
    readings: dict[object, Reading] = {}
    for layer in fixed:
        kind = layer.sliding_window if isinstance(layer, StaticSlidingLayer) else None
        store = layer.reserved
        store.reading = readings.setdefault(kind, store.reading)
        store.reading.mode = mode


def offloaded(layer: Any, prefetcher: Prefetcher, only_non_sliding: bool) -> Any:
    """A layer, its states at home elsewhere where that is worth it; recurrent states are small, and stay.

    Raises:
        UnsupportedLayerError: it holds tokens in a way of its own, which cannot be moved.
    """
    if isinstance(layer, TokenLayer):
        return layer if only_non_sliding and layer.is_sliding else OffloadedLayer(layer, prefetcher)
    if isinstance(layer, compat.ATTENTION_LAYER):
        raise UnsupportedLayerError(
            f"expected layers that can be offloaded, but a {type(layer).__name__} holds tokens in a way of its own: "
            "leave out offloading."
        )
    return layer


def quantized_layers(
    config: object, quantization: Quantization, quantize_sliding: bool, length_hint: int | None = None
) -> list[Any]:
    """As `dynamic_layers`, with full attention quantized, and windows as well where `quantize_sliding` says so."""
    # A window drops its oldest tokens, so that none of them stays for good.
    in_window = dataclasses.replace(quantization, sink_tokens=0)

    def window(spec: LayerSpec) -> SlidingLayer:
        return SlidingLayer(spec.options["sliding_window"], QuantizedStore(in_window) if quantize_sliding else None)

    kinds: dict[str, Callable[[LayerSpec], Any]] = {
        "full_attention": lambda spec: QuantizedLayer(quantization, length_hint),
        **dict.fromkeys(WINDOWED, window),
    }
    return [
        kinds[spec.layer_type](spec) if spec.layer_type in kinds else compat.upstream_layer(spec)
        for spec in compat.layer_specs(config)
    ]
