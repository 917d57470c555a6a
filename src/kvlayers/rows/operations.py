"""Rows of caches: merged, taken out, dropped, and rolled back each by itself."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.core.cache import Cache
from kvlayers.core.layer_operations import LayerOperations
from kvlayers.errors import BatchIndexError, OptionError, RollbackError, StateMismatchError
from kvlayers.rows.dense_rows import share_places


class Rows:
    """The rows of a cache, and what a decode loop passes to the model beside it.

    Rows are aligned on the right, as in a batch that is padded on the left: the newest token of each row is in the last
    column. So masks have zeros on the left alone, and the position of a token is the number of its row's tokens before.

    Args:
        cache: the cache. It may change; nothing of it is kept here.

    Example:
        >>> import kvlayers, torch
        >>> first, second = kvlayers.DynamicCache(), kvlayers.DynamicCache()
        >>> _ = first.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
        >>> _ = second.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0)
        >>> rows = kvlayers.Rows(kvlayers.merge([first, second]))
        >>> rows.lengths, rows.position_ids().tolist(), rows.attention_mask().tolist()
        ((3, 1), [[3], [1]], [[1, 1, 1, 1], [0, 0, 1, 1]])
    """

    def __init__(self, cache: Cache) -> None:
        if not isinstance(cache, Cache):
            raise OptionError(f"`cache` must be a cache of kvlayers, got a {type(cache).__name__}: pass a cache.")
        self.cache = cache

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that each row has seen and not rolled back, `[batch]`."""
        return lengths_of(self.cache)

    def attention_mask(self, new_tokens: int = 1, device: torch.device | str | None = None) -> Tensor:
        """The mask of the next pass, int64 `[batch, longest row + new_tokens]`: 0 in front of shorter rows.

        Args:
            new_tokens: tokens that the pass adds to each row.
            device: where the mask is made.
        """
        lengths = torch.tensor(self.lengths, device=device)
        columns = max(self.lengths) + new_tokens
        first = columns - new_tokens - lengths
        return (torch.arange(columns, device=device) >= first[:, None]).long()

    def position_ids(self, new_tokens: int = 1, device: torch.device | str | None = None) -> Tensor:
        """Positions of the next tokens of each row, int64 `[batch, new_tokens]`; arguments as of `attention_mask`."""
        return torch.tensor(self.lengths, device=device)[:, None] + torch.arange(new_tokens, device=device)


def _parts(cache: Cache) -> tuple[Cache, ...]:
    """The caches that have layers: the cache, or both parts of a pair."""
    return cache._parts() if cache.is_pair else (cache,)


def lengths_of(cache: Cache) -> tuple[int, ...]:
    """Tokens that each row of a cache has seen, `[batch]`; empty before the first states."""
    for layer in cache.self_attention.adapted_layers():
        lengths = layer.row_lengths
        if lengths and None not in lengths and (layer.attends or layer.length):
            return lengths
    return ()


def merge(caches: Sequence[Cache]) -> Cache:
    """One cache with the sequences of several as its rows, whatever their lengths.

    Each row goes on as if it were alone: it counts, evicts and packs its own tokens. The caches do not change.

    Args:
        caches: at least one, of one model and one kind, each with at least one token.

    Raises:
        OptionError: no caches, or something else.
        StateMismatchError: they differ in kind, settings, heads, dtype or device, or one is empty.
        UnsupportedLayerError: layers that cannot be rows, such as those of transformers.
    """
    if not isinstance(caches, list | tuple) or not caches or not all(isinstance(cache, Cache) for cache in caches):
        raise OptionError(f"`caches` must be a list of at least one cache of kvlayers, got {caches!r}: pass caches.")
    _check_alike(caches)
    merged = caches[0].fork()
    for part, *parts in zip(_parts(merged), *map(_parts, caches), strict=True):
        _let_have(part, [_rows_of(layers) for layers in zip(*(own.adapted_layers() for own in parts), strict=True)])
    return merged


