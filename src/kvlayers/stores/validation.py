"""Whether new states can be held at all, and beside those that are held."""

from operator import index

from torch import Tensor

from kvlayers.errors import CapacityError, StateMismatchError
from kvlayers.stores.buffer import StateForm, form_of

_FORM_PARTS = ("batch size", "kv_heads", "head_dim", "dtype", "device")


def checked_forms(keys: Tensor, values: Tensor) -> tuple[StateForm, StateForm]:
    """Forms of keys and values that are states of one forward pass.

    Raises:
        StateMismatchError: they are not.
    """
    key_shape, value_shape = keys.shape, values.shape
    if len(key_shape) != 4 or len(value_shape) != 4:
        raise StateMismatchError(
            "expected keys and values [batch, kv_heads, tokens, head_dim], but saw shapes "
            f"{tuple(key_shape)} and {tuple(value_shape)}: reshape them before the update."
        )
    if key_shape[2] != value_shape[2]:
        raise StateMismatchError(
            f"expected keys and values of as many tokens, but saw {key_shape[2]} and {value_shape[2]}: pass the "
            "states of one forward pass together."
        )
    return form_of(keys), form_of(values)


def check_one_batch(key_form: StateForm, value_form: StateForm) -> None:
    """Raise `StateMismatchError` where keys and values are of different batch sizes."""
    if key_form[0] != value_form[0]:
        raise StateMismatchError(
            f"expected keys and values of one batch size, but saw {key_form[0]} and {value_form[0]}: pass the "
            "states of one forward pass together."
        )


def mismatch(
    seen: tuple[StateForm, StateForm], held: tuple[StateForm | None, StateForm | None], length: int
) -> StateMismatchError:
    """The error for states of other forms than the `length` tokens that are held."""
    for side, new_form, held_form in zip(("keys", "values"), seen, held, strict=True):
        for part, new, old in zip(_FORM_PARTS, new_form, held_form or (), strict=False):
            if new != old:
                held_already = f"the {length} tokens that are held" if length else "the memory that is reserved"
                way_out = (
                    "select or repeat the cache's sequences (batch_select_indices, batch_repeat_interleave), or reset "
                    "the cache first"
                )
                return StateMismatchError(
                    f"expected {side} of {part} {old}, as {held_already}, but saw {part} {new}: convert the states, "
                    f"{way_out if length else 'or make another cache'}."
                )
    return StateMismatchError("the states do not match those that are held: reset the cache first.")


def no_room_for_tokens(limit: int, held: int, tokens: int) -> CapacityError:
    """The error for `tokens` more than the `limit` allows beside those that are held."""
    # Compiled code that holds a number for one that varies writes it into a message only when it is told which it is.
    limit, held, tokens = index(limit), index(held), index(tokens)
    return CapacityError(
        f"expected at most {limit} tokens, the size of the reservation, but saw {held} held and {tokens} new: reserve "
        f"{held + tokens} or more (max_cache_len), or crop the cache first."
    )


def no_room_for_batch(limit: int, batch_size: int) -> CapacityError:
    """The error for more sequences than were reserved for."""
    limit, batch_size = index(limit), index(batch_size)
    return CapacityError(
        f"expected at most {limit} sequences, the size of the reservation, but saw {batch_size}: make the cache with "
        f"max_batch_size={batch_size} or more, or with grow=True."
    )


def check_dense_state(tensors: dict[str, Tensor]) -> int:
    """Tokens in `keys` and `values` of a state; 0 where it has neither.

    Raises:
        StateMismatchError: they are not keys and values of as many tokens.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    match = [len(shape) == 4 and (shape[0], shape[2]) for shape in shapes.values()]
    if shapes and (set(shapes) != {"keys", "values"} or not match[0] or match[0] != match[1]):
        raise StateMismatchError(
            f"expected keys and values [batch, kv_heads, tokens, head_dim] of as many tokens, but saw {shapes}: "
            "take the state again."
        )
    return int(shapes["keys"][2]) if shapes else 0
