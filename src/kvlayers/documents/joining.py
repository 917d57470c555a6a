"""States at other positions: concatenated documents, and a context with another middle."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvlayers.core.arguments import whole_number
from kvlayers.core.cache import Cache
from kvlayers.core.cache_layer import CacheLayer, adapted
from kvlayers.core.cache_operations import Origin, form_of_rows
from kvlayers.core.token_store import KVPair
from kvlayers.documents.recomputing import check_recomputable, deviations, recompute_tokens
from kvlayers.errors import CapacityError, OptionError, StateMismatchError, UnsupportedLayerError
from kvlayers.kernels.attention.packed_tensor import as_dense
from kvlayers.rope.from_config import rotaries
from kvlayers.rope.rotary import Rotary
from kvlayers.upstream import cache_argument, model_types
from kvlayers.upstream.model_layers import layer_specs
from kvlayers.utils.options import checks_options
from kvlayers.utils.units import share_of

EVERYTHING = "100%"
"""What is recomputed unless a caller asks for less."""


class PlacedTokens(NamedTuple):
    """Tokens of a cache, and where they are put.

    Attributes:
        cache: the cache.
        begin: its first token that is taken.
        stop: the token after the last one.
        to: the position of the first token in the new context.
    """

    cache: Cache
    begin: int
    stop: int
    to: int


class Joined(NamedTuple):
    """A cache that was concatenated.

    Attributes:
        cache: the cache.
        recomputed: the recomputed positions.
    """

    cache: Cache
    recomputed: Sequence[int]


@torch.no_grad()
def moved(cache: Cache, to: int, model: Any) -> Cache:
    """A cache with the same tokens at the positions from `to` on: keys are rotated by the distance.

    The tokens do not see what is before them. Whoever goes on with the cache passes `position_ids`, from
    `to + cache.get_seq_length()` on: `generate()` would count from 0. To put it after others, use
    `kvlayers.concatenate`.

    Args:
        cache: the cache. It does not change.
        to: the new position of the first token, which is at position 0 in the cache.
        model: the model, or its config.

    Returns:
        A cache of the same kind.

    Raises:
        OptionError: `to` is no position.
        StateMismatchError: the cache is empty.
        CapacityError: a position is beyond those of the model.
        ConfigError: the model does not rotate its keys by their positions, or in a way that depends on the length.
        UnsupportedLayerError: a layer holds more or less than the keys and values of its tokens: recurrent states,
            evicted tokens, sinks, latents.
    """
    position, length = whole_number(to, "`to`"), _checked([cache], model)[0]
    if position < 0:
        raise OptionError(f"`to` must be a position, at least 0, got {to}: pass where the first token goes.")
    found = _joined([PlacedTokens(cache, 0, length, position)], model, length).cache
    found.known_ids = cache.known_ids
    found.origins = (Origin(position, 0 if position else cache.exact_tokens),)
    return found


@checks_options
def concatenate(
    caches: Sequence[Cache],
    model: Any,
    *,
    recompute: int | str = EVERYTHING,
    ids: Sequence[Tensor] | None = None,
    beginning_tokens: int = 0,
    into: Cache | None = None,
) -> Cache:
    """One cache with the tokens of several, at consecutive positions, as if they were one text.

    Each document was computed without those before it, so its states differ from those of the whole text. Some tokens
    are recomputed: the first ones of each document, or those whose states change most when they see the documents
    before (CacheBlend, Yao et al. 2024, arXiv:2405.16444). Such a token is exact if all tokens that it sees are.

    Args:
        caches: the documents, each a cache of the same kind for the same model, whose first token is at position 0:
            rows of a batch must not be padded. They do not change. A reservation of the first one must have room for
            all.
        model: the model.
        recompute: how many first tokens of each document after the first to recompute, or a share of the tokens after
            the first document, such as "15%": the tokens that change most. By default, all of these are
            recomputed. That is exact in full precision, and hardly faster than to read the whole text. Layers must keep
            every token: for a model with windows, read the documents with a `DynamicCache()` without a config.
        ids: the tokens of each cache, int64 `[tokens]` or `[batch, tokens]`, for `recompute`. Default: the ids that
            the caches know from `generate()`.
        beginning_tokens: number of tokens of the common beginning of all documents, such as a system prompt. Only the
            first document's are taken.
        into: an empty cache for the result, such as `kvlayers.QuantizedCache(config=model)`: documents in full
            precision are then rounded once. It keeps every token, if the documents do, or the model's windows.
            Default: a cache of the kind of the first document.

    Returns:
        The cache, with `generate()` going on after the last document.

    Raises:
        OptionError: no caches, something else, a wrong `recompute`, missing `ids`, or `into` is not an empty cache of
            kvlayers for this model.
        StateMismatchError: caches of different models, kinds or settings, an empty one, or `ids` of another number.
        CapacityError: there are more tokens than positions of the model, or than `into` has room for.
        ConfigError, UnsupportedLayerError: as for `moved`; tokens cannot be recomputed; or `into` keeps tokens
            that the documents' windows have left.

    Example:
        >>> import kvlayers, torch, transformers
        >>> config = transformers.LlamaConfig(
        ...     num_hidden_layers=2, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=99,
        ... )
        >>> model, documents = transformers.LlamaForCausalLM(config).eval(), []
        >>> texts = [torch.tensor([[5, 8, 13]]), torch.tensor([[21, 34]])]
        >>> for ids in texts:
        ...     _, cache = kvlayers.generate(model, ids, max_new_tokens=1, return_dict_in_generate=True).to_tuple()
        ...     documents.append(cache)
        >>> kvlayers.concatenate(documents[::-1], model, recompute="50%", ids=texts[::-1]).get_seq_length()
        5
    """
    return joined(caches, model, recompute, ids, beginning_tokens, into).cache


@torch.no_grad()
def joined(
    caches: Sequence[Cache],
    model: Any,
    recompute: int | str,
    ids: Sequence[Tensor] | None,
    beginning_tokens: int,
    into: Cache | None,
) -> Joined:
    """What `concatenate` returns, and which of its tokens were recomputed."""
    lengths, shared = _checked(caches, model), whole_number(beginning_tokens, "`beginning_tokens`")
    if not 0 <= shared < min(lengths) + (len(lengths) == 1):
        raise OptionError(
            f"`beginning_tokens` must be from 0 to less than the tokens of each cache, got {beginning_tokens}: pass "
            "fewer."
        )
    pieces, end = [], 0
    for number, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
        begin = shared if number else 0
        pieces.append(PlacedTokens(cache, begin, length, end))
        end += length - begin
    # The first document is right as it is.
    amount = recompute_amount(recompute) * (len(pieces) > 1)
    known = _known_ids(caches, lengths, ids, "ids", amount)
    if known is not None and any(bool((own[:, :shared] != known[0][:, :shared]).any()) for own in known):
        raise StateMismatchError(
            f"`beginning_tokens` must be tokens that all caches begin with, got {shared}, in which the caches differ: "
            "pass fewer."
        )
    tokens = None if known is None else torch.cat([known[0], *(own[:, shared:] for own in known[1:])], dim=1)
    return _joined(pieces, model, lengths[0], amount, tokens, into)


@torch.no_grad()
def replace_tokens(
    cache: Cache,
    start: int,
    stop: int,
    ids: Tensor,
    model: Any,
    *,
    recompute: int | str = EVERYTHING,
    known_ids: Tensor | None = None,
) -> None:
    """Put other tokens in the place of those from `start` to `stop`. What is after them moves.

    The new tokens are computed, and see all that is before them. The tokens after them have seen the old ones,
    and are recomputed as far as `recompute` asks.

    Args:
        cache: the cache to change.
        start: the first token to replace.
        stop: the token after the last one.
        ids: the new tokens, int64 `[tokens]` or `[batch, tokens]`. If there are none, the old ones are taken out.
        model: the model.
        recompute: how many first tokens after the change to recompute, or a share of the tokens after the change,
            such as "15%": the tokens that change most. By default, all of them.
        known_ids: the tokens of the cache, `[batch, tokens]`, for `recompute`. Default: the ids that it knows
            from `generate()`.

    Raises:
        OptionError: `start` and `stop` are no range of tokens, or another argument is wrong.
        RollbackError: the cache cannot be cropped to `start`.
        StateMismatchError, CapacityError, ConfigError, UnsupportedLayerError: as for `moved` and `concatenate`.
            Nothing is changed.
    """
    (length,) = _checked([cache], model)
    if cache.first_position:
        raise StateMismatchError(
            f"`cache` must begin at position 0, got one that was moved to {cache.first_position}: pass "
            "moved(cache, 0, model) instead."
        )
    first, after = whole_number(start, "`start`"), whole_number(stop, "`stop`")
    if not 0 <= first <= after <= length:
        raise OptionError(
            f"`start` and `stop` must be a range of the {length} tokens, got {start} and {stop}: pass two positions in "
            "order."
        )
    new = _as_rows(ids, cache.batch_size, "ids")
    # Without tokens after them, the new ones have seen all that they would see.
    amount = recompute_amount(recompute) * (after < length)
    known = _known_ids([cache], [length], None if known_ids is None else [known_ids], "known_ids", amount)
    tokens = (
        None if known is None else torch.cat([known[0][:, :first], new.to(known[0].device), known[0][:, after:]], dim=1)
    )
    middle = first + new.shape[1]
    end, are_moved = middle + length - after, bool(amount) or (middle != after < length)
    check_joinable(model, cache.adapted_layers(), end, amount, are_moved)
    beginning = cache.fork()
    beginning.crop(first - length)
    if new.shape[1]:
        cache_argument.read_tokens(model, new.to(model.device), beginning)
    pieces = [
        piece
        for piece in (PlacedTokens(beginning, 0, middle, 0), PlacedTokens(cache, after, length, middle))
        if piece.begin < piece.stop
    ]
    changed = _joined(pieces, model, middle, amount, tokens).cache if pieces else beginning
    cache.replace_layers(changed.adapted_layers())
    cache.known_ids, cache.origins = changed.known_ids, changed.origins


def _checked(caches: Sequence[Cache], model: Any) -> list[int]:
    """The lengths of caches, if they may be concatenated."""
    if not isinstance(caches, list | tuple) or not caches or not all(isinstance(cache, Cache) for cache in caches):
        raise OptionError(
            f"`cache`, or each of `caches`, must be a cache of kvlayers, got {caches!r:.60}: pass [cache, other]."
        )
    expected = form_of_rows(caches[0])
    for cache in caches:
        if len(cache.parts()) > 1:
            raise UnsupportedLayerError("`caches` must be of a decoder alone, got a pair: its encoder saw one text.")
        if not cache.length:
            raise StateMismatchError(f"`caches` must each have tokens, got {cache!r}: pass its document first.")
        if form_of_rows(cache) != expected or cache.batch_size != caches[0].batch_size:
            raise StateMismatchError(
                f"`caches` must be of one model, kind, settings and batch size, got {caches[0]!r} and {cache!r}: make "
                "them alike."
            )
    count, expected_count = len(caches[0].adapted_layers()), len(layer_specs(model))
    if count != expected_count:
        raise StateMismatchError(
            f"`caches` must have the {expected_count} layers of `model`, got {count}: pass the model that filled them."
        )
    return [cache.length for cache in caches]


def recompute_amount(recompute: int | str) -> int | Fraction:
    """A number of first tokens of each document, or a share of the tokens after the first one.

    Raises:
        OptionError: it is anything else.
    """
    if isinstance(recompute, int) and not isinstance(recompute, bool) and recompute >= 0:
        return recompute
    share = share_of(recompute)
    if share is None:
        raise OptionError(
            f"`recompute` must be a number of first tokens, such as 32, or a share, such as '15%', got {recompute!r}: "
            "pass one."
        )
    return share


def _as_rows(ids: Tensor, batch: int, name: str) -> Tensor:
    """Ids as `[batch, tokens]`."""
    try:
        found = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError):
        raise OptionError(
            f"`{name}` must be whole numbers [tokens] or [{batch}, tokens], got {ids!r}: pass ids."
        ) from None
    found = found[None] if found.dim() == 1 else found
    if (
        found.is_floating_point()
        or found.dtype == torch.bool
        or found.is_meta
        or found.is_sparse
        or found.dim() != 2
        or found.shape[0] not in (1, batch)
    ):
        raise OptionError(
            f"`{name}` must be whole numbers [tokens] or [{batch}, tokens], got {found.dtype} {list(found.shape)} on "
            f"{found.device}: pass ids as the tokenizer returns them."
        )
    return found.to(torch.int64).expand(batch, -1)


def _known_ids(
    caches: Sequence[Cache],
    lengths: Sequence[int],
    given: Sequence[Tensor] | None,
    name: str,
    amount: int | Fraction,
) -> list[Tensor] | None:
    """The tokens of each cache, `[batch, tokens]`; `None` if they are not known, and not needed.

    Args:
        caches: the caches.
        lengths: their lengths.
        given: what the caller has passed as the argument `name`, instead of what the caches know.
        name: the argument.
        amount: what is to be recomputed.
    """
    if not isinstance(given, list | tuple | Tensor | None):
        raise OptionError(
            f"`{name}` must be the token ids of each of the {len(caches)} caches, got {given!r}: pass a list with the "
            "ids of each."
        )
    ids = [cache.known_ids for cache in caches] if given is None else list(given)
    known = [own for own in ids if own is not None]
    if not len(known) == len(ids) == len(caches):
        if given is None and not amount:
            return None
        raise OptionError(
            f"`{name}` must be the token ids of each of the {len(caches)} caches, got {len(known)}"
            f"{' that the caches know' if given is None else ''}: pass a tensor for each."
        )
    found = [_as_rows(own, cache.batch_size, name) for own, cache in zip(known, caches, strict=True)]
    for cache, own, length in zip(caches, found, lengths, strict=True):
        if own.shape[1] != length and given is None:
            raise StateMismatchError(f"The cache knows {own.shape[1]} of its {length} tokens: pass `{name}`.")
        if own.shape[1] != length:
            raise StateMismatchError(
                f"`{name}` must be the {length} tokens of the cache, got {own.shape[1]}: pass the ids that it was "
                "filled with."
            )
        # A comparison waits for the device.
        count = 0 if given is None or cache.known_ids is None else min(cache.known_ids.shape[1], length)
        if count and bool((cache.known_ids[:, :count].to(own.device) != own[:, :count]).any()):  # type: ignore[index]
            raise StateMismatchError(
                f"`{name}` must be the tokens that the cache has seen, got others: pass the ids that it was filled "
                "with."
            )
    return [own.to(found[0].device) for own in found]


def _joined(
    pieces: Sequence[PlacedTokens],
    model: Any,
    exact: int,
    amount: int | Fraction = 0,
    ids: Tensor | None = None,
    into: Cache | None = None,
) -> Joined:
    """A cache with the tokens of pieces, of which the first `exact` are right."""
    end = pieces[-1].to + pieces[-1].stop - pieces[-1].begin
    by_layer = list(zip(*(piece.cache.adapted_layers() for piece in pieces), strict=True))
    are_moved = bool(amount) or any(map(_distance, pieces))
    rotations = check_joinable(model, [layer for layers in by_layer for layer in layers], end, amount, are_moved)
    if into is not None:
        check_into(into, model, [layers[0] for layers in by_layer], pieces[0].cache.batch_size, end)
    inexact = [range(piece.to, piece.to + piece.stop - piece.begin) for piece in pieces if piece.to >= exact]
    states = [_states(layers, pieces, rotations[index]) for index, layers in enumerate(by_layer)]
    chosen: list[int] = []
    if amount:
        ids = torch.as_tensor(ids, device=model.device)
        chosen = _chosen(model, ids, states, inexact, amount)
        if chosen:
            recompute_tokens(model, ids, states, chosen)
    if into is None:
        into = pieces[0].cache.fork()
        into.reset()
    try:
        for index, (keys, values) in enumerate(states):
            into.update(keys, values, index)
    except BaseException:
        # Such as no memory for a layer: those before it have their states.
        into.reset()
        raise
    into.known_ids = ids
    left = set(itertools.chain(*inexact)).difference(chosen)
    limits = [limit for limit in (pieces[0].cache.exact_tokens, min(left, default=None)) if limit is not None]
    into.origins = (Origin(exact_tokens=min(limits, default=None)),)
    return Joined(into, chosen)


def check_joinable(
    model: Any, layers: Sequence[CacheLayer], end: int, amount: int | Fraction, are_moved: bool
) -> list[Rotary | None]:
    """Raise if a model's states cannot be concatenated.

    Args:
        model: the model.
        layers: the layers of its caches.
        end: the position after the last token.
        amount: what is to be recomputed.
        are_moved: whether any token gets another position.

    Returns:
        How the keys of each layer rotate, `None` for a layer whose keys do not.

    Raises:
        CapacityError, UnsupportedLayerError, ConfigError: as `concatenate`.
    """
    most = model_types.most_positions(model)
    if most is not None and end > most:
        raise CapacityError(
            f"positions must be below the `max_position_embeddings` of the model, {most}, got {end - 1} for the last "
            "token: leave tokens out."
        )
    _check_movable(layers, "caches")
    if amount:
        check_recomputable(model, layers)
    return rotaries(model, "compute all tokens as one prompt") if are_moved else [None for _ in layers]


def check_into(
    into: Cache, model: Any, sources: Sequence[CacheLayer], rows: int, tokens: int, name: str = "into"
) -> None:
    """Raise if a cache cannot take in the states of other layers.

    Args:
        into: the cache.
        model: the model.
        sources: the layers of a document's cache.
        rows: how many sequences there are.
        tokens: how many tokens all documents have.
        name: the argument that asks for the cache.
    """
    is_cache = isinstance(into, Cache) and len(into.parts()) == 1
    layers = [adapted(layer) for layer in into.layers_for(len(sources))] if is_cache else []
    windows = [spec.options.get("sliding_window") for spec in layer_specs(model)]
    fits = len(layers) == len(sources) and all(map(_takes_in, layers, sources, windows))
    if not fits or into.batch_size not in (-1, rows):
        raise OptionError(
            f"`{name}` must be an empty cache of kvlayers for the {len(sources)} layers of this model, and for the "
            f"batch of the documents, got {into!r}: make one with config=model.config."
        )
    _check_movable(layers, name)
    for layer, source in zip(layers, sources, strict=True):
        if _reach(layer, tokens) > _reach(source, tokens):
            raise UnsupportedLayerError(
                f"`{name}` must not keep more tokens than the documents, got {layer.original!r} for documents that "
                f"keep a window of {source.sliding_window}: compute the documents with a DynamicCache() without a "
                "config."
            )
        layer.make_room(tokens)


def _takes_in(layer: CacheLayer, source: CacheLayer, window: int | None) -> bool:
    """Whether a layer is empty and of the same model as `source`, as far as it knows. The model's has this window."""
    mine, others = ([(form.kv_heads, form.head_dim) for form in each.forms] for each in (layer, source))
    return not layer.length and layer.sliding_window in (None, window) and (not mine or not others or mine == others)


