"""The table of capabilities in the docs shows what the kinds really do. KVLAYERS_WRITE_DOCS=1 writes it."""

import copy
import os
import pathlib
from collections.abc import Callable

import torch

import kvlayers
from kvlayers import (
    CacheLayer,
    CapacityError,
    DynamicLayer,
    EvictingLayer,
    HybridLayer,
    LinearAttentionLayer,
    OffloadedLayer,
    Quantization,
    QuantizedLayer,
    SlidingLayer,
    StaticLayer,
    StaticSlidingLayer,
    offload,
)
from kvlayers.rope.rotary import Rotary
from recording_transfers import RecordingTransfers

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "capabilities.md"
WINDOW, WIDE_WINDOW, RESERVED = 8, 80, 600
PAST, REMOVED = 100, 40
"""Tokens of which a quantized layer has packed a block, and of which some are rolled back, from the block as well."""

IN_CODES = Quantization(residual_length=0, sink_tokens=4)
WINDOW_IN_CODES = Quantization(residual_length=0, sink_tokens=0)


def _prefetcher() -> offload.Prefetcher:
    return offload.Prefetcher(transfers=lambda device: RecordingTransfers())


KINDS: dict[str, Callable[[], CacheLayer]] = {
    "DynamicLayer": DynamicLayer,
    "SlidingLayer": lambda: SlidingLayer(WINDOW),
    "StaticLayer": lambda: StaticLayer(RESERVED, max_batch_size=6),
    "StaticSlidingLayer": lambda: StaticSlidingLayer(RESERVED, WINDOW, max_batch_size=6),
    "SinkLayer": lambda: kvlayers.SinkLayer(WINDOW, 2, Rotary(torch.tensor([1.0, 0.1]), "halves")),
    "EvictingLayer": lambda: EvictingLayer("knorm", budget=16, sink_tokens=2, recent_tokens=8, per_head=False),
    "RecallLayer": lambda: kvlayers.RecallLayer(kvlayers.layers.Recall(pages=4, page_tokens=8, recent_tokens=8)),
    "QuantizedLayer": lambda: QuantizedLayer(IN_CODES),
    "SlidingLayer, quantized": lambda: SlidingLayer(WIDE_WINDOW, kvlayers.stores.QuantizedStore(WINDOW_IN_CODES)),
    "DynamicLayer, offloaded": lambda: OffloadedLayer(DynamicLayer(), _prefetcher()),
    "QuantizedLayer, offloaded": lambda: OffloadedLayer(QuantizedLayer(IN_CODES), _prefetcher()),
    "LinearAttentionLayer": LinearAttentionLayer,
    "HybridLayer": lambda: HybridLayer(DynamicLayer(), LinearAttentionLayer()),
}


def tokens(count: int, batch: int = 2, **form: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 2, count, 4, **form), torch.randn(batch, 2, count, 4, **form)


