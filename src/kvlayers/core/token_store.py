"""How tokens are held: the contract of a store."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.buffer import StateForm, TokenBuffer
from kvlayers.core.description import (
    Argument,
    DescriptionContext,
    Fact,
    Facts,
    arguments_from,
    check_initialiser,
    described_facts,
    registered_class,
)
from kvlayers.errors import StateMismatchError, UnsupportedLayerError
from kvlayers.utils.registry import ClassRegistry
from kvlayers.utils.sending import sent_by_value
from kvlayers.utils.tensor_memory import storages_of

Fidelity = Literal["exact", "rounded", "partial", "evicting"]
"""What happens to the states that the model attends to: all are kept as they came; all are kept, but some are rounded
to fewer bits; all are kept, but a query reads some of them; or the states of some tokens are evicted."""


def least_faithful(fidelities: Iterable[Fidelity]) -> Fidelity:
    """The fidelity of something that consists of parts with these fidelities; "exact" if there are no parts."""
    return max(fidelities, key=get_args(Fidelity).index, default="exact")


KVPair = tuple[Tensor, Tensor]
"""Keys and values of the same tokens."""

BufferSwap = Callable[[TokenBuffer, int, int], TokenBuffer]
"""Called with a buffer and the start and end of its live tokens; returns the buffer to hold instead."""


DEFAULT_STORE: dict[str, Fact] = {"store": "DenseStore"}
"""The description of the store that layers make by themselves, which their own descriptions leave out."""


@dataclass(frozen=True)
class StoreArgument(Argument):
    """The argument of a layer that is its store. Its facts are those of the store.

    Attributes:
        room: the most tokens that the layer expects the store to hold, given the facts; `None` if it does not know.
    """

    room: Callable[[Any], int] | None = None

    @override
    def facts_of(self, described: object) -> dict[str, Fact]:
        facts: dict[str, Fact] = self.value_of(described).describe()
        return {} if facts == DEFAULT_STORE else facts

    @override
    def read(self, facts: Facts, context: DescriptionContext) -> Any:
        hint = None if self.room is None else self.room(facts)
        store_class = store_class_of(facts)
        return None if store_class is None else store_class.from_description(facts, replace(context, length_hint=hint))


UPDATE_METHODS = ("validate", "append", "extend", "newest", "length", "count")
"""What updates of a store are made of."""


class StateHolder(ABC):
    """What layers and stores have in common: how they are made from facts, and what they say of the states they hold.

    Attributes:
        described: names of arguments of the initialiser that are plain facts, each kept in an attribute of the same
            name. A file records them.
        made_with: the other arguments that a file records. A subclass inherits them, and names its own in `described`.
        hints: names of arguments that no file records, because no state depends on them.
        is_opaque: whether compiled code calls the update of the layer by an operator, instead of being traced through
            it.
        sized_for: the number of tokens that it was told to make room for, `None` if it was told no number.
        bits: bits of a number of a key and of a value if they are rounded, `None` in full precision.
        attention_paths: how often attention on the states was computed in which way; empty if torch reads plain
            tensors.
        packing_paths: how often an accelerator packed keys, or values, on each path; empty if it packs none.
    """

    described: ClassVar[tuple[str, ...]] = ()
    made_with: ClassVar[tuple[Argument, ...]] = ()
    hints: ClassVar[tuple[str, ...]] = ()
    is_opaque = False
    sized_for: int | None = None
    bits: tuple[int, int] | None = None
    attention_paths: Mapping[str, int] = MappingProxyType({})
    packing_paths: Mapping[str, int] = MappingProxyType({})

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        sent_by_value(cls)

    @property
    def fidelity(self) -> Fidelity:
        """What is done to the states that the model attends to.

        Raises:
            UnsupportedLayerError: the class does not say.
        """
        name = type(self).__name__
        raise UnsupportedLayerError(f"`{name}` has no `fidelity`, which a plan asks for: define `{name}.fidelity`.")

    @property
    def exact_from(self) -> int | None:
        """Position from which on every token is held as it came; `None` if the class does not say.

        A store counts from the first token that it holds, and a layer from the first that it has seen. It is 0 until a
        token is rounded or evicted, and grows whenever that happens to further tokens. Tokens that a model's own window
        has passed do not count, since the model attends to none of them. Neither do sinks, in front of rounded tokens.
        What is exact need not define it.

        Raises:
            UnsupportedLayerError: the class does not say what its `fidelity` is.
        """
        return 0 if self.fidelity == "exact" else None

    @classmethod
    def reserved_by(cls, facts: Facts) -> tuple[int, int]:
        """Tokens, and sequences, that one of these facts reserves memory for: 0 if it takes memory as it needs it.

        A file that asks for much more memory than it holds states for is refused because of this number.
        """
        return 0, 0

    @abstractmethod
    def held_tensors(self) -> Iterator[Tensor]:
        """Every tensor that keeps memory alive, spare room included. Forks may hold the same memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""
        return sum(storages_of(self.held_tensors()).values())

    def trim(self) -> None:
        """Give back spare room, and memory of tokens that nobody reads any more, if that is worth a copy."""

    def compact(self) -> None:
        """Hold all tokens in memory of its own, in one piece. Sequences no longer share tokens."""

    @abstractmethod
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        """Prepare for states of these forms before the first ones arrive: reserve memory if its size is known.

        Raises:
            UnsupportedLayerError: the layer does not attend.
        """

    def count(self, tokens: int) -> None:
        """Count tokens that an operator takes in, while compiled code that calls the operator is traced.

        When that code runs, the operator counts the tokens itself, and arrives at the same number. Only what is opaque
        needs it.

        Raises:
            UnsupportedLayerError: the class does not say how, although its `is_opaque` is true.
        """
        raise UnsupportedLayerError(
            f"A layer that compiled code calls by an operator must count its tokens, got a {type(self).__name__}: "
            "define its `count`, as its is_opaque is true."
        )

    def check_select(self, batch_size: int) -> None:
        """Raise what `select` would raise for any `batch_size` indices: nothing if memory is taken as needed."""

    @abstractmethod
    def select(self, indices: Tensor) -> None:
        """Make sequence `i` what sequence `indices[i]` was. `indices` is int64 `[new_batch]` and in range."""

    def share_prefix(self, other: Any, tokens: int) -> None:
        """Hold the first `tokens` tokens in the memory of `other`, which has the same ones, if both can.

        The states must be the same, which nobody checks. The other does not change while this is done. By default
        nothing is shared.
        """

    @abstractmethod
    def fork(self) -> Self:
        """An independent continuation: a change of one never shows in the other."""