def _reach(layer: CacheLayer, tokens: int) -> int:
    """How many of the last `tokens` tokens a layer needs, and keeps."""
    return tokens if layer.sliding_window is None else min(tokens, layer.sliding_window - 1)


def _distance(piece: PlacedTokens) -> int:
    """By how many positions its tokens move."""
    return piece.to - piece.begin - piece.cache.first_position


def _chosen(
    model: Any, ids: Tensor, states: Sequence[KVPair], inexact: Sequence[range], amount: int | Fraction
) -> list[int]:
    """The positions to recompute, in order."""
    positions = [position for own in inexact for position in own]
    if isinstance(amount, int):
        return [position for own in inexact for position in own[:amount]]
    count = math.ceil(amount * len(positions))
    if not positions or count == len(positions):
        return positions
    most = deviations(model, ids, states)[positions].topk(count).indices
    return sorted(positions[index] for index in most.tolist())


def _check_movable(layers: Sequence[CacheLayer], name: str) -> None:
    """Raise `UnsupportedLayerError` if a layer's states are not those of its tokens alone.

    Args:
        layers: the layers.
        name: the argument that they are from.
    """
    for layer in layers:
        has_more = layer.traits.is_recurrent or layer.traits.has_other_states or layer.traits.counts_rows
        keeps_all = layer.traits.attends and (layer.is_sliding or layer.held_tokens == layer.length)
        if layer.traits.is_upstream or layer.fidelity == "evicting" or has_more or not keeps_all:
            raise UnsupportedLayerError(
                f"`{name}` must hold the keys and values of all tokens, or of windows, and nothing else, got "
                f"{layer.original!r}: use another cache, or extract(row) of a batch of rows."
            )