def give(layer: CacheLayer, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """What attention, or a convolution, reads once a layer has taken in new tokens."""
    read = keys
    if layer.traits.is_recurrent:
        read = layer.update_conv_state(keys.transpose(2, 3).flatten(1, 2), conv_kernel_size=4)
        layer.update_recurrent_state(keys.sum(2))
    return layer.update(keys, values)[0] if layer.traits.attends else read


def past(layer: CacheLayer, count: int = PAST) -> CacheLayer:
    for _ in range(count):
        give(layer, *tokens(1))
    return layer


def roll_back(layer: CacheLayer) -> bool:
    past(layer)
    layer.crop(-REMOVED)
    return layer.length == PAST - REMOVED


def record_and_roll_back(layer: CacheLayer) -> bool:
    past(layer)
    layer.activate_past_recording()
    give(layer, *tokens(REMOVED))
    layer.crop(-REMOVED)
    return layer.length == PAST


def any_length(layer: CacheLayer) -> bool:
    return past(layer, RESERVED + 1).length == RESERVED + 1


def one_address(layer: CacheLayer) -> bool:
    addresses = set()
    for _ in range(200):
        read = give(layer, *tokens(1))
        addresses.add((read if layer.traits.attends else layer.conv_states[0]).untyped_storage().data_ptr())
    return len(addresses) == 1


def bounded_memory(layer: CacheLayer) -> bool:
    held = past(layer, 300).nbytes
    return past(layer, 200).nbytes == held


def keeps_batch(change: Callable[[CacheLayer], object], batch: int) -> Callable[[CacheLayer], bool]:
    def operation(layer: CacheLayer) -> bool:
        change(past(layer))
        give(layer, *tokens(1, batch))
        return layer.batch_size == batch

    return operation


def twin(make: Callable[[CacheLayer], CacheLayer]) -> Callable[[CacheLayer], bool]:
    def operation(layer: CacheLayer) -> bool:
        other = make(past(layer))
        give(other, *tokens(1))
        return (layer.length, other.length) == (PAST, PAST + 1)

    return operation


def load_state(layer: CacheLayer) -> bool:
    state = past(layer).state()
    layer.reset()
    layer.load_state(state)
    return layer.length == PAST


def gradients(layer: CacheLayer) -> bool:
    keys, values = tokens(4, requires_grad=True)
    give(layer, keys, values)
    attended = give(layer, *tokens(1)).sum()
    if not attended.requires_grad:
        return False
    attended.backward()
    return bool(keys.grad is not None and keys.grad.abs().sum() > 0)


CAPABILITIES: dict[str, Callable[[CacheLayer], bool]] = {
    "holds any number of tokens": any_length,
    "memory does not grow with the tokens": bounded_memory,
    "memory stays at one address": one_address,
    "rolls back (`crop`, `truncate`)": roll_back,
    "rolls back recorded tokens (`activate_past_recording`)": record_and_roll_back,
    "reorders (`reorder_cache`)": keeps_batch(lambda layer: layer.reorder_cache(torch.tensor([1, 0])), 2),
    "selects (`batch_select_indices`)": keeps_batch(lambda layer: layer.batch_select_indices([1]), 1),
    "repeats (`batch_repeat_interleave`)": keeps_batch(lambda layer: layer.batch_repeat_interleave(3), 6),
    "forks (`fork`, `copy.deepcopy`)": twin(copy.deepcopy),
    "saves and loads (`state`, `load_state`)": load_state,
    "lets gradients through": gradients,
}
NOTES = {
    ("rolls back (`crop`, `truncate`)", "LinearAttentionLayer"): "to checkpoints (`truncate`)",
    ("rolls back (`crop`, `truncate`)", "HybridLayer"): "to checkpoints (`truncate`)",
    ("rolls back (`crop`, `truncate`)", "SlidingLayer"): "until the window is full",
    ("rolls back (`crop`, `truncate`)", "StaticSlidingLayer"): "until the window is full",
    ("rolls back (`crop`, `truncate`)", "SlidingLayer, quantized"): "until the window is full",
    ("rolls back (`crop`, `truncate`)", "SinkLayer"): "until the window is full",
    ("memory does not grow with the tokens", "EvictingLayer"): "with a budget, within 64 tokens",
    ("rolls back (`crop`, `truncate`)", "EvictingLayer"): "within what every head holds",
    ("repeats (`batch_repeat_interleave`)", "StaticLayer"): "within the reserved batch",
    ("repeats (`batch_repeat_interleave`)", "StaticSlidingLayer"): "within the reserved batch",
    ("lets gradients through", "QuantizedLayer"): "to the newest update only",
    ("lets gradients through", "QuantizedLayer, offloaded"): "to the newest update only",
    ("lets gradients through", "SlidingLayer, quantized"): "to the newest update only",
}


def table() -> str:
    rows = [
        "# What each kind of layer can do",
        "",
        "Look up here whether a cache can do what you plan. A test tries every operation with every kind of layer",
        "and writes this table. If a kind does not support an operation, it raises a named error and changes nothing.",
        "",
        f"| | {' | '.join(f'`{kind}`' for kind in KINDS)} |",
        f"|---|{'---|' * len(KINDS)}",
    ]
    for capability, operation in CAPABILITIES.items():
        cells = []
        for kind, make in KINDS.items():
            torch.manual_seed(0)
            try:
                able = operation(make())
            except (kvlayers.errors.RollbackError, CapacityError):
                able = False
            cells.append("yes" if able else NOTES.get((capability, kind), "no"))
        rows.append(f"| {capability} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def test_the_table_in_the_docs_is_what_the_kinds_do() -> None:
    seen = table()
    if os.environ.get("KVLAYERS_WRITE_DOCS"):
        PAGE.write_text(seen)
    assert PAGE.read_text() == seen
