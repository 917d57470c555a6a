"""Checks of what callers pass: batch indices, numbers of tokens, lengths to crop to, new states, saved states."""

import contextlib
import operator
from collections.abc import Sequence
from operator import index
from typing import Any, cast

import torch
from torch import Tensor

from kvlayers.core.buffer import StateForm, form_of
from kvlayers.errors import BatchIndexError, CapacityError, OptionError, RollbackError, StateMismatchError
from kvlayers.upstream.callers import warn_of_old_use
from kvlayers.utils.options import check_whole_number
from kvlayers.utils.transforms import autocast_dtype
from kvlayers.utils.units import tokens

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
        raise BatchIndexError(f"`indices` must be batch indices, got {indices!r}: pass a list or a tensor.") from error
    if rows.dtype == torch.bool and not rows.is_meta:
        if tuple(rows.shape) != (batch_size,):
            raise BatchIndexError(
                f"A mask of sequences must have the shape ({batch_size},), got {tuple(rows.shape)}: pass one entry for "
                "each sequence."
            )
        rows = rows.nonzero().squeeze(1)
    if (
        rows.dim() != 1
        or rows.shape[0] == 0
        or rows.layout != torch.strided
        or rows.is_floating_point()
        or rows.is_complex()
    ):
        raise BatchIndexError(
            f"`indices` must be a list of at least one batch index, all whole numbers, got shape {tuple(rows.shape)} "
            f"of {rows.dtype} on {rows.device}: pass the numbers of the sequences to keep."
        )
    rows = rows.to(torch.int64)
    if rows.device.type == "cpu":
        lowest, highest = int(rows.min()), int(rows.max())
        if lowest < -batch_size or highest >= batch_size:
            raise BatchIndexError(
                f"`indices` must be below the batch size {batch_size}, got {lowest} to {highest}: select "
                "among the sequences that the cache holds."
            )
        if lowest < 0:
            rows = rows % batch_size
    return rows


def repeated_rows(repeats: int, batch_size: int) -> Tensor:
    """Indices that repeat each of `batch_size` rows `repeats` times in a row, int64 `[batch_size * repeats]`."""
    if not isinstance(repeats, int) or isinstance(repeats, bool) or repeats < 1:
        raise BatchIndexError(f"`repeats` must be at least 1, got {repeats!r}: repeat each sequence once or more.")
    return torch.arange(batch_size).repeat_interleave(repeats)


def unbounded_as_minus_one(capacity: int | None) -> int:
    """A capacity as transformers writes it: -1 if there is no maximum."""
    return -1 if capacity is None else capacity


def whole_number(number: object, what: str) -> int:
    """`number` as an `int`, if it is an int, or an integer tensor of one element. `what` names it in the error.

    A truth is no number, since `True` is hardly ever meant as 1.

    Raises:
        OptionError: it is something else, such as a float.
    """
    if not isinstance(number, bool) and not (isinstance(number, Tensor) and number.dtype == torch.bool):
        # torch raises a RuntimeError for a tensor without data.
        with contextlib.suppress(TypeError, RuntimeError):
            return operator.index(number)  # type: ignore[arg-type]
    raise OptionError(f"{what} must be a whole number, got {number!r:.60}: pass an integer.")


def checked_hint(length_hint: object) -> int | None:
    """The tokens that the option `length_hint` says: a number such as 4096, a text such as "4k", or `None`.

    Raises:
        OptionError: it is something else, or less than 0.
    """
    # In ordinary calls without a call in Python, as each layer asks.
    if length_hint is None or (type(length_hint) is int and length_hint >= 0):
        return length_hint
    hint = whole_number(tokens(length_hint, "length_hint"), "`length_hint`")  # type: ignore[arg-type]
    check_whole_number(hint, "`length_hint`", 0, of="tokens", advice=": leave it out if the number is not known")
    return hint