def _rows_of(layers: Sequence[LayerOperations]) -> list[LayerOperations]:
    """A layer for each sequence of several layers."""
    return [layer.row(index) for layer in layers for index in range(layer.batch_size or 0)]


def _let_have(part: Cache, rows: Sequence[Sequence[LayerOperations]]) -> None:
    """Let a cache have layers with these rows."""
    part.layers = [row[0].side_by_side(row) if row else layer for row, layer in zip(rows, part.layers, strict=True)]
    share_places(part.layers)
    part.known_ids = None
    part.forget_pass()


def _check_alike(caches: Sequence[Cache]) -> None:
    first = caches[0]
    if any(not lengths_of(cache) for cache in caches):
        raise StateMismatchError(
            "`caches` must each have tokens, got an empty cache: pass its prompt to the model first."
        )
    for cache in caches[1:]:
        expected, got = _form(first), _form(cache)
        if expected != got:
            seen = next((pair for pair in zip(expected, got, strict=False) if pair[0] != pair[1]), (expected, got))
            raise StateMismatchError(
                f"`caches` must be of one model, kind and settings, got {seen[0]} and {seen[1]}: merge caches that "
                "were made with the same arguments for the same model."
            )


def _form(cache: Cache) -> list[Any]:
    """What two caches must have in common to be rows of one: kinds, settings, and forms of states."""
    form: list[Any] = [cache.kind, cache.offloading]
    for part in _parts(cache):
        for layer in part.adapted_layers():
            forms = [own._replace(batch_size=1) for own in layer.forms]
            form.append((layer.separate_rows[0].kind, layer.describe(), forms))
    return form


def extend(cache: Cache, other: Cache) -> None:
    """Append the rows of another cache, which does not change; raises as `merge`."""
    merged = merge([cache, other])
    for part, joined in zip(_parts(cache), _parts(merged), strict=True):
        part.layers, part.known_ids = joined.layers, None
        part.forget_pass()


def extract(cache: Cache, row: int) -> Cache:
    """A cache with one row, as if it had been decoded alone. It does not change when `cache` does.

    Raises:
        BatchIndexError: there is no such row.
    """
    rows = max(cache.batch_size, 0)
    index = operator.index(row)
    if not -rows <= index < rows:
        raise BatchIndexError(f"`row` must be from 0 to {rows - 1}, got {row}: pass the index of a row.")
    alone = cache.fork()
    for part, own in zip(_parts(alone), _parts(cache), strict=True):
        layers = own.adapted_layers()
        part.layers = [layer.row(index % rows).original if layer.batch_size else layer for layer in layers]
        part.known_ids = None
        part.forget_pass()
    return alone


def crop_rows(cache: Cache, lengths: Sequence[int]) -> None:
    """Roll each row back to its own length, exactly.

    Raises:
        BatchIndexError: not one length for each row.
        RollbackError: a row cannot be put back to its length; nothing is changed.
    """
    held = lengths_of(cache)
    wanted = [operator.index(length) for length in lengths]
    if len(wanted) != len(held):
        raise BatchIndexError(f"`lengths` must have one length for each of {len(held)} rows, got {len(wanted)}.")
    for row, (length, own) in enumerate(zip(wanted, held, strict=True)):
        if not 0 <= length <= own:
            raise RollbackError(
                f"`lengths` must be between 0 and the tokens of each row, got {length} for row {row}, which has {own}: "
                "pass lengths that the rows had."
            )
    part = cache.self_attention
    if len(set(held)) == 1 and len(set(wanted)) == 1:
        if wanted != list(held):
            cache.crop(wanted[0] - held[0])
        return
    if not all(layer.counts_rows for layer in part.adapted_layers()):
        _let_have(part, [_rows_of([layer]) for layer in part.adapted_layers()])
    layers = part.adapted_layers()
    for layer in layers:
        layer.check_truncate_rows(wanted)
    for layer in layers:
        layer.truncate_rows(wanted)
    part.known_ids = None
    part.forget_pass()
