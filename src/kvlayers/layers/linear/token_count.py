"""How many tokens a recurrent layer has seen."""

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.stores.buffer import COUNT_DTYPE
from kvlayers.stores.description import Fact


class TokenCount:
    """Tokens that each convolution of a layer has seen: the columns that it was given.

    Compiled code counts on the device, since it would be compiled anew for each count of the host. The host adds the
    device's count to its own when it is next asked.

    Args:
        number_of_states: convolutions to count for.
    """

    def __init__(self, number_of_states: int) -> None:
        self._number_of_states = number_of_states
        self._seen: dict[int, int] = {}
        # Whether the columns of the forward pass under way were counted.
        self._columns_were_counted = dict.fromkeys(range(number_of_states), False)
        self._is_known = True
        self._on_device: Tensor | None = None
        self._is_ahead_on_device = False

    def add(self, state_idx: int, tokens: int, columns: Tensor, eager: bool) -> None:
        """Count tokens that one of the convolutions was given.

        Args:
            state_idx: index of the convolution.
            tokens: how many tokens they are.
            columns: the columns of these tokens, on the device that compiled code counts on.
            eager: whether this is eager code.
        """
        self._columns_were_counted[state_idx] = True
        if self._on_device is None:
            self._on_device = self._zeros(columns.device)
            if eager:
                # Before any code is compiled around it.
                torch._dynamo.mark_static_address(self._on_device)
        if eager:
            seen = self.seen() if self._is_ahead_on_device else self._seen
            seen[state_idx] = seen.get(state_idx, 0) + tokens
        else:
            self._on_device.select(0, state_idx).add_(tokens)
            self._is_ahead_on_device = True

    def _zeros(self, device: torch.device) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros(self._number_of_states, dtype=COUNT_DTYPE, device=device)

    def add_token_without_columns(self, state_idx: int) -> bool:
        """Count one token if a recurrent state came without columns. Returns whether it did."""
        if self._columns_were_counted[state_idx]:
            self._columns_were_counted[state_idx] = False
            return False
        if torch.compiler.is_compiling():
            if self._on_device is not None:
                self._on_device.select(0, state_idx).add_(1)
            self._is_ahead_on_device = True
        else:
            seen = self.seen()
            if state_idx in seen:
                seen[state_idx] += 1
            else:
                self._is_known = False
        return True

    def stop_counting(self) -> None:
        """Stop counting: the columns that came need not be tokens."""
        self._is_known = False
        self._columns_were_counted = dict.fromkeys(self._columns_were_counted, True)

    def seen(self) -> dict[int, int]:
        """The count of each convolution that was given columns."""
        if self._is_ahead_on_device and self._on_device is not None:
            for index, tokens in enumerate(self._on_device.tolist()):
                if tokens:
                    self._seen[index] = self._seen.get(index, 0) + tokens
            self._on_device.zero_()
            self._is_ahead_on_device = False
        return self._seen

    @property
    def length(self) -> int | None:
        """Tokens seen, `None` if the count is not known."""
        if not self._is_known:
            return None
        seen = self.seen()
        return seen[min(seen)] if seen else 0

    def set(self, seen: Mapping[int, int]) -> None:
        """Go on from these counts."""
        self.seen()
        self._seen = dict(seen)
        self._columns_were_counted = dict.fromkeys(self._columns_were_counted, False)

    def remove(self, tokens: int) -> None:
        """Take back the newest tokens."""
        self.set({index: seen - tokens for index, seen in self.seen().items()})

    def clear(self) -> None:
        """Count from zero again."""
        self.set({})
        self._is_known = True

    def fork(self) -> Self:
        """An independent count."""
        twin = type(self)(self._number_of_states)
        twin.set(self.seen())
        twin._columns_were_counted, twin._is_known = dict(self._columns_were_counted), self._is_known
        if self._on_device is not None:
            twin._on_device = self._zeros(self._on_device.device)
            torch._dynamo.mark_static_address(twin._on_device)
        return twin

    def tensors(self) -> list[Tensor]:
        """The tensors of the count."""
        return [] if self._on_device is None else [self._on_device]

    def facts(self) -> dict[str, Fact]:
        """The count as plain facts."""
        return {"is_known": self._is_known, **{f"tokens.{index}": seen for index, seen in self.seen().items()}}

    def read(self, facts: Mapping[str, Fact]) -> None:
        """Go on from the count that `facts()` returned."""
        found = {index: facts.get(f"tokens.{index}") for index in range(self._number_of_states)}
        self.set({index: seen for index, seen in found.items() if isinstance(seen, int)})
        self._is_known = bool(facts.get("is_known", True))
