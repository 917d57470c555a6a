"""Which tokens a layer keeps: the contract of a layer of attention, and the transformers surface derived from it."""

from abc import abstractmethod

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from typing_extensions import override

from ..errors import UnsupportedLayerError
from ..stores.buffer import StateForm, form_of
from .layer_operations import LayerOperations, LayerState, crop_target, unbounded_as_minus_one, whole_number

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
    def restorable(self, length: int) -> int:
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

    # What follows is how transformers and older code ask for the above.

    @property
    def is_initialized(self) -> bool:
        """Whether the form of the states is known."""
        return self.batch_size is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Prepare for states like these, whose tokens are not taken in."""
        self.reserve_form(form_of(key_states), form_of(value_states))

    def get_seq_length(self) -> int:
        """As `length`."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As `mask_sizes`."""
        return self.mask_sizes(query_length)
