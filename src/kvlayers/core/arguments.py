"""What the arguments of layers and caches mean: batch indices, numbers of tokens, lengths to crop to."""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from kvlayers.errors import BatchIndexError, OptionError, RollbackError

BatchIndices = Tensor | Sequence[int]


def as_batch_indices(indices: BatchIndices, batch_size: int) -> Tensor:
    """Batch rows as an int64 tensor `[new_batch]`.

    Args:
        indices: whole numbers from `-batch_size` to `batch_size - 1`, or a boolean mask `[batch_size]`.
        batch_size: number of rows.

    Raises:
        BatchIndexError: no row is selected, or a row does not exist. Indices on an accelerator are not read back for
            this check, since that would stall it at every step of a beam search. There, the device itself fails on a
            row that does not exist.
    """
    try:
        rows = torch.as_tensor(indices)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BatchIndexError(f"expected batch indices, but saw {indices!r}: pass a list or a tensor.") from error
    if rows.dtype == torch.bool:
        if tuple(rows.shape) != (batch_size,):
            raise BatchIndexError(
                f"expected a mask of shape ({batch_size},), one entry for each sequence, but saw {tuple(rows.shape)}."
            )
        rows = rows.nonzero().squeeze(1)
    if rows.dim() != 1 or rows.shape[0] == 0 or rows.is_floating_point() or rows.is_complex():
        raise BatchIndexError(
            f"expected a list of at least one batch index, all whole numbers, but saw shape {tuple(rows.shape)} "
            f"of {rows.dtype}."
        )
    rows = rows.to(torch.int64)
    if rows.device.type == "cpu":
        lowest, highest = int(rows.min()), int(rows.max())
        if lowest < -batch_size or highest >= batch_size:
            raise BatchIndexError(
                f"expected batch indices below the batch size {batch_size}, but saw {lowest} to {highest}: select "
                "among the sequences that the cache holds."
            )
        if lowest < 0:
            rows = rows % batch_size
    return rows


def is_identity(rows: Tensor, batch_size: int) -> bool:
    """Whether selecting `rows` changes nothing. False if an accelerator would have to be waited for."""
    return rows.device.type == "cpu" and rows.shape[0] == batch_size and rows.tolist() == list(range(batch_size))


def repeated_rows(repeats: int, batch_size: int) -> Tensor:
    """Indices that repeat each of `batch_size` rows `repeats` times in a row, int64 `[batch_size * repeats]`."""
    if not isinstance(repeats, int) or isinstance(repeats, bool) or repeats < 1:
        raise BatchIndexError(f"expected to repeat each sequence at least once, but saw repeats={repeats!r}.")
    return torch.arange(batch_size).repeat_interleave(repeats)


def unbounded_as_minus_one(capacity: int | None) -> int:
    """A capacity as transformers writes it: -1 if there is no maximum."""
    return -1 if capacity is None else capacity


def whole_number(number: object, what: str) -> int:
    """`number` as an `int`, if it is an int, or an integer tensor of one element. `what` names it in the error.

    Raises:
        OptionError: it is something else, such as a float.
    """
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError as error:
        raise OptionError(f"expected {what} to be a whole number, but saw {number!r}.") from error


def crop_target(tokens: int, length: int) -> int:
    """The length that `crop(tokens)` asks for, if `length` tokens are held.

    A positive number is a length, as in transformers 4. Zero and negative numbers remove tokens, as in transformers 5.

    Raises:
        RollbackError: fewer tokens are held.
    """
    tokens = whole_number(tokens, "tokens to crop")
    target = tokens if tokens > 0 else length + tokens
    if not 0 <= target <= length:
        asked = f"to keep {tokens}" if tokens > 0 else f"to remove {-tokens}"
        raise RollbackError(
            f"expected to crop within the {length} tokens that are held, but was asked {asked}: pass a length of at "
            f"most {length}, or a negative count of at least {-length}."
        )
    return target
