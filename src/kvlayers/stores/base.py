"""How tokens are held: the contract of a store."""

from abc import ABC, abstractmethod

from torch import Tensor

from .buffer import StateForm


class TokenStore(ABC):
    """Holds the keys and values of one run of consecutive tokens.

    Keys are `[batch, kv_heads, tokens, key_head_dim]`, values `[batch, kv_heads, tokens, value_head_dim]`; the two
    head_dims may differ (multi-head latent attention), and so may the kv_heads. A store knows nothing of positions:
    which tokens are worth keeping is the layer's business.
    """

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens held."""

    @property
    @abstractmethod
    def key_form(self) -> StateForm | None:
        """Batch size, kv_heads, head_dim, dtype and device of the keys; `None` before the first states."""

    @property
    @abstractmethod
    def value_form(self) -> StateForm | None:
        """The same of the values."""

    @abstractmethod
    def admit(self, keys: Tensor, values: Tensor) -> int:
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
    def replace(self, keys: Tensor, values: Tensor) -> None:
        """Hold a copy of admitted states in place of everything held so far."""

    @abstractmethod
    def newest_keys(self, count: int) -> Tensor:
        """Keys of the newest `count` tokens, in order."""

    @abstractmethod
    def newest_values(self, count: int) -> Tensor:
        """Values of the newest `count` tokens, in order."""

    def newest(self, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the newest `count` tokens, in order."""
        return self.newest_keys(count), self.newest_values(count)

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

    @abstractmethod
    def select(self, indices: Tensor) -> None:
        """Make batch row `i` what row `indices[i]` was; `indices` is `[new_batch]`, int64, checked by the caller."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all tokens, keep the memory."""

    @abstractmethod
    def fork(self) -> "TokenStore":
        """An independent store with the same tokens."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""
