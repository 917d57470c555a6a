"""The contract of a layer that attends, and a layer that attends by another one."""

from abc import abstractmethod
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from typing_extensions import override

from kvlayers.core.arguments import checked_forms, query_count, whole_number
from kvlayers.core.buffer import StateForm
from kvlayers.core.layer_operations import LayerOperations
from kvlayers.errors import StateMismatchError


class CacheLayer(LayerOperations, CacheLayerMixin):  # type: ignore[misc]
    """The keys and values of one layer of a model.

    A kind of layer implements the abstract members below, and those of `LayerOperations`. The names that transformers
    and older code call are derived from them.
    """

    def __init__(self) -> None:
        # Not the initialiser of transformers: it would assign attributes that are properties here.
        pass

    @abstractmethod
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens, and return the states that their queries attend to.

        Args:
            key_states: `[batch, kv_heads, new, key_head_dim]`.
            value_states: `[batch, kv_heads, new, value_head_dim]`.
            *args: ignored. Caches and models of transformers pass further arguments, which change with its versions.
            **kwargs: ignored, for the same reason.

        Returns:
            Keys `[batch, kv_heads, attended, key_head_dim]` and values `[batch, kv_heads, attended, value_head_dim]`.
            `attended` is the length that `mask_sizes(new)` returned just before. They may be views of the cache's
            memory, so do not write to them.

        Raises:
            StateMismatchError: the batch size, kv_heads, head_dim, dtype or device differ from those held.
            CapacityError: more tokens than fit.
        """

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens seen and not rolled back."""

    @property
    @abstractmethod
    def keys(self) -> Any:
        """Keys held, `[batch, kv_heads, held, head_dim]`, `None` before the first states."""

    @property
    @abstractmethod
    def values(self) -> Any:
        """Values held, `[batch, kv_heads, held, head_dim]`, `None` before the first states."""

    @property
    @abstractmethod
    def dtype(self) -> Any:
        """dtype of the keys, `None` before the first states."""

    @property
    @abstractmethod
    def device(self) -> Any:
        """Device of the keys, `None` before the first states."""

    @abstractmethod
    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of the states that the next `update` of `query_length` tokens returns, and position of the first one.

        That update must follow: a layer may take or move memory for it, and remembers what it returned here.
        """

    @property
    @override
    def held_tokens(self) -> int | None:
        return self.length

    @abstractmethod
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        """Prepare for states of these forms before the first ones arrive."""

    def recount(self, length: int) -> None:
        """Set the number of tokens seen to `length`, after states were assigned by hand.

        Raises:
            StateMismatchError: the layer does not hold the states of `length` tokens; nothing is changed.
        """
        if length != self.length:
            raise not_of_so_many(length, self.length)

    # By the names of transformers and older code

    @property
    @override
    def is_initialized(self) -> bool:
        """Whether the form of the states is known. Setting it to false is a `reset`."""
        return self.batch_size is not None

    @is_initialized.setter
    def is_initialized(self, is_initialized: bool) -> None:
        if not is_initialized:
            self.reset()
        elif not self.is_initialized:
            raise StateMismatchError(
                "`is_initialized` must stay False until there are keys and values, got True on an empty "
                "layer: assign keys and values, or call update."
            )

    @property
    def cumulative_length(self) -> int:
        """As `length`, by the name of transformers' sliding, static and quantized layers. Setting it is a `recount`."""
        return self.get_seq_length()

    @cumulative_length.setter
    def cumulative_length(self, length: int) -> None:
        self.recount(whole_number(length, "`cumulative_length`"))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Prepare for states of these shapes, which are not taken in. Values have the form of keys if not given."""
        self.reserve_form(*checked_forms(key_states, key_states if value_states is None else value_states))

    @override
    def get_seq_length(self) -> int:
        """As `length`."""
        return self.length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """As `mask_sizes`. Caches of transformers before 5.4 pass positions instead, int64 `[query_length]`."""
        return self.mask_sizes(query_count(query_length))


def not_of_so_many(length: int, held: int) -> StateMismatchError:
    """The error for a number of tokens whose states a layer does not hold."""
    return StateMismatchError(
        f"The number of tokens must be that of the states that are held, {held}, got {length}: use crop to remove "
        "tokens, and update to add tokens."
    )


class Forwarded:
    """A member of a layer that one of its parts answers: a method, or an attribute that can be assigned too.

    Args:
        part: name of the attribute that holds the part.
    """

    def __init__(self, part: str) -> None:
        self.part = part
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        return self if layer is None else getattr(getattr(layer, self.part), self.name)

    def __set__(self, layer: Any, value: Any) -> None:
        setattr(getattr(layer, self.part), self.name, value)


def forwarded(part: str) -> Any:
    """A `Forwarded`, which stands for a member of any type."""
    return Forwarded(part)


class WrapperLayer(CacheLayer):
    """A layer that attends by another layer, and answers for it.

    Args:
        wrapped: the layer that attends.

    Attributes:
        wrapped: the same layer.
    """

    wrapped: Any

    length = forwarded("wrapped")
    capacity = forwarded("wrapped")
    held_tokens = forwarded("wrapped")
    forms = forwarded("wrapped")
    batch_size = forwarded("wrapped")
    dtype = forwarded("wrapped")
    device = forwarded("wrapped")
    sliding_window = forwarded("wrapped")
    reservation_facts = forwarded("wrapped")
    is_sliding = forwarded("wrapped")
    is_croppable = forwarded("wrapped")
    is_recording = forwarded("wrapped")
    can_be_stacked = forwarded("wrapped")
    rotaries = forwarded("wrapped")
    bits = forwarded("wrapped")
    fidelity = forwarded("wrapped")
    exact_from = forwarded("wrapped")
    attention_paths = forwarded("wrapped")
    packing_paths = forwarded("wrapped")
    sized_for = forwarded("wrapped")
    planned_bits = forwarded("wrapped")
    note_left_padding = forwarded("wrapped")
    nearest_restorable = forwarded("wrapped")
    check_truncate = forwarded("wrapped")
    check_select = forwarded("wrapped")
    held_tensors = forwarded("wrapped")

    def __init__(self, wrapped: CacheLayer) -> None:
        super().__init__()
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        """Further public attributes of the wrapped layer, such as its reservation."""
        # A copy that is being made does not have its wrapped layer yet.
        if not name.startswith("_") and "wrapped" in vars(self):
            return getattr(self.wrapped, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @override
    def __dir__(self) -> list[str]:
        public = [name for name in dir(self.wrapped) if not name.startswith("_")]
        return sorted({*super().__dir__(), *public})
