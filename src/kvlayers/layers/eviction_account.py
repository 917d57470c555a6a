"""How many tokens of each sequence a layer has evicted, and how many it may hold."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlayers.errors import StateMismatchError
from kvlayers.eviction.settings import STEP, EvictionSettings
from kvlayers.layers.sink_tokens import PADDING_NAME

EVICTED_NAME = "evicted_tokens"
"""The name of the numbers of evicted tokens in a state."""

NAMES = (EVICTED_NAME, PADDING_NAME)
"""The names of all numbers in a state."""

_NOTHING = torch.zeros(1, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class EvictionAccount:
    """Numbers of tokens of each sequence, for an average KV head. Every change makes a new object.

    Attributes:
        settings: how the layer evicts.
        padding: tokens of padding before each sequence, int64 `[batch]` on the host; `None` without padding.
        evicted: tokens evicted of each sequence without its padding, int64 `[batch]` on the host, or `[1]` if it is the
            same number for all.
    """

    settings: EvictionSettings
    padding: Tensor | None = None
    evicted: Tensor = _NOTHING

    @functools.cached_property
    def next_eviction(self) -> int | None:
        """Tokens seen when the first sequence is due, if tokens come one by one; `None` without a budget."""
        if self.settings.budget is None:
            return None
        absent = self.evicted if self.padding is None else self.evicted + self.padding
        return int(absent.min()) + self.settings.budget + STEP

    def lengths(self, seen: int) -> Tensor:
        """Tokens of each sequence without its padding, int64 `[batch]`, or `[1]` without padding."""
        return torch.full((1,), seen) if self.padding is None else (seen - self.padding).clamp(min=0)

    def held(self, seen: int) -> Tensor:
        """Tokens that an average head holds of each sequence, int64 `[batch]` or `[1]`."""
        return self.lengths(seen) - self.evicted

    def is_due(self, seen: int, slack: int) -> bool:
        """Whether any sequence holds more than `slack` tokens too many."""
        return bool((self.held(seen) > self._allowed(seen) + slack).any())

    def wanted(self, seen: int, slack: int, batch: int) -> list[int]:
        """Tokens that each sequence is to hold: all, unless it holds more than `slack` tokens too many."""
        # An average is rounded down, so that `held` would evict a token of a sequence whose heads hold 3 and 4.
        allowed = self._allowed(seen)
        return torch.where(self.held(seen) > allowed + slack, allowed, seen).expand(batch).tolist()

    def _allowed(self, seen: int) -> Tensor:
        return torch.tensor([self.settings.allowed(tokens) for tokens in self.lengths(seen).tolist()])

    def with_counts(self, seen: int, counts: Tensor) -> "EvictionAccount":
        """The account after heads have kept `counts` tokens, int64 `[batch, kv_heads]` on the host."""
        evicted = self.lengths(seen) - counts.sum(1) // counts.shape[1]
        return replace(self, evicted=evicted[:1] if bool((evicted == evicted[0]).all()) else evicted)

    def with_padding(self, padding: Tensor | None) -> "EvictionAccount":
        """The account of an empty layer behind this padding."""
        return EvictionAccount(self.settings, padding)

    def selected(self, indices: Tensor) -> "EvictionAccount":
        """The account of the sequences at `indices`, int64 `[new_batch]`."""
        if self.padding is None and self.evicted.shape[0] == 1:
            return self
        indices = indices.cpu()
        return replace(
            self,
            padding=None if self.padding is None else self.padding[indices],
            evicted=self.evicted if self.evicted.shape[0] == 1 else self.evicted[indices],
        )

    def check_batch(self, batch_size: int) -> None:
        """Raise `StateMismatchError` if the padding is for another number of sequences."""
        if self.padding is not None and self.padding.shape[0] != batch_size:
            raise StateMismatchError(
                f"`left_padding` has {self.padding.shape[0]} entries, got states of {batch_size} sequences: give one "
                "entry for each sequence, beams included, or reset the cache."
            )

    def state(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Copies of the numbers on a device, with their names."""
        for name, numbers in ((EVICTED_NAME, self.evicted), (PADDING_NAME, self.padding)):
            if numbers is not None:
                yield name, numbers.to(device, copy=True)

    def of_state(self, tensors: dict[str, Tensor], seen: int) -> "EvictionAccount":
        """The account that `state` returned these tensors for, of a layer that has seen `seen` tokens.

        Raises:
            StateMismatchError: the tensors are no such numbers.
        """
        for name, numbers in tensors.items():
            if numbers.dim() != 1 or not numbers.numel() or numbers.dtype != torch.int64 or bool((numbers < 0).any()):
                raise StateMismatchError(
                    f"`{name}` must be int64 [batch] and not negative, got {list(numbers.shape)} of {numbers.dtype}: "
                    "take the state again."
                )
        padding = tensors.get(PADDING_NAME)
        account = EvictionAccount(
            self.settings,
            None if padding is None else padding.to("cpu", copy=True),
            tensors.get(EVICTED_NAME, _NOTHING).to("cpu", copy=True),
        )
        sizes = {account.evicted.shape[0], 1 if padding is None else padding.shape[0]} - {1}
        if len(sizes) > 1 or bool((account.held(seen) < 0).any()):
            raise StateMismatchError(
                f"`{EVICTED_NAME}` must be at most the {seen} tokens seen, with a number for each sequence, got "
                f"{account.evicted.tolist()}: take the state again."
            )
        return account
