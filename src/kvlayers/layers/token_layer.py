"""A layer over a store of tokens: what full, sliding and static attention share."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import Self, override

from ..errors import StateMismatchError
from ..stores import TokenStore
from ..stores.base import Fact, Mover
from ..stores.buffer import StateForm
from .base import CacheLayer, LayerState


class TokenLayer(CacheLayer):
    """A layer that keeps tokens in a `TokenStore`. Which tokens those are, a subclass decides."""

    def __init__(self, store: TokenStore) -> None:
        super().__init__()
        self._store = store

    @property
    def store(self) -> TokenStore:
        """How the tokens are held."""
        return self._store

    @property
    def is_opaque(self) -> bool:  # type: ignore[override]
        """Whether compiled code calls `update` as an operator, rather than be traced through it."""
        return self._store.is_opaque

    @property
    def keys(self) -> Tensor | None:
        """Keys held, a view `[batch, kv_heads, held, head_dim]` in the order of their tokens; `None` at first."""
        return None if self._store.key_form is None else self._store.newest_keys(self._store.length)

    @keys.setter
    def keys(self, states: Tensor) -> None:
        self._replace(states, self.values)

    @property
    def values(self) -> Tensor | None:
        """Values held, a view `[batch, kv_heads, held, head_dim]` in the order of their tokens; `None` at first."""
        return None if self._store.key_form is None else self._store.newest_values(self._store.length)

    @values.setter
    def values(self, states: Tensor) -> None:
        self._replace(self.keys, states)

    def _replace(self, keys: Tensor | None, values: Tensor | None) -> None:
        if keys is None or values is None or keys.shape[2] != self._store.length:
            raise StateMismatchError(
                f"expected states of the {self._store.length} tokens that are held in place of these: use update for "
                "new tokens, and from_legacy_cache to fill a new cache."
            )
        self._store = self._store.rewritten(keys, values)

    @property
    @override
    def batch_size(self) -> int | None:
        form = self._store.key_form
        return None if form is None else form[0]

    @property
    def dtype(self) -> torch.dtype | None:
        """dtype of the keys, `None` before the first states."""
        form = self._store.key_form
        return None if form is None else form[3]

    @property
    def values_dtype(self) -> torch.dtype | None:
        """dtype of the values, `None` before the first states."""
        form = self._store.value_form
        return None if form is None else form[3]

    @property
    def device(self) -> torch.device | None:
        """Device of the keys, `None` before the first states."""
        form = self._store.key_form
        return None if form is None else form[4]

    @override
    def check_select(self, batch_size: int) -> None:
        self._store.check_batch(batch_size)

    @override
    def select(self, indices: Tensor) -> None:
        self._store.select(indices)

    @override
    def reset(self) -> None:
        self._store.clear()

    @override
    def fork(self) -> Self:
        twin = copy.copy(self)
        twin._store = self._store.fork()
        return twin

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        yield from self._store.held_tensors()

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        if self._store.length:
            raise StateMismatchError(
                f"expected an empty layer, but {self._store.length} tokens are held: reset the cache first."
            )
        self._store.reserve_form(key_form, value_form)

    def snapshot(self) -> Self:
        """See `TokenStore.snapshot`."""
        twin = copy.copy(self)
        twin._store = self._store.snapshot()
        return twin

    def relocate(self, move: Mover) -> None:
        """See `TokenStore.relocate`."""
        self._store.relocate(move)

    def settings(self) -> dict[str, Fact]:
        """What the layer was made with and a state of it depends on."""
        return self._store.settings()

    def reservation(self) -> dict[str, Fact]:
        """What the layer was told to reserve, on which no state of it depends."""
        return {}

    @override
    def state(self) -> LayerState:
        facts = {**self.settings(), **self.reservation(), "length": self.length}
        return LayerState(type(self).__name__, self._store.state(), facts)

    @override
    def load_state(self, state: LayerState) -> None:
        self.check_state(state)
        self._store.load_state(state.tensors)

    @override
    def check_state(self, state: LayerState) -> None:
        if state.kind != type(self).__name__:
            raise StateMismatchError(
                f"expected the state of a {type(self).__name__}, but saw that of a {state.kind}: load it into a cache "
                "of the kind that it was taken from."
            )
        for name, value in self.settings().items():
            if state.facts.get(name) != value:
                raise StateMismatchError(
                    f"expected a state with {name}={value}, but saw {name}={state.facts.get(name)}: load it into a "
                    "cache that was made with the same settings."
                )
        kinds = {(tensor.layout, tensor.device) for tensor in state.tensors.values()}
        if len(kinds) > 1 or any(layout != torch.strided for layout, _ in kinds):
            raise StateMismatchError(f"expected dense tensors on one device, but saw {sorted(map(str, kinds))}.")
        self.check_held(self._store.check_state(state.tensors), seen_tokens(state))

    def check_held(self, held: int, seen: int) -> None:
        """Raise `StateMismatchError` where a layer that has seen `seen` tokens cannot go on from `held` of them."""
        if held != seen:
            raise StateMismatchError(
                f"expected a state with all of its {seen} tokens, but saw {held}: take the state again."
            )


def seen_tokens(state: LayerState) -> int:
    """The count of tokens that a state says its layer has seen."""
    length = state.facts.get("length")
    if not isinstance(length, int):
        raise StateMismatchError(f"expected a state that counts its tokens, but saw length={length!r}.")
    return length