def query_count(queries: object, what: str = "`query_length`") -> int:
    """Tokens of the next update: their number, or that of their positions, int64 `[tokens]`. `what` names it in errors.

    Raises:
        OptionError: it is neither.
    """
    if isinstance(queries, Tensor) and queries.dim() == 1:
        queries = queries.shape[0]
    # While code is exported, the number is a symbol.
    count: Any = queries if isinstance(queries, torch.SymInt) else whole_number(queries, what)
    if count < 0:
        raise OptionError(f"{what} must be at least 0, got {count}: pass the number of new tokens.")
    return count  # type: ignore[no-any-return]


def crop_argument(tokens_to_remove: int | None, max_length: int | None) -> int:
    """The argument of `crop`, by its name of today or the one before.

    Raises:
        OptionError: both or neither is given.
    """
    if (tokens_to_remove is None) == (max_length is None):
        raise OptionError(
            f"`crop` must be given one number, got tokens_to_remove={tokens_to_remove!r} and "
            f"max_length={max_length!r}: pass crop(length), or crop(-count)."
        )
    if max_length is None:
        return cast("int", tokens_to_remove)
    warn_of_old_use("crop(max_length=...)", f"write crop({max_length})")
    return max_length


def crop_target(tokens: int, length: int) -> int:
    """The length that `crop(tokens)` asks for, if `length` tokens are held.

    A positive number is a length, as in transformers 4. Zero and negative numbers remove tokens, as in transformers 5.

    Raises:
        RollbackError: fewer tokens are held.
    """
    tokens = whole_number(tokens, "tokens to crop")
    target = tokens if tokens > 0 else length + tokens
    if not 0 <= target <= length:
        raise RollbackError(
            f"`tokens` must be within the {length} tokens that are held, got {tokens}: pass a length of at most "
            f"{length}, or a negative count of at least {-length} to remove tokens."
        )
    return target


def check_rollback(length: int, held: int) -> int:
    """The length as an `int`. Raises `RollbackError` if layers of `held` tokens never had `length` tokens."""
    number = whole_number(length, "`length`")
    if not 0 <= number <= held:
        raise RollbackError(
            f"`length` must be from 0 to the {held} tokens that are held, got {length}: pass a length among them."
        )
    return number


_FORM_PARTS = ("batch size", "kv_heads", "head_dim", "dtype", "device")
_REMEDIES = {
    "batch size": "select or repeat the cache's sequences (batch_select_indices, batch_repeat_interleave), or reset() "
    "the cache for another batch",
    "dtype": "run all passes in that dtype, or all passes under autocast, or reset() the cache",
    "device": "move the states to that device",
}
_OTHER_MODEL = "use the cache with the model that filled it, or reset() it for another one"


def checked_forms(keys: Tensor, values: Tensor) -> tuple[StateForm, StateForm]:
    """Forms of keys and values of one forward pass.

    Raises:
        StateMismatchError: keys and values do not have four dimensions, or have different numbers of tokens.
    """
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor):
        raise StateMismatchError(
            f"Keys and values must be tensors, got a {type(keys).__name__} and a {type(values).__name__}: pass the "
            "states of one forward pass."
        )
    key_shape, value_shape = keys.shape, values.shape
    if len(key_shape) != 4 or len(value_shape) != 4:
        raise StateMismatchError(
            f"Keys and values must be [batch, kv_heads, tokens, head_dim], got shapes {tuple(key_shape)} and "
            f"{tuple(value_shape)}: reshape them before the update."
        )
    if key_shape[2] != value_shape[2]:
        raise StateMismatchError(
            f"Keys and values must have the same number of tokens, got {key_shape[2]} and {value_shape[2]}: pass the "
            "states of one forward pass together."
        )
    return form_of(keys), form_of(values)


def check_one_batch(key_form: StateForm, value_form: StateForm) -> None:
    """Raise `StateMismatchError` if keys and values have different batch sizes."""
    if key_form.batch_size != value_form.batch_size:
        raise StateMismatchError(
            f"Keys and values must have the same batch size, got {key_form.batch_size} and {value_form.batch_size}: "
            "pass the states of one forward pass together."
        )


