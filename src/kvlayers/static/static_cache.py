"""The cache that reserves its memory once."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import transformers
from typing_extensions import Self, override

from kvlayers.core.cache import Cache
from kvlayers.core.cache_layer import adapted
from kvlayers.core.description import Argument, DescriptionContext, OptionsArgument
from kvlayers.core.from_config import HYBRID, WINDOWED, CheckpointOptions, Checkpoints, Factory, layers_of
from kvlayers.core.named_caches import named, register, register_cache_class
from kvlayers.errors import ConfigError, OptionError
from kvlayers.static.slots import Buckets, MaskExtent
from kvlayers.static.static_layer import StaticLayer, StaticSlidingLayer
from kvlayers.upstream import model_layers, model_types
from kvlayers.upstream.model_layers import LayerSpec
from kvlayers.utils.options import check_accepted, checks_options
from kvlayers.utils.units import tokens


@dataclasses.dataclass(frozen=True)
class Reservation:
    """The memory that the layers of a static cache reserve, and how compiled code reads it; see `StaticLayer`."""

    max_cache_len: int
    max_batch_size: int | None = None
    buckets: Buckets | None = None
    grow: bool = False

    def facts(self) -> dict[str, Any]:
        """The fields as values that JSON has."""
        return dataclasses.asdict(self)

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """The reservation with these `facts`, which may contain other facts too."""
        buckets = None if facts["buckets"] is None else Buckets(**facts["buckets"])
        return cls(facts["max_cache_len"], facts["max_batch_size"], buckets, facts["grow"])


def static_layers(config: object, reserved: Reservation, checkpoints: CheckpointOptions = None) -> list[Any]:
    """A layer with a fixed reservation for each layer of a model; transformers' layers as in `dynamic_layers`."""
    # If one layer must refuse a token, the windows before it must refuse it too: an update that only some layers have
    # taken in could not be taken back.
    attending = [HYBRID.get(spec.layer_type, spec.layer_type) for spec in model_layers.layer_specs(config)]
    token_limit = reserved.max_cache_len if any(kind not in WINDOWED for kind in attending) else None

    def window(spec: LayerSpec) -> StaticSlidingLayer:
        return StaticSlidingLayer(
            sliding_window=spec.options["sliding_window"], token_limit=token_limit, **vars(reserved)
        )

    kinds: dict[str, Factory] = {
        "full_attention": lambda spec: StaticLayer(**vars(reserved)),
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
        or any(layer.traits.attends and store is None and not layer.traits.is_upstream for layer, store in reserved)
        or len({layer.capacity for layer, _ in fixed if not layer.is_sliding}) > 1
    )
    extents: dict[object, MaskExtent] = {}
    for layer, store in fixed:
        store.mask_extent = extents.setdefault(layer.sliding_window, store.mask_extent)
        store.mask_extent.mode = mode


def fixed_layers(layers: Iterable[Any]) -> Iterator[Any]:
    """The layers that attend over a reservation on the device that computes, also within a hybrid layer."""
    attending = (adapted(layer).parts[0] for layer in layers)
    return (layer for layer in attending if layer.reserved is not None)


