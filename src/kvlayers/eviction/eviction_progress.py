"""How far a layer has evicted its text, and the queries that attention has shown of it."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlayers.core.cache_layer import LayerState
from kvlayers.core.preparation import PADDING_NAME
from kvlayers.errors import RollbackError, StateMismatchError
from kvlayers.eviction.options import EvictionOptions
from kvlayers.eviction.rule import ALL_QUERIES

STEP = 64
"""While single tokens come, a layer with a budget holds up to this many tokens more before it evicts again."""

EVICTED_NAME = "evicted_tokens"
"""The name of the numbers of evicted tokens in a state."""

QUERIES_NAME = "observed_queries"
"""The name of the queries in a state."""

OBSERVED_NAME = "observed_tokens"
"""The name of how many of these queries belong to each sequence."""

PROGRESS_NAMES = (EVICTED_NAME, PADDING_NAME, QUERIES_NAME, OBSERVED_NAME)
"""The names of all tensors in a state that the store does not hold."""

WHOLE_FROM = "whole_from"
"""The name of this position in a state."""

_NOTHING = torch.zeros(1, dtype=torch.int64)


def _shortest(numbers: Tensor) -> Tensor:
    """Numbers `[batch]`, as `[1]` if they are all the same."""
    return numbers[:1] if bool((numbers == numbers[0]).all()) else numbers


@dataclass(frozen=True, eq=False)
class EvictionProgress:
    """How many tokens of each sequence are gone, for an average KV head. Every change makes a new object.

    Attributes:
        options: how the layer evicts.
        padding: tokens of padding before each sequence, int64 `[batch]` on the host; `None` without padding.
        evicted: tokens evicted of each sequence without its padding, int64 `[batch]` on the host, or `[1]` if it is the
            same number for all.
        whole_from: position from which on every head holds every token.
        shown: queries that attention has shown of the newest tokens, as far as the rule wants them: rotated and not
            scaled, in the order of their tokens, `[batch, heads, tokens, head_dim]`. A part is joined with the next
            one when that is as long: so a query is copied a few times, and not once for each later token.
        observed: how many of the newest tokens of each sequence have a query that the rule may see: their keys are held
            by every head. int64 `[batch]` on the host, or `[1]` if it is the same number for all.
    """

    options: EvictionOptions
    padding: Tensor | None = None
    evicted: Tensor = _NOTHING
    whole_from: int = 0
    shown: tuple[Tensor, ...] = ()
    observed: Tensor = _NOTHING

    @functools.cached_property
    def next_eviction(self) -> float:
        """Tokens seen when a sequence first holds a step too many, if tokens come one by one; infinite with `keep`."""
        absent = self.evicted if self.padding is None else self.evicted + self.padding
        return math.inf if self.options.budget is None else int(absent.min()) + self.options.budget + STEP

    def lengths(self, seen: int) -> Tensor:
        """Tokens of each sequence without its padding, int64 `[batch]`, or `[1]` without padding."""
        return torch.full((1,), seen) if self.padding is None else (seen - self.padding).clamp(min=0)

    def held(self, seen: int) -> Tensor:
        """Tokens that an average head holds of each sequence, int64 `[batch]` or `[1]`."""
        return self.lengths(seen) - self.evicted

    def is_due(self, seen: int, slack: int) -> bool:
        """Whether any sequence holds more than `slack` tokens too many."""
        return min(self.wanted(seen, slack, self.held(seen).shape[0])) < seen

    def wanted(self, seen: int, slack: int, batch: int) -> list[int]:
        """Tokens that each sequence is to hold: all, unless it holds more than `slack` tokens too many."""
        # An average is rounded down, so that `held` would evict a token of a sequence whose heads hold 3 and 4.
        allowed = torch.tensor([self.options.allowed(tokens) for tokens in self.lengths(seen).tolist()])
        return torch.where(self.held(seen) > allowed + slack, allowed, seen).expand(batch).tolist()

    def unpadded(self, counts: Tensor) -> Tensor:
        """How many of the tokens that heads hold are not padding, int64 `[batch, kv_heads]` on the host.

        Args:
            counts: tokens that each head holds, likewise.
        """
        if self.padding is None:
            return counts
        # An eviction drops the padding before the recent tokens. It may have come while the padding still went on.
        dropped = self.whole_from + self.options.recent_tokens if self.whole_from else 0
        return (counts - (self.padding - dropped).clamp(min=0)[:, None]).clamp(min=0)

    def after_eviction(self, seen: int, held: Tensor, kept: Tensor) -> "EvictionProgress":
        """The progress after heads that had `held` of `seen` tokens have kept some of them.

        Args:
            seen: tokens seen.
            held: tokens that each head held, without padding, int64 `[batch, kv_heads]` on the host.
            kept: how many it has kept, likewise.
        """
        options, lengths = self.options, self.lengths(seen)
        # A sequence that keeps every token goes on as if the others were not there.
        left = torch.where(
            (kept < held).any(1), 0 if options.rule.queries == ALL_QUERIES else options.recent_tokens, lengths
        )
        observed = _NOTHING if options.budget is None else _shortest(self.observed.minimum(left))
        return replace(
            self,
            evicted=_shortest(lengths - kept.sum(1) // kept.shape[1]),
            whole_from=max(self.whole_from, seen - options.recent_tokens),
            shown=self.shown if bool(observed.any()) else (),
            observed=observed,
        )

    def selected(self, indices: Tensor) -> "EvictionProgress":
        """The progress of the sequences at `indices`, int64 `[new_batch]`."""
        shown = tuple(part.index_select(0, indices.to(part.device)) for part in self.shown)
        if self.padding is None and self.evicted.shape[0] == self.observed.shape[0] == 1:
            return replace(self, shown=shown) if shown else self
        indices = indices.cpu()
        padding = None if self.padding is None else self.padding[indices]
        evicted, observed = (
            numbers if numbers.shape[0] == 1 else numbers[indices] for numbers in (self.evicted, self.observed)
        )
        return replace(self, padding=padding, evicted=evicted, shown=shown, observed=observed)

    def held_tensors(self) -> Iterator[Tensor]:
        """Every tensor that keeps memory alive. The numbers are on the host."""
        yield from self.shown

    def check_batch(self, batch_size: int) -> None:
        """Raise `StateMismatchError` if the padding is for another number of sequences."""
        if self.padding is not None and self.padding.shape[0] != batch_size:
            raise StateMismatchError(
                f"`left_padding` has {self.padding.shape[0]} entries, got states of {batch_size} sequences: give one "
                "entry for each sequence, beams included, or reset the cache."
            )

    def check_truncate(self, length: int, seen: int) -> None:
        """Raise `RollbackError` if some head lacks a token that a text of `length` of the `seen` tokens ends with."""
        if length and length < self.whole_from:
            raise RollbackError(
                f"The layer can be rolled back to {self.whole_from} to {seen} tokens, or be emptied by reset(), got "
                f"{length}: some of the tokens before have been evicted. Call activate_past_recording() before the "
                "tokens that may be taken back, protect more recent_tokens, or fork() the cache."
            )

    # Queries

    @property
    def _wanted_queries(self) -> int:
        """How many of the newest queries the rule may see of any sequence."""
        most, wanted = int(self.observed.max()), self.options.rule.queries
        return most if wanted == ALL_QUERIES else min(most, wanted)

    @property
    def queries(self) -> Tensor | None:
        """What the rule wants of the queries of the newest tokens, `[batch, heads, observed, head_dim]`."""
        return self._newest if self.shown else None

    @property
    def _newest(self) -> Tensor:
        # Queries of a prompt are large, and one part of them is not copied.
        joined = self.shown[0] if len(self.shown) == 1 else torch.cat(self.shown, dim=2)
        return joined[:, :, -max(self._wanted_queries, 1) :]

    def with_queries(self, queries: Tensor) -> "EvictionProgress":
        """The same with the queries of further tokens, `[batch, heads, new, head_dim]`, as far as they are wanted."""
        parts = [*self.shown, queries.detach()]
        while len(parts) > 1 and parts[-2].shape[2] <= parts[-1].shape[2]:
            parts[-2:] = [torch.cat(parts[-2:], dim=2)]
        progress = replace(self, shown=tuple(parts), observed=self.observed + queries.shape[2])
        if sum(part.shape[2] for part in parts) < 2 * progress._wanted_queries:
            return progress
        # A copy, so that the other queries are not kept in memory.
        return replace(progress, shown=(progress._newest.clone(),))

    def without_queries(self, tokens: int) -> "EvictionProgress":
        """The same without the queries of the newest `tokens` tokens."""
        parts, left = [], sum(part.shape[2] for part in self.shown) - tokens
        for part in self.shown:
            if left > 0:
                parts.append(part[:, :, :left])
            left -= part.shape[2]
        return replace(self, shown=tuple(parts), observed=(self.observed - tokens).clamp(min=0))

    # State

    def state(self, device: torch.device) -> dict[str, Tensor]:
        """Copies of the numbers on a device, and of the queries, by name."""
        observed = (self.queries, self.observed) if self.shown else (None, None)
        held = zip(PROGRESS_NAMES, (self.evicted, self.padding, *observed), strict=True)
        return {name: tensor.to(device, copy=True) for name, tensor in held if tensor is not None}

    def of_state(self, state: LayerState) -> "EvictionProgress":
        """The progress of the layer that `state` was taken from.

        Raises:
            StateMismatchError: the tensors and facts are not those of such a layer.
        """
        seen, whole_from = state.length, state.facts.get(WHOLE_FROM)
        if not isinstance(whole_from, int) or not 0 <= whole_from <= seen:
            raise StateMismatchError(
                f"`{WHOLE_FROM}` must be a position among the {seen} tokens of the state, got {whole_from!r}: take the "
                "state again."
            )
        tensors = state.split(PROGRESS_NAMES)[0]
        queries = tensors.pop(QUERIES_NAME, None)
        is_shown = queries is not None and queries.dim() == 4 and queries.is_floating_point()
        if is_shown != (OBSERVED_NAME in tensors) or is_shown != (queries is not None):
            raise StateMismatchError(
                f"`{QUERIES_NAME}` must be floating-point [batch, heads, tokens, head_dim] and come with "
                f"`{OBSERVED_NAME}`, got {None if queries is None else list(queries.shape)}: take the state again."
            )
        for name, numbers in tensors.items():
            if numbers.dim() != 1 or not numbers.numel() or numbers.dtype != torch.int64 or bool((numbers < 0).any()):
                raise StateMismatchError(
                    f"`{name}` must be int64 [batch] and not negative, got {list(numbers.shape)} of {numbers.dtype}: "
                    "take the state again."
                )
        held = {name: numbers.to("cpu", copy=True) for name, numbers in tensors.items()}
        evicted, observed = (held.get(name, _NOTHING) for name in (EVICTED_NAME, OBSERVED_NAME))
        shown = () if queries is None else (queries.clone(),)
        progress = EvictionProgress(self.options, held.get(PADDING_NAME), evicted, whole_from, shown, observed)
        sizes = {numbers.shape[0] for numbers in held.values()} - {1}
        most = seen if whole_from else 0
        if len(sizes) > 1 or bool((progress.held(seen) < 0).any()) or bool((evicted > most).any()):
            raise StateMismatchError(
                f"`{EVICTED_NAME}` must be at most {most} of the {seen} tokens seen, with a number for each sequence, "
                f"got {evicted.tolist()} with `{WHOLE_FROM}` {whole_from}: take the state again."
            )
        return progress
