"""What every layer of a cache can do, whether it attends or not, and the names that transformers has for it."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor
from typing_extensions import Self

from kvlayers.errors import OptionError, RollbackError, StateMismatchError, UnsupportedLayerError
from kvlayers.layers.batch_indices import BatchIndices, as_batch_indices, repeated_rows
from kvlayers.layers.shape import LayerShape, PlannedBytes
from kvlayers.rope.rotary import Rotary
from kvlayers.stores.contract import Fidelity, lacks_member
from kvlayers.stores.description import DescriptionContext, Fact, Facts
from kvlayers.utils.registry import ClassRegistry, DescribesItself
from kvlayers.utils.tensor_memory import storages_of


@dataclass(frozen=True)
class LayerState:
    """All that a layer must keep to go on decoding elsewhere: tensors, and plain facts."""

    kind: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Fact] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens that the layer had seen.

        Raises:
            StateMismatchError: the state does not say it.
        """
        length = self.facts.get("length")
        if not isinstance(length, int):
            raise StateMismatchError(f"expected a state that counts its tokens, but saw length={length!r}.")
        return length


def unbounded_as_minus_one(capacity: int | None) -> int:
    """A capacity as transformers writes it, where -1 means that there is no maximum."""
    return -1 if capacity is None else capacity