def _states(layers: Sequence[CacheLayer], pieces: Sequence[PlacedTokens], rotary: Rotary | None) -> KVPair:
    """Keys and values of a layer for all tokens. They are zeros for tokens that no window reaches."""
    total = sum(piece.stop - piece.begin for piece in pieces)
    missing = _reach(layers[0], total)
    parts: list[KVPair] = []
    for layer, piece in zip(reversed(layers), reversed(pieces), strict=True):
        keys, values = layer.peek()
        begin = max(piece.begin, piece.stop - missing)
        first = (layer.length or 0) - (0 if keys is None else keys.shape[2])
        if keys is None or values is None or begin < first:
            raise UnsupportedLayerError(
                f"`caches` must hold the tokens from {begin} on, got a window from {first} on: compute the documents "
                "with a DynamicCache() without a config, which keeps all of them."
            )
        keys, values = (as_dense(states)[:, :, begin - first : piece.stop - first] for states in (keys, values))
        if rotary is not None and (distance := _distance(piece)):
            keys = rotary.rotated(keys, rotary.partner(keys), distance)
        parts.append((keys, values))
        missing -= piece.stop - begin
        if not missing:
            break
    joined = [torch.cat(side, dim=2) for side in zip(*reversed(parts), strict=True)]
    left = total - joined[0].shape[2]
    keys, values = (torch.nn.functional.pad(side, (0, 0, left, 0)) if left else side for side in joined)
    return keys, values
