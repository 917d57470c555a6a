"""Steps that measure attention to evicted and recalled tokens beside torch's attention to all tokens."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from lib.gpu_stage import Findings, Setup
from lib.gpu_timing import copies_of, median, microseconds
from lib.internals import (
    DENSE_PIECE_TOKENS,
    DenseSegment,
    GatheredSegment,
    KVSegments,
    PathCounter,
    dispatch,
    reference,
)
from packed_reference import counted_launches, random_pair, relative_error

DENSE = "SDPA, all tokens"
CLOSE = 4 * torch.finfo(torch.bfloat16).eps
KEEP = 4
"""One token of so many is kept."""


def _pair(setup: Setup, tokens: int, kv_heads: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    heads, head_dim = setup.choose((8, 128), (2, 32))
    return random_pair(1, kv_heads or heads, tokens, head_dim, dtype=torch.bfloat16, device=setup.device, seed=seed)


def per_head_segments(setup: Setup, tokens: int) -> KVSegments:
    """A flat buffer of which KV heads hold from a quarter to seven quarters of the average, and 64 newer tokens."""
    kv_heads = setup.choose(8, 2)
    average = tokens // DENSE_PIECE_TOKENS
    pieces = [round(average * (0.25 + 1.5 * head / (kv_heads - 1))) for head in range(kv_heads)]
    most, total = max(pieces), sum(pieces)
    head = torch.arange(most, device=setup.device)
    counts, starts, columns = [], [], []
    first = 0
    for number in pieces:
        held = head < number
        counts.append(held * DENSE_PIECE_TOKENS)
        starts.append(torch.where(held, (first + head) * DENSE_PIECE_TOKENS, 0))
        columns.append((most - number + head) * DENSE_PIECE_TOKENS)
        first += number
    keys, values = _pair(setup, total * DENSE_PIECE_TOKENS, kv_heads=1)
    source = DenseSegment(keys.expand(-1, kv_heads, -1, -1), values.expand(-1, kv_heads, -1, -1))
    first_tokens, held_tokens, first_columns = (torch.stack(table)[None] for table in (starts, counts, columns))
    flat = GatheredSegment(source, first_tokens, held_tokens, first_columns, most * DENSE_PIECE_TOKENS)
    return KVSegments((flat, DenseSegment(*_pair(setup, 64))))


def evicted_attention(setup: Setup) -> Findings:
    """Attention of one query to a quarter of the tokens: as many for each KV head, or budgets of their own."""
    found = Findings()
    for tokens in setup.choose((16384, 32768), (1024,)):
        even = _pair(setup, tokens // KEEP + 64)
        uneven = per_head_segments(setup, tokens // KEEP)
        query = _query(setup)
        scale, paths = query.shape[3] ** -0.5, PathCounter()
        with counted_launches() as launches:
            seen = dispatch.attend(query, uneven, None, scale, paths)
        error = relative_error(seen, reference.attend(query, uneven, None, scale))
        found.details[f"check, {tokens:,} tokens"] = {"error": error, "paths": paths.counts, "launches": launches}
        found.expect(error < CLOSE, f"{tokens:,} tokens: attention to pieces is {error:.3f} from plain torch's")
        calls = {
            f"{DENSE}, {tokens:,}": _dense_call(setup, query, tokens),
            f"even budgets, {tokens // KEEP:,}": lambda turn, q=query, kv=even: _sdpa(q, kv),
            f"budgets of heads, {tokens // KEEP:,}": lambda turn, q=query, kv=uneven, s=scale: dispatch.attend(
                q, kv, None, s, PathCounter()
            ),
        }
        _measure(setup, found, calls)
        setup.free_memory()
    return found


def recalled_attention(setup: Setup) -> Findings:
    """Attention of one query to 64 pages that it chooses, the choice included."""
    found = Findings()
    pages = setup.choose(64, 4)
    for tokens in setup.choose((8192, 16384, 32768), (1024,)):
        layer = kvlayers.RecallLayer(kvlayers.layers.Recall(pages=pages))
        layer.update(*_pair(setup, tokens))
        recalled = layer.update(*_pair(setup, 1, seed=1))
        query = _query(setup)
        with counted_launches() as launches:
            _sdpa(query, recalled)
        found.details[f"launches of kvlayers' kernels, {tokens:,} tokens"] = launches
        calls = {
            f"{DENSE}, {tokens:,}": _dense_call(setup, query, tokens),
            f"recall of {pages} pages, {tokens:,}": lambda turn, q=query, kv=recalled: _sdpa(q, kv),
        }
        _measure(setup, found, calls)
        setup.free_memory()
    return found


def _query(setup: Setup) -> Tensor:
    heads, head_dim = setup.choose((32, 128), (4, 32))
    return torch.randn(1, heads, 1, head_dim, device=setup.device, dtype=torch.bfloat16)


def _sdpa(query: Tensor, states: tuple[Any, Any]) -> Tensor:
    return scaled_dot_product_attention(query, *states, enable_gqa=True)


def _dense_call(setup: Setup, query: Tensor, tokens: int) -> Any:
    """Attention to all tokens, of other copies of the states at each turn."""
    first = _pair(setup, tokens)
    copies = min(copies_of(2 * first[0].nbytes), setup.choose(16, 2))
    held = [first, *(_pair(setup, tokens, seed=number) for number in range(1, copies))]
    return lambda turn: _sdpa(query, held[turn % len(held)])


def _measure(setup: Setup, found: Findings, calls: dict[str, Any]) -> None:
    trials, turns = setup.choose(15, 2), dict.fromkeys(calls, setup.choose(16, 2))
    for in_graph in (True, False) if setup.on_cuda else (False,):
        how = "in a graph" if in_graph else "eager"
        times = microseconds(setup, calls, turns, trials, in_graph)
        base, *others = calls
        found.add(f"{base}, {how}", median(times[base]), "us")
        for name in others:
            found.add(f"{name}, {how}", median(times[name]), "us")
            found.add("  share of SDPA over all tokens", median(times[name]) / median(times[base]), "")
        found.details |= {f"{name}, {how}": each for name, each in times.items()}
