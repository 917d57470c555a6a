"""A layer whose states are on the host, or on disk, between updates."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.buffer import StateForm
from kvlayers.core.cache_layer import (
    LayerState,
    WrapperLayer,
    adapted,
    beside_attention,
    forwarded,
    layer_class,
    layer_from_description,
    register_layer,
)
from kvlayers.core.description import DescriptionContext, Fact, Facts
from kvlayers.core.token_layer import TokenLayer
from kvlayers.core.token_store import TokenStore
from kvlayers.errors import CapacityError, OptionError, UnsupportedLayerError
from kvlayers.kernels.attention.packed_ops import observed, observer_of
from kvlayers.kernels.attention.packed_tensor import PackedStates
from kvlayers.kernels.codes.quantizer_contract import Side
from kvlayers.offload.paged_reads import PagedReads
from kvlayers.offload.prefetcher import Prefetcher
from kvlayers.utils import late


def facts_of_wrapped(facts: Facts) -> dict[str, Fact]:
    """The facts of the wrapped layer, without the name of its kind."""
    return {name: fact for name, fact in facts.items() if name != "offloaded"}


def on_device(state: LayerState, device: torch.device | None) -> LayerState:
    """The state with tensors on a device, or on the device that the state says if `device` is `None`."""
    goal = state.facts.get("device") if device is None else device
    if not isinstance(goal, str | torch.device):
        return state
    tensors = {name: tensor.to(goal) for name, tensor in state.tensors.items()}
    return LayerState(state.kind, tensors, state.facts)


def _done_in(context: Callable[["OffloadedLayer"], AbstractContextManager[TokenLayer]], name: str) -> Any:
    """An operation of this name that the wrapped layer does in a context."""

    def call(layer: "OffloadedLayer", *args: Any) -> None:
        with context(layer) as wrapped:
            getattr(wrapped, name)(*args)

    return call


@register_layer
class OffloadedLayer(WrapperLayer):
    """Any layer of tokens, held on the host or on disk, and on its device while it is updated and attended to.

    The wrapped layer decides which tokens are kept, and how. Updates return states on the device; everything else is
    done where the states are held. `Prefetcher` guarantees the order of transfers and computations.

    On a machine that computes on the host, states stay in the host's memory, or in the files of `DiskMemory`.

    States that autograd follows are not moved.

    Compiled code calls `update` by an operator. For the masks of such code, the layer keeps counts of its own, which
    are the same wherever the states are.

    Args:
        layer: the layer to wrap, such as a `DynamicLayer`, `SlidingLayer`, `StaticLayer` or `QuantizedLayer`.
        prefetcher: the prefetcher that all layers of a cache share. If it is not given, the layer gets its own, which
            uses the host's memory.

    Raises:
        UnsupportedLayerError: a layer that does not hold tokens. (Recurrent states are small, and stay on the device.)

    Example:
        >>> import torch, kvlayers
        >>> layer = kvlayers.OffloadedLayer(kvlayers.DynamicLayer())
        >>> keys, values = layer.update(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8))
        >>> layer
        OffloadedLayer(DynamicLayer(length=3))
    """

    is_opaque = True
    swap_buffers = forwarded("store")
    wrapped: TokenLayer

    def __init__(self, layer: TokenLayer, prefetcher: Prefetcher | None = None) -> None:
        if not isinstance(layer, TokenLayer):
            raise UnsupportedLayerError(
                f"`layer` must be a layer that holds tokens, got a {type(layer).__name__}: leave it on its device."
            )
        if prefetcher is not None and not isinstance(prefetcher, Prefetcher):
            raise OptionError(
                f"`prefetcher` must be a Prefetcher, got {prefetcher!r}: leave it out for one of its own."
            )
        super().__init__(layer)
        self.traits = layer.traits
        self.prefetcher = Prefetcher() if prefetcher is None else prefetcher
        self.index = next(self.prefetcher.numbers)
        self.version = 0
        self._seen = self._past = 0
        self._pages = PagedReads()
        self._read_counts()

    # Taking in states

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        attended: tuple[Tensor, Tensor] = self._update(key_states, value_states)
        return attended

    # Streams cannot be compiled. If compiled code cannot call the operator, it breaks its graph here.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        self.prefetcher.meter.begin_update(self.index)
        if not isinstance(key_states, Tensor) or not self.prefetcher.offloads(key_states.device):
            attended = self.wrapped.update(key_states, value_states)
        elif (page_tokens := _page_tokens_of(self.wrapped, key_states)) is not None:
            # A token is taken in where the pages are held. Then the pages that its query chooses are brought.
            with self.prefetcher.pages_at_home(self, self.wrapped.store):
                states = self.wrapped.update(key_states, value_states)
            attended = self._pages.attended(self, self.prefetcher, page_tokens, (key_states, value_states), states)
        else:
            attended = self._update_offloaded(key_states, value_states)
        self._read_counts()
        return attended

    def _update_offloaded(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        before = self.wrapped.snapshot()
        try:
            self.prefetcher.fetch(self, key_states.device)
            attended = self.wrapped.update(key_states, value_states)
            if (observe := observer_of(attended[0])) is not None:
                return observed(*attended, functools.partial(self._show, observe))
            self.prefetcher.write_back(self)
        except BaseException:
            # The buffers on the host still hold what they held, as nobody wrote to them.
            self.wrapped = before
            self._note_change()
            self.prefetcher.discard(self)
            raise
        return attended

    def _show(self, observe: Callable[[Tensor], None], query: Tensor) -> None:
        """Show queries to a layer that evicts by them, while its states are on the device; write back what is left."""
        with self._fetched(changes=True, on=query.device):
            observe(query)

    # Counting for compiled code

    def _read_counts(self) -> None:
        """Copy the counts of the wrapped layer. It has no counts between the assignments of keys and of values."""
        layer = self.wrapped
        if layer.store.complete is layer.store:
            self._seen, self._past = layer.length, layer.attended_past(layer.held_tokens)

    @override
    def count(self, tokens: int) -> None:
        self._past = self.wrapped.attended_past(self._past + tokens)
        self._seen = self._seen + tokens

    # Reading

    # Held on their device: a copy if they are held elsewhere, otherwise as in a layer of tokens. Writing to a copy does
    # not change the layer. To change it, assign keys, and then values.
    keys: Any = TokenLayer.keys
    values: Any = TokenLayer.values

    def _assign(self, states: Tensor, side: Side) -> None:
        with self._fetched(changes=True) as layer:
            setattr(layer, side, states)

    def _handed_out(self, side: Side) -> Tensor | None:
        with self._fetched():
            states: Tensor | None = getattr(self.wrapped, side)
        if states is None or isinstance(states, PackedStates) or self.prefetcher.queue(self.device) is None:
            return states
        return states.clone()

    @override
    def peek(self) -> tuple[Tensor | None, Tensor | None]:
        with self._fetched():
            return self.wrapped.peek()

    @contextlib.contextmanager
    def _fetched(self, changes: bool = False, on: torch.device | None = None) -> Iterator[TokenLayer]:
        """Keep the states on their device, or `on` a device before there are any, within this context."""
        device = self.device if on is None else on
        if device is not None and self.prefetcher.offloads(device):
            self.prefetcher.fetch(self, device)
        if changes:
            self._note_change()
        try:
            yield self.wrapped
        finally:
            if changes:
                self._read_counts()
            self._write_back_if_possible()

    @contextlib.contextmanager
    def _on_host(self) -> Iterator[TokenLayer]:
        """Keep the states where they are held, for an operation of the host. New states go there afterwards."""
        self._settle()
        self.prefetcher.discard(self)
        self._note_change()
        try:
            yield self.wrapped
        finally:
            self._read_counts()
            self._write_back_if_possible()

    def _where_it_evicts(self) -> AbstractContextManager[TokenLayer]:
        """The context for an operation after which the layer may evict tokens that were recorded."""
        evicts = self.wrapped.traits.evicts_by_states and self.wrapped.is_recording
        return self._fetched(changes=True) if evicts else self._on_host()

    def exchange_store(self, make: Callable[[TokenStore], TokenStore]) -> None:
        """Hold the same tokens in the store that `make` returns for the present one, which is on its device then."""
        with self._fetched(changes=True) as layer:
            layer.store = make(layer.store)

    def _note_change(self) -> None:
        self.version += 1
        self._pages = PagedReads()

    def _settle(self) -> None:
        """Hold everything where it is held between updates, also if nobody showed the queries of the last update."""
        self._write_back_if_possible()
        self.prefetcher.synchronize(self)

    def _write_back_if_possible(self) -> None:
        # The operation is done. If there is no memory for the states on the host, they stay on their device until
        # there is.
        with contextlib.suppress(CapacityError):
            self.prefetcher.write_back(self)

    # Operations

    select = _done_in(_on_host, "select")
    expand = _done_in(_on_host, "expand")
    trim = _done_in(_on_host, "trim")
    compact = _done_in(_on_host, "compact")
    reset = _done_in(_on_host, "reset")
    _recount = _done_in(_on_host, "_recount")
    activate_past_recording = _done_in(_on_host, "activate_past_recording")
    deactivate_past_recording = _done_in(_where_it_evicts, "deactivate_past_recording")
    truncate = _done_in(_where_it_evicts, "truncate")

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        with self._on_host() as layer:
            layer.reserve_form(key_form, value_form)
        self.prefetcher.write_back(self)

    @override
    def fork(self) -> Self:
        self._settle()
        twin = self.__class__(self.wrapped.fork(), self.prefetcher)
        twin.index = self.index
        twin._write_back_if_possible()
        return twin

    def use_prefetcher(self, prefetcher: Prefetcher) -> None:
        """Be brought to the device by another prefetcher from now on."""
        self._settle()
        self.prefetcher.discard(self)
        self.prefetcher = prefetcher

    @override
    def describe(self) -> dict[str, Fact]:
        return {**self.wrapped.describe(), "offloaded": self.wrapped.kind}

    @classmethod
    @override
    def from_description(cls, facts: Facts, context: DescriptionContext) -> Self:
        return cls(cast("TokenLayer", layer_from_description(facts["offloaded"], facts_of_wrapped(facts), context)))

    @classmethod
    @override
    def reserved_by(cls, facts: Facts) -> tuple[int, int]:
        return layer_class(facts["offloaded"]).reserved_by(facts_of_wrapped(facts))

    @override
    def state(self) -> LayerState:
        """The state of the wrapped layer, with tensors on the host. It says on which device they are computed."""
        self._settle()
        state, device = self.wrapped.state(), self.device
        # What a layer holds beside its store, such as queries, is on the device.
        tensors = {name: tensor.cpu() for name, tensor in state.tensors.items()}
        return LayerState(state.kind, tensors, {**state.facts, "device": None if device is None else str(device)})

    @override
    def load_state(self, state: LayerState) -> None:
        with self._on_host() as layer:
            layer.load_state(on_device(state, self.device))

    @override
    def offload(self) -> None:
        """Do nothing: between updates the states are offloaded."""

    @override
    def prefetch(self) -> None:
        """Do nothing: the prefetcher brings the states of the next layer by itself."""

    # Members of the wrapped layer

    @property
    @override
    def unwrapped(self) -> TokenLayer:
        return self.wrapped

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        """Every tensor that keeps memory alive between updates."""
        yield from self.wrapped.held_tensors()
        yield from self._pages.held_tensors()

    @property
    @override
    def memory_tier(self) -> str:  # type: ignore[override]
        if not self.prefetcher.offloads(self.device):
            return "device"
        return "disk" if self.prefetcher.memory.holds_host_states else "host"

    @property
    @override
    def length(self) -> int:
        return self._seen if torch.compiler.is_compiling() else self.wrapped.length

    @override
    def make_room(self, tokens: int) -> None:
        # The operator that compiled code calls makes room by itself.
        if not torch.compiler.is_compiling():
            self.wrapped.make_room(tokens)

    @override
    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        if torch.compiler.is_compiling():
            return self._past + query_length, self._seen - self._past
        return self.wrapped.mask_sizes(query_length)

    @override
    def check_state(self, state: LayerState) -> None:
        self.wrapped.check_state(on_device(state, self.device))

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._write_back_if_possible()

    def __repr__(self) -> str:
        return f"OffloadedLayer({self.wrapped!r})"


def _page_tokens_of(layer: TokenLayer, keys: Tensor) -> int | None:
    """Tokens of a page if the queries of new tokens read pages where they are held; else `None`.

    Args:
        layer: the layer.
        keys: keys of the new tokens, `[batch, kv_heads, tokens, head_dim]`.
    """
    reads_all = layer.recall is None or (torch.is_grad_enabled() and keys.requires_grad)
    return None if reads_all else cast("Any", layer).chosen_page_tokens(keys.shape[2])


def placed(layer: Any, prefetcher: Prefetcher, only_non_sliding: bool) -> Any:
    """A layer of a cache: wrapped so that its states are held elsewhere, if that is worth it.

    Recurrent states are small, and stay on the device.

    Args:
        layer: a layer of kvlayers or of transformers.
        prefetcher: the prefetcher of the cache.
        only_non_sliding: leave layers that attend within a window on the device.

    Raises:
        OptionError: it is no layer.
        UnsupportedLayerError: it attends, and its states cannot be moved.
    """
    known = adapted(layer)
    attention: Any = known.parts[0]
    rows = attention.separate_rows
    if all(isinstance(row, TokenLayer) for row in rows):
        if only_non_sliding and attention.is_sliding:
            return layer
        wrapped = [OffloadedLayer(row, prefetcher) for row in rows]
        return beside_attention(known, wrapped[0] if rows[0] is attention else late.function("separate rows")(wrapped))
    if attention.traits.attends:
        raise UnsupportedLayerError(
            f"Layers must be of a kind that can be offloaded, got a {type(attention.original).__name__}, which holds "
            "tokens in a way of its own: leave out offloading."
        )
    return layer
