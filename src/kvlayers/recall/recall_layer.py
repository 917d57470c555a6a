"""A layer that keeps every token, of which a single query attends to a few pages."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.buffer import LayerShape, nbytes_of
from kvlayers.core.cache_layer import LayerState, register_layer
from kvlayers.core.dense_store import DenseStore
from kvlayers.core.description import OptionFacts, OptionsArgument
from kvlayers.core.dynamic_cache import DynamicCache
from kvlayers.core.named_caches import named, register
from kvlayers.core.token_layer import DynamicLayer
from kvlayers.core.token_store import Fidelity, TokenStore, filled_nbytes
from kvlayers.errors import OptionError
from kvlayers.kernels.attention.dispatch import PathCounter
from kvlayers.kernels.attention.packed_ops import choosing
from kvlayers.kernels.attention.packed_tensor import PackedStates, Version, as_dense
from kvlayers.kernels.attention.segment_kinds import DENSE_PIECE_TOKENS
from kvlayers.kernels.attention.segments import KVSegments
from kvlayers.kernels.codes.quantizer_contract import Side
from kvlayers.offload.paged_reads import places_for
from kvlayers.quantized.quantized_store import QuantizedStore
from kvlayers.recall.pages import (
    BOUNDS,
    ENDS,
    PageBounds,
    PagePriority,
    check_bounds_state,
    chosen_segments,
)
from kvlayers.utils.options import as_options, check_whole_number, checks_options, mapping_option


@mapping_option("recall")
@dataclass(frozen=True)
class Recall(OptionFacts):
    """How a single query finds the pages that it attends to, in a layer that keeps every token.

    Args:
        pages: pages that each KV head attends to, besides the first and the newest tokens; "all" for full attention.
        page_tokens: tokens of a page, 1 to 64. Packed states are read in blocks, so it must be the size of their block,
            which is 64 unless groups along tokens are longer.
        sink_tokens: first tokens of a sequence that every query attends to, with the rest of their pages.
        recent_tokens: newest tokens that every query attends to, with the rest of their pages. The query's own token is
            among them, so it is at least 1.

    Raises:
        OptionError: a value that is no number of tokens or of pages, or too small, or too large.

    Example:
        >>> import kvlayers
        >>> kvlayers.layers.Recall(pages=32)
        Recall(pages=32, page_tokens=64, sink_tokens=4, recent_tokens=64)
    """

    # They stand among the facts of stores, which have other names.
    fact_names: ClassVar[Mapping[str, str]] = {
        name: f"recall_{name}" for name in ("pages", "page_tokens", "sink_tokens", "recent_tokens")
    }

    pages: int | Literal["all"] = 64
    page_tokens: int = DENSE_PIECE_TOKENS
    sink_tokens: int = 4
    recent_tokens: int = 64

    def __post_init__(self) -> None:
        if self.pages != "all":
            check_whole_number(self.pages, "`pages` of recall", 1, advice=': pass that, or "all"')
        check_whole_number(
            self.page_tokens,
            "`page_tokens` of recall",
            1,
            # So many are read at once by kernels.
            DENSE_PIECE_TOKENS,
            advice=": pass as many, and more pages rather than longer ones",
        )
        check_whole_number(self.sink_tokens, "`sink_tokens` of recall", 0)
        check_whole_number(self.recent_tokens, "`recent_tokens` of recall", 1)

    @classmethod
    def of(cls, given: "Recall | Mapping[str, Any]") -> "Recall":
        """The `Recall` for the option `recall` of a cache: a `Recall`, or a mapping of its arguments.

        Raises:
            OptionError: the option is something else, or names an argument that does not exist.
        """
        return as_options(cls, given, "{'pages': 64}, or {'pages': 'all'}")

    def layer(self, length_hint: int | None = None, store: TokenStore | None = None) -> "RecallLayer":
        """A layer that chooses pages with these options, over `store` if it is given."""
        return RecallLayer(self, length_hint) if store is None else RecallLayer(self, store=store)


@register_layer
class RecallLayer(DynamicLayer):
    """Full attention that keeps every token, and lets a single query attend to the pages that matter to it.

    Quest (Tang et al. 2024, arXiv:2406.10774) bounds the score of a query with any key of a page by the maximum and the
    minimum of the page's keys. Each KV head reads the pages with the highest bounds, where the bound of a page is the
    highest one of the query heads that share the KV head. The first and the newest tokens are always read. Several
    queries at once (a prompt, a turn of a chat, a draft) attend to every token.

    Nothing is evicted, so the layer can be rolled back to any length, and the next query may choose any page again. The
    pages are chosen when attention is computed, by `scaled_dot_product_attention` or by the first product of eager
    attention. An attention function that reads the states in another way reads all of them, and so does attention that
    autograd follows. If no more pages are there than may be chosen, the layer does what a `DynamicLayer` does.

    The pages stand at multiples of `page_tokens`, counted from the first token, padding included. A page of padding
    alone is not chosen if attention is given a mask. Eager attention applies its mask later, so it may choose such
    pages.

    Args:
        recall: how many pages are read, and which tokens always are; the defaults if it is not given.
        length_hint: the most tokens that are expected, if known; see `DenseStore`.
        store: how the tokens are held; a `DenseStore` if it is not given.

    Example:
        >>> import torch, kvlayers
        >>> layer = kvlayers.RecallLayer(kvlayers.layers.Recall(pages=4))
        >>> _ = layer.update(torch.randn(1, 2, 1000, 64), torch.randn(1, 2, 1000, 64))
        >>> keys, values = layer.update(torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64))
        >>> query = torch.randn(1, 8, 1, 64)
        >>> torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True).shape
        torch.Size([1, 8, 1, 64])
    """

    made_with = (*DynamicLayer.made_with, OptionsArgument("recall", options=Recall))
    beside = ("_bounds",)
    is_opaque = True

    @checks_options
    def __init__(
        self,
        recall: Recall | Mapping[str, Any] | None = None,
        length_hint: int | None = None,
        store: TokenStore | None = None,
    ) -> None:
        super().__init__(length_hint, store)
        self.recall = Recall() if recall is None else Recall.of(recall)
        self._bounds = PageBounds(self.recall.page_tokens)
        self._version = Version()
        self._paths = PathCounter()

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        store, bounds, pages = self.store, self._bounds, self.recall.pages
        if pages == "all":
            return store.take_in(key_states, value_states)
        new = (
            key_states.shape[2]
            if isinstance(key_states, Tensor) and key_states.dim() == 4
            else store.validate(key_states, value_states)
        )
        if not store.length:
            store.validate(key_states, value_states)
            self._bounds = bounds = self._without_pages()
        made: list[Tensor] = []
        if store.length + new - bounds.end >= bounds.page_tokens:
            store.validate(key_states, value_states)
            made = self._bounds_with(key_states)
            bounds.prepare(made)
        attended = store.take_in(key_states, value_states)
        if made:
            bounds.hold(made)
        if new != 1:
            return attended
        # Of the pages between those of the sinks and the newest tokens, if no sequence is padded.
        first = bounds.pages_from(self.recall.sink_tokens)
        last = bounds.pages_within(store.length - self.recall.recent_tokens)
        if last - first <= pages:
            return attended
        choose = functools.partial(self._choose, (first, last))
        return choosing(*attended, choose, self._version, self._paths)

    def chosen_page_tokens(self, tokens: int) -> int | None:
        """Tokens of a page, if the query of an update of `tokens` tokens reads pages that it chooses, else `None`.

        The pages can then be read where they are held, without the others.
        """
        recall, bounds = self.recall, self._bounds
        # Before there are blocks, tokens are few.
        if tokens != 1 or recall.pages == "all" or not (self.store.holds_tokens_apart or self.store.exact_from):
            return None
        last = bounds.pages_within(self.store.length + tokens - recall.recent_tokens)
        return recall.page_tokens if last - bounds.pages_from(recall.sink_tokens) > recall.pages else None

    def _without_pages(self) -> PageBounds:
        """Bounds of no page, of the pages that the form of the states asks for.

        Raises:
            OptionError: the store packs tokens in blocks of another size.
        """
        store, size = self.store, self.recall.page_tokens
        if isinstance(store, QuantizedStore) and store.block_tokens not in (1, size):
            raise OptionError(
                f"`page_tokens` of recall must be the size of a block of packed states, {store.block_tokens}, got "
                f"{size}: pass page_tokens={store.block_tokens}, or shorter groups if that is more than 64."
            )
        return PageBounds(size, _first_page(store))

    def _bounds_with(self, keys: Tensor) -> list[Tensor]:
        """Bounds of the pages that new keys fill, `[batch, kv_heads, pages, 2 * head_dim]`, in a few tensors."""
        store, bounds = self.store, self._bounds
        unfinished = store.length - bounds.end
        if unfinished <= 0:
            return bounds.of_keys(as_dense(keys)[:, :, -unfinished:])
        # Held keys may be in other memory than new ones.
        held = as_dense(store.newest(unfinished)[0]).to(keys.device)
        return bounds.of_keys(held, as_dense(keys))

    # The choice

    def _choose(self, choice: tuple[int, int], query: Tensor, segments: KVSegments, mask: Tensor | None) -> KVSegments:
        """The segments with the same columns that the query of one token reads.

        The pages are chosen from their bounds alone, wherever the states are. Whatever is not in the range that they
        are chosen from is read.

        Args:
            choice: the first page to choose from, and the page behind the last one, when the token of the query came.
            query: `[batch, heads, 1, head_dim]`. If there is a mask, transformers' "sdpa" makes the query heads of a KV
                head queries, and shows them as `[batch, kv_heads, group, head_dim]`: all of them of the one new token.
            segments: all tokens of the layer.
            mask: mask of all tokens, bool or additive, of the shape of the query but for `tokens` in place of head_dim,
                to which it is expanded; `None` for none.
        """
        pages, recall, bounds = int(self.recall.pages), self.recall, self._bounds
        first, last = choice
        if mask is None:
            places = bounds.best(query, first, last, pages, None)
        else:
            visible = mask.expand(*query.shape[:3], segments.tokens)[:, 0, -1]
            if visible.dtype != torch.bool:
                visible = visible > torch.finfo(visible.dtype).min / 2
            padding = visible.to(torch.uint8).argmax(1)
            # The first tokens of a padded sequence are in another page than those of the others.
            further = 0 if not recall.sink_tokens else 2 + (recall.sink_tokens - 2) // recall.page_tokens
            first, most = 0, pages + further
            places = bounds.best(query, 0, last, min(most, last), PagePriority(padding, recall.sink_tokens, pages))
        return chosen_segments(segments, places, bounds.start_of(first), bounds.start_of(last))

    @property
    @override
    def attention_paths(self) -> Mapping[str, int]:  # type: ignore[override]
        return Counter(super().attention_paths) + self._paths.counts

    @property
    @override
    def fidelity(self) -> Fidelity:
        # Every token is kept, but what a query leaves out is an error of attention: it shows in the outputs, and
        # depends on which tokens come together.
        return super().fidelity if self.recall.pages == "all" else "partial"

    # Operations

    @override
    def _handed_out(self, side: Side) -> Tensor | None:
        # Copies: what a caller writes would not be within the bounds of its page.
        states = super()._handed_out(side)
        return states if states is None or isinstance(states, PackedStates) else states.clone()

    @override
    def _replace(self, keys: Tensor, values: Tensor) -> None:
        super()._replace(keys, values)
        self._forget_pages()
        self._make_pages(keys)

    def _make_pages(self, keys: Tensor) -> None:
        """Make the bounds of all pages of the held tokens, from their keys."""
        bounds = self._bounds
        if self.recall.pages != "all" and self.length - bounds.end >= bounds.page_tokens:
            made = bounds.of_keys(as_dense(keys)[:, :, bounds.end :])
            bounds.prepare(made)
            bounds.hold(made)

    def _forget_pages(self) -> None:
        self._version.advance()
        self._bounds = self._without_pages()

    @override
    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._version.advance()
        # The tokens of a packed block stay together. Those behind them are put into pages again.
        packed = self.store.exact_from or 0
        self._bounds.truncate(self.store.length, packed)

    @override
    def _with_beside(self, indices: Tensor, change: Callable[[], None]) -> None:
        super()._with_beside(indices, change)
        self._version.advance()

    @override
    def reset(self) -> None:
        super().reset()
        self._version.advance()
        self._bounds = PageBounds(self.recall.page_tokens)

    @override
    def trim(self) -> None:
        super().trim()
        self._bounds.trim()

    @override
    def fork(self) -> Self:
        return self._with_own_pages(super().fork())

    @override
    def snapshot(self) -> Self:
        return self._with_own_pages(super().snapshot())

    def _with_own_pages(self, twin: Self) -> Self:
        twin._bounds, twin._version, twin._paths = self._bounds.fork(), Version(), PathCounter()
        return twin

    def copies_nbytes(self, shape: LayerShape, tokens: int) -> int:
        """Bytes of tokens that an `OffloadedLayer` over this layer leaves on the device for the next query."""
        recall, size, store = self.recall, self.recall.page_tokens, self.store
        first = -(-max(recall.sink_tokens - _first_page(store), 0) // size)
        last = (tokens - _first_page(store) - recall.recent_tokens) // size
        if recall.pages == "all" or last - first <= recall.pages:
            return 0
        forms, pages = shape.forms(), first + places_for(recall.pages)
        if isinstance(store, QuantizedStore):
            # So many blocks, and what is in full precision: as a store of a shorter text.
            return sum(filled_nbytes(QuantizedStore(store.quantization), forms, tokens - (last - pages) * size))
        newest = sum(filled_nbytes(DenseStore(), forms, tokens - last * size))
        return sum(nbytes_of(form, pages * size) for form in forms) + newest

    # Description and state

    @override
    def state(self) -> LayerState:
        state = super().state()
        # Bounds of keys that are held as they came can be made again.
        if self.store.holds_tokens_apart:
            return state
        return LayerState(state.kind, {**state.tensors, **self._bounds.state()}, state.facts)

    @override
    def check_state(self, state: LayerState) -> None:
        own, held = state.split((BOUNDS, ENDS))
        super().check_state(held)
        if own:
            keys, first = held.tensors["keys"], _first_page(self.store)
            check_bounds_state(own, keys, first, state.length, self.recall.page_tokens)

    @override
    def load_state(self, state: LayerState) -> None:
        self.check_state(state)
        own, held = state.split((BOUNDS, ENDS))
        self.store.load_state(held.tensors)
        self._forget_pages()
        if own:
            self._bounds.load_state(own)
        elif self.store.holds_tokens_apart and held.tensors:
            self._make_pages(held.tensors["keys"])


def _first_page(store: TokenStore) -> int:
    """Number of the token at which the first page begins: packed blocks follow one another behind the sinks."""
    return store.quantization.sink_tokens if isinstance(store, QuantizedStore) else 0


register("recall")(named(DynamicCache, "length_hint", {"recall": Recall()}))
