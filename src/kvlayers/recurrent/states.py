"""The tensors of a recurrent layer, how many tokens it has seen, and checks of what it is given."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.core.buffer import COUNT_DTYPE
from kvlayers.core.description import Fact
from kvlayers.errors import LayerIndexError, StateMismatchError

FAMILIES = ("conv", "recurrent")
"""The two kinds of states: of convolutions, and recurrent ones."""

States = dict[tuple[str, int], Tensor]
"""States by their family, and their index within the layer."""


class LinearStates:
    """Convolution states and recurrent states of a layer, by their index.

    A state is written in place, so that compiled code finds it at one address. If autograd follows a state, the tensor
    is replaced instead.

    Args:
        number_of_states: convolution states, and as many recurrent states.

    Attributes:
        conv: convolution states `[batch, channels, kernel]`, `None` before the first tokens.
        recurrent: recurrent states, whose first axis is the batch, `None` before the first tokens.
        has_conv: whether the convolution state holds tokens, and not only memory for them.
        has_recurrent: the same for the recurrent state.
    """

    def __init__(self, number_of_states: int) -> None:
        indices = range(number_of_states)
        self.conv: dict[int, Tensor | None] = dict.fromkeys(indices)
        self.recurrent: dict[int, Tensor | None] = dict.fromkeys(indices)
        self.has_conv: dict[int, bool] = dict.fromkeys(indices, False)
        self.has_recurrent: dict[int, bool] = dict.fromkeys(indices, False)

    def put(self, family: str, state_idx: int, states: Tensor) -> Tensor:
        """Hold a convolution state, `[batch, channels, kernel]`, or a recurrent state, and return the held tensor."""
        held: dict[int, Tensor | None] = getattr(self, family)
        here = held[state_idx] = written(held[state_idx], states)
        getattr(self, f"has_{family}")[state_idx] = True
        return here

    def forget(self, family: str, state_idx: int) -> None:
        """Hold neither a state nor memory for it."""
        getattr(self, family)[state_idx] = None
        getattr(self, f"has_{family}")[state_idx] = False

    @property
    def kernel(self) -> dict[int, int | None]:
        """Columns of each convolution state, `None` before the first tokens."""
        return {index: None if held is None else held.shape[-1] for index, held in self.conv.items()}

    def reserve(self, state_idx: int, conv: Tensor | None, recurrent: Tensor | None, kernel: int) -> None:
        """Take memory for states of these shapes, unless the layer holds states already."""
        if conv is not None and not self.has_conv[state_idx]:
            self.conv[state_idx] = _reserved(conv, (*conv.shape[:-1], kernel))
        if recurrent is not None and not self.has_recurrent[state_idx]:
            self.recurrent[state_idx] = _reserved(recurrent, tuple(recurrent.shape))

    def live(self) -> States:
        """The states that hold tokens."""
        return {
            (family, index): states
            for family in FAMILIES
            for index, states in getattr(self, family).items()
            if states is not None and getattr(self, f"has_{family}")[index]
        }

    @property
    def live_batch(self) -> int | None:
        """Batch size of the states that hold tokens, `None` if no state does."""
        return next((states.shape[0] for states in self.live().values()), None)

    def select(self, indices: Tensor) -> None:
        """Make sequence `i` what sequence `indices[i]` was."""
        for held in (self.conv, self.recurrent):
            for index, states in held.items():
                if states is not None:
                    held[index] = written(states, rows(states, indices))

    def clear(self) -> None:
        """Forget all states. The memory is kept, and filled with zeros."""
        for held in (self.conv, self.recurrent):
            for index, states in held.items():
                if states is not None and states.requires_grad:
                    held[index] = None
                elif states is not None:
                    states.zero_()
        self.has_conv = dict.fromkeys(self.has_conv, False)
        self.has_recurrent = dict.fromkeys(self.has_recurrent, False)

    def fork(self) -> Self:
        """Independent copies of all states."""
        twin = type(self)(len(self.conv))
        for name in FAMILIES:
            held = vars(self)[name]
            vars(twin)[name] = {index: None if states is None else _copied(states) for index, states in held.items()}
        twin.has_conv, twin.has_recurrent = dict(self.has_conv), dict(self.has_recurrent)
        return twin

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, whether they hold tokens or not."""
        for held in (self.conv, self.recurrent):
            yield from (states for states in held.values() if states is not None)


class StatesByIndex(dict[int, Tensor | None]):
    """The states of a layer by their index, as a dict that passes assigned states on to the layer.

    Args:
        held: the states.
        put: called with the index and the assigned states.
    """

    def __init__(self, held: Mapping[int, Tensor | None], put: Callable[[int, Tensor | None], None]) -> None:
        super().__init__(held)
        self._put = put

    def __setitem__(self, state_idx: int, states: Tensor | None) -> None:
        self._put(state_idx, states)
        super().__setitem__(state_idx, states)

    def __reduce__(self) -> tuple[type, tuple[dict[int, Tensor | None]]]:
        # A copy belongs to no layer.
        return dict, (dict(self),)