@register_cache_class
class StaticCache(Cache, transformers.StaticCache):  # type: ignore[misc]
    """Reserves memory for `max_cache_len` tokens when the first tokens come, and keeps it at one address.

    Sliding and chunked attention reserve their window, and some room to move it in.

    Eager code attends to the tokens that are held. Compiled code attends to a bucket, the smallest of a few sizes that
    holds them. So it is compiled once for each bucket, and the cost of a step depends on the tokens that are held, not
    on the tokens that are reserved.

    Example:
        >>> import torch, kvlayers, transformers
        >>> config = transformers.LlamaConfig(num_hidden_layers=1)
        >>> cache = kvlayers.StaticCache(config, max_cache_len=4)
        >>> _ = cache.update(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), layer_idx=0)
        >>> cache.get_seq_length(), cache.get_max_length()
        (3, 4)
        >>> cache.update(torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8), layer_idx=0)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        kvlayers.errors.CapacityError: The reservation ... 4 tokens, ... 3 held and 2 new: reserve 5 or more ...

    Args:
        config: config of the model, or the model.
        max_cache_len: tokens to reserve, prompt and continuation together: 4096, or "4k".
        offloading: hold states on the host, and on their device only while they are attended to. The forward pass
            around such a cache is not compiled.
        offload_only_non_sliding: leave layers that attend within a window on the device.
        max_batch_size: sequences to reserve for; the batch size of the first tokens if it is not given. Fewer sequences
            use a part of the memory.
        buckets: sizes of the buckets that compiled code attends to.
        grow: take a larger reservation if this one is too small, instead of raising `CapacityError`. Compiled code
            cannot, and raises.
        compiled: whether `generate()` may compile the forward pass around this cache. The masks, which it makes outside
            of compiled code, are then masks of buckets. If it is not given, it is true if there is an accelerator, and
            false from the first states on if these are on the CPU. A function that you compile with the model and its
            masks in it does not need it.
        offload_device: "cpu" for the host's memory, "disk" for memory-mapped files.
        offload_directory: the directory of these files, for "disk".
        checkpoints: when recurrent layers take checkpoints and how many they keep, `Checkpoints` or a mapping of its
            arguments. Compiled code takes none.
        device: accepted because transformers accepts it, without effect: states stay on the device that they come on.
        dtype: accepted in the same way: states keep the dtype that they come in.

    Raises:
        UnsupportedLayerError: a layer cannot be offloaded, and offloading is asked for.
        OptionError: an option that does not exist, or a reservation of no tokens or no sequences.
        ConfigError: the config does not describe the model's layers, or `compiled=True` for a model that cannot be
            compiled around such a cache (those with alibi).
    """

    made_with = (OptionsArgument("reservation", "_reservation", options=Reservation), Argument("compiled"))
    is_static = True

    @checks_options
    def __init__(
        self,
        config: object,
        max_cache_len: int | str,
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
        max_batch_size: int | None = None,
        buckets: Buckets | None = None,
        grow: bool = False,
        compiled: bool | None = None,
        offload_device: str = "cpu",
        offload_directory: str | os.PathLike[str] | None = None,
        checkpoints: Checkpoints | Mapping[str, int | None] | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        check_accepted(dtype, device)
        config = model_types.config_of(config)
        self._reservation = Reservation(tokens(max_cache_len, "max_cache_len"), max_batch_size, buckets, grow)
        self._grows = grow
        layers = static_layers(config, self._reservation, checkpoints)
        super().__init__(layers, None, offloading, offload_only_non_sliding, offload_device, offload_directory)
        if not isinstance(compiled, bool | None):
            raise OptionError(f"`compiled` must be True, False or None, got {compiled!r}: pass one of them.")
        of_all = model_types.counts_on_the_whole_reservation(config)
        if compiled and of_all:
            raise ConfigError(
                "`config` must be of a model that attends to as many slots as its cache returns, got a "
                f"{type(config).__name__}, whose alibi is made for all that are reserved: leave out compiled=True."
            )
        # `None` is open until the first states show on which device they are.
        self.compiled = None if compiled is None and torch.accelerator.is_available() and not of_all else bool(compiled)

    @classmethod
    @override
    def from_description(cls, options: Mapping[str, Any], layers: list[Any], context: DescriptionContext) -> Self:
        cache = super().from_description(options, layers, context)
        cache._grows = cache._reservation.grow
        # Adapters of transformers' layers are made again, as they are told whether they grow.
        cache._adapted = ()
        # Whether masks are of buckets is a matter of the machine that goes on, too.
        cache.compiled = None if options["compiled"] and torch.accelerator.is_available() else False
        return cache

    @override
    def layers_of_model(self, config: Any) -> list[Any]:
        return static_layers(config, self._reservation)

    @property
    def compiled(self) -> bool:
        """Whether masks that are made outside of compiled code are masks of buckets."""
        return any(layer.reserved.mask_extent.mode.is_compiled for layer in fixed_layers(self.layers))

    @compiled.setter
    def compiled(self, compiled: bool | None) -> None:
        for layer in fixed_layers(self.layers):
            layer.reserved.mask_extent.mode.compiled = compiled

    def settle(self) -> None:
        """Let compiled steps go on from any number of tokens without another compilation.

        This is needed only between a compiled function that took in prompts of many different lengths and compiled
        steps, if no eager code of the cache runs between the two. `generate()` does it by itself.
        """
        for layer in fixed_layers(self.layers):
            layer.reserved.sync_slot()

    @override
    def for_cross_attention(self, encoder_length: int | None = None) -> Cache:
        """An empty cache for cross-attention in a model that has this cache for self-attention.

        Args:
            encoder_length: tokens to reserve. If it is not given, the cache grows.
        """
        if encoder_length is None:
            return super().for_cross_attention()
        # Its masks are the encoder's, and it is filled once, so compiled code too reads the tokens that are held.
        reservation = dataclasses.replace(self._reservation, max_cache_len=encoder_length)
        layers = [StaticLayer(**vars(reservation)) for _ in self.layers]
        return Cache(layers=layers, **self.offloading_options())


register("static")(named(StaticCache, "max_cache_len"))