class LayerOperations(DescribesItself, ABC):
    """The operations of a layer: roll back, select sequences, copy, measure, save.

    A kind of layer implements the abstract members; what transformers and older code call besides is derived from them
    here, once.

    Attributes:
        attends: whether it takes keys and values.
        is_recurrent: whether it has convolution states or recurrent states.
        has_other_states: whether keys and values are not all that it holds of a token that it attends to.
        is_sliding: whether it attends within a window.
        is_croppable: whether `crop` can put it back as it was.
        is_compileable: whether generate() may compile the forward pass around it.
        supports_early_init: whether memory can be reserved before the first states.
        record_past: whether models must pass every token's states to it, rather than write to the states themselves.
        is_opaque: whether compiled code calls its `update` as an operator, rather than be traced through it.
        keeps_every_token: whether it can be put back to any number of tokens, whatever it has seen since.
        rotaries: rotations that its description names by their fingerprints.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = True
    attends = True
    is_recurrent = False
    has_other_states = False
    record_past: bool = False
    is_opaque = False
    keeps_every_token = False
    rotaries: tuple[Rotary, ...] = ()

    @property
    def kind(self) -> str:
        """Name of the kind of layer, by which its saved states are known: that which its class is registered by."""
        return LAYER_CLASSES.name_of(type(self))

    @abstractmethod
    def describe(self) -> dict[str, Fact]:
        """Plain facts from which an empty layer like this one is made. They are among the facts of its `state()`."""

    @classmethod
    @abstractmethod
    def from_description(cls, facts: Facts, context: DescriptionContext) -> Self:
        """An empty layer, from what `describe` returned.

        Args:
            facts: what `describe` returned, among other facts. They may come from a file that anybody has written.
            context: what is needed besides, such as the reader of the layer's store.

        Raises:
            KeyError: a fact is missing.
            KVLayersError: a fact has a value that the layer does not take.
        """

    @classmethod
    def reserved_by(cls, facts: Facts) -> tuple[int, int]:
        """How many tokens, and how many sequences, a layer of these facts reserves memory for with its first states.

        0 if it takes memory as it needs it. What a file asks for is compared with what it holds by this.
        """
        return 0, 0

    @property
    def can_be_stacked(self) -> bool:
        """Whether states of several such layers can be put side by side, the shorter ones padded on the left."""
        return False

    @property
    @abstractmethod
    def length(self) -> int | None:
        """Tokens seen and not rolled back, `None` where that cannot be known."""

    @property
    @abstractmethod
    def capacity(self) -> int | None:
        """The most tokens that the layer can hold, `None` where there is no such number."""

    @property
    @abstractmethod
    def batch_size(self) -> int | None:
        """Sequences side by side, `None` before the first states."""

    @property
    def sized_for(self) -> int | None:
        """The number of tokens that the layer was told to make room for, `None` if it was told no number."""
        return None

    @property
    def fidelity(self) -> Fidelity:
        """What the layer does to the states that the model attends to.

        Raises:
            UnsupportedLayerError: the class does not say.
        """
        raise lacks_member(self, "fidelity")

    def planned_nbytes(self, shape: LayerShape, tokens: int, sized_for: int | None) -> PlannedBytes:
        """The `nbytes` of a layer like this one after it took in `tokens` tokens at once.

        Args:
            shape: what the model's layer holds for each token and each sequence.
            tokens: tokens of a sequence.
            sized_for: number of tokens to make room for, in place of the layer's own `sized_for`.

        Raises:
            CapacityError: the tokens do not fit into a reservation of `sized_for` tokens.
            ConfigError: the layer attends, and the model's layer does not.
            UnsupportedLayerError: the class has no arithmetic.
        """
        raise lacks_member(self, "planned_nbytes")

    def planned_bits(self, shape: LayerShape) -> float:
        """Bits of one number of a key or value that is not among the few in full precision, its scales included."""
        return 8.0 * shape.dtype.itemsize

    @property
    def is_recording(self) -> bool:
        """Whether more is held than is needed, for a later rollback."""
        return self.record_past

    @abstractmethod
    def nearest_restorable(self, length: int) -> int:
        """The greatest length, `length` at most, that the layer can be put back to, exactly.

        Raises:
            RollbackError: there is none.
        """

    @abstractmethod
    def check_truncate(self, length: int) -> None:
        """Raise `RollbackError` where the layer cannot be put back to `length` tokens, exactly."""

    @abstractmethod
    def truncate(self, length: int) -> int | None:
        """Roll back to when the layer had seen `length` tokens, or as near before that as it can.

        Returns:
            How many of the `length` tokens must be passed again. A layer of tokens goes back exactly, or raises, and
            so returns nothing.

        Raises:
            RollbackError: it cannot; nothing is changed.
        """

    def check_select(self, batch_size: int) -> None:
        """Raise what `select` would raise for any `batch_size` indices: nothing, where memory is taken as needed."""
        return

    @abstractmethod
    def select(self, indices: Tensor) -> None:
        """Make sequence `i` what sequence `indices[i]` was. `indices` is int64 `[new_batch]` and in range."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all tokens; the memory is kept for the next ones."""

    @abstractmethod
    def fork(self) -> Self:
        """An independent continuation: what happens to the one never shows in the other."""

    def peek(self) -> tuple[Tensor | None, Tensor | None]:
        """Keys and values held, `[batch, kv_heads, held, head_dim]`, to be read before the cache changes again.

        They may be views of memory that forks share and that is written again; `keys` and `values` are not. A layer
        that does not attend has none.
        """
        return None, None

    @abstractmethod
    def held_tensors(self) -> Iterator[Tensor]:
        """Every tensor that keeps memory alive, spare room included. Forks may hold the same memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""
        return sum(storages_of(self.held_tensors()).values())

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

    def make_room(self, tokens: int) -> None:
        """Be ready for `tokens` more, before any layer takes them in: some layers cannot give a token back.

        Raises:
            CapacityError: so many do not fit.
        """
        return

    def activate_past_recording(self) -> None:
        """Keep what a later `truncate` may need. Nothing to do for a layer that drops no tokens of its own accord."""
        return

    def deactivate_past_recording(self) -> None:
        """End what `activate_past_recording` began."""
        return

    def check_removal(self, tokens: int) -> None:
        """Raise `RollbackError` where `remove_newest(tokens)` would."""
        if self.length:
            self.check_truncate(self.length - tokens)

    def remove_newest(self, tokens: int) -> None:
        """Roll back the newest `tokens` tokens. A layer that the model never used has none, and is left alone."""
        if self.length:
            self.truncate(self.length - tokens)

    # What follows is how transformers and older code ask for the above.

    def get_max_length(self) -> int:
        """As `capacity`, with -1 for no maximum."""
        return unbounded_as_minus_one(self.capacity)

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` before transformers 5.13."""
        return self.get_max_length()

    def crop(self, tokens: int) -> None:
        """Keep `tokens` tokens where that is positive, else remove `-tokens` of the newest: exactly.

        Raises:
            RollbackError: as `check_truncate`.
        """
        length = crop_target(tokens, self.length or 0)
        self.check_truncate(length)
        self.truncate(length)

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

    def expand(self, repeats: int) -> None:
        """As `batch_repeat_interleave`, where what the copies have in common may be held once for all of them."""
        self.batch_repeat_interleave(repeats)

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

    def __copy__(self) -> Self:
        # As a shallow copy of a layer of transformers is: it may be updated without the original.
        return self.fork()

    def _twin(self) -> Self:
        """A layer with the very same attributes."""
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        twin = self.fork()
        memo[id(self)] = twin
        return twin

    def __repr__(self) -> str:
        try:
            return f"{type(self).__name__}(length={self.length})"
        except StateMismatchError as error:
            # Keys and values that were assigned do not match: a debugger shows the layer all the same.
            return f"{type(self).__name__}({error})"


LAYER_CLASSES = ClassRegistry("layer", "kvlayers.layers", "unregister_layer", LayerOperations)  # type: ignore[type-abstract]
"""The layers that a file may name."""


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
