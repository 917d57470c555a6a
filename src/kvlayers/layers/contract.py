"""The contract of a layer that attends: what it adds to `LayerOperations`, the contract of every layer."""

from abc import abstractmethod
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from typing_extensions import override

from kvlayers.errors import StateMismatchError
from kvlayers.layers.arguments import whole_number
from kvlayers.layers.transformers_names import TransformersNames
from kvlayers.stores.buffer import StateForm, form_of


class CacheLayer(TransformersNames, CacheLayerMixin):  # type: ignore[misc]
    """The keys and values of one layer of a model.

    A kind of layer implements the abstract members below, and those of `LayerOperations`. The names that transformers
    and older code call are derived from them, here and in `TransformersNames`.
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

    @override
    def peek(self) -> tuple[Tensor | None, Tensor | None]:
        return self.keys, self.values

    @override
    def nearest_restorable(self, length: int) -> int:
        self.check_truncate(length)
        return length

    @abstractmethod
    def check_truncate(self, length: int) -> None:
        """Raise what `truncate(length)` would raise.

        Raises:
            RollbackError: fewer tokens are held, or tokens that would be needed again are gone.
        """

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
                "expected keys and values before a layer is initialized, but saw is_initialized = True on an empty "
                "layer: assign keys and values, or call update."
            )

    @property
    def cumulative_length(self) -> int:
        """As `length`, by the name of transformers' sliding, static and quantized layers. Setting it is a `recount`."""
        return self.get_seq_length()

    @cumulative_length.setter
    def cumulative_length(self, length: int) -> None:
        self.recount(whole_number(length, "cumulative_length"))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Prepare for states of these shapes, which are not taken in. Values have the form of keys if not given."""
        self.reserve_form(form_of(key_states), form_of(key_states if value_states is None else value_states))

    @override
    def get_seq_length(self) -> int:
        """As `length`."""
        return self.length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """As `mask_sizes`. Caches of transformers before 5.4 pass positions instead, int64 `[query_length]`."""
        return self.mask_sizes(query_length.shape[0] if isinstance(query_length, Tensor) else query_length)


def not_of_so_many(length: int, held: int) -> StateMismatchError:
    """The error for a number of tokens whose states a layer does not hold."""
    return StateMismatchError(
        f"expected the number of tokens whose states are held, {held}, but saw {length}: use crop to remove tokens, "
        "and update to add tokens."
    )
