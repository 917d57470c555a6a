"""What an empty cache is told before the first tokens: the model, and which tokens are padding."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from kvlayers.core.cache import Cache
from kvlayers.core.cache_layer import CacheLayer
from kvlayers.core.dense_store import may_share
from kvlayers.core.dynamic_layer import DynamicLayer
from kvlayers.core.layer_list import adapted
from kvlayers.errors import OptionError, StateMismatchError, UnsupportedLayerError
from kvlayers.rope.rotary import Rotary


def prepare_layers(cache: Cache, layers: list[Any], padding: Tensor | None) -> None:
    """Have an empty cache use these layers, unless its own differ from them in nothing but the padding.

    Args:
        cache: the cache.
        layers: layers that were made for the model and the padding.
        padding: tokens of padding before each sequence, int64 `[batch]`; `None` without padding.

    Raises:
        StateMismatchError: the cache has seen tokens.
    """
    if cache.get_seq_length():
        raise StateMismatchError(
            f"The cache must be empty, got one that has seen {cache.get_seq_length()} tokens: reset it first."
        )
    if _settings_of(layers) == _settings_of(cache.layers):
        # Memory stays reserved, and recording goes on.
        for layer in cache.adapted_layers():
            part: Any = layer.parts[0].unwrapped
            if "left_padding" in part.hints:
                part.left_padding = padding
        return
    is_recording = any(layer.is_recording for layer in cache.adapted_layers())
    Cache.__init__(cache, layers, None, **cache.offloading_options())
    if is_recording:
        cache.activate_past_recording()


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
