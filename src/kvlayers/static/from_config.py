"""Static layers from a model's config, and what those of a cache agree on."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from kvlayers.core.adapted import adapted
from kvlayers.core.from_config import HYBRID, WINDOWED, CheckpointOptions, Factory, layers_of
from kvlayers.static.slots import Buckets, MaskExtent
from kvlayers.static.static_layer import StaticLayer, StaticSlidingLayer
from kvlayers.upstream import model_layers
from kvlayers.upstream.model_layers import LayerSpec


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
    return layers_of(config, kinds, checkpoints, reserved.max_cache_len)


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
