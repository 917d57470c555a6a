"""The tensors of a recurrent layer, at an address that does not change."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.layers.linear.checkpoints import Checkpoint, States, rows


class LinearStates:
    """Convolution states and recurrent states of a layer, by their index.

    A state is written in place, so that compiled code finds it at one address. If autograd follows a state, the tensor
    is replaced instead.

    Args:
        number_of_states: convolution states, and as many recurrent states.

    Attributes:
        conv: convolution states `[batch, channels, kernel]`, `None` before the first tokens.
        recurrent: recurrent states, whose first axis is the batch, `None` before the first tokens.
        kernel: columns of each convolution state.
        has_conv: whether the convolution state holds tokens, and not only memory for them.
        has_recurrent: the same for the recurrent state.
    """

    def __init__(self, number_of_states: int) -> None:
        indices = range(number_of_states)
        self.conv: dict[int, Tensor | None] = dict.fromkeys(indices)
        self.recurrent: dict[int, Tensor | None] = dict.fromkeys(indices)
        self.kernel: dict[int, int | None] = dict.fromkeys(indices)
        self.has_conv: dict[int, bool] = dict.fromkeys(indices, False)
        self.has_recurrent: dict[int, bool] = dict.fromkeys(indices, False)

    def put_conv(self, state_idx: int, columns: Tensor, kernel: int) -> None:
        """Hold `columns`, `[batch, channels, kernel]`."""
        self.conv[state_idx] = written(self.conv[state_idx], columns)
        self.kernel[state_idx], self.has_conv[state_idx] = kernel, True

    def put_recurrent(self, state_idx: int, states: Tensor) -> Tensor:
        """Hold a recurrent state, and return the held tensor."""
        held = self.recurrent[state_idx] = written(self.recurrent[state_idx], states)
        self.has_recurrent[state_idx] = True
        return held

    def put(self, checkpoint: Checkpoint) -> None:
        """Hold the states of a checkpoint."""
        checkpoint = checkpoint.resolved()
        for index, states in checkpoint.conv.items():
            self.put_conv(index, states, states.shape[-1])
        for index, states in checkpoint.recurrent.items():
            self.put_recurrent(index, states)

    def forget_conv(self, state_idx: int) -> None:
        """Hold neither columns nor memory for them."""
        self.conv[state_idx] = self.kernel[state_idx] = None
        self.has_conv[state_idx] = False

    def forget_recurrent(self, state_idx: int) -> None:
        """Hold neither a recurrent state nor memory for it."""
        self.recurrent[state_idx] = None
        self.has_recurrent[state_idx] = False

    def reserve(self, state_idx: int, conv: Tensor | None, recurrent: Tensor | None, kernel: int) -> None:
        """Take memory for states of these shapes, unless the layer holds states already."""
        if conv is not None and not self.has_conv[state_idx]:
            self.conv[state_idx] = _reserved(conv, (*conv.shape[:-1], kernel))
            self.kernel[state_idx] = kernel
        if recurrent is not None and not self.has_recurrent[state_idx]:
            self.recurrent[state_idx] = _reserved(recurrent, tuple(recurrent.shape))

    def filled(self) -> tuple[set[int], set[int]]:
        """Indices of the convolution states and of the recurrent states that hold tokens."""
        conv = {index for index, filled in self.has_conv.items() if filled}
        return conv, {index for index, filled in self.has_recurrent.items() if filled}

    def live(self) -> tuple[States, States]:
        """The convolution states and the recurrent states that hold tokens."""
        conv, recurrent = self.filled()
        return (
            {index: states for index, states in self.conv.items() if states is not None and index in conv},
            {index: states for index, states in self.recurrent.items() if states is not None and index in recurrent},
        )

    @property
    def live_batch(self) -> int | None:
        """Batch size of the states that hold tokens, `None` if no state does."""
        for given, held in ((self.has_conv, self.conv), (self.has_recurrent, self.recurrent)):
            for index, states in held.items():
                if states is not None and given[index]:
                    return states.shape[0]
        return None

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
        for name in ("conv", "recurrent"):
            held = vars(self)[name]
            vars(twin)[name] = {index: None if states is None else _copied(states) for index, states in held.items()}
        twin.kernel, twin.has_conv = dict(self.kernel), dict(self.has_conv)
        twin.has_recurrent = dict(self.has_recurrent)
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
