"""The cache that keeps attention sinks and a window, for chats without an end."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from kvlayers.core.cache_layer import forwarded
from kvlayers.core.description import OptionsArgument, RotaryArgument
from kvlayers.core.from_config import HYBRID, dynamic_layers, with_attention
from kvlayers.core.named_caches import named, register, register_cache_class
from kvlayers.core.preparation import PreparedCache, padding_of
from kvlayers.errors import ConfigError
from kvlayers.quantized.quantization import Quantization
from kvlayers.rope.from_config import rotaries
from kvlayers.rope.rotary import Rotary
from kvlayers.sinks.sink_layer import SinkConfig, SinkLayer
from kvlayers.sinks.sink_tokens import check_sinks
from kvlayers.upstream import model_layers
from kvlayers.utils.options import checks_options
from kvlayers.utils.units import tokens


@register_cache_class
class SinkCache(PreparedCache):
    """Attention sinks: holds the first few tokens and the newest tokens, so that a chat may go on without an end.

    StreamingLLM, Xiao et al. 2023 (arXiv:2309.17453). `SinkLayer` says what is attended to. Layers of the model that
    slide a window of `window_length` tokens or fewer keep their own window.

    The config says how a model rotates its keys. It may also come later: `prepare` takes it, and `generate()` under
    `install()` passes it to a cache without a config.

    Example:
        >>> import kvlayers, transformers
        >>> config = transformers.LlamaConfig(num_hidden_layers=2)
        >>> cache = kvlayers.SinkCache(window_length=256, num_sink_tokens=4, config=config)
        >>> cache, cache.get_max_length()
        (SinkCache(2 x SinkLayer, 0 tokens, 0 B), 256)
        >>> kvlayers.SinkCache(256, config=transformers.GPT2Config())
        Traceback (most recent call last):
        kvlayers.errors.ConfigError: ...

    Args:
        window_length: tokens that a query attends to, the sinks and itself included: 4096, or "4k".
        num_sink_tokens: how many of them are sinks.
        config: config of the model, or the model.
        rotary: how the model's keys are rotated, for a model that kvlayers does not know.
        left_padding: tokens of padding before each sequence, beams included. `generate()` under `install()` finds them.
        quantization: how the window is held in packed codes: a `Quantization`, or a mapping of its options. Without it,
            the window is held in full precision. The sinks always are. Fixed scales of fp8 are its `key_scales` and
            `value_scales`, the same for all layers; it does not take the option `scales` of `QuantizedCache`.
        offloading: hold states on the host, and on their device only while they are attended to.
        offload_device: "cpu" for the host's memory, "disk" for memory-mapped files.
        offload_directory: the directory of these files, for "disk".

    Raises:
        OptionError: an option that does not exist, or a window that is not larger than the sinks.
        ConfigError: a model without RoPE, with a RoPE that depends on the length, or with an unknown RoPE.
    """

    made_with = (OptionsArgument("sinks", "_options", options=SinkConfig), RotaryArgument("rotary", "_rotary"))
    rotates_keys = True
    _options: SinkConfig
    is_compileable = False
    """At every token the sinks are rotated by another distance."""
    window_length = forwarded("_options")
    """Tokens that a query attends to, the sinks and itself included."""
    num_sink_tokens = forwarded("_options")
    """How many of them are sinks."""
    quantization = forwarded("_options")
    """How the window is held in packed codes, `None` for full precision."""

    @checks_options
    def __init__(
        self,
        window_length: int | str,
        num_sink_tokens: int = 4,
        config: object | None = None,
        rotary: Rotary | None = None,
        left_padding: Sequence[int] | Tensor | None = None,
        quantization: Quantization | Mapping[str, Any] | None = None,
        offloading: bool = False,
        offload_device: str = "cpu",
        offload_directory: str | os.PathLike[str] | None = None,
    ) -> None:
        window_length = tokens(window_length, "window_length")
        check_sinks(window_length, num_sink_tokens)
        packed = Quantization.of(quantization)
        # A window drops its oldest tokens, so no token of it could stay as a sink of the store.
        packed = None if packed is None else dataclasses.replace(packed, sink_tokens=0)
        options = SinkConfig(window_length, num_sink_tokens, packed, padding_of(left_padding))
        self._begin(options, config, rotary, offloading, False, offload_device, offload_directory)

    @override
    def _layer_without_config(self) -> SinkLayer:
        if self._rotary is None:
            raise ConfigError(
                "`config` must say how the model rotates its keys, got none: make the cache with "
                "config=model.config, call prepare(model.config), or generate() under kvlayers.install()."
            )
        return self._options.layer(self._rotary)

    @override
    def _layers_for(self, config: Any, options: SinkConfig) -> list[Any]:
        return sink_layers(config, options, self._rotary)

    @override
    def most_tokens(self, layer_idx: int | None = None) -> int:
        """Tokens that a query attends to; for a layer with a window of the model itself, the length of that window."""
        return self._options.window_length if layer_idx is None else super().most_tokens(layer_idx)


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
        kind = HYBRID.get(spec.layer_type, spec.layer_type)
        window = spec.options["sliding_window"] if kind == "sliding_attention" else 0
        if kind == "full_attention" or window > sink_config.window_length:
            forgetful = False
            sinks = sink_config.layer(rotary if rotations is None else rotations[index])
            layers[index] = with_attention(layers[index], sinks)
    if forgetful:
        raise ConfigError(
            f"`config` must have a layer that attends to more than {sink_config.window_length} tokens, got "
            f"{', '.join(sorted({spec.layer_type for spec in specs}))}: the model forgets by itself, so use a "
            "DynamicCache."
        )
    return layers


SINK_WINDOW = 256
"""The window length of a sink cache if the options give none, as in transformers 4."""

register("sink")(named(SinkCache, defaults={"window_length": SINK_WINDOW}))
