"""Caches side by side as one batch, and what a decode loop passes to the model for it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.core.arguments import query_count
from kvlayers.core.cache import Cache
from kvlayers.core.cache_layer import rows_of
from kvlayers.core.preparation import drop_padding, left_padding_of
from kvlayers.errors import OptionError, StateMismatchError
from kvlayers.utils.options import checks_options


def merge(caches: Sequence[Cache]) -> Cache:
    """One cache with the sequences of several as its rows, whatever their lengths. The caches do not change.

    Each row goes on as if it were alone: it counts, evicts and packs its own tokens. `Rows` has the mask and the
    positions that the model must be passed.

    Args:
        caches: at least one, of one model, kind and settings, each with at least one token.

    Raises:
        OptionError: no caches, or something else.
        StateMismatchError: they differ in kind, settings, heads, dtype or device, or one is empty.
        UnsupportedLayerError: layers that cannot be rows, such as those of transformers.
    """
    if not isinstance(caches, list | tuple) or not caches or not all(isinstance(cache, Cache) for cache in caches):
        raise OptionError(
            f"`caches` must be a list of at least one cache of kvlayers, got {caches!r:.60}: pass [cache, other]."
        )
    merged: Cache = caches[0].fork()
    merged.extend(*caches[1:])
    return merged


class Rows:
    """The rows of a cache, and what a decode loop passes to the model beside it.

    Rows are aligned on the right, as in a batch that is padded on the left: the newest token of each row is in the last
    column. So masks have zeros on the left alone, and the position of a token is the number of its row's tokens before.
    A model that is given neither takes shorter rows for longer ones. Of pairs, masks of the encoder's output are padded
    on the left as well.

    Args:
        cache: the cache. It may change afterwards.
        attention_mask: `[batch, tokens]`, the mask of the tokens that the cache has seen, if they were padded on the
            left, and their positions did not count the padding. The padding is dropped from the cache.

    Raises:
        OptionError: `cache` is no cache of kvlayers.
        StateMismatchError: the mask is not that of the tokens that the cache has seen, or pads on the right.
        UnsupportedLayerError: there is padding that a layer cannot drop; nothing is changed.

    Example:
        >>> import kvlayers, torch
        >>> first, second = kvlayers.DynamicCache(), kvlayers.DynamicCache()
        >>> _ = first.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
        >>> _ = second.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0)
        >>> rows = kvlayers.Rows(kvlayers.merge([first, second]))
        >>> rows.lengths, rows.position_ids().tolist(), rows.attention_mask().tolist()
        ((3, 1), [[3], [1]], [[1, 1, 1, 1], [0, 0, 1, 1]])
    """

    @checks_options
    def __init__(self, cache: Cache, attention_mask: Tensor | None = None) -> None:
        if not isinstance(cache, Cache):
            raise OptionError(f"`cache` must be a cache of kvlayers, got a {type(cache).__name__}: pass a cache.")
        self.cache = cache
        if attention_mask is not None:
            self._drop_padding(attention_mask)

    def _drop_padding(self, attention_mask: Tensor) -> None:
        padding, lengths = left_padding_of(attention_mask), self.lengths
        if tuple(attention_mask.shape) != (len(lengths), max(lengths, default=0)) or len(set(lengths)) > 1:
            raise StateMismatchError(
                f"`attention_mask` must be [{len(lengths)}, {max(lengths, default=0)}], a batch that was padded to one "
                f"length, got {list(attention_mask.shape)} for rows of {list(lengths)} tokens: pass the mask of the "
                "tokens that the cache has seen."
            )
        if padding is None:
            return
        part = self.cache.self_attention
        rows = [rows_of([layer]) for layer in part.adapted_layers()]
        for of_layer in rows:
            for row, tokens in zip(of_layer, padding.tolist(), strict=False):
                drop_padding(row, tokens)
        part.replace_layers(
            [
                of_layer[0].side_by_side(of_layer) if of_layer else layer
                for of_layer, layer in zip(rows, part.adapted_layers(), strict=True)
            ]
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that each row has seen and not rolled back, `[batch]`."""
        return self.cache.row_lengths

    def attention_mask(self, new_tokens: int = 1, device: torch.device | str | None = None) -> Tensor:
        """The mask of the next pass, int64 `[batch, longest row + new_tokens]`: 0 in front of shorter rows.

        Models without attention take masks of the new tokens alone, `[batch, new_tokens]`.

        Args:
            new_tokens: tokens that the pass adds to each row.
            device: where the mask is made. Default: the device of the cache.
        """
        device = self._device if device is None else device
        attends = any(layer.traits.attends for layer in self.cache.self_attention.adapted_layers())
        lengths = self.lengths if attends else [0] * len(self.lengths)
        columns = max(lengths, default=0) + query_count(new_tokens, "`new_tokens`")
        first = columns - new_tokens - torch.tensor(lengths, device=device)
        return (torch.arange(columns, device=device) >= first[:, None]).long()

    def position_ids(self, new_tokens: int = 1, device: torch.device | str | None = None) -> Tensor:
        """Positions of the next tokens of each row, int64 `[batch, new_tokens]`; arguments as of `attention_mask`."""
        device = self._device if device is None else device
        lengths, origins = self.lengths, self.cache.origins
        of_each = zip(origins * (len(lengths) // len(origins)), lengths, strict=True)
        next_ones = [origin.first_position + length for origin, length in of_each]
        return torch.tensor(next_ones, device=device)[:, None] + torch.arange(
            query_count(new_tokens, "`new_tokens`"), device=device
        )

    @property
    def _device(self) -> Any:
        layers = self.cache.self_attention.adapted_layers()
        return next((layer.device for layer in layers if layer.device is not None), None)