def rows(states: Tensor, indices: Tensor) -> Tensor:
    """The sequences at `indices` of states whose first axis is the batch."""
    return states.index_select(0, indices.to(states.device))


def written(held: Tensor | None, states: Tensor) -> Tensor:
    """`states`, written to the memory of `held` if they fit there. States that autograd follows are returned as is."""
    if states.requires_grad:
        return states
    if (
        held is None
        or held.requires_grad
        or held.shape != states.shape
        or held.dtype != states.dtype
        or held.device != states.device
    ):
        held = _reserved(states, tuple(states.shape))
    held.copy_(states)
    return held


def kept(states: Tensor) -> Tensor:
    """A detached copy."""
    with torch.inference_mode(False), torch.no_grad():
        return states.detach().clone()


def _reserved(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    # Allocated in inference mode, it could never be written to outside of it.
    with torch.inference_mode(False):
        reserved = torch.zeros(shape, dtype=like.dtype, device=like.device)
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(reserved)
    return reserved


def _copied(states: Tensor) -> Tensor:
    return states.clone() if states.requires_grad else written(None, states)


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


MOST_STATES = 1024
"""States that a layer may have. Models have one or two, and a file may claim any number."""


def no_state(state_idx: object, number_of_states: int) -> LayerIndexError:
    """The error for a state index that a layer does not have."""
    return LayerIndexError(
        f"`state_idx` must be a whole number from 0 to {number_of_states - 1}, as the layer has {number_of_states} "
        f"states, got {state_idx!r}: make the cache from the config of the model that uses it."
    )


def check_is_tensor(states: object, name: str) -> None:
    """Raise `StateMismatchError` if states are no tensor. `name` is what they are."""
    if not isinstance(states, Tensor):
        raise StateMismatchError(
            f"{name} must be a tensor, got a {type(states).__name__}: pass what the model computed."
        )


def check_columns(states: Tensor, held: Tensor, conv_kernel_size: int | None, kernel: int) -> None:
    """Raise `StateMismatchError` if new columns cannot follow the held columns.

    Args:
        states: the new columns, `[batch, channels, new]`.
        held: the held columns, `[batch, channels, kernel]`.
        conv_kernel_size: columns to keep, as the model says now.
        kernel: columns to keep, as the model said first.
    """
    if (
        isinstance(states, Tensor)
        and states.dtype == held.dtype
        and states.shape[:-1] == held.shape[:-1]
        and states.device == held.device
        and (conv_kernel_size is None or conv_kernel_size == kernel)
    ):
        return
    check_is_tensor(states, "Convolution inputs")
    raise StateMismatchError(
        f"Convolution inputs must be {[*held.shape[:-1], 'new']} of {held.dtype} on {held.device} with a kernel of "
        f"{kernel}, got {[*states.shape]} of {states.dtype} on {states.device} with a kernel of "
        f"{conv_kernel_size}: reset the cache first, or use one for each model and batch."
    )


def check_first_columns(states: Tensor, kernel: int, batch_size: int | None) -> None:
    """Raise `StateMismatchError` if these columns cannot be the first ones.

    Args:
        states: the columns, `[batch, channels, new]`.
        kernel: columns to keep.
        batch_size: batch size of other states of the layer, `None` if there are none.
    """
    check_is_tensor(states, "Convolution inputs")
    if states.dim() < 2 or type(kernel) is not int or kernel < 1:
        raise StateMismatchError(
            f"Convolution inputs must be [batch, channels, new] with a kernel of at least 1, got {[*states.shape]} and "
            f"{kernel!r}: pass the columns of one forward pass, and the size of the convolution."
        )
    if batch_size is not None and states.shape[0] != batch_size:
        raise StateMismatchError(
            f"Convolution inputs must be of {batch_size} sequences, got {states.shape[0]}: reset the cache first."
        )


def check_recurrent(states: Tensor, held: Tensor | None, batch_size: int | None) -> None:
    """Raise `StateMismatchError` if a recurrent state cannot be held.

    Args:
        states: the state, which begins with the batch.
        held: the state that it replaces, `None` if it is the first one.
        batch_size: batch size of other states of the layer, `None` if there are none.
    """
    if isinstance(states, Tensor) and held is not None:
        if states.dtype == held.dtype and states.shape == held.shape and states.device == held.device:
            return
        raise StateMismatchError(
            f"The recurrent state must be {[*held.shape]} of {held.dtype} on {held.device}, got {[*states.shape]} of "
            f"{states.dtype} on {states.device}: reset the cache first, or use one for each model and batch."
        )
    check_is_tensor(states, "The recurrent state")
    if states.dim() < 1 or (batch_size is not None and states.shape[0] != batch_size):
        raise StateMismatchError(
            f"The recurrent state must be of {batch_size} sequences, got {[*states.shape]}: reset the cache first."
        )
