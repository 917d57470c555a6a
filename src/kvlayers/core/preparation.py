"""What an empty cache is told before the first tokens: the model, and which tokens are padding."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from kvlayers.core.adapted import adapted
from kvlayers.core.cache import Cache
from kvlayers.errors import OptionError, StateMismatchError
from kvlayers.rope.rotary import Rotary


def prepare_layers(cache: Cache, layers: list[Any], padding: Tensor | None) -> None:
    """Have an empty cache use these layers, unless its own differ from them in nothing but the padding.

    Args:
        cache: the cache.
        layers: layers that were made for the model and the padding.
        padding: tokens of padding before each sequence, int64 `[batch]`; `None` without padding.
    """
    if _settings_of(layers) == _settings_of(cache.layers):
        # Memory stays reserved, and recording goes on.
        for layer in cache.adapted_layers():
            layer.note_left_padding(padding)
        return
    is_recording = any(layer.is_recording for layer in cache.adapted_layers())
    Cache.__init__(cache, layers, None, **cache.offloading_options())
    if is_recording:
        cache.activate_past_recording()


def check_empty(cache: Cache) -> None:
    """Raise `StateMismatchError` if a cache has seen tokens."""
    if cache.get_seq_length():
        raise StateMismatchError(
            f"The cache must be empty, but it has seen {cache.get_seq_length()} tokens: reset it first."
        )


def check_rotary(rotary: object) -> None:
    """Raise `OptionError` if the option `rotary` is neither `None` nor a `Rotary`."""
    if rotary is not None and not isinstance(rotary, Rotary):
        raise OptionError(f"`rotary` must be a kvlayers.rope.rotary.Rotary, got a {type(rotary).__name__}.")


def _settings_of(layers: Iterable[Any]) -> list[Any]:
    """The settings of layers, as far as two caches for one model can differ in them."""
    parts = [adapted(layer).parts[0].unwrapped for layer in layers]
    return [(type(part.original), part.describe()) for part in parts]
