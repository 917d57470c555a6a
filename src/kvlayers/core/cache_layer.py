"""The contract of a layer of a cache, and a layer that attends by another one."""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from typing_extensions import Self, override

from kvlayers.core.arguments import (
    BatchIndices,
    as_batch_indices,
    checked_forms,
    crop_target,
    query_count,
    repeated_rows,
    unbounded_as_minus_one,
    whole_number,
)
from kvlayers.core.buffer import StateForm
from kvlayers.core.description import (
    DescriptionContext,
    Fact,
    Facts,
    arguments_from,
    check_initialiser,
    described_facts,
    registered_class,
)
from kvlayers.core.token_store import StateHolder
from kvlayers.errors import RegistryError, StateMismatchError, UnsupportedLayerError
from kvlayers.utils import late
from kvlayers.utils.registry import ClassRegistry
from kvlayers.utils.sending import sent_by_value


@sent_by_value
@dataclass(frozen=True)
class LayerState:
    """Everything that a layer needs to go on decoding elsewhere.

    Attributes:
        kind: name of the kind of layer.
        tensors: copies of its tensors, by name.
        facts: plain facts that belong to them, by name.
    """

    kind: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Fact] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens that the layer had seen.

        Raises:
            StateMismatchError: the state does not say so.
        """
        length = self.facts.get("length")
        if not isinstance(length, int):
            raise StateMismatchError(
                f"`length` must be the number of tokens of the state, got {length!r}: take the state again."
            )
        return length

    def split(self, names: Collection[str]) -> "tuple[dict[str, Tensor], LayerState]":
        """The tensors of these names, which a layer keeps beside its store, and the state without them."""
        rest = dict(self.tensors)
        return {name: rest.pop(name) for name in self.tensors if name in names}, replace(self, tensors=rest)


def check_kind_of_state(state: object, kind: str) -> None:
    """Raise `StateMismatchError` if `state` is not what a layer of this kind returns as its state."""
    if not isinstance(state, LayerState):
        raise StateMismatchError(
            f"`state` must be a LayerState, got a {type(state).__name__}: pass what the state() of a layer returned."
        )
    if state.kind != kind:
        raise StateMismatchError(
            f"`state` must be that of a {kind}, got that of a {state.kind}: load it into a cache of the kind that it "
            "was taken from."
        )


def forked_once(held: Any, memo: dict[int, object]) -> Any:
    """What `copy.deepcopy` makes of a layer or of a cache: a fork, which is the same wherever a structure has it."""
    twin = memo[id(held)] = held.fork()
    return twin


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """What a kind of layer is like, whatever it holds. A kind states it once.

    Attributes:
        attends: whether it takes keys and values.
        is_recurrent: whether it has convolution states or recurrent states.
        has_other_states: whether it holds more of an attended token than its key and value, such as an indexer's key.
        is_upstream: whether it is one of transformers' layers, behind an adapter.
        keeps_every_token: whether it can be put back to any number of tokens, whatever it has seen since.
        evicts_by_states: whether tokens are evicted for what their keys and values are. The device of the states
            computes that.
        counts_columns: whether it counts its tokens by the columns that its convolutions are given.
        counts_rows: whether each row can be rolled back by itself: it has `check_truncate_rows` and `truncate_rows`.
        can_be_stacked: whether states of several such layers can be put side by side, if the store of keys and values
            holds tokens apart.
    """

    attends: bool = True
    is_recurrent: bool = False
    has_other_states: bool = False
    is_upstream: bool = False
    keeps_every_token: bool = False
    evicts_by_states: bool = False
    counts_columns: bool = False
    counts_rows: bool = False
    can_be_stacked: bool = False


class CacheLayer(StateHolder):
    """What a layer can do: say what it is and holds, take in states, roll back, select sequences, copy and save.

    A kind of layer implements the abstract members. The other members have an answer that suits most layers: a layer
    for which it is wrong overrides it. The names that transformers and older code call are derived from them.

    To transformers, a layer that attends is also one of its `CacheLayerMixin`, as layers derived from `TokenLayer` are.

    Attributes:
        traits: what its kind is like, whatever it holds.
        is_sliding: whether it attends within a window.
        is_croppable: whether `crop` can put it back as it was.
        is_compileable: whether generate() may compile the forward pass around it.
        supports_early_init: whether memory can be reserved before the first states.
        record_past: whether models must pass the states of every token to it, instead of writing to the held states.
        sliding_window: tokens that a query attends to, itself included; `None` for full attention.
        counts_on_device: whether its count of tokens stands on a device that would have to be waited for.
        forms: form of the keys and of the values; empty before the first states, and for a layer that does not attend.
        device: device of the states, `None` before the first ones.
        reserved: the memory that was reserved at one address, `None` for a layer that takes memory as it needs it.
        memory_tier: where the states are between updates: "device", "host" or "disk".
        reservation_facts: names of described facts that states do not depend on. A state may be loaded into a layer
            whose facts of these names differ, and rows of one batch may differ in them.
    """

    traits = LayerTraits()
    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = True
    record_past: bool = False
    sliding_window: int | None = None
    counts_on_device: bool = False
    forms: tuple[StateForm, ...] = ()
    device: Any = None
    reserved: Any = None
    memory_tier: str = "device"
    reservation_facts: frozenset[str] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if beside := sorted(LayerTraits.__dataclass_fields__.keys() & vars(cls).keys()):
            raise RegistryError(
                f"`traits` of {cls.__qualname__} must say what its kind is like, got an attribute `{beside[0]}` of the "
                f"class, which nobody asks for: write traits = LayerTraits({beside[0]}=...)."
            )

    def __init__(self) -> None:
        # Not the initialiser of transformers: it would assign attributes that are properties here.
        pass

    # What the layer consists of

    @property
    def original(self) -> Any:
        """The layer as it stands in `cache.layers`: itself, or transformers' layer for the adapter of one."""
        return self

    @property
    def parts(self) -> "tuple[CacheLayer, ...]":
        """The layer itself; for a hybrid layer, its attention layer and then its recurrent layer."""
        return (self,)

    @property
    def unwrapped(self) -> "CacheLayer":
        """The layer without a wrapper that moves its states between devices."""
        return self

    # Rows: sequences of lengths of their own

    @property
    def separate_rows(self) -> "Sequence[CacheLayer]":
        """The layers of its rows, if each row is a layer of its own; otherwise the layer itself."""
        return (self,)

    @property
    def row_lengths(self) -> tuple[int | None, ...]:
        """Tokens that each sequence has seen and not rolled back, `[batch]`; empty before the first states."""
        return (self.length,) * (self.batch_size or 0)

    def row(self, index: int) -> "CacheLayer":
        """A layer with one sequence of this layer, to go on by itself. It does not change when this layer does."""
        row = self.fork()
        row.select(as_batch_indices([whole_number(index, "`row`")], self.batch_size or 0))
        row.compact()
        return row

    def side_by_side(self, layers: "Sequence[CacheLayer]") -> "CacheLayer":
        """A layer whose rows are the sequences of these layers, of which this is the first. They do not change.

        Raises:
            UnsupportedLayerError: layers of this kind cannot be rows.
        """
        joined: CacheLayer = late.function("separate rows")(rows_of(layers))
        return joined

    # What it is made from

    @property
    def kind(self) -> str:
        """Name of the kind of layer in saved states: the name that its class is registered by."""
        return LAYER_CLASSES.name_of(type(self))

    def describe(self) -> dict[str, Fact]:
        """Plain facts from which an empty layer like this one can be made. They are among those of its `state()`."""
        return described_facts(self)

    @classmethod
    def from_description(cls, facts: Facts, context: DescriptionContext) -> Self:
        """An empty layer, made from what `describe` returned.

        Args:
            facts: what `describe` returned, among other facts. They may come from a file that anybody could have
                written.
            context: what else descriptions are read with: rotations, and functions that make stores and layers.

        Raises:
            KeyError: a fact is missing.
            KVLayersError: a fact has a value that the layer does not take.
        """
        return cls(**arguments_from(cls, facts, context))

    # What it holds

    @property
    @abstractmethod
    def length(self) -> int | None:
        """Tokens seen and not rolled back, `None` if that cannot be known."""

    def get_seq_length(self) -> int:
        """As `length`. Static layers return a tensor in compiled code.

        Raises:
            UnsupportedLayerError: the layer does not know.
        """
        length = self.length
        if length is None:
            raise UnsupportedLayerError(
                f"A layer must know how many tokens it has seen, got a {type(self).__name__}, which the model does not "
                "tell: ask an attention layer, if the model has one."
            )
        return length

    @property
    @abstractmethod
    def capacity(self) -> int | None:
        """The most tokens that the layer can hold, `None` if there is no maximum."""

    @property
    @abstractmethod
    def batch_size(self) -> int | None:
        """Sequences side by side, `None` before the first states."""

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
                "`is_initialized` must stay False until there are keys and values, got True on an empty "
                "layer: assign keys and values, or call update."
            )

    @property
    def held_tokens(self) -> int | None:
        """Tokens of which keys and values are held, `None` for a layer that does not attend."""
        return self.length

    @property
    def is_recording(self) -> bool:
        """Whether more is held than is needed, for a later rollback."""
        return self.record_past

    def nearest_restorable(self, length: int) -> int:
        """The greatest length, `length` at most, to which the layer can be put back exactly.

        Raises:
            RollbackError: it cannot be put back to any such length.
        """
        self.check_truncate(length)
        return length

    @abstractmethod
    def check_truncate(self, length: int) -> None:
        """Raise `RollbackError` if the layer cannot be put back to `length` tokens exactly."""

    @abstractmethod
    def truncate(self, length: int) -> int | None:
        """Roll back to when the layer had seen `length` tokens, or to the nearest earlier length that it can restore.

        Returns:
            How many of the `length` tokens must be passed again. A layer of tokens goes back exactly or raises, so it
            returns `None`.

        Raises:
            RollbackError: the layer cannot go back; nothing is changed.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget all tokens; the memory is kept for the next ones."""

    @property
    @abstractmethod
    def keys(self) -> Any:
        """Keys held, `[batch, kv_heads, held, head_dim]`, `None` before the first states."""

    @property
    @abstractmethod
    def values(self) -> Any:
        """Values held, `[batch, kv_heads, held, head_dim]`, `None` before the first states."""

    def peek(self) -> tuple[Tensor | None, Tensor | None]:
        """Keys and values held, `[batch, kv_heads, held, head_dim]`, to be read before the cache changes again.

        They may be views of memory that forks share and that is written again, while `keys` and `values` may not. Both
        are `None` for a layer that does not attend.
        """
        return self.keys, self.values

    @abstractmethod
    def state(self) -> LayerState:
        """Copies of the live tensors, and the facts that belong to them."""

    @abstractmethod
    def load_state(self, state: LayerState) -> None:
        """Become what the layer was when `state` was taken.

        Raises:
            StateMismatchError: the state is of another kind of layer, or of a layer that was made with other arguments.
        """

    @abstractmethod
    def check_state(self, state: LayerState) -> None:
        """Raise what `load_state(state)` would raise."""

    def _recount(self, length: int) -> None:
        """Set the number of tokens seen to `length`, after states were assigned by hand.

        Raises:
            StateMismatchError: the layer does not hold the states of `length` tokens; nothing is changed.
        """
        if length != self.length:
            raise not_of_so_many(length, self.length)

    def make_room(self, tokens: int) -> None:
        """Make room for `tokens` more tokens, before any layer takes them in: some layers cannot give a token back.

        Raises:
            CapacityError: they do not fit.
        """

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
            UnsupportedLayerError: the layer does not attend.
            StateMismatchError: the batch size, kv_heads, head_dim, dtype or device differ from those held.
            CapacityError: more tokens than fit.
        """

    @abstractmethod
    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of the states that the next `update` of `query_length` tokens returns, and position of the first one.

        That update must follow: a layer may take or move memory for it, and remembers what it returned here.

        Raises:
            UnsupportedLayerError: the layer does not attend.
        """

    def _does_not_attend(self) -> UnsupportedLayerError:
        return UnsupportedLayerError(
            f"The layer must be one that attends, got a {type(self.original).__name__}: the cache was made for another "
            "model, so make one from the config of the model that uses it."
        )

    def activate_past_recording(self) -> None:
        """Keep everything that a later `truncate` may need. A layer that never drops tokens need not do anything."""

    def deactivate_past_recording(self) -> None:
        """End what `activate_past_recording` began."""

    def expand(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times in a row. What the copies have in common may be held only once."""
        self.batch_repeat_interleave(repeats)

    def offload(self) -> None:
        """Refuse to move the states to the host: only an `OffloadedLayer` moves them.

        Raises:
            UnsupportedLayerError: always.
        """
        raise UnsupportedLayerError(
            f"The layer must be one whose states can move between devices, got a {type(self).__name__}: make the cache "
            "with offloading=True."
        )

    def prefetch(self) -> None:
        """As `offload`.

        Raises:
            UnsupportedLayerError: always.
        """
        self.offload()

    # By the names of transformers and older code

    @property
    def cumulative_length(self) -> int:
        """As `length`, by the name of transformers' sliding, static and quantized layers; set after an assignment."""
        return self.get_seq_length()

    @cumulative_length.setter
    def cumulative_length(self, length: int) -> None:
        self._recount(whole_number(length, "`cumulative_length`"))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Prepare for states of these shapes, which are not taken in. Values have the form of keys if not given."""
        self.reserve_form(*checked_forms(key_states, key_states if value_states is None else value_states))

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """As `mask_sizes`. Caches of transformers before 5.4 pass positions instead, int64 `[query_length]`."""
        return self.mask_sizes(query_count(query_length))

    def get_max_length(self) -> int:
        """As `capacity`, with -1 for no maximum."""
        return unbounded_as_minus_one(self.capacity)

    get_max_cache_shape = get_max_length
    """The name of `get_max_length` before transformers 5.13."""

    def crop(self, tokens: int) -> None:
        """Roll back, exactly: keep `tokens` tokens if the number is positive, else remove the newest `-tokens` tokens.

        Raises:
            RollbackError: see `check_truncate`.
        """
        length = crop_target(tokens, self.length or 0)
        self.check_truncate(length)
        self.truncate(length)

    def reorder_cache(self, beam_idx: BatchIndices) -> None:
        """As `batch_select_indices`, by the name that beam search uses."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: BatchIndices) -> None:
        """Keep the sequences at `indices`, in that order. An index may occur more than once."""
        if self.batch_size is not None:
            self.select(as_batch_indices(indices, self.batch_size))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times in a row."""
        if self.batch_size is not None:
            self.select(repeated_rows(repeats, self.batch_size))

    # Copies

    def __copy__(self) -> Self:
        # Like a shallow copy of transformers' layer, it may be updated without a change of the original.
        return self.fork()

    def _twin(self) -> Self:
        """A layer with the very same attributes."""
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__dict__)
        return twin

    __deepcopy__ = forked_once

    def __repr__(self) -> str:
        try:
            return f"{type(self).__name__}(length={self.length})"
        except StateMismatchError as error:
            # Assigned keys and values do not match. A debugger shows the layer all the same.
            return f"{type(self).__name__}({error})"


def adapted(layer: Any, grows: bool = False) -> CacheLayer:
    """The layer itself if it is one of kvlayers' layers; otherwise a new adapter over it.

    Args:
        layer: a layer of kvlayers or of transformers.
        grows: whether a reservation that is too small is replaced by a larger one, instead of raising `CapacityError`.

    Raises:
        OptionError: it is no layer.
    """
    if isinstance(layer, CacheLayer):
        return layer
    adapter: CacheLayer = late.function("adapter")(layer, grows)
    return adapter


def beside_attention(layer: Any, attention: CacheLayer) -> CacheLayer:
    """A layer that attends as `attention` does, and has what `layer` has beside its own attention."""
    joined: CacheLayer = attention if len(layer.parts) == 1 else layer.with_attention(attention)
    return joined


def is_stackable(layer: CacheLayer) -> bool:
    """Whether states of several such layers can be put side by side, the shorter ones padded on the left."""
    parts: tuple[Any, ...] = layer.parts
    return all(
        part.traits.can_be_stacked and (not part.traits.attends or part.store.holds_tokens_apart) for part in parts
    )


def rows_of(layers: Sequence[CacheLayer]) -> list[CacheLayer]:
    """A layer for each sequence of several layers, to go on by itself."""
    return [layer.row(index) for layer in layers for index in range(layer.batch_size or 0)]


def in_step(asked: CacheLayer, layers: Sequence[CacheLayer]) -> tuple[int, ...]:
    """Indices of the layers that have seen as many tokens as a layer, and may hold as many: one mask is made for all.

    Other layers may hold something else, such as the image that cross-attention reads (mllama), or stand still.

    Args:
        asked: the layer that is asked how its next tokens are masked.
        layers: layers of the same cache.
    """
    seen, capacity = None if asked.counts_on_device else asked.length, asked.capacity
    return tuple(
        index
        for index, layer in enumerate(layers)
        # A count that stands on an accelerator is not waited for.
        if (layer.counts_on_device or layer.length in (seen, None)) and layer.capacity == capacity
    )


def let_static_layers_agree(layers: Sequence[CacheLayer]) -> None:
    """Let layers that reserve their memory agree on what attention reads, since one mask serves all layers."""
    if any(layer.parts[0].unwrapped.reserved is not None for layer in layers):
        late.function("static layers agree")(layers)


LAYER_CLASSES = ClassRegistry("layer", "kvlayers.layers", "unregister_layer", CacheLayer, check_initialiser)  # type: ignore[type-abstract]
"""The layers that a file may name."""

register_layer = LAYER_CLASSES.register
"""Let layers of a class, which derives from `TokenLayer` or from `CacheLayer`, be loaded from files."""

unregister_layer = LAYER_CLASSES.remove
"""Remove a class of layers from the registry, by its name."""

layer_names = LAYER_CLASSES.names
"""The names of all registered layers, including those of entry points in other packages."""


def layer_class(kind: Fact) -> type[CacheLayer]:
    """The class that is registered as a kind of layer.

    Raises:
        RegistryError: no class is registered as this kind.
    """
    found: type[CacheLayer] = registered_class(LAYER_CLASSES, kind, "register_layer")
    return found


def layer_from_description(kind: Fact, facts: Facts, context: DescriptionContext) -> CacheLayer:
    """An empty layer of a kind, from what its `describe` returned. Raises as `layer_class`."""
    return layer_class(kind).from_description(facts, context)


def not_of_so_many(length: int, held: int | None) -> StateMismatchError:
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

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        return self if layer is None else getattr(getattr(layer, self.part), self.name)

    def __set__(self, layer: Any, value: Any) -> None:
        setattr(getattr(layer, self.part), self.name, value)


forwarded: Any = Forwarded
"""A `Forwarded` stands for a member of any type."""


def forwarding(part: str, names: str) -> Any:
    """A base class for layers: a part of the layer, the attribute `part`, answers for the members of these names."""
    return type("Forwarding", (), {name: Forwarded(part) for name in names.split()})


ANSWERED_BY_WRAPPED = """
    length capacity held_tokens forms batch_size dtype device sliding_window reservation_facts
    is_sliding is_croppable is_recording bits fidelity exact_from attention_paths packing_paths sized_for
    nearest_restorable check_truncate check_select held_tensors
"""


class WrapperLayer(forwarding("wrapped", ANSWERED_BY_WRAPPED), CacheLayer, CacheLayerMixin):  # type: ignore[misc]
    """A layer that attends by another layer, and answers for it.

    Args:
        wrapped: the layer that attends.

    Attributes:
        wrapped: the same layer.
    """

    wrapped: Any

    def __init__(self, wrapped: CacheLayer) -> None:
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        """Further public attributes of the wrapped layer, such as its reservation."""
        # A copy that is being made does not have its wrapped layer yet.
        if not name.startswith("_") and "wrapped" in vars(self):
            return getattr(self.wrapped, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @override
    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in dir(self.wrapped) if not name.startswith("_"))})