class TokenStore(StateHolder):
    """Holds the keys and values of consecutive tokens.

    Keys are `[batch, kv_heads, tokens, key_head_dim]`, values `[batch, kv_heads, tokens, value_head_dim]`; the two
    head_dims may differ (multi-head latent attention), and so may the kv_heads. A store knows nothing about positions:
    the layer decides which tokens to keep.

    If the initialiser of a store takes only plain facts, the class names them in `described` and keeps them in
    attributes of the same names. The store can then be saved, and loaded once it is registered with
    `register_store`. Any other store defines `describe` and `from_description`.
    """

    holds_tokens_apart = False
    """Whether `state()` is `keys` and `values` alone, in which each token lies by itself, in full precision."""

    def planned_bits(self, key_form: StateForm, value_form: StateForm) -> float:
        """Bits of one number of a key or value in the store's main memory, with its share of scales and zeros."""
        return 8.0 * key_form.dtype.itemsize

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens held."""

    @property
    def complete(self) -> Self:
        """The store itself; of a `PendingAssignment`, the one that held tokens before keys or values were assigned."""
        return self

    @property
    @abstractmethod
    def forms(self) -> tuple[StateForm, StateForm] | None:
        """Forms of the keys and of the values: batch size, kv_heads, head_dim, dtype and device.

        `None` before the first states.
        """

    def _known_forms(self) -> tuple[StateForm, StateForm]:
        if self.forms is None:
            raise StateMismatchError("The store is empty, so it has no states to read: update the layer first.")
        return self.forms

    @abstractmethod
    def validate(self, keys: Tensor, values: Tensor) -> int:
        """Check that new states can follow the held ones; return the number of new tokens.

        An empty store takes on their form when they are appended.

        Raises:
            StateMismatchError: keys and values do not match each other, or the states that are held.
        """

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append validated states to the held ones.

        Raises:
            CapacityError: the store cannot hold that many tokens.
        """

    @abstractmethod
    def extend(self, keys: Tensor, values: Tensor, past: int | None = None) -> KVPair:
        """Append validated states; return the keys and values that their queries attend to.

        Args:
            keys: `[batch, kv_heads, new, key_head_dim]`.
            values: `[batch, kv_heads, new, value_head_dim]`.
            past: how many of the newest held tokens are attended to, `None` for all of them.

        Returns:
            Keys and values of `past` held tokens and of the new tokens, in order.

        Raises:
            CapacityError: the store cannot hold that many tokens.
        """

    def take_in(self, keys: Tensor, values: Tensor) -> KVPair:
        """`validate` states, then `extend` by them.

        A store may take a shorter way for one token, if its class keeps the updates of the class that knows the way.
        """
        self.validate(keys, values)
        return self.extend(keys, values)

    @abstractmethod
    def extend_and_evict(self, keys: Tensor, values: Tensor, past: int, kept: int) -> KVPair:
        """As `extend`, but hold only the newest `kept` tokens afterwards, and make room for no more than these.

        `kept` may be more than the `past` and new tokens that are attended to, and at most what is held with the new
        tokens.
        """

    def overwrite(self, count: int, keys: Tensor, values: Tensor) -> bool:
        """Write other states over the oldest of the newest `count` tokens, where they lie, if that can be done.

        Args:
            count: how many of the newest held tokens are read after that.
            keys: `[batch, kv_heads, tokens, key_head_dim]` for at most `count` tokens, in the form of the held ones.
            values: `[batch, kv_heads, tokens, value_head_dim]`.

        Returns:
            Whether they were written; if not, the tokens are as they were. They never are in a store that packs
            tokens, nor where a fork reads them, nor if autograd follows them.
        """
        return False

    @abstractmethod
    def newest(self, count: int) -> KVPair:
        """Keys and values of the newest `count` tokens, in order."""

    def caller_views(self) -> KVPair:
        """Keys and values of all tokens, for a caller to keep and to write to.

        They are the same tensors until the store changes, because `torch.export` identifies the inputs of a program by
        identity. No other store shows what the caller writes, and no store writes there again. The tensors that
        `newest` returns are only for reading, before the store changes.
        """
        return self.newest(self.length)

    @abstractmethod
    def drop_oldest(self, count: int) -> None:
        """Forget the oldest `count` tokens."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forget all but the oldest `length` tokens."""

    @abstractmethod
    def reserve(self, tokens: int) -> None:
        """Make sure that `tokens` tokens fit in all; move the held ones to larger memory if they do not."""

    @abstractmethod
    def shrink(self, tokens: int) -> None:
        """Free the memory beyond what `tokens` tokens need."""

    def expand(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times in a row. What the copies have in common may be held only once."""
        if self.forms is not None:
            self.select(torch.arange(self.forms[0].batch_size).repeat_interleave(repeats))

    @abstractmethod
    def clear(self) -> None:
        """Forget all tokens; keep the memory."""

    @property
    def kind(self) -> str:
        """Name that the class of the store is registered by."""
        return STORE_CLASSES.name_of(type(self))

    def describe(self) -> dict[str, Fact]:
        """Plain facts from which an empty store like this one is made. `store` is its kind.

        They are saved among the facts of the store's layer, so their names must differ from the layer's.
        """
        return {"store": self.kind, **described_facts(self)}

    @classmethod
    def from_description(cls, facts: Facts, context: DescriptionContext) -> Self:
        """An empty store, from what `describe` returned.

        Args:
            facts: the result of `describe`, possibly among other facts.
            context: everything else that it is made from.

        Raises:
            OptionError: a fact has a value that the store does not take.
        """
        hints = {"length_hint": context.length_hint} if "length_hint" in cls.hints else {}
        return cls(**arguments_from(cls, facts, context), **hints)

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Copies of all held tensors, `keys` and `values` among them; empty before the first states."""

    @abstractmethod
    def check_state(self, tensors: dict[str, Tensor]) -> int:
        """Check a state; return the number of its tokens.

        Raises:
            StateMismatchError: the tensors are not the state of a store of this kind.
        """

    @abstractmethod
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore a state, which the caller has checked."""

    @abstractmethod
    def swap_buffers(self, swap: BufferSwap) -> None:
        """Replace each buffer by the result of `swap`, which holds the same tokens and has the same capacity.

        Forms stay the same, and with them the device on which new states are expected.
        """

    def swap_unpaged_buffers(self, swap: BufferSwap) -> None:
        """As `swap_buffers`, for the few tokens that are in no page if pages are read apart; by default there are none.

        They are where they are computed while pages are read where they are held.
        """

    @abstractmethod
    def snapshot(self) -> Self:
        """A shallow copy over the same buffers. It is valid until something writes to the buffers."""

    def rewritten(self, keys: Tensor, values: Tensor) -> Self:
        """This store, or a new one like it, with other states for the tokens that it holds.

        Raises:
            StateMismatchError: keys and values do not match each other.
        """
        fresh = self.fork()
        fresh.clear()
        fresh.validate(keys, values)
        fresh.append(keys, values)
        return fresh


def keeps_updates_of(store_class: type[TokenStore], ancestor: type[TokenStore]) -> bool:
    """Whether no method that an update calls has been overridden since an ancestor of the class."""
    return all(getattr(store_class, name) is getattr(ancestor, name) for name in UPDATE_METHODS)


STORE_CLASSES = ClassRegistry("store", "kvlayers.stores", "unregister_store", TokenStore, check_initialiser)  # type: ignore[type-abstract]
"""The stores that a file may name."""


register_store = STORE_CLASSES.register
"""Let layers over a store of a class, which derives from `TokenStore`, be saved and loaded."""

unregister_store = STORE_CLASSES.remove
"""Remove a class of stores from the registry, by its name."""

store_names = STORE_CLASSES.names
"""All stores that a file may name, including those of entry points in other packages."""


def store_class_of(facts: Facts) -> type[TokenStore] | None:
    """The class of the store that a layer's facts describe; `None` if the layer makes its own.

    Raises:
        RegistryError: no store is registered by the name in the facts.
    """
    return registered_class(STORE_CLASSES, facts["store"], "register_store") if "store" in facts else None


def states_on_meta(forms: Sequence[StateForm], tokens: int) -> Iterator[Tensor]:
    """Keys and values of these forms, as shapes without memory."""
    for form in forms:
        yield torch.empty((form.batch_size, form.kv_heads, tokens, form.head_dim), dtype=form.dtype, device="meta")


def filled_nbytes(store: TokenStore, forms: Sequence[StateForm], tokens: int) -> list[int]:
    """Bytes of each buffer of an empty store after it took in `tokens` tokens."""
    keys, values = states_on_meta(forms, tokens)
    with torch.no_grad():
        store.validate(keys, values)
        store.append(keys, values)
    return list(storages_of(store.held_tensors()).values())
