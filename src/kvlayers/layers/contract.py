"""Which tokens a layer keeps: the contract of a layer of attention, and the transformers surface derived from it."""

from abc import abstractmethod
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from typing_extensions import override

from kvlayers.errors import StateMismatchError, UnsupportedLayerError
from kvlayers.layers.operations import LayerOperations, LayerState, crop_target, unbounded_as_minus_one, whole_number
from kvlayers.stores.buffer import StateForm, form_of

__all__ = ["CacheLayer", "LayerOperations", "LayerState", "crop_target", "unbounded_as_minus_one", "whole_number"]


class CacheLayer(LayerOperations, CacheLayerMixin):  # type: ignore[misc]
    """One model layer's share of a cache: the keys and values that it attends to.

    A kind of layer implements the abstract members below and those of `LayerOperations`; what transformers and older
    code call besides is derived from them, once.
    """

    def __init__(self) -> None:
        # Not the initialiser of transformers: it would assign attributes that are properties here.
        pass

    @abstractmethod
    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Take in the states of new tokens, and return the states that their queries attend to.

        Args:
            key_states: `[batch, kv_heads, new, key_head_dim]`.
            value_states: `[batch, kv_heads, new, value_head_dim]`.

        Returns:
            Keys `[batch, kv_heads, attended, key_head_dim]` and values `[batch, kv_heads, attended, value_head_dim]`,
            where `attended` is what `mask_sizes(new)` said just before. They may be views of the cache's memory: read
            them, do not write to them.

        Raises:
            StateMismatchError: states of another batch size, kv_heads, head_dim, dtype or device than those held.
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

    def count(self, tokens: int) -> None:
        """Count tokens that an operator takes in, while compiled code that calls it is traced.

        When that code runs, the operator counts them itself, and to the same number.
        """
        raise UnsupportedLayerError(
            f"expected a layer that compiled code calls by an operator, but saw a {type(self).__name__}: give it a "
            "count of its own, as its is_opaque is true."
        )

    @abstractmethod
    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of what the next `update` of `query_length` tokens returns, and the position of its first token.

        That update must follow: a layer may move or take memory for it, and remembers what it has said.
        """

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
        """Take `length` for the number of tokens seen, after states were put in place by hand.

        Raises:
            StateMismatchError: the layer does not hold the states of so many tokens; nothing is changed.
        """
        if length != self.length:
            raise not_of_so_many(length, self.length)

    # What follows is how transformers and older code ask for the above.

    @property
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
        """Prepare for states like these, whose tokens are not taken in. Values are like keys where not given."""
        self.reserve_form(form_of(key_states), form_of(key_states if value_states is None else value_states))

    def get_seq_length(self) -> int:
        """As `length`."""
        return self.length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """As `mask_sizes`, of a number of tokens, or of their positions as caches of transformers before 5.4 pass."""
        return self.mask_sizes(query_length.shape[0] if isinstance(query_length, Tensor) else query_length)


def not_of_so_many(length: int, held: int) -> StateMismatchError:
    """The error for a count of tokens that a layer's states are not those of."""
    return StateMismatchError(
        f"expected the number of tokens whose states are held, {held}, but saw {length}: use crop to remove tokens, "
        "and update to add tokens."
    )


def public_names(layer: CacheLayer) -> list[str]:
    """The names of a layer that user code may read."""
    return [name for name in dir(layer) if not name.startswith("_")]


def attribute_within(wrapper: CacheLayer, within: str, name: str) -> Any:
    """A public attribute of the layer that another layer is made of.

    Args:
        wrapper: the layer that was asked, and does not have it.
        within: which of its attributes is the layer that may have it.
        name: what was asked for.

    Raises:
        AttributeError: neither of the two layers has it.
    """
    # A copy that is being made has no layer within yet.
    if not name.startswith("_") and within in vars(wrapper):
        return getattr(vars(wrapper)[within], name)
    raise AttributeError(f"'{type(wrapper).__name__}' object has no attribute '{name}'")
