"""Requests that are answered side by side: each waits for room, is read in chunks, is decoded as a row, and leaves."""

import contextvars
import copy
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from kvlayers.core.cache import Cache
from kvlayers.errors import OptionError
from kvlayers.generation.cache_by_name import AUTO, NamedCache, own_cache, request_of
from kvlayers.generation.call_arguments import check_vocabulary
from kvlayers.generation.prefix_reuse.active_store import ActiveStore
from kvlayers.generation.prefix_reuse.eligibility import StorePart
from kvlayers.generation.prefix_reuse.prefixed_call import usable_cache
from kvlayers.generation.retried_pass import pass_unseen
from kvlayers.generation.row_decoding import DecodedRow, Drafter, RowDecoder, check_takes_rows
from kvlayers.prefix import Hit
from kvlayers.rope.from_config import frequencies_within, remembers_lengths
from kvlayers.upstream import generate_calls, model_types
from kvlayers.utils import late

MAX_OVERTAKEN = 8
"""How many requests may join before one that must wait, for room or for rows with its frequencies. As many are looked
at behind it. Then it is the next one, so that no request waits for ever."""


Kind = TypeVar("Kind", bound="Request")


@dataclass(eq=False, kw_only=True)
class Request(DecodedRow):
    """A prompt on its way to an answer.

    Attributes:
        config: a `GenerationConfig` with `max_new_tokens`.
        given: objects that processors and criteria need: a `tokenizer`, or those that a caller passes to `generate()`.
        copies: further requests with the same prompt, which is read once for all of them.
        cached_tokens: how many tokens of the prompt came from a store.
        overtaken: how many requests behind it have joined.
        most_tokens: tokens of the prompt, the answer and drafts.
        frequencies: by which frequencies its keys are rotated, `None` if these change with its length.
        cache: what was read, until the row has it.
        part: the part of the store that it looked into.
        logits: after the prompt, `[1, vocab]`, if another request has read it.
        context: that of its caller, whose session what it inserts belongs to. Another thread may read the prompt.
    """

    config: Any
    given: Mapping[str, Any] = field(default_factory=dict)
    copies: "Sequence[Request]" = ()
    cached_tokens: int = field(default=0, init=False)
    overtaken: int = field(default=0, init=False)
    most_tokens: int = field(default=0, init=False)
    frequencies: str | None = field(default=None, init=False)
    cache: Cache | None = field(default=None, init=False)
    part: StorePart | None = field(default=None, init=False)
    logits: Tensor | None = field(default=None, init=False)
    context: contextvars.Context = field(default_factory=contextvars.copy_context, init=False)


