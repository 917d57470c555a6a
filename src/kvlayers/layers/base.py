"""Which tokens a layer keeps: the contract of a layer, and the transformers surface derived from it."""

import operator
from abc import abstractmethod
from dataclasses import dataclass, field

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from typing_extensions import Self

from ..errors import OptionError, RollbackError, UnsupportedLayerError
from ..stores.base import Fact
from ..stores.buffer import StateForm, form_of
from .batch import BatchIndices, as_batch_indices, repeated_rows


@dataclass(frozen=True)
class LayerState:
    """All that a layer must keep to go on decoding elsewhere: tensors, and plain facts."""

    kind: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Fact] = field(default_factory=dict)


def unbounded_as_minus_one(capacity: int | None) -> int:
    """A capacity as transformers writes it, where -1 means that there is no maximum."""
    return -1 if capacity is None else capacity


class CacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One model layer's share of a cache.

    A kind of layer implements the abstract members below; what transformers and older code call besides is derived
    from them here, once.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = True
    attends = True
    is_recurrent = False

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
    def capacity(self) -> int | None:
        """The most tokens that the layer can hold, `None` where there is no such number."""

    @property
    @abstractmethod
    def batch_size(self) -> int | None:
        """Sequences side by side, `None` before the first states."""

    @abstractmethod
    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of what the next `update` of `query_length` tokens returns, and the position of its first token.

        That update must follow: a layer may move or take memory for it, and remembers what it has said.
        """

    @abstractmethod
    def check_truncate(self, length: int) -> None:
        """Raise what `truncate(length)` would raise.

        Raises:
            RollbackError: fewer tokens are held, or tokens that would be needed again are gone.
        """

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Roll back, exactly, to when the layer had seen `length` tokens.

        Raises:
            RollbackError: as `check_truncate`; nothing is changed.
        """

    def check_select(self, batch_size: int) -> None:
        """Raise what `select` would raise for any `batch_size` indices: nothing, where memory is taken as needed."""

    @abstractmethod
    def select(self, indices: Tensor) -> None:
        """Make sequence `i` what sequence `indices[i]` was. `indices` is int64 `[new_batch]` and in range."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all tokens; the memory is kept for the next ones."""

    @abstractmethod
    def fork(self) -> Self:
        """An independent continuation: what happens to the one never shows in the other."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""

    @abstractmethod
    def state(self) -> LayerState:
        """Copies of the live tensors, and the facts beside them."""

    @abstractmethod
    def load_state(self, state: LayerState) -> None:
        """Become what the layer was when `state` was taken.

        Raises:
            StateMismatchError: the state is of another kind of layer, or of one that was made with other settings.
        """

    @abstractmethod
    def check_state(self, state: LayerState) -> None:
        """Raise what `load_state(state)` would raise."""

    @abstractmethod
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        """Prepare for states of these forms before the first ones arrive."""

    def make_room(self, tokens: int) -> None:
        """Be ready for `tokens` more, before any layer takes them in: some layers cannot give a token back.

        Raises:
            CapacityError: so many do not fit.
        """

    def activate_past_recording(self) -> None:
        """Keep what a later `truncate` may need. Nothing to do for a layer that drops no tokens of its own accord."""

    def check_removal(self, tokens: int) -> None:
        """Raise `RollbackError` where `remove_newest(tokens)` would."""
        if self.length:
            self.check_truncate(self.length - tokens)

    def remove_newest(self, tokens: int) -> None:
        """Roll back the newest `tokens` tokens. A layer that the model never used has none, and is left alone."""
        if self.length:
            self.truncate(self.length - tokens)

    def deactivate_past_recording(self) -> None:
        """End what `activate_past_recording` began."""

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

    def get_max_length(self) -> int:
        """As `capacity`, with -1 for no maximum."""
        return unbounded_as_minus_one(self.capacity)

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` before transformers 5.13."""
        return self.get_max_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As `mask_sizes`."""
        return self.mask_sizes(query_length)

    def crop(self, tokens: int) -> None:
        """Keep `tokens` tokens where that is positive, else remove `-tokens` of the newest.

        Raises:
            RollbackError: as `truncate`.
        """
        self.truncate(crop_target(tokens, self.length))

    def reorder_cache(self, beam_idx: BatchIndices) -> None:
        """As `batch_select_indices`, under the name that beam search uses."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: BatchIndices) -> None:
        """Keep the sequences at `indices`, in that order; an index may come more than once."""
        if self.batch_size is not None:
            self.select(as_batch_indices(indices, self.batch_size))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times, copies side by side."""
        if self.batch_size is not None:
            self.select(repeated_rows(repeats, self.batch_size))

    def offload(self) -> None:
        """Refuse to move: where a layer's memory is, is the business of a wrapper, and a plain layer has none.

        Raises:
            UnsupportedLayerError: always.
        """
        raise UnsupportedLayerError(
            f"expected a layer that can move between devices, but a {type(self).__name__} stays on its own: make the "
            "cache with offloading=True."
        )

    def prefetch(self) -> None:
        """As `offload`.

        Raises:
            UnsupportedLayerError: always.
        """
        self.offload()

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        twin = self.fork()
        memo[id(self)] = twin
        return twin

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self.length})"


def whole_number(number: object, what: str) -> int:
    """`number` as an `int`, where it is one by type: an int, or an integer tensor of one element.

    Raises:
        OptionError: it is not.
    """
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError as error:
        raise OptionError(f"expected {what} to be a whole number, but saw {number!r}.") from error


def crop_target(tokens: int, length: int) -> int:
    """Length that `crop(tokens)` asks for, of a cache of `length` tokens.

    A positive number is a length, as in transformers 4; zero and negative ones remove tokens, as in transformers 5.

    Raises:
        RollbackError: that many tokens are not held.
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
