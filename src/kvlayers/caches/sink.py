"""The cache for chats without an end."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.caches.base import Cache
from kvlayers.caches.from_config import attention_part, sink_layers
from kvlayers.caches.registry import register_cache_class
from kvlayers.errors import ConfigError, OptionError, StateMismatchError
from kvlayers.layers import OffloadedLayer, SinkLayer, TokenLayer
from kvlayers.layers.sink import check_sinks, padding_of
from kvlayers.layers.sink_config import SinkConfig
from kvlayers.rope.rotary import Rotary
from kvlayers.stores.description import DescriptionContext
from kvlayers.stores.quantization import Quantization
from kvlayers.upstream.model_types import config_of
from kvlayers.utils.options import checks_options
from kvlayers.utils.units import tokens


@register_cache_class
class SinkCache(Cache):
    """Attention sinks: holds the first few tokens and the newest, so that a chat may go on for as long as it likes.

    StreamingLLM, Xiao et al. 2023 (arXiv:2309.17453). See `SinkLayer` for what is attended to. Windows that the model
    slides itself, and that are no longer than `window_length`, stay what they are.

    How a model rotates its keys is read from its config, which may also come later: a cache without one is given it by
    `generate()` under `install()`, and by `prepare`.

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
        quantization: how the window is held in packed codes: a `Quantization`, or its options. In full precision where
            not given; the sinks always are.
        offloading: hold states on the host, and on their device only while they are attended to.
        offload_device: "cpu" for the host's memory, "disk" for memory-mapped files.
        offload_directory: where the files are made, for "disk".

    Raises:
        OptionError: an option that does not exist, or a window that is not larger than the sinks.
        ConfigError: a model without RoPE, with one that depends on the length, or whose RoPE is not known.
    """

    rotates_keys = True

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
        if config is not None:
            config = config_of(config)
        if rotary is not None and not isinstance(rotary, Rotary):
            raise OptionError(f"expected rotary to be a kvlayers.Rotary, but saw a {type(rotary).__name__}.")
        self.window_length = window_length
        self.num_sink_tokens = num_sink_tokens
        self.quantization = _window_quantization(quantization)
        self._rotary = rotary
        self._padding = padding_of(left_padding)
        if config is None:
            super().__init__(None, self._layer_without_config, offloading, False, offload_device, offload_directory)
        else:
            super().__init__(self._layers_of(config), None, offloading, False, offload_device, offload_directory)

    def _layers_of(self, config: object) -> list[Any]:
        sinks = SinkConfig(self.window_length, self.num_sink_tokens, self.quantization, self._padding)
        return sink_layers(config, sinks, self._rotary)

    def _layer_without_config(self) -> SinkLayer:
        if self._rotary is None:
            raise ConfigError(
                "expected to know how the model rotates its keys, but the cache has no config: make it with "
                "config=model.config, call prepare(model.config), or generate() under kvlayers.install()."
            )
        sinks = SinkConfig(self.window_length, self.num_sink_tokens, self.quantization, self._padding)
        return sinks.layer(self._rotary)

    @override
    def prepare(self, config: object, attention_mask: Tensor | None = None) -> None:
        """Tell an empty cache which model it is for, and which tokens are padding, where it does not know.

        Args:
            config: config of the model, or the model.
            attention_mask: `[batch, tokens]`, 0 for padding on the left.

        Raises:
            StateMismatchError: tokens are held, or there is padding elsewhere than on the left.
            ConfigError: as for the cache itself.
        """
        if self.get_seq_length():
            raise StateMismatchError(
                f"expected an empty cache, but {self.get_seq_length()} tokens have been seen: reset it first."
            )
        config = config_of(config)
        padding = self._padding if attention_mask is None else left_padding_of(attention_mask)
        before, self._padding = self._padding, padding
        try:
            layers = self._layers_of(config)
        except Exception:
            self._padding = before
            raise
        if _settings(layers) == _settings(self.layers):
            # What it has reserved and records stays.
            for layer in _sinks(self.layers):
                layer.left_padding = padding
            return
        is_recording = any(layer.is_recording for layer in self.adapted_layers())
        Cache.__init__(self, layers, None, **self.offloading_options())
        if is_recording:
            self.activate_past_recording()

    @property
    @override
    def rotaries(self) -> tuple[Rotary, ...]:
        return super().rotaries if self._rotary is None else (self._rotary, *super().rotaries)

    @override
    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "window_length": self.window_length,
            "num_sink_tokens": self.num_sink_tokens,
            "quantization": None if self.quantization is None else self.quantization.facts(),
            "left_padding": None if self._padding is None else self._padding.tolist(),
            "rotary": None if self._rotary is None else self._rotary.fingerprint,
        }

    @classmethod
    @override
    def from_description(cls, options: Mapping[str, Any], layers: list[Any], context: DescriptionContext) -> Self:
        cache = super().from_description(options, layers, context)
        cache.window_length, cache.num_sink_tokens = options["window_length"], options["num_sink_tokens"]
        check_sinks(cache.window_length, cache.num_sink_tokens)
        quantization = options["quantization"]
        cache.quantization = None if quantization is None else Quantization(**quantization)
        cache._padding = padding_of(options["left_padding"])
        cache._rotary = context.rotary(options["rotary"])
        if options["grows"]:
            cache.make_more_with(cache._layer_without_config)
        return cache

    @classmethod
    @override
    def layers_from_config(cls, options: Mapping[str, Any], config: object, context: DescriptionContext) -> list[Any]:
        quantization = options["quantization"]
        sinks = SinkConfig(
            options["window_length"],
            options["num_sink_tokens"],
            None if quantization is None else Quantization(**quantization),
        )
        return sink_layers(config, sinks, context.rotary(options["rotary"]))

    @override
    def reset(self) -> None:
        """Forget all tokens, and the padding before them; the memory is kept for the next ones."""
        super().reset()
        self._padding = None

    @override
    def most_tokens(self, layer_idx: int | None = None) -> int:
        """Tokens that a query attends to; in a layer whose window the model slides itself, those of that window."""
        return self.window_length if layer_idx is None else super().most_tokens(layer_idx)

    @property
    def is_compileable(self) -> bool:
        """Never: the sinks are turned by a number of their own at every token."""
        return False


def left_padding_of(attention_mask: Tensor) -> Tensor | None:
    """Tokens of padding before each sequence of a mask `[batch, tokens]`, int64 `[batch]`; `None` where there is none.

    A sequence that is nothing but padding has none, as it has no first token either.

    Raises:
        StateMismatchError: it is no such mask, or has padding elsewhere.
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2 or not attention_mask.numel():
        shape = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise StateMismatchError(f"expected an attention_mask [batch, tokens], but saw {shape}.")
    is_token = attention_mask.ne(0).to("cpu", torch.int8)
    if bool((is_token[:, 1:] < is_token[:, :-1]).any()):
        raise StateMismatchError(
            "expected padding on the left alone, as masks go by position and sinks stand at those of tokens that have "
            "been evicted, but saw some behind tokens: pad on the left, and the turns of a batch of chats not at all "
            "(one cache for each), or use a DynamicCache."
        )
    padding = is_token.argmax(dim=1)
    return padding if bool(padding.any()) else None


def _sinks(layers: Sequence[Any]) -> list[SinkLayer]:
    return [part for part in map(_token_part, layers) if isinstance(part, SinkLayer)]


def _token_part(layer: Any) -> Any:
    part = attention_part(layer)
    return part.layer if isinstance(part, OffloadedLayer) else part


def _settings(layers: Sequence[Any]) -> list[Any]:
    """What layers were made with, for as much as two caches can differ in it."""
    parts = map(_token_part, layers)
    return [(type(part), part.describe() if isinstance(part, TokenLayer) else None) for part in parts]


def _window_quantization(given: Quantization | Mapping[str, Any] | None) -> Quantization | None:
    if given is None:
        return None
    if not isinstance(given, Quantization | Mapping):
        raise OptionError(
            f"expected quantization to be a kvlayers.Quantization or a mapping with its options, but saw a "
            f"{type(given).__name__}: pass, for example, quantization={{'nbits': 4}}."
        )
    quantization = given if isinstance(given, Quantization) else Quantization(**given)
    # A window drops its oldest tokens, so that none of those in it stays for good.
    return dataclasses.replace(quantization, sink_tokens=0)