def promoted_forms(
    seen: tuple[StateForm, StateForm], held: tuple[StateForm, StateForm], length: int
) -> tuple[StateForm, StateForm]:
    """The forms of the `length` held tokens, with the dtypes that `torch.cat` gives to held and new states.

    Raises:
        StateMismatchError: the forms differ in more than the dtype, or there is no such dtype (float8, whole numbers).
    """
    dtypes = [form.dtype for form in (*seen, *held)]
    if not all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes):
        raise mismatch(seen, held, length)
    promoted = tuple(
        old._replace(dtype=torch.promote_types(new.dtype, old.dtype)) for new, old in zip(seen, held, strict=True)
    )
    if not all(new._replace(dtype=form.dtype) == form for new, form in zip(seen, promoted, strict=True)):
        raise mismatch(seen, held, length)
    return promoted[0], promoted[1]


def check_can_follow(keys: StateForm, values: StateForm, held: Sequence[StateForm], length: int) -> bool:
    """Check that attention can read the `length` held tokens beside new ones, as far as dtype and device say.

    Returns:
        Whether it can without autocast, which converts all that attention reads to one dtype.

    Raises:
        StateMismatchError: it cannot.
    """
    if len(held) != 2:
        return True
    key_form, value_form = held
    seen = (
        key_form._replace(dtype=keys.dtype, device=keys.device),
        value_form._replace(dtype=values.dtype, device=values.device),
    )
    promoted = seen if seen == (key_form, value_form) else promoted_forms(seen, (key_form, value_form), length)
    if promoted != seen and autocast_dtype(keys.device) is None:
        raise mismatch((keys, values), (key_form, value_form), length)
    return promoted == seen


def mismatch(
    seen: tuple[StateForm, StateForm], held: tuple[StateForm | None, StateForm | None], length: int
) -> StateMismatchError:
    """The error for states whose form differs from that of the `length` held tokens."""
    for side, new_form, held_form in zip(("keys", "values"), seen, held, strict=True):
        for part, new, old in zip(_FORM_PARTS, new_form, held_form or (), strict=False):
            if new != old:
                held_already = f"the {length} held tokens" if length else "the reserved memory"
                remedy = _REMEDIES.get(part, _OTHER_MODEL) if length else "make another cache"
                return StateMismatchError(
                    f"The {side} must have {part} {old}, like {held_already}, got {part} {new}: {remedy}."
                )
    return StateMismatchError("The states do not match the held ones: reset the cache first.")


def no_room_for_tokens(limit: int, held: int, tokens: int) -> CapacityError:
    """The error for `tokens` new tokens that exceed the limit, with `held` tokens held."""
    # If compiled code treats a number as a symbol, `index` makes it an int, so that the message can show it.
    limit, held, tokens = index(limit), index(held), index(tokens)
    return CapacityError(
        f"The reservation has room for at most {limit} tokens, got {held} held and {tokens} new: reserve "
        f"{held + tokens} or more (max_cache_len: the prompt and all of its answer), or crop the cache first."
    )


def no_room_for_batch(limit: int, batch_size: int) -> CapacityError:
    """The error for more sequences than the reservation has room for."""
    limit, batch_size = index(limit), index(batch_size)
    return CapacityError(
        f"The reservation holds at most {limit} sequence{'s' * (limit > 1)}, got {batch_size}: make the cache with "
        f"max_batch_size={batch_size} or more, or with grow=True."
    )


def check_dense_state(tensors: dict[str, Tensor]) -> int:
    """Tokens in `keys` and `values` of a state; 0 if it has neither.

    Raises:
        StateMismatchError: they are not keys and values of the same tokens.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    match = [len(shape) == 4 and (shape[0], shape[2]) for shape in shapes.values()]
    if shapes and (set(shapes) != {"keys", "values"} or not match[0] or match[0] != match[1]):
        raise StateMismatchError(
            "A state must have keys and values [batch, kv_heads, tokens, head_dim] of the same tokens, got "
            f"{shapes}: take the state again."
        )
    return int(shapes["keys"][2]) if shapes else 0
