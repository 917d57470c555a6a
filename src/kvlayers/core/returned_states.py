"""The packed states that a store has returned, and which of them are stale."""

import weakref
from collections.abc import Callable

import torch

from kvlayers.core.buffer import StateForm
from kvlayers.core.token_store import KVPair
from kvlayers.kernels.attention.dispatch import PathCounter
from kvlayers.kernels.attention.packed_tensor import PackedStates, Snapshot, Version, packed_pair
from kvlayers.kernels.attention.segments import KVSegments


class ReturnedStates:
    """Makes the packed states that a store returns. A copy of it has returned none.

    Attributes:
        paths: counts the paths that attention on the states takes.
    """

    def __init__(self) -> None:
        self.paths = PathCounter()
        self._version: Version | None = None
        self._newest: weakref.ref[Snapshot] | None = None

    def __reduce__(self) -> tuple[type["ReturnedStates"], tuple[()]]:
        return ReturnedStates, ()

    def attended(
        self, store: object, segments: KVSegments, forms: tuple[StateForm, StateForm], length: int, tokens: int
    ) -> KVPair:
        """Keys and values of segments: packed states, or copies while code is compiled or if their dtypes differ.

        Args:
            store: the store that returns them.
            segments: the tokens.
            forms: the forms of keys and of values.
            length: tokens that the store holds.
            tokens: tokens in the segments.
        """
        key_form, value_form = forms
        # Packed states have one dtype, as attention does.
        if torch.compiler.is_compiling() or key_form.dtype != value_form.dtype:
            return segments.dense("keys", key_form.dtype), segments.dense("values", value_form.dtype)
        # Made late: forks are many, and few of them return states before they are forked again.
        version = self._version = Version() if self._version is None else self._version
        snapshot = Snapshot(
            segments, key_form.dtype, key_form.device, version, version.number, length, self.paths, store
        )
        batch, kv_heads, key_dim, _, _ = key_form
        return (
            PackedStates(snapshot, "keys", (batch, kv_heads, tokens, key_dim)),
            PackedStates(snapshot, "values", (batch, kv_heads, tokens, value_form.head_dim)),
        )

    def newest(
        self, count: int, attended: Callable[[int], KVPair], forms: tuple[StateForm, StateForm], length: int
    ) -> KVPair:
        """Keys and values of the newest `count` tokens; the last returned pair if it still has these tokens.

        So keys and values that are read one after the other are of one snapshot.

        Args:
            count: how many tokens.
            attended: makes keys and values of the newest tokens.
            forms: the forms of keys and of values.
            length: tokens that the store holds.
        """
        snapshot = None if self._newest is None else self._newest()
        if snapshot is not None and (snapshot.segments.tokens, snapshot.length) == (count, length):
            shapes = [(form.batch_size, form.kv_heads, count, form.head_dim) for form in forms]
            return packed_pair(snapshot, *shapes)
        returned = attended(count)
        if isinstance(returned[0], PackedStates):
            # Whoever reads values after keys still has the keys.
            self._newest = weakref.ref(returned[0].snapshot)
        return returned

    def forget(self) -> None:
        """Make new states from now on. States that were returned stay valid."""
        self._newest = None

    def invalidate(self) -> None:
        """Make all states that were returned so far stale."""
        if self._version is not None:
            self._version.advance()
        self._newest = None
