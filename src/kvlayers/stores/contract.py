"""How tokens are held: the contract of a store."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, get_args

from torch import Tensor
from typing_extensions import Self

from kvlayers.errors import UnsupportedLayerError
from kvlayers.stores.buffer import StateForm, TokenBuffer
from kvlayers.stores.description import DescribedByArguments, DescriptionContext, Fact, Facts
from kvlayers.utils.registry import ClassRegistry, DescribesItself
from kvlayers.utils.tensor_memory import storages_of

Fidelity = Literal["exact", "rounded", "evicting"]
"""What happens to the states that the model attends to: all are kept as they came, all are kept but some are rounded to
fewer bits, or the states of some tokens are evicted."""


def least_faithful(fidelities: Iterable[Fidelity]) -> Fidelity:
    """The fidelity of something that consists of parts with these fidelities; "exact" if there are no parts."""
    return max(fidelities, key=get_args(Fidelity).index, default="exact")


def lacks_member(part: object, member: str) -> UnsupportedLayerError:
    """The error for a layer or a store whose class does not define a member that a plan asks for."""
    name = type(part).__name__
    return UnsupportedLayerError(f"`{name}` has no `{member}`, which a plan asks for: define `{name}.{member}`.")


StatePair = tuple[Tensor, Tensor]
"""Keys and values of the same tokens."""

Mover = Callable[[TokenBuffer, int, int], TokenBuffer]
"""Given a buffer, of whose tokens those from a first to a last one count, the buffer that is to be held instead."""


class TokenStore(DescribedByArguments, DescribesItself, ABC):
    """Holds the keys and values of one run of consecutive tokens.

    Keys are `[batch, kv_heads, tokens, key_head_dim]`, values `[batch, kv_heads, tokens, value_head_dim]`; the two
    head_dims may differ (multi-head latent attention), and so may the kv_heads. A store knows nothing of positions:
    which tokens are worth keeping is the layer's business.

    A store whose initialiser takes nothing but plain facts names them in `described`, and keeps them in attributes of
    the same names; it can then be saved and loaded when it is registered with `register_store`. Any other store defines
    `describe` and `from_description`.
    """

    is_opaque = False
    """Whether compiled code calls the layer that has the store by an operator, rather than be traced through it."""

    holds_tokens_apart = False
    """Whether `state()` is `keys` and `values` alone, in which each token lies by itself, in full precision."""
    shares_prefixes = False
    """Whether a `SharedStore` can hold the tokens once for several sequences that go on from them."""
    is_complete = True
    """Whether keys and values are of the same tokens. False only between the assignment of keys and that of values."""

    @property
    def sized_for(self) -> int | None:
        """The number of tokens that the store was told to make room for, `None` if it was told no number."""
        return None

    @property
    def fidelity(self) -> Fidelity:
        """What the store does to the states that it takes in.

        Raises:
            UnsupportedLayerError: the class does not say.
        """
        raise lacks_member(self, "fidelity")

    def planned_nbytes(self, key_form: StateForm, value_form: StateForm, tokens: int, sized_for: int | None) -> int:
        """The `nbytes` of a store like this one after it took in `tokens` tokens at once.

        Args:
            key_form: form of the keys.
            value_form: form of the values.
            tokens: tokens of a sequence.
            sized_for: number of tokens to make room for, in place of the store's own `sized_for`.

        Raises:
            CapacityError: the tokens do not fit into a reservation of `sized_for` tokens.
            UnsupportedLayerError: the class has no arithmetic.
        """
        raise lacks_member(self, "planned_nbytes")

    def planned_bits(self, key_form: StateForm, value_form: StateForm) -> float:
        """Bits of one number of a key or value in the store's main memory, with its share of scales and zeros."""
        return 8.0 * key_form[3].itemsize

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens held."""

    @property
    def bits(self) -> tuple[int, int] | None:
        """Bits of a number of a key and of a value if they are rounded, `None` in full precision."""
        return None

    @property
    def attention_paths(self) -> Mapping[str, int]:
        """How often attention on these states was computed in which way; empty in full precision."""
        return {}

    @property
    def complete(self) -> Self:
        """The store that held tokens before keys or values alone were assigned; otherwise the store itself."""
        return self

    def count(self, tokens: int) -> None:
        """See `CacheLayer.count`. Only for a store that is opaque."""
        raise NotImplementedError

    @property
    @abstractmethod
    def key_form(self) -> StateForm | None:
        """Batch size, kv_heads, head_dim, dtype and device of the keys; `None` before the first states."""

    @property
    @abstractmethod
    def value_form(self) -> StateForm | None:
        """The same of the values."""

    @abstractmethod
    def validate(self, keys: Tensor, values: Tensor) -> int:
        """Check that new states can follow those held; return how many tokens they are.

        An empty store takes on their form when it next makes room for them.

        Raises:
            StateMismatchError: keys and values do not match each other, or the states held.
        """

    @abstractmethod
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        """Take on a form, and allocate what can be allocated, before the first states arrive."""

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add admitted states behind those held.

        Raises:
            CapacityError: the store cannot hold that many tokens.
        """

    @abstractmethod
    def extend(
        self, keys: Tensor, values: Tensor, past: int | None = None, front: StatePair | None = None
    ) -> StatePair:
        """Append admitted states; return what their queries attend to.

        Args:
            keys: `[batch, kv_heads, new, key_head_dim]`.
            values: `[batch, kv_heads, new, value_head_dim]`.
            past: how many of the newest tokens that were held before are attended to, `None` for all of them.
            front: keys and values of other tokens, of the form of those held, that are attended to in front of them.

        Returns:
            Keys and values of the tokens in front, of `past` tokens and of the new ones, in order.

        Raises:
            CapacityError: the store cannot hold that many tokens.
        """

    @abstractmethod
    def extend_and_evict(
        self, keys: Tensor, values: Tensor, past: int, kept: int, front: StatePair | None = None
    ) -> StatePair:
        """As `extend`, where no more than the newest `kept` tokens are held afterwards, nor room is made for more."""

    @abstractmethod
    def newest_keys(self, count: int) -> Tensor:
        """Keys of the newest `count` tokens, in order."""

    @abstractmethod
    def newest_values(self, count: int) -> Tensor:
        """Values of the newest `count` tokens, in order."""

    def newest(self, count: int) -> StatePair:
        """Keys and values of the newest `count` tokens, in order."""
        return self.newest_keys(count), self.newest_values(count)

    def hand_out(self) -> StatePair:
        """Keys and values of all tokens, for a caller to keep and to write to: the same tensors until a change.

        No other store shows what the caller writes, and none writes there again. (`torch.export` knows the inputs of a
        program by their identity.) What `newest` returns is for reading before the store changes.
        """
        return self.newest(self.length)

    def visible_states(self) -> tuple[Tensor | None, Tensor | None]:
        """As `hand_out`, or `None` twice before the first states."""
        return (None, None) if self.key_form is None else self.hand_out()

    @abstractmethod
    def drop_oldest(self, count: int) -> None:
        """Forget the oldest `count` tokens."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forget all but the oldest `length` tokens."""

    @abstractmethod
    def reserve(self, tokens: int) -> None:
        """Make sure that `tokens` tokens fit, moving what is held if they would not."""

    @abstractmethod
    def shrink(self, tokens: int) -> None:
        """Give back memory beyond what `tokens` tokens need."""

    def check_batch(self, batch_size: int) -> None:
        """Raise `CapacityError` where so many sequences cannot be held: never, where memory is taken as needed."""

    @abstractmethod
    def select(self, indices: Tensor) -> None:
        """Make batch row `i` what row `indices[i]` was; `indices` is `[new_batch]`, int64, checked by the caller."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all tokens, keep the memory."""

    @property
    def kind(self) -> str:
        """Name of the kind of store: that which its class is registered by."""
        return STORE_CLASSES.name_of(type(self))

    def describe(self) -> dict[str, Fact]:
        """Plain facts from which an empty store like this one is made. `store` is its kind.

        They stand among those of the layer that has the store, so their names should be the store's own.
        """
        return {"store": self.kind, **self.described_arguments()}

    @classmethod
    def from_description(cls, facts: Facts, context: DescriptionContext) -> Self:
        """An empty store, from what `describe` returned.

        Args:
            facts: what `describe` returned, among other facts.
            context: what is needed besides.

        Raises:
            OptionError: a fact has a value that the store does not take.
        """
        return cls(**cls.arguments_from(facts))

    @classmethod
    def reserved_by(cls, facts: Facts) -> tuple[int, int]:
        """How many tokens, and how many sequences, a store of these facts reserves memory for with its first states.

        0 if it takes memory as it needs it. What a file asks for is compared with what it holds by this.
        """
        return 0, 0

    @classmethod
    def check_description(cls) -> None:
        """Raise `RegistryError` if the arguments of the initialiser are not those that are described."""
        if cls.from_description.__func__ is TokenStore.from_description.__func__:  # type: ignore[attr-defined]
            cls.check_arguments()

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Copies of all that is held, `keys` and `values` among them; empty before the first states."""

    @abstractmethod
    def check_state(self, tensors: dict[str, Tensor]) -> int:
        """The count of tokens in a state.

        Raises:
            StateMismatchError: the tensors are no state of such a store.
        """

    @abstractmethod
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Hold what was held when the state was taken, which was checked by the caller."""

    @abstractmethod
    def fork(self) -> Self:
        """An independent store with the same tokens."""

    @abstractmethod
    def swap_buffers(self, move: Mover) -> None:
        """Hold the same tokens in other buffers, of the same capacity: each in what `move` gives for the one it is in.

        Forms, and with them the device that new states are expected on, stay what they are.
        """

    @abstractmethod
    def snapshot(self) -> Self:
        """What the store is now, over the same buffers: true for as long as nobody writes to those."""

    def rewritten(self, keys: Tensor, values: Tensor) -> Self:
        """A store like this one with other states for the tokens that it holds, this one itself or a new one.

        Raises:
            StateMismatchError: keys and values do not match each other.
        """
        fresh = self.fork()
        fresh.clear()
        fresh.validate(keys, values)
        fresh.append(keys, values)
        return fresh

    @abstractmethod
    def held_tensors(self) -> Iterator[Tensor]:
        """Every tensor that keeps memory alive, spare room included."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""
        return sum(storages_of(self.held_tensors()).values())


STORE_CLASSES = ClassRegistry("store", "kvlayers.stores", "unregister_store", TokenStore)  # type: ignore[type-abstract]
"""The stores that a file may name."""
