"""`generate()` with a `PrefixStore`: look up what is stored, compute the rest, and insert what was computed.

Compared to a plain call, `generate()` gets another cache, and may get its padding in another place. There are three
ways to make the cache:

* One prompt: the cache of its longest stored prefix.
* Prompts with a common prefix: the cache of this prefix is expanded, so that the prefix is held once for all prompts.
  Padding moves from the left to behind the prefix. This is done only if nothing depends on the order of the ids except
  the model, which uses its `position_ids`.
* Other prompts, and caches that cannot be shared in this way: each prompt is computed separately from its own longest
  stored prefix, and the caches are stacked, padded as the prompts are.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from kvlayers.core.cache import Cache
from kvlayers.core.cache_layer import LayerState, is_stackable
from kvlayers.core.description import Fact
from kvlayers.errors import KVLayersError, UnsupportedLayerError
from kvlayers.generation import cache_by_name
from kvlayers.generation.patching import Method, overriding
from kvlayers.generation.prefill import MIN_TOKENS, is_told_positions, pass_limit
from kvlayers.generation.prefix_reuse import active_store
from kvlayers.generation.prefix_reuse.borders import snapshot_lengths
from kvlayers.generation.prefix_reuse.eligibility import (
    ID_READERS,
    PADDING_INDEPENDENT_OPTIONS,
    IneligibleError,
    PromptBatch,
    StorePart,
    check_generate,
    check_options,
    ids_name,
    prompts_of,
)
from kvlayers.generation.prefix_reuse.images import ImagesApart, images_in_place
from kvlayers.generation.retried_pass import pass_unseen
from kvlayers.prefix import Hit
from kvlayers.prefix.keys import tokens_of
from kvlayers.recurrent.hybrid_layer import LINEAR
from kvlayers.upstream import cache_argument, generate_calls, model_types
from kvlayers.utils.tensor_memory import is_out_of_memory

ROOM_FOR_ANSWER = 256
"""Tokens of an answer for which memory is reserved at first. Stored caches keep the reservation, and most answers end
early."""

MOST_SINGLY = 16
"""Tokens that a model which takes one at a time reads so. If more are left behind a snapshot, it is read by itself."""

CHECKPOINTS = {"most": 16}
"""Checkpoints of recurrent states, so that one entry serves many of the places where prompts may diverge."""


def usable_cache(found: Cache | None, device: torch.device, make_empty: Callable[[], Cache]) -> Cache:
    """A cache from a store, on `device` and with the reservation of a new one; an empty cache if nothing was found.

    Args:
        found: the cache, which belongs to the caller.
        device: device of the model.
        make_empty: makes an empty cache with the same options.
    """
    if found is None:
        return make_empty()
    devices = {layer.parts[0].device for layer in found.adapted_layers() if layer.length}
    if not found.is_static and devices <= {device}:
        return found
    # It was reserved for another call, or loaded from a file.
    cache, state = make_empty(), found.state()
    layers = tuple(
        dataclasses.replace(
            layer,
            tensors={name: tensor.to(device) for name, tensor in layer.tensors.items()},
            facts={**layer.facts, **({"device": str(device)} if "device" in layer.facts else {})},
        )
        for layer in state.layers
    )
    cache.load_state(dataclasses.replace(state, layers=layers))
    return cache


def depends_on_chunks(cache: Cache) -> bool:
    """Whether what the cache holds depends on which tokens came together, as that of caches that evict does."""
    return any(not layer.traits.is_upstream and layer.fidelity == "evicting" for layer in cache.adapted_layers())


_CACHE_FROM_STORE: ContextVar[Cache | None] = ContextVar("the cache that the current call starts from", default=None)


def generate(active: active_store.ActiveStore, plain: Method, model: Any, arguments: dict[str, Any]) -> Any:
    """Call `plain(**arguments)`, which is `generate()`, with a cache from a store if possible.

    Args:
        active: the store.
        plain: `generate()` of the model, without a store.
        model: the model.
        arguments: arguments of the call, by name.

    Returns:
        What `plain` returns.

    Raises:
        OptionError: the call cannot use the store, and the store is required.
    """
    with active_store.CURRENT.override(None):
        try:
            call = PrefixedCall(active, model, arguments)
            cache, new_arguments = call.prepare()
        except IneligibleError as reason:
            active.on_bypass(str(reason))
            output = _with_cached_tokens(plain(**arguments), ())
            made = cache_argument.in_output(output)
            if isinstance(made, Cache) and made is not cache_argument.passed_in(arguments):
                made.prefix_notes = (f"the call could not use the store: {reason}",)
            return output
        try:
            output = call_with(cache, plain, new_arguments, call.cached_tokens)
        except BaseException as error:
            # The caller's code has ended the call: a streamer, a criterion, or a signal.
            if not is_out_of_memory(error):
                call.keep_prompt(cache)
            raise
        return call.finish(output, cache)


def call_with(cache: Cache, plain: Method, arguments: Mapping[str, Any], cached_tokens: tuple[int, ...]) -> Any:
    """Call `generate()` with a cache in the place of one by name.

    Args:
        cache: the cache, which is among the arguments.
        plain: `generate()` of the model, without a store.
        arguments: its arguments by name.
        cached_tokens: for each prompt, how many tokens the call does not have to compute.

    Returns:
        What `plain` returns, with `cached_tokens`.
    """
    covered = active_store.COVERED.get()
    if covered is not None:
        covered.append(sum(cached_tokens))
    with overriding(_CACHE_FROM_STORE, cache):
        return _with_cached_tokens(plain(**arguments), cached_tokens)


def pass_counted(
    model: Any, ids: Tensor, cache: Cache, chunk: int | None, positions: Tensor | None = None, **of_images: Tensor
) -> None:
    """As `pass_unseen`, for the states alone.

    Raises:
        IneligibleError: the cache has not counted the tokens that the model was given.
    """
    pass_unseen(model, ids, cache, chunk, positions, logits=0, **of_images)
    if cache.length != ids.shape[1]:
        raise IneligibleError(f"{type(model).__name__} puts other tokens into its cache than it is given")


def _with_cached_tokens(output: Any, cached_tokens: tuple[int, ...]) -> Any:
    """What `generate()` returns, with the attribute `cached_tokens` unless it is a plain tensor."""
    if isinstance(output, ModelOutput):
        output.cached_tokens = cached_tokens
    return output


def is_from_store(cache: object) -> bool:
    """Whether the cache of the current call is one that `call_with` has passed in place of a cache by name."""
    return cache is not None and cache is _CACHE_FROM_STORE.get()


class PrefixedCall:
    """A call of `generate()` that uses a store.

    Args:
        active: the store.
        model: the model.
        arguments: arguments of `generate()`, by name.

    Attributes:
        config: the full `GenerationConfig` of the call.
        cached_tokens: for each prompt, how many of its tokens the store had.

    Raises:
        IneligibleError: the call cannot use a store.
    """

    def __init__(self, active: active_store.ActiveStore, model: Any, arguments: Mapping[str, Any]) -> None:
        self._model = model
        self._arguments = dict(arguments)
        check_generate(model, self._arguments)
        if cache_argument.passed_in(self._arguments) is not None:
            raise IneligibleError("it is given a cache")
        self.config, model_kwargs = generate_calls.full_generation_config(model, self._arguments)
        self._name = cache_by_name.resolve_name(
            model, self.config, cache_by_name.requested_name(self._arguments), is_given_a_cache=False
        )
        names = model_types.image_arguments(model.config)
        check_options(self.config, self._arguments, model_kwargs, names)
        self._prompts = prompts_of(model, self.config, self._arguments)
        given = {name: value for name, value in model_kwargs.items() if name in names and value is not None}
        are_apart = bool(given) and model.config.model_type in model_types.HAS_IMAGES_APART
        if are_apart and self._prompts.is_padded:
            raise IneligibleError("its prompt is padded, beside which there are images")
        self._images = (
            ImagesApart(model.config, self._prompts.input_ids, given)
            if are_apart
            else images_in_place(model.config, self._prompts.input_ids, self._prompts.padding, given)
        )
        self._keys = PromptBatch(self._images.keys, self._prompts.padding)
        self._positions = generate_calls.own_positions(model, self._prompts.input_ids, model_kwargs)
        self._repeats = generate_calls.sequences_per_prompt(self.config)
        self._is_one = len(self._prompts) == self._repeats == 1 and not self._prompts.is_padded
        self._options = dict(cache_by_name.checked_options(self.config.cache_config or {}))
        # What it is known by is what the call asks for.
        self._part = StorePart(model, active, self._name, self._options)
        self.cached_tokens: tuple[int, ...] = ()
        self._known: dict[int, int] = {}
        """How many tokens of each prompt others have begun with."""
        self._notes: list[str] = []
        """What each lookup has found."""

    def prepare(self) -> tuple[Cache, dict[str, Any]]:
        """The cache to start from, and the arguments with which to call `generate()`.

        Raises:
            IneligibleError: the prompts differ, and their caches cannot be stacked.
        """
        changes: dict[str, Any] = {}
        if self._is_one:
            cache = self._for_one_prompt()
        else:
            example = self.empty()
            if depends_on_chunks(example):
                raise IneligibleError(f"what a cache '{self._name}' holds depends on which tokens came at once")
            # How many tokens all prompts start with, fewer than the shortest has, without cutting an image.
            common = self._images.boundary(0, self._keys.common_prefix_length())
            stackable = can_be_stacked(example)
            shareable = self._can_share(example, common)
            # Else the states of a token differ with padding before it.
            attends = any(layer.traits.attends for layer in example.adapted_layers())
            if self._prompts.is_padded and attends and not is_told_positions(self._model):
                raise IneligibleError("its prompts are padded, and the model counts padding in its positions")
            if not shareable and not stackable:
                raise IneligibleError(
                    f"its prompts have few tokens in common or are padded, and caches '{self._name}' cannot be put "
                    "side by side"
                )
            hits = [self._lookup(row) for row in range(len(self._prompts))] if stackable else []
            self.cached_tokens = tuple(hit.covered for hit in hits) or (0,) * len(self._prompts)
            if shareable and all(hit.covered <= common for hit in hits):
                cache, changes = self._for_shared_prefix(common, hits)
            else:
                cache = self._for_separate_prompts(common, hits)
        cache.prefix_notes = tuple(self._notes)
        arguments = {name: value for name, value in self._arguments.items() if name not in model_types.FOR_ENCODERS}
        if self._positions is not None:
            arguments["position_ids"] = self._positions
        return cache, {**arguments, **changes, cache_argument.name_in_generate(self._model): cache}

    def keep_prompt(self, cache: Cache) -> None:
        """Insert the prompt of a call that failed into the store, if there is one prompt, and it was read to its end.

        What was decoded is not inserted, since only the call knew its tokens.
        """
        tokens = self._prompts.input_ids.shape[1]
        was_read = all(layer.length is not None and layer.length >= tokens for layer in cache.adapted_layers())
        if self._is_one and was_read and not depends_on_chunks(cache):
            # What cannot be rolled back was inserted during the prefill.
            # The caller gets the error that has ended the call, and no other.
            with contextlib.suppress(KVLayersError, RuntimeError, MemoryError):
                cache.truncate(tokens)
                self._images.insert(self._part, self._keys.input_ids, cache)

    def finish(self, output: Any, cache: Cache) -> Any:
        """What `generate()` is to return. The states of a single sequence are inserted into the store."""
        sequences = output.sequences if isinstance(output, ModelOutput) else output
        ids = self._prompts.input_ids
        if self._is_one:
            self._images.insert(
                self._part,
                torch.cat([self._keys.input_ids.to(sequences.device), sequences[:, ids.shape[1] :]], dim=1),
                cache,
            )
        elif self._prompts.is_padded:
            # The padding may have been moved.
            sequences[:, : ids.shape[1]] = ids.repeat_interleave(sequences.shape[0] // ids.shape[0], dim=0)
        return output

    def _for_one_prompt(self) -> Cache:
        hit = self._lookup(0)
        self.cached_tokens = (hit.covered,)
        cache = usable_cache(hit.cache, self._part.device, self.empty)
        end = self._images.end(0)
        if cache.keeps_every_token:
            self._compute(0, cache, end)
        elif not depends_on_chunks(cache):
            # generate() reads the few tokens behind the last border together with the last one.
            self._compute(0, cache, self._prompts.input_ids.shape[1] - 1, least=end)
        elif hit.covered < end:
            raise IneligibleError(f"what a cache '{self._name}' holds depends on which tokens came with an image")
        return cache

    def _for_shared_prefix(self, common: int, hits: list[Hit]) -> tuple[Cache, dict[str, Any]]:
        cache = self._common_prefix(common, hits)
        cache.expand(len(self._prompts) * self._repeats)
        if not self._prompts.is_padded:
            return cache, {}
        moved, mask = self._prompts.with_padding_after(common)
        return cache, {ids_name(self._arguments): moved, "attention_mask": mask}

    def _common_prefix(self, common: int, hits: list[Hit]) -> Cache:
        """A cache that has seen the first `common` tokens, which all prompts start with."""
        usable = [hit for hit in hits if hit.covered <= common]
        hit = max(usable, key=lambda hit: hit.covered) if usable else self._lookup(0, common + 1)
        self.cached_tokens = tuple(max(hit.covered, own) for own in self.cached_tokens)
        cache = usable_cache(hit.cache, self._part.device, self.empty)
        self._compute(0, cache, common)
        return cache

    def _for_separate_prompts(self, common: int, hits: list[Hit]) -> Cache:
        caches: list[Cache] = []
        shorter_hits = sum(hit.covered < common for hit in hits)
        shared = self._common_prefix(common, hits) if shorter_hits > 1 and common >= MIN_TOKENS else None
        for row, hit in enumerate(hits):
            cache = (
                usable_cache(hit.cache, self._part.device, self.empty)
                if shared is None or hit.covered > common
                else shared.fork()
            )
            self._compute(row, cache, self._prompts.row(row).shape[1] - 1)
            # Reservations cannot be expanded, so each prompt is stacked as often as it is continued.
            caches.extend([cache] * self._repeats)
        stacked = self.empty(rows=len(caches))
        stack(caches, stacked, self._prompts.input_ids.shape[1] - 1)
        return stacked

    def _can_share(self, example: Cache, common: int) -> bool:
        if example.is_static or common < (MIN_TOKENS if len(self._prompts) > 1 else 1):
            return False
        if any(self._images.end(row) > common for row in range(len(self._prompts))):
            return False
        return not self._prompts.is_padded or (self._padding_can_move() and example.keeps_every_token)

    def _padding_can_move(self) -> bool:
        """Whether only the model can tell where the padding is, which uses the mask and `position_ids`.

        Callbacks that see the ids can tell, too, and so can modules that count slots for their own window.
        """
        model, config = self._model, self.config
        defaults = generate_calls.default_generation_options()
        options = {name: value for name, value in vars(config).items() if not name.startswith("_")}
        changed = {name for name, value in options.items() if value != defaults.get(name)}
        has_id_readers = any(self._arguments.get(name) for name in ID_READERS)
        uses_mask = model.is_backend_compatible() and model.config.model_type not in model_types.SCALES_BY_SLOT
        if has_id_readers or changed - PADDING_INDEPENDENT_OPTIONS or self._positions is not None:
            return False
        return "position_ids" in generate_calls.forward_arguments(model) and uses_mask

    def _lookup(self, row: int, tokens: int | None = None) -> Hit:
        """Look up a prompt, or its first `tokens`."""
        keys = self._keys.row(row)[:, :tokens]
        hit = self._images.lookup(self._part, keys)
        self._known[row] = hit.known
        while (whole := self._images.boundary(row, hit.covered)) < hit.covered:
            hit = self._images.lookup(self._part, keys[:, : whole + 1])
        self._notes.append(
            f"{hit.covered} of {keys.shape[-1]} tokens were stored{f': {hit.reason}' if hit.reason else ''}"
        )
        return hit

    def empty(self, rows: int = 1) -> Cache:
        """A cache like the one that `generate()` would make."""
        tokens, new = self._prompts.input_ids.shape[1], self.config.max_new_tokens
        # The default of generate() is 20 new tokens.
        total = max(int(self.config.max_length or 0), tokens + 20) if new is None else tokens + int(new)
        cache = self._make(rows, min(total, tokens + ROOM_FOR_ANSWER))
        return self._make(rows, total) if cache.is_static else cache

    def repeated(self, cache: Cache) -> Cache:
        """The cache of one prompt, for each of the sequences that go on from it."""
        if self._repeats > 1 and cache.is_static:
            rows = self.empty(rows=self._repeats)
            stack([cache] * self._repeats, rows, cache.length)
            return rows
        cache.expand(self._repeats)
        return cache

    def _make(self, rows: int, length_hint: int) -> Cache:
        cache = cache_by_name.cache_for(
            self._name, cache_by_name.request_of(self._model, self._options, batch_size=rows, length_hint=length_hint)
        )
        if not isinstance(cache, Cache) or not cache.layers:
            raise IneligibleError(f"the cache '{self._name}' is a {type(cache).__name__}, which is not one of kvlayers")
        if not any(layer.traits.attends or layer.traits.counts_columns for layer in cache.adapted_layers()):
            raise IneligibleError(f"no layer of {cache!r} counts its tokens in this version of transformers")
        if cache.recurrent_parts() and "checkpoints" not in self._options:
            self._options["checkpoints"] = CHECKPOINTS
            return self._make(rows, length_hint)
        return cache

    def _compute(self, row: int, cache: Cache, length: int, least: int | None = None) -> None:
        """Pass those of the first `length` tokens of a prompt that `cache` has not seen, and store snapshots.

        From `least` on, the few tokens behind the last border are left out, if they need no pass of their own.

        Raises:
            IneligibleError: the cache has not counted these tokens.
        """
        if not length:
            return
        begin, limit = cache.length, pass_limit(self._model, cache)
        ids, first = self._prompts.row(row).to(self._part.device), self._prompts.padding[row]
        stops = (self._images.boundary(row, stop) for stop in self._snapshot_lengths(row, cache, begin, least, length))
        for stop in sorted({stop for stop in stops if stop > begin}):
            of_images = self._images.arguments(row, begin, stop)
            is_apart = limit is not None and begin == 0 and length - stop > MOST_SINGLY
            if is_apart and of_images:
                continue
            into = self.empty() if is_apart else cache
            # A model that takes tokens one by one does so only behind others. Otherwise chunks are those of generate().
            chunk = self.config.prefill_chunk_size if limit is None else stop if begin == 0 else limit
            chunk = None if of_images else chunk
            # As the model makes them, `[axes, 1, tokens]`.
            own = None if self._positions is None else self._positions[..., row : row + 1, first : first + stop].to(ids)
            pass_counted(self._model, ids[:, :stop], into, chunk, own, **of_images)
            self._images.insert(self._part, self._keys.row(row)[:, :stop], into)
            begin = 0 if is_apart else stop

    def _snapshot_lengths(self, row: int, cache: Cache, begin: int, least: int | None, length: int) -> list[int]:
        """The lengths between `begin` and `length` at which the cache is inserted into the store."""
        if cache.keeps_every_token:
            return [length]
        # A cache that cannot be rolled back does not serve prompts that diverge in between. With a model that takes
        # tokens one by one, snapshots of long texts would take long.
        is_limited = pass_limit(self._model, cache) is not None
        every = None if is_limited else self._part.active.store.snapshot_tokens
        least = length if is_limited or least is None else least
        ends = torch.tensor([] if self.config.eos_token_id is None else self.config.eos_token_id).reshape(-1).tolist()
        ids = tokens_of(self._keys.row(row))
        return snapshot_lengths(ids, begin, least, length, self._known.get(row, 0), ends, every)


def can_be_stacked(cache: Cache) -> bool:
    """Whether caches like this one can be put side by side, whatever their lengths."""
    return bool(cache.layers) and all(map(is_stackable, cache.adapted_layers()))


def stack(caches: Sequence[Cache], into: Cache, length: int) -> None:
    """Let `into` hold the sequences of `caches`, each padded on the left to `length` tokens.

    The states of padding are zeros, which the attention mask must leave out. Recurrent states have seen no padding.
    Their checkpoints are not copied.

    Args:
        caches: of one sequence each, with layers like those of `into`.
        into: an empty cache.
        length: tokens, padding included; no fewer than any of the caches has seen.

    Raises:
        UnsupportedLayerError: a layer whose tokens do not lie apart: a packed layer, a sink, transformers' layer.
        StateMismatchError: the caches have other layers than `into`.
    """
    if not all(map(can_be_stacked, [*caches, into])):
        raise UnsupportedLayerError(
            f"`caches` must be caches whose tokens lie apart from each other, got {into!r}: use one for each sequence."
        )
    # One layer at a time, so that the states of only one layer are held three times.
    for layer, *rows in zip(into.adapted_layers(), *(cache.adapted_layers() for cache in caches), strict=True):
        layer.load_state(_stacked([row.state() for row in rows], length))


def _stacked(states: Sequence[LayerState], length: int) -> LayerState:
    """The states of one layer side by side, as if each sequence had `length` tokens."""
    # The cache of a prompt of one token is empty, and a layer that the model never used is empty in every cache.
    example = next((state for state in states if state.tensors), states[0])
    facts: dict[str, Fact] = {}
    for name, fact in example.facts.items():
        own_name = name.removeprefix(LINEAR)
        counts = fact is not None and (own_name == "length" or own_name.startswith("tokens."))
        if not _is_past(name):
            facts[name] = 0 if own_name == "checkpoints" else length if counts else fact
    window = facts.get("sliding_window")
    most = min(length, window - 1) if isinstance(window, int) else length
    tensors = {}
    for name, form in example.tensors.items():
        own = [state.tensors.get(name) for state in states]
        if name in ("keys", "values"):
            held = [form[:, :, :0] if tensor is None else tensor for tensor in own]
            seen = [fact if isinstance(fact := state.facts.get("length"), int) else 0 for state in states]
            tensors[name] = _tokens_side_by_side(held, [length - tokens for tokens in seen], most)
        elif not _is_past(name):
            tensors[name] = torch.cat([torch.zeros_like(form) if tensor is None else tensor for tensor in own])
    return LayerState(example.kind, tensors, facts if tensors else dict(example.facts))


def _is_past(name: str) -> bool:
    return name.removeprefix(LINEAR).startswith("checkpoint.")


def _tokens_side_by_side(states: Sequence[Tensor], padding: Sequence[int], most: int) -> Tensor:
    """Keys or values `[1, kv_heads, held, head_dim]` in one tensor: of each, the newest `most` tokens or all."""
    held = min(max(own.shape[2] + padded for own, padded in zip(states, padding, strict=True)), most)
    _, kv_heads, _, head_dim = states[0].shape
    together = states[0].new_zeros((len(states), kv_heads, held, head_dim))
    for row, own in enumerate(states):
        tokens = min(own.shape[2], held)
        together[row, :, held - tokens :] = own[0, :, own.shape[2] - tokens :]
    return together
