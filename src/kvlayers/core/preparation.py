"""What an empty cache is told before the first tokens: the model, and which tokens are padding."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.core.cache import Cache
from kvlayers.core.cache_layer import CacheLayer, adapted
from kvlayers.core.dense_store import may_share
from kvlayers.core.token_layer import DynamicLayer
from kvlayers.errors import OptionError, StateMismatchError, UnsupportedLayerError
from kvlayers.rope.rotary import Rotary
from kvlayers.upstream.model_types import config_of


class PreparedCache(Cache):
    """A cache whose layers are made for a model and for the padding of a batch, both of which it may be told later.

    Attributes:
        _options: how layers are made: a dataclass with the `left_padding` of each sequence.
        _rotary: how all layers rotate their keys; as the config says if it is `None`.
    """

    learns_padding = True
    _options: Any
    _rotary: Rotary | None

    def _begin(self, options: Any, config: object, rotary: Rotary | None, *placement: Any) -> None:
        """Do what remains to initialisers: `placement` has the last arguments of `Cache`.

        Raises:
            OptionError: `rotary` is no rotation.
            ConfigError: as `_layers_for`.
        """
        config = None if config is None else config_of(config)
        check_rotary(rotary)
        self._options, self._rotary = options, rotary
        layers = None if config is None else self._layers_for(config, options)
        Cache.__init__(self, layers, self._layer_without_config if layers is None else None, *placement)

    @abstractmethod
    def _layer_without_config(self) -> Any:
        """A layer of a model whose config is not known. Raises `ConfigError` if it must be."""

    @abstractmethod
    def _layers_for(self, config: Any, options: Any) -> list[Any]:
        """The layers of a model. Raises `ConfigError` if the model cannot have such a cache."""

    @override
    def prepare(self, config: object, attention_mask: Tensor | None = None) -> None:
        """Tell an empty cache which model it is for, and which tokens are padding.

        Args:
            config: config of the model, or the model.
            attention_mask: `[batch, tokens]`, 0 for padding on the left.

        Raises:
            StateMismatchError: tokens are held, or there is padding that is not on the left.
            ConfigError: as for the cache itself.
        """
        padding = self._options.left_padding if attention_mask is None else left_padding_of(attention_mask)
        options = replace(self._options, left_padding=padding)
        layers = self._layers_for(config_of(config), options)
        if self.length:
            raise StateMismatchError(
                f"The cache must be empty, got one that has seen {self.length} tokens: reset it first."
            )
        if _settings_of(layers) == _settings_of(self.layers):
            # Memory stays reserved, and recording goes on.
            for layer in self.adapted_layers():
                part: Any = layer.parts[0].unwrapped
                if "left_padding" in part.hints:
                    part.left_padding = padding
        else:
            is_recording = any(layer.is_recording for layer in self.adapted_layers())
            Cache.__init__(self, layers, None, **self.offloading_options())
            if is_recording:
                self.activate_past_recording()
        self._options = options

    @override
    def _layer_maker(self) -> Callable[[], Any]:
        return self._layer_without_config

    @override
    def layers_of_model(self, config: Any) -> list[Any]:
        return self._layers_for(config, self._options)

    @override
    def reset(self) -> None:
        """Forget all tokens, and the padding before them; the memory is kept for the next ones."""
        super().reset()
        self._options = replace(self._options, left_padding=None)


def drops_padding(layer: CacheLayer) -> bool:
    """Whether padding may be passed to a layer first, and dropped without a trace in what it holds of other tokens."""
    return _may_drop(layer) and may_share(layer.store)


def drop_padding(layer: CacheLayer, tokens: int) -> None:
    """Let a layer of one sequence forget its first `tokens` tokens, as if they had never been passed.

    Raises:
        UnsupportedLayerError: the layer cannot.
    """
    if _may_drop(layer):
        layer.store.drop_oldest(tokens)
    elif tokens:
        raise UnsupportedLayerError(
            f"`attention_mask` must have no padding for a {type(layer.original).__name__}, got {tokens} columns of it: "
            "pass each prompt without padding to a cache of its own, and merge() them."
        )


def _may_drop(layer: CacheLayer) -> TypeGuard[DynamicLayer]:
    # What is beside the store may count the tokens that are dropped.
    return isinstance(layer, DynamicLayer) and not layer.beside


def check_rotary(rotary: object) -> None:
    """Raise `OptionError` if the option `rotary` is neither `None` nor a `Rotary`."""
    if rotary is not None and not isinstance(rotary, Rotary):
        raise OptionError(
            f"`rotary` must be a kvlayers.rope.rotary.Rotary, got a {type(rotary).__name__}: make one, or pass config=."
        )


def _settings_of(layers: Iterable[Any]) -> list[Any]:
    """The settings of layers, as far as two caches for one model can differ in them."""
    parts = [adapted(layer).parts[0].unwrapped for layer in layers]
    return [(type(part.original), part.describe()) for part in parts]


PADDING_NAME = "left_padding"
"""The name of the padding of each sequence in a state."""


def left_padding_of(attention_mask: Tensor) -> Tensor | None:
    """Tokens of padding before each sequence of a mask `[batch, tokens]`, int64 `[batch]`; `None` without padding.

    A sequence that consists of padding only counts as unpadded, since it has no first token.

    Raises:
        StateMismatchError: the mask has another shape, or padding that is not on the left.
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2 or not attention_mask.numel():
        shape = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise StateMismatchError(f"`attention_mask` must be [batch, tokens], got {shape}: pass a mask of the tokens.")
    is_token = attention_mask.ne(0).to("cpu", torch.int8)
    if bool((is_token[:, 1:] < is_token[:, :-1]).any()):
        raise StateMismatchError(
            "A cache that does not hold every token needs padding on the left only, because masks go by position, but "
            "the mask has padding behind tokens: pad on the left, and do not pad the turns of a batch of chats (use "
            "one cache for each chat), or use a DynamicCache."
        )
    padding = is_token.argmax(dim=1)
    return padding if bool(padding.any()) else None


def padding_of(left_padding: Sequence[int] | Tensor | None) -> Tensor | None:
    """Tokens of padding before each sequence, int64 `[batch]` on the host; `None` without padding.

    Raises:
        OptionError: not a whole number, of at least 0, for each sequence.
    """
    if left_padding is None:
        return None
    try:
        padding = torch.as_tensor(left_padding)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_padding(left_padding) from error
    whole = not padding.dtype.is_floating_point and padding.dtype != torch.bool and not padding.dtype.is_complex
    if padding.dim() != 1 or not padding.numel() or not whole or bool((padding < 0).any()):
        raise _no_padding(left_padding)
    padding = padding.to("cpu", torch.int64, copy=True)
    return padding if bool(padding.any()) else None


def _no_padding(left_padding: object) -> OptionError:
    return OptionError(
        f"`left_padding` must be a count of tokens of at least 0 for each sequence, got {left_padding!r}: pass int64 "
        "`[batch]`."
    )