class RowEngine(Generic[Kind]):
    """Requests that wait, those whose prompts are being read, and rows that are being decoded.

    Args:
        model: a decoder-only model.
        config: the `GenerationConfig` that requests have in common.
        named: which cache rows have.
        active: the store in which prompts are looked up, and into which they are inserted.
        max_rows: most requests that are read or decoded at a time. A model that keeps states in its modules has one.
        memory: bytes that all rows may take, or a share of what is free; `None` for half of it.
        chunk_tokens: most tokens of prompts that are read between two steps of the other rows. A prompt is read whole
            if what a cache holds would depend on it.
        drafter: makes drafts, `None` for no drafts.

    Raises:
        OptionError: the model takes no rows, there is no such cache, or no drafts for such a model; or the store is
            required, and cannot be used.
    """

    def __init__(
        self,
        model: Any,
        config: Any,
        named: NamedCache,
        active: ActiveStore | None,
        max_rows: int,
        memory: int | str | Fraction | None,
        chunk_tokens: int,
        drafter: Drafter | None = None,
    ) -> None:
        self._model, self._named, self._active = model, named, active
        self._room_for_drafts = 0 if drafter is None else drafter.tokens
        if model.config.is_encoder_decoder:
            raise OptionError(
                f"`model` must be a decoder-only model, got a {type(model).__name__}: use model.generate()."
            )
        check_takes_rows(model)
        if named.name == AUTO:
            raise OptionError(f"`cache` must be one cache for all rows, got {AUTO!r}: name it, and pass `memory`.")
        self._between_steps = chunk_tokens
        # Now, so that wrong options are refused before the first prompt.
        example = self._empty_cache(1 + int(config.max_new_tokens))
        is_kept_elsewhere = model_types.kept_states(model) is not None
        if is_kept_elsewhere:
            # Its modules have states of one sequence, and a pass of several tokens begins another one.
            max_rows, chunk_tokens = 1, sys.maxsize
        elif model_types.depends_on_passes(model.config) or any(
            layer.traits.is_upstream or layer.fidelity != "exact" for layer in example.adapted_layers()
        ):
            chunk_tokens = config.prefill_chunk_size or sys.maxsize
        if drafter is not None and (is_kept_elsewhere or example.recurrent_parts()):
            raise OptionError(
                "`prompt_lookup_num_tokens` and `assistant_model` must be left out for a model whose states cannot be "
                f"taken back, each row's to a length of its own, got a {type(model).__name__}: leave them out."
            )
        self._max_rows, self._chunk_tokens = max_rows, chunk_tokens
        self._room = late.function("room for rows")(named.name, request_of(model, named.options, batch_size=1), memory)
        self._part_of_store()
        self._decoder = RowDecoder[Kind](model, drafter)
        self._waiting: list[Kind] = []
        self._reading: deque[Kind] = deque()
        # Read to their end, until they join.
        self._ready: list[Kind] = []
        self._held_before = 1

    def _empty_cache(self, length_hint: int) -> Cache:
        """A cache of one sequence, of so many tokens."""
        return own_cache(self._model, self._named, batch_size=1, length_hint=length_hint)

    @property
    def held(self) -> list[Kind]:
        """The requests whose states are held."""
        return [*self._decoder.rows, *self._ready, *self._reading]

    def admit(self, more: Callable[[], Kind | None]) -> Iterator[Kind]:
        """Let requests join that fit, and yield those that have failed.

        Args:
            more: the next request that waits, `None` for none.
        """
        # As long as no row leaves, those that wait wait on, and only new ones are looked at.
        place = 0 if len(self.held) < self._held_before else len(self._waiting)
        while (
            len(self.held) < self._max_rows
            and place <= MAX_OVERTAKEN
            and all(each.overtaken < MAX_OVERTAKEN for each in self._waiting[:place])
        ):
            if place == len(self._waiting):
                new = more()
                if new is None:
                    break
                self._waiting.append(new)
            request = self._waiting[place]
            try:
                joins = request.error is None and self._joins(request)
            except Exception as error:
                request.error = error
            if request.error is None and not joins:
                place += 1
            else:
                del self._waiting[place]
                if request.error is not None:
                    yield request
                else:
                    for each in self._waiting[:place]:
                        each.overtaken += 1
        self._held_before = len(self.held)

    def advance(self) -> Iterator[Kind]:
        """Read a part of the prompts, take a step with all rows, and yield the requests that have ended."""
        yield from self._read()
        self._decoder.step()
        yield from self._decoder.drop_ended()

    def cancel(self, request: Kind) -> None:
        """Take a request out. One that is being decoded ends with the next step."""
        request.is_stopped = True
        for requests in (self._waiting, self._reading, self._ready):
            if request in requests:
                requests.remove(request)
                request.cache = None

    def _part_of_store(self) -> StorePart | None:
        return StorePart.if_usable(self._model, self._active, self._named.name, self._named.options)

    def _joins(self, request: Kind) -> bool:
        """Whether a request may join those that are held, which it then does."""
        check_vocabulary(self._model, request.ids, "prompts")
        held = self.held
        request.most_tokens = request.prompt_tokens + int(request.config.max_new_tokens) + self._room_for_drafts
        request.frequencies = frequencies_within(self._model.config, request.prompt_tokens, request.most_tokens)
        # One pass has one set of frequencies.
        is_other = held and request.frequencies not in {each.frequencies for each in held} - {None}
        if is_other or not self._room.fits(request.most_tokens, [each.most_tokens for each in held]):
            return False
        own = copy.copy(request.config)
        own.max_length = request.prompt_tokens + own.max_new_tokens
        request.processors = generate_calls.logits_processors(self._model, own, request.ids, request.given)
        request.criteria = generate_calls.stopping_criteria(self._model, own, request.given)
        request.samples = bool(own.do_sample)
        # A draft would be rotated by the frequencies of a longer sequence.
        request.most = 0 if request.frequencies is None else own.max_length
        self._reading.append(request)
        return True

    def _cache_of(self, request: Kind) -> Cache:
        """The cache of a prompt, which has seen what the store has: also what the prompts before have inserted."""
        if request.cache is None:
            # The model may have changed since the prompts before.
            request.part = self._part_of_store()
            found = Hit() if request.part is None else request.part.lookup(request.ids)
            empty = functools.partial(self._empty_cache, request.most_tokens)
            request.cache = usable_cache(found.cache, self._model.device, empty)
            request.cached_tokens = found.covered
        return request.cache

    def _read(self) -> Iterator[Kind]:
        """Read chunks of prompts, the first one at least, and let those join that were read to their end.

        A step costs as much for few rows as for many, so short prompts are read before the same step. Without rows that
        would wait, prompts are read until all have joined.
        """
        tokens = 0
        while self._reading:
            request = self._reading[0]
            try:
                # A store is asked in the step in which a prompt is read, as the model may change before.
                seen = 0 if request.cache is None else request.cache.length
                more = self._end_of_chunk(request, seen) - seen
                if tokens and tokens + more > self._between_steps and self._decoder.rows:
                    break
                seen = self._cache_of(request).length
                stop = self._end_of_chunk(request, seen)
                tokens += stop - seen
                logits = self._logits_of(request, stop)
            except Exception as error:
                self._reading.popleft()
                request.error, request.cache = error, None
                yield request
            else:
                if stop == request.prompt_tokens:
                    self._ready.append(self._reading.popleft())
                    self._wait_with(request, logits)
                    self._decoder.begin(request, logits)
        ready, self._ready = self._ready, []
        # Some may have ended with their first token.
        going_on = [request for request in ready if not self._decoder.has_ended(request)]
        self._decoder.join(going_on, [self._cache_of(request) for request in going_on])
        cache, most = self._decoder.cache, [each.most_tokens for each in self.held]
        # They have taken memory for further rows.
        recurrent = () if cache is None or not going_on else cache.recurrent_parts()
        if recurrent and not self._room.fits(max(most), most + most[: len(most) // 2]):
            for part in recurrent:
                part.trim()
        for request in ready:
            # Its states are those of its row now.
            request.cache = None
            if request not in going_on:
                yield request

    def _wait_with(self, request: Kind, logits: Tensor) -> None:
        """Let the copies of a request wait first, with what it has read."""
        for each in request.copies:
            each.cache, each.logits = self._cache_of(request).fork(), logits
            each.cached_tokens = request.prompt_tokens
            # It joins as if a row had left.
            self._held_before = sys.maxsize
        # Those of this engine were made as the request was.
        self._waiting[:0] = cast("Sequence[Kind]", request.copies)
        request.copies = ()

    def _end_of_chunk(self, request: Kind, seen: int) -> int:
        """How many tokens of a prompt its cache will have seen after the chunk behind `seen` tokens."""
        # Parts of the prompt would be rotated by the frequencies of shorter prompts.
        is_read_whole = frequencies_within(self._model.config, 1, request.prompt_tokens) is None
        return request.prompt_tokens if is_read_whole else min(seen + self._chunk_tokens, request.prompt_tokens)

    @torch.no_grad()
    def _logits_of(self, request: Kind, stop: int) -> Tensor:
        """The logits after the first `stop` tokens of a prompt, `[1, vocab]`."""
        if request.logits is not None:
            return request.logits
        ids, cache, model = request.ids, self._cache_of(request), self._model
        if cache.length == 0 and remembers_lengths(model.config):
            # By a pass over a short sequence, so that the answer does not depend on those before it.
            model(ids[:, :1], use_cache=False)
        output = pass_unseen(model, ids[:, :stop], cache)
        if stop == request.prompt_tokens and request.part is not None:
            now = self._part_of_store()
            if now is not None and now.is_of_same_states(request.part):
                request.context.run(now.insert, ids, cache)
        return output.logits[:, -1]  # type: ignore[no-any-return]
