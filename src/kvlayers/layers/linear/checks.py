"""Checks of the states that a recurrent layer is given, before anything is changed."""

from torch import Tensor

from kvlayers.errors import LayerIndexError, OptionError, StateMismatchError

MOST_STATES = 1024
"""States that a layer may have. Models have one or two, and a file may claim any number."""


def check_number_of_states(number: object) -> int:
    """`number` if a layer can have as many states.

    Raises:
        OptionError: it is not a whole number from 1 to `MOST_STATES`.
    """
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MOST_STATES:
        raise OptionError(f"`number_of_states` must be a whole number from 1 to {MOST_STATES}, got {number!r}.")
    return number


def no_state(state_idx: object, number_of_states: int) -> LayerIndexError:
    """The error for a state index that a layer does not have."""
    return LayerIndexError(
        f"expected a state index from 0 to {number_of_states - 1}, as the layer has {number_of_states}, but saw "
        f"{state_idx!r}: make the cache from the config of the model that uses it."
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
        states.dtype == held.dtype
        and states.shape[:-1] == held.shape[:-1]
        and states.device == held.device
        and (conv_kernel_size is None or conv_kernel_size == kernel)
    ):
        return
    raise StateMismatchError(
        f"expected convolution inputs {[*held.shape[:-1], 'new']} of {held.dtype} on {held.device} with a kernel of "
        f"{kernel}, but saw {[*states.shape]} of {states.dtype} on {states.device} with a kernel of "
        f"{conv_kernel_size}: reset the cache first, or use one for each model and batch."
    )


def check_first_columns(states: Tensor, kernel: int, batch_size: int | None) -> None:
    """Raise `StateMismatchError` if these columns cannot be the first ones.

    Args:
        states: the columns, `[batch, channels, new]`.
        kernel: columns to keep.
        batch_size: batch size of other states of the layer, `None` if there are none.
    """
    if states.dim() < 2 or not isinstance(kernel, int) or kernel < 1:
        raise StateMismatchError(
            f"expected convolution inputs [batch, channels, new] and a kernel of at least 1, but saw "
            f"{[*states.shape]} and {kernel}."
        )
    if batch_size is not None and states.shape[0] != batch_size:
        raise StateMismatchError(
            f"expected convolution inputs of {batch_size} sequences, but saw {states.shape[0]}: reset the cache first."
        )


def check_recurrent(states: Tensor, held: Tensor) -> None:
    """Raise `StateMismatchError` if a recurrent state cannot replace the held one."""
    if states.dtype == held.dtype and states.shape == held.shape and states.device == held.device:
        return
    raise StateMismatchError(
        f"expected a recurrent state {[*held.shape]} of {held.dtype} on {held.device}, but saw {[*states.shape]} of "
        f"{states.dtype} on {states.device}: reset the cache first, or use one for each model and batch."
    )


def check_first_recurrent(states: Tensor, batch_size: int | None) -> None:
    """Raise `StateMismatchError` if a recurrent state has another batch size than the other states."""
    if states.dim() < 1 or (batch_size is not None and states.shape[0] != batch_size):
        raise StateMismatchError(
            f"expected a recurrent state of {batch_size} sequences, but saw {[*states.shape]}: reset the cache first."
        )
