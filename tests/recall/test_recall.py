"""Recall: which pages a query reads, against a loop over pages and a softmax over the tokens that it allows."""

import copy
import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import repeat_kv

import kvlayers
from kvlayers import DynamicLayer, OffloadedLayer, OptionError, Quantization, QuantizedLayer, RecallLayer, stores
from kvlayers.layers import Recall
from matrix import once, product
from models import CONFIGS
from recall_reference import RecallReference
from recording_transfers import recording_transfers

LLAMA = CONFIGS["llama"]()
RECALL = Recall(pages=3, page_tokens=8, sink_tokens=4, recent_tokens=8)
BLOCKS = Recall(pages=2, page_tokens=64, sink_tokens=4, recent_tokens=64)
FEW_BITS = Quantization(nbits=4, residual_length=64, sink_tokens=16)
KV_HEADS, GROUP, HEAD_DIM = 2, 3, 16
EXACT = {"rtol": 0, "atol": 3e-6}
"""float32 rounds a softmax over a hundred tokens of order 1 to a few units of 1e-7."""


class Run:
    """A layer and its reference, which take in the same states and answer the same queries."""

    def __init__(self, layer: Any, recall: Recall = RECALL, first: int = 0, batch: int = 2) -> None:
        self.layer, self.reference, self.batch = layer, RecallReference(recall, first), batch
        self.generator = torch.Generator().manual_seed(0)

    def random(self, heads: int, tokens: int) -> Tensor:
        return torch.randn(self.batch, heads, tokens, HEAD_DIM, generator=self.generator)

    def feed(
        self, tokens: int = 1, dtype: torch.dtype = torch.float32, padding: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Let both take in tokens: their queries, and what the layer returns."""
        keys, values, query = (self.random(heads, tokens).to(dtype) for heads in (KV_HEADS, KV_HEADS, 6))
        for sequence, padded in enumerate(padding):
            keys[sequence, :, :padded] = 1e4
        attended = self.layer.update(keys, values)
        self.reference.update(keys, values)
        return query, attended

    def check(self, *chunks: int) -> "Run":
        for tokens in chunks:
            query, attended = self.feed(tokens)
            torch.testing.assert_close(attend(query, attended), self.reference.attend(query).float(), **EXACT)
        return self


def attend(query: Tensor, attended: tuple[Tensor, Tensor]) -> Tensor:
    queries, tokens = query.shape[2], attended[0].shape[2]
    mask = None if queries == 1 else torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
    return scaled_dot_product_attention(query, *attended, mask, enable_gqa=True)


LAYERS: dict[str, Callable[[], Any]] = {
    "dense": lambda: RecallLayer(RECALL),
    "offloaded": lambda: OffloadedLayer(
        RecallLayer(RECALL), kvlayers.offload.Prefetcher(transfers=recording_transfers)
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    "chunks",
    [[70, *[1] * 30], [1] * 110, [5, 3, 60, 1, 1, 9, 1, 40, 1, 1, 8, *[1] * 20]],
    ids=["prompt", "one by one", "turns"],
)
def test_a_query_reads_the_pages_of_the_highest_bounds(kind: str, chunks: list[int]) -> None:
    Run(LAYERS[kind]()).check(*chunks)


@pytest.mark.parametrize("recall", [RECALL, Recall(1, 2, 0, 1), Recall(2, 16, 40, 3), Recall(5, 64, 0, 100)], ids=str)
def test_pages_sinks_and_recent_tokens(recall: Recall) -> None:
    Run(RecallLayer(recall), recall).check(300, 1, 70, *[1] * 6, 64, 1)


def through_state(layer: Any) -> Any:
    fresh = layer.fork()
    fresh.reset()
    fresh.load_state(layer.state())
    return fresh


ASSIGNED = torch.arange(2.0 * 2 * KV_HEADS * 90 * HEAD_DIM).sin().view(2, 2, KV_HEADS, 90, HEAD_DIM)


def assign(layer: Any) -> None:
    layer.keys, layer.values = ASSIGNED


def share(layer: Any) -> None:
    layer.share_prefix(layer.fork(), 50)
    layer.trim()
    layer.compact()


OPERATIONS: dict[str, tuple[Callable[[Any], Any], list[int], int]] = {
    "remove one": (lambda layer: layer.crop(-1), [0, 1], 1),
    "remove a page and more": (lambda layer: layer.crop(-19), [0, 1], 19),
    "remove nearly all": (lambda layer: layer.crop(-90), [0, 1], 90),
    "select one": (lambda layer: layer.batch_select_indices(torch.tensor([1])), [1], 0),
    "select more": (lambda layer: layer.batch_select_indices(torch.tensor([1, 0, 1])), [1, 0, 1], 0),
    "expand": (lambda layer: layer.expand(2), [0, 0, 1, 1], 0),
    "reset": (lambda layer: layer.reset(), [0, 1], 99),
    "fork": (lambda layer: layer.fork(), [0, 1], 0),
    "deepcopy": (copy.deepcopy, [0, 1], 0),
    "pickle": (lambda layer: pickle.loads(pickle.dumps(layer)), [0, 1], 0),
    "state": (through_state, [0, 1], 0),
    "assign": (assign, [0, 1], 0),
    "share, trim and compact": (share, [0, 1], 0),
}
"""What is done to a layer, the sequences that are left, and how many of their tokens are taken back."""


def operate(run: Run, operation: str) -> Run | None:
    """Change the layer of a run. If that makes another layer, returns the run of the one before."""
    change, rows, removed = OPERATIONS[operation]
    other = Run(run.layer, run.reference.recall, run.reference.first, run.batch)
    other.reference = run.reference.copy()
    run.layer, reference = change(run.layer) or run.layer, run.reference
    if run.layer is not other.layer:
        # The other one goes on elsewhere.
        other.generator.manual_seed(9)
        other.check(1, 1, 20, 1)
    if operation == "assign":
        reference.keys, reference.values = ASSIGNED
    reference.select(rows)
    reference.truncate(reference.length - removed)
    run.batch = len(rows)
    return None if run.layer is other.layer else other


@pytest.mark.parametrize(("kind", "operation"), once(LAYERS, OPERATIONS))
def test_decoding_goes_on_after_every_operation(kind: str, operation: str) -> None:
    run = Run(LAYERS[kind]()).check(90, *[1] * 9)
    other = operate(run, operation)
    run.check(1, 1, 1, 30, *[1] * 20)
    if other is not None:
        other.check(1, 1)


ALL = Recall(pages="all")


@pytest.mark.parametrize(
    ("recall", "chunks", "dtype"),
    [
        *((ALL, (300, 1, 1, 5, 1), dtype) for dtype in (torch.float32, torch.bfloat16)),
        *((RECALL, (tokens, 1), torch.float32) for tokens in (8 * 3 + 8 + 8 + 6, 20)),
    ],
    ids=str,
)
def test_all_pages_and_few_are_no_recall(recall: Recall, chunks: tuple[int, ...], dtype: torch.dtype) -> None:
    """Bit for bit, and on the same path."""
    plain, layer = DynamicLayer(), RecallLayer(recall)
    torch.manual_seed(0)
    for tokens in chunks:
        keys, values = torch.randn(2, 2, 2, tokens, 32).to(dtype)
        query = torch.randn(2, 8, tokens, 32).to(dtype)
        assert torch.equal(*(attend(query, each.update(keys, values)) for each in (layer, plain)))
    if recall is ALL:
        assert layer.nbytes == plain.nbytes
        assert layer.fidelity == "exact" != RecallLayer().fidelity


@pytest.mark.parametrize(
    ("padding", "additive", "sinks"), product([[0, 21], [8, 64], [95, 0], [3, 3]], [False, True], [4, 0])
)
def test_padding_is_not_chosen(padding: list[int], additive: bool, sinks: int) -> None:
    """Padding keys may be anything; each sequence has its own sinks."""
    recall = Recall(pages=3, page_tokens=8, sink_tokens=sinks, recent_tokens=8)
    run = Run(RecallLayer(recall), recall)
    run.feed(100, padding=padding)
    for _ in range(20):
        query, attended = run.feed()
        visible = torch.arange(run.reference.length) >= torch.tensor(padding)[:, None]
        mask = visible[:, None, None]
        if additive:
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        found = scaled_dot_product_attention(query, *attended, mask, enable_gqa=True)
        torch.testing.assert_close(found, run.reference.attend(query, padding).float(), **EXACT)


def test_eager_attention_reads_the_same_pages() -> None:
    run = Run(RecallLayer(RECALL)).check(90)
    for _ in range(10):
        query, attended = run.feed()
        keys, values = (repeat_kv(states, GROUP) for states in attended)
        found = torch.matmul((torch.matmul(query, keys.transpose(2, 3)) / HEAD_DIM**0.5).softmax(-1), values)
        torch.testing.assert_close(found, run.reference.attend(query).float(), **EXACT)


def test_bfloat16_reads_pages_of_the_highest_bounds() -> None:
    """As far as bfloat16 can tell: bounds that are rounded may put two pages in the other order."""
    run = Run(RecallLayer(RECALL))
    run.feed(120, torch.bfloat16)
    for _ in range(10):
        query, attended = run.feed(1, torch.bfloat16)
        found = attend(query, attended).float()
        torch.testing.assert_close(found, run.reference.attend(query).float(), rtol=0, atol=2e-2)


# Packed states


def packed_pair(chunks: list[int], recall: Recall = BLOCKS) -> tuple[RecallLayer, QuantizedLayer, RecallReference]:
    """A recall layer and a packed layer of the same states, and the reference of the choice."""
    layer = RecallLayer(recall, store=stores.QuantizedStore(FEW_BITS))
    packed, reference = QuantizedLayer(FEW_BITS), RecallReference(recall, FEW_BITS.sink_tokens)
    torch.manual_seed(0)
    for tokens in chunks:
        keys, values = torch.randn(2, 2, 2, tokens, 32)
        for each in (layer, packed, reference):
            each.update(keys, values)
    return layer, packed, reference


def check_packed(layer: Any, packed: QuantizedLayer, reference: RecallReference, steps: int) -> None:
    """A query reads the codes of the pages that the reference chooses by the keys as they came."""
    for _ in range(steps):
        batch = reference.keys.shape[0]
        keys, values, query = torch.randn(batch, 2, 1, 32), torch.randn(batch, 2, 1, 32), torch.randn(batch, 6, 1, 32)
        found = attend(query, layer.update(keys, values))
        attended = packed.update(keys, values)
        reference.update(keys, values)
        mask = reference.allowed(query).repeat_interleave(3, 1)[:, :, None]
        expected = scaled_dot_product_attention(query, *attended, mask, enable_gqa=True)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunks", [[500], [100, 200, 1, 1, 190], [1] * 240], ids=["prompt", "turns", "one by one"])
@pytest.mark.parametrize("recall", [BLOCKS, Recall(1, 64, sink_tokens=90, recent_tokens=200)], ids=["few", "many"])
def test_packed_pages_are_blocks(chunks: list[int], recall: Recall) -> None:
    layer, packed, reference = packed_pair(chunks, recall)
    check_packed(layer, packed, reference, 70)
    assert layer.bits == (4, 4)


@pytest.mark.parametrize("length", [470, 400, 300, 290, 17, 5])
def test_packed_pages_after_a_crop(length: int) -> None:
    """A block that is cut keeps its codes, and its page; what comes next is in other pages."""
    layer, packed, reference = packed_pair([520])
    in_blocks = int(packed.exact_from or 0)
    reference.cut = {start: reference.keys[:, :, start : start + 64] for start in [length - (length - 16) % 64]}
    for each in (layer, packed, reference):
        each.truncate(length)
    whole = list(range(80, length + 1, 64)) if length >= 80 else []
    cut = [length] if length < in_blocks and length > 16 and (length - 16) % 64 else []
    kept = [*whole, *cut]
    reference.cut = reference.cut if cut else {}
    for tokens in (300, 1, 40, 1):
        keys, values = torch.randn(2, 2, tokens, 32), torch.randn(2, 2, tokens, 32)
        for each in (layer, packed, reference):
            each.update(keys, values)
        first = kept[-1] if kept else 16
        reference.ends = [*kept, *range(first + 64, reference.length + 1, 64)]
    check_packed(layer, packed, reference, 2)


# Memory, descriptions and bad input


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"pages": 0}, "`pages` of recall must be a whole number, at least 1"),
    ({"pages": "every"}, 'or "all"'),
    ({"pages": True}, "`pages`"),
    ({"page_tokens": 65}, "from 1 to 64, got 65"),
    ({"page_tokens": 0}, "`page_tokens`"),
    ({"sink_tokens": -1}, "`sink_tokens`"),
    ({"recent_tokens": 0}, "`recent_tokens`"),
    ({"recent_tokens": 1.5}, "`recent_tokens`"),
]
BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    *((functools.partial(Recall, **options), OptionError, message) for options, message in OPTIONS),
    *((functools.partial(RecallLayer, options), OptionError, message) for options, message in OPTIONS),
    *((functools.partial(Recall.of, given), OptionError, "[Rr]ecall") for given in ({"page": 3}, 64, "all", [64])),
    (lambda: kvlayers.DynamicCache(recall={"pgaes": 4}), OptionError, "did you mean 'pages'"),
    (lambda: kvlayers.DynamicCache(recall="all"), OptionError, "'pages': 'all'"),
    (lambda: kvlayers.DynamicCache(pages=4), OptionError, r"part of the option `recall`, as in recall=\{'pages'"),
    (lambda: kvlayers.make_cache("static", LLAMA, recall={"pages": 3}, max_cache_len=64), OptionError, "recall"),
    (lambda: kvlayers.make_cache("sink", LLAMA, recall={"pages": 3}), OptionError, "recall"),
    (
        lambda: RecallLayer(Recall(pages=4, page_tokens=8)).load_state(RecallLayer(RECALL).state()),
        kvlayers.errors.StateMismatchError,
        "recall_pages",
    ),
]


@pytest.mark.parametrize(("act", "error", "message"), BAD)
def test_bad_input_is_a_named_error(act: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        act()


def test_a_state_with_wrong_pages_is_refused() -> None:
    layer, _, _ = packed_pair([520])
    state = layer.state()
    for name, wrong in [
        ("page_bounds", state.tensors["page_bounds"][:, :, 1:]),
        ("page_bounds", state.tensors["page_bounds"].long()),
        ("page_ends", state.tensors["page_ends"] + 64),
        ("page_ends", state.tensors["page_ends"].flip(0)),
        ("page_ends", state.tensors["page_ends"].float()),
    ]:
        fresh = RecallLayer(BLOCKS, store=stores.QuantizedStore(FEW_BITS))
        with pytest.raises(kvlayers.errors.StateMismatchError, match="of a state"):
            fresh.load_state(kvlayers.layers.LayerState(state.kind, {**state.tensors, name: wrong}, state.facts))
        assert fresh.length == 0


def test_pages_of_packed_states_are_blocks() -> None:
    layer = RecallLayer(Recall(page_tokens=16), store=stores.QuantizedStore(FEW_BITS))
    with pytest.raises(OptionError, match="pass page_tokens=64"):
        layer.update(torch.randn(1, 2, 5, 32), torch.randn(1, 2, 5, 32))
    assert layer.length == 0
