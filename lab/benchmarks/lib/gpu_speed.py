"""Steps that measure kernels and decoding beside torch's attention and transformers' caches."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from lib.gpu_model import (
    CACHES,
    DYNAMIC,
    FP8,
    INT4,
    INT8,
    LEAST_ALLOWED,
    ONE_BILLION,
    REFERENCE,
    WITHOUT_CUDNN,
    column_of,
    compare_logits,
    copies_of,
    eight_billion,
    elapsed,
    expected_logits,
    fill_with_random,
    filled,
    llama,
    measure_decoding,
    median,
    microseconds,
    milliseconds,
    newest_logits,
    recorded,
    token_ids,
    twin_of,
)
from lib.gpu_stage import NO_DEVICE, Findings, Setup, Step
from lib.internals import (
    DENSE_PIECE_TOKENS,
    DenseSegment,
    GatheredSegment,
    KVSegments,
    PathCounter,
    Quantization,
    QuantizedStore,
    as_dense,
    dispatch,
    interleaved,
    slabs,
)
from packed_reference import counted_launches, extended, filled_store, random_pair, relative_error

SHAPES = ((8192, 1), (32768, 1), (2048, 1), (8192, 8), (32768, 8), (2048, 8))
"""Tokens and sequences, the most telling first."""

FLASH, DENSE = "flash SDPA", "SDPA, all tokens"
KEEP = 4
"""One token of so many is kept by a layer that evicts."""

OFFLOADED, OFFLOADED_INT4 = "kvlayers offloaded", "kvlayers offloaded int4"
TRANSFORMERS_OFFLOADED = "transformers offloaded"
OFFLOADED_CACHES: dict[str, Callable[[Any, bool], Any]] = {
    OFFLOADED: lambda config, offloading: kvlayers.DynamicCache(config=config, offloading=offloading),
    OFFLOADED_INT4: lambda config, offloading: kvlayers.QuantizedCache(config=config, nbits=4, offloading=offloading),
    TRANSFORMERS_OFFLOADED: lambda config, offloading: transformers.DynamicCache(config=config, offloading=offloading),
}


# Attention alone


def heads_of(setup: Setup) -> tuple[int, int, int]:
    """Heads, KV heads and head_dim of the layers whose attention is timed."""
    sizes: tuple[int, int, int] = setup.choose((32, 8, 128), (4, 2, 32))
    return sizes


def pair(
    setup: Setup, tokens: int, batch: int = 1, kv_heads: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor]:
    _, usual, head_dim = heads_of(setup)
    return random_pair(batch, kv_heads or usual, tokens, head_dim, torch.bfloat16, setup.device, seed)


def query_of(setup: Setup, batch: int = 1) -> Tensor:
    heads, _, head_dim = heads_of(setup)
    return torch.randn(batch, heads, 1, head_dim, device=setup.device, dtype=torch.bfloat16)


def attend(query: Tensor, states: tuple[Any, Any]) -> Tensor:
    return scaled_dot_product_attention(query, *states, enable_gqa=True)


def flash(setup: Setup) -> AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if setup.on_cuda else nullcontext()


def dense_copies(setup: Setup, tokens: int, batch: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Copies of dense states, of which each turn reads another one."""
    first = pair(setup, tokens, batch)
    copies = min(copies_of(2 * first[0].nbytes), setup.choose(64, 2))
    return [first, *(pair(setup, tokens, batch, seed=number) for number in range(1, copies))]


def add_times(
    setup: Setup,
    found: Findings,
    calls: Mapping[str, Callable[[bool, int], Any]],
    turns: Mapping[str, int],
    name_of: Callable[[str, str], str],
) -> None:
    """Time calls of attention in a CUDA graph and without one, in turns.

    Args:
        setup: the device.
        found: gets the microseconds.
        calls: by name, called with whether they are in a graph and with the number of the turn.
        turns: how many calls in a row are timed.
        name_of: the name of a figure, of a call and of how it was timed.
    """
    for in_graph in (True, False) if setup.on_cuda else (False,):
        how = "in a graph" if in_graph else "eager"
        asked = {name: functools.partial(call, in_graph) for name, call in calls.items()}
        times = microseconds(setup, asked, turns, setup.choose(15, 2), in_graph)
        for name, each in times.items():
            found.add(name_of(name, how), median(each), "us")
            found.details[name_of(name, how)] = {"us": each}


def attention_beside_flash(setup: Setup, batch: int) -> Findings:
    """Attention of one query token to int4 states beside flash attention to the same number of dense ones."""
    found = Findings()
    for tokens in setup.in_time(found, setup.choose((8192, 32768, 131072), (256,))):
        query, dense = query_of(setup, batch), dense_copies(setup, tokens, batch)
        copies = min(copies_of(2 * dense[0][0].nbytes // 4), setup.choose(64, 2))
        stores = [filled_store(Quantization(nbits=4), dense[0]) for _ in range(copies)]
        held: dict[str, list[Any]] = {
            FLASH: dense,
            "int4": [extended(store, pair(setup, 1, batch, seed=1)) for store in stores],
        }
        shape = f"batch {batch}, {tokens:,} tokens"
        _check_attention(setup, found, f"int4, {shape}", query, held["int4"][0], stores[0])

        def call(name: str, in_graph: bool, turn: int, query: Tensor = query, held: Any = held) -> Any:
            # Entering the context takes time on the host, which counts where there is no graph: torch chooses there.
            with flash(setup) if in_graph and name == FLASH else nullcontext():
                return attend(query, held[name][turn % len(held[name])])

        def name_of(name: str, how: str, shape: str = shape) -> str:
            return f"{'SDPA' if name == FLASH and how == 'eager' else name}, {shape}, {how}"

        turns = {name: max(len(each), setup.choose(8, 1)) for name, each in held.items()}
        add_times(setup, found, {name: functools.partial(call, name) for name in held}, turns, name_of)
        del dense, stores, held, call
        setup.free_memory()
    return found


def _check_attention(
    setup: Setup, found: Findings, what: str, query: Tensor, packed: tuple[Any, Any], store: QuantizedStore
) -> None:
    """Compare with attention to the dequantized states."""
    before = Counter(store.attention_paths)
    with counted_launches() as launches:
        seen = attend(query, packed)
    paths = list(Counter(store.attention_paths) - before)
    with flash(setup):
        error = relative_error(seen, attend(query, (as_dense(packed[0]), as_dense(packed[1]))))
    found.details[f"check of {what}"] = {"error": error, "paths": paths, "launches": launches}
    found.expect(error < LEAST_ALLOWED, f"{what}: attention is {error:.3f} from that to dequantized states")


def per_head_segments(setup: Setup, tokens: int) -> KVSegments:
    """A flat buffer of which KV heads hold from a quarter to seven quarters of the average, and 64 newer tokens."""
    kv_heads = heads_of(setup)[1]
    average = tokens // DENSE_PIECE_TOKENS
    pieces = [round(average * (0.25 + 1.5 * head / (kv_heads - 1))) for head in range(kv_heads)]
    most = max(pieces)
    piece = torch.arange(most, device=setup.device)
    counts, starts, columns, first = [], [], [], 0
    for number in pieces:
        held = piece < number
        counts.append(held * DENSE_PIECE_TOKENS)
        starts.append(torch.where(held, (first + piece) * DENSE_PIECE_TOKENS, 0))
        columns.append((most - number + piece) * DENSE_PIECE_TOKENS)
        first += number
    keys, values = pair(setup, first * DENSE_PIECE_TOKENS, kv_heads=1)
    source = DenseSegment(keys.expand(-1, kv_heads, -1, -1), values.expand(-1, kv_heads, -1, -1))
    tables = [torch.stack(table)[None] for table in (starts, counts, columns)]
    flat = GatheredSegment(source, *tables, most * DENSE_PIECE_TOKENS)
    return KVSegments((flat, DenseSegment(*pair(setup, 64))))


def _add_gathered(
    setup: Setup, found: Findings, tokens: int, query: Tensor, calls: Mapping[str, Callable[[], Any]]
) -> None:
    """Time attention to some of the tokens beside torch's to all of them."""
    dense = dense_copies(setup, tokens)
    by_turn: dict[str, Callable[[bool, int], Any]] = {
        f"{DENSE}, {tokens:,}": lambda in_graph, turn: attend(query, dense[turn % len(dense)])
    }
    by_turn |= {name: lambda in_graph, turn, call=call: call() for name, call in calls.items()}
    add_times(setup, found, by_turn, dict.fromkeys(by_turn, setup.choose(16, 2)), lambda name, how: f"{name}, {how}")
    setup.free_memory()


def evicted_attention(setup: Setup) -> Findings:
    """Attention of one query to a quarter of the tokens: as many for each KV head, or budgets of their own."""
    found = Findings()
    for tokens in setup.choose((16384, 32768), (1024,)):
        query, even, uneven = (
            query_of(setup),
            pair(setup, tokens // KEEP + 64),
            per_head_segments(setup, tokens // KEEP),
        )
        scale = query.shape[3] ** -0.5

        def to_pieces(query: Tensor = query, uneven: KVSegments = uneven, scale: float = scale) -> Tensor:
            return dispatch.attend(query, uneven, None, scale, PathCounter())

        error = relative_error(to_pieces(), slabs.attend(query, uneven, None, scale))
        found.expect(error < LEAST_ALLOWED, f"{tokens:,} tokens: attention to pieces is {error:.3f} from plain torch's")
        calls = {
            f"even budgets, {tokens // KEEP:,}": functools.partial(attend, query, even),
            f"budgets of heads, {tokens // KEEP:,}": to_pieces,
        }
        _add_gathered(setup, found, tokens, query, calls)
    return found


def recalled_attention(setup: Setup) -> Findings:
    """Attention of one query to 64 pages that it chooses, the choice included."""
    found, pages = Findings(), setup.choose(64, 4)
    for tokens in setup.choose((8192, 16384, 32768), (1024,)):
        layer = kvlayers.RecallLayer(kvlayers.layers.Recall(pages=pages))
        layer.update(*pair(setup, tokens))
        query, recalled = query_of(setup), layer.update(*pair(setup, 1, seed=1))
        calls = {f"recall of {pages} pages, {tokens:,}": functools.partial(attend, query, recalled)}
        _add_gathered(setup, found, tokens, query, calls)
    return found


# A model


def decoding(
    setup: Setup, shapes: Sequence[tuple[int, int]], names: Iterable[str], is_shared: bool = False
) -> Findings:
    """Steps of `generate()` behind tokens of each sequence, or of one prompt that all sequences share."""
    found, model = Findings(), eight_billion(setup)
    for tokens, batch in setup.in_time(found, setup.choose(shapes, ((256, 1), (320, 2)))):

        def prepare(make: Any, length: int, batch: int = batch) -> Any:
            if not is_shared:
                return filled(setup, model.config, make, length, batch)
            cache = filled(setup, model.config, make, length, 1)
            repeat = cache.expand if isinstance(cache, kvlayers.Cache) else cache.batch_repeat_interleave
            repeat(batch)
            return cache

        measure_decoding(setup, model, {name: CACHES[name] for name in names}, tokens, batch, found, prepare)
    return found


def graphs(setup: Setup) -> Findings:
    """One step behind a fixed number of tokens as a CUDA graph: the time of the device without that of the host.

    A replay repeats the step, so that no dynamic nor packed cache can generate like this: the times say what a host
    without cost would leave.
    """
    found, model = Findings(), eight_billion(setup)
    for tokens, batch in setup.in_time(found, setup.choose(SHAPES, ((256, 1),))):
        ids, column = token_ids(setup, model.config, batch, 1), column_of(tokens, batch)
        make = functools.partial(filled, setup, model.config, tokens=tokens, batch=batch)
        _, allowed = expected_logits(model, functools.partial(make, CACHES[REFERENCE]), ids)

        def measure(
            name: str, make: Any = make, ids: Tensor = ids, allowed: float = allowed, column: str = column
        ) -> None:
            # The same two steps: what they compile and plan is not done while the second one is recorded.
            warm = make(CACHES[name])
            expected = [newest_logits(model, warm, ids) for _ in range(2)][1]
            del warm
            cache, logits = make(CACHES[name]), []

            def step() -> None:
                logits.append(newest_logits(model, cache, ids))

            if setup.on_cuda:
                replay = recorded(step)
            else:
                step()
                replay = step
            replay()
            compare_logits(found, f"{name}, {column}", expected, logits[-1], allowed)
            times = [1000 * elapsed(setup, replay) for _ in range(setup.choose(20, 2))]
            found.add(name, median(times), "ms a step in a graph", column=column)
            found.details.setdefault(column, {})[name] = times

        for name in CACHES:
            if name != WITHOUT_CUDNN:
                found.guarded(f"{name}, {column}", functools.partial(measure, name), may_fail=True)
                setup.free_memory()
    return found


def turns_behind(setup: Setup, held: int, new: int, names: Sequence[str], what: str) -> Findings:
    """Time to read new tokens behind tokens that caches hold: the first token of a prompt, or another turn."""
    found, model = Findings(), eight_billion(setup)
    ids = token_ids(setup, model.config, 1, new)
    times: dict[str, list[float]] = {name: [] for name in names}
    logits: dict[str, Any] = {}

    def made(name: str) -> Any:
        return filled(setup, model.config, CACHES[name], held, 1) if held else CACHES[name](model.config, new)

    def turn(name: str, cache: Any) -> None:
        logits[name] = newest_logits(model, cache, ids)

    for trial in range(setup.choose(5, 2)):
        for name in interleaved(list(names), trial):
            took = milliseconds(setup, functools.partial(turn, name, made(name)))
            # The first one compiles kernels.
            times[name] += [took] if trial else []
    expected, allowed = expected_logits(model, lambda: made(REFERENCE), ids)
    for name in names:
        # A prompt attends to its own states in full precision, whatever the cache holds afterwards.
        rounds = held and name in (INT4, INT8, FP8)
        wanted = newest_logits(model, twin_of(made(name), model.config), ids) if rounds else expected
        compare_logits(found, name, wanted, logits[name], allowed)
        found.add(f"{name}: {what}", median(times[name]), "ms")
    found.details["ms"] = times
    return found


def first_token(setup: Setup) -> Findings:
    tokens = setup.choose(8192, 256)
    return turns_behind(setup, 0, tokens, (REFERENCE, DYNAMIC, INT4, INT8, FP8), f"first token of {tokens:,}")


def second_turn(setup: Setup) -> Findings:
    held, new = setup.choose((32768, 512), (256, 64))
    return turns_behind(setup, held, new, (REFERENCE, DYNAMIC, INT4), f"{new} tokens behind {held:,}")


def packing(setup: Setup) -> Findings:
    """The slowest step among those in which a block is packed once."""
    found, model = Findings(), eight_billion(setup)
    period, rounds = 64, setup.choose(3, 1)
    for name in (DYNAMIC, INT4):
        cache = filled(setup, model.config, CACHES[name], setup.choose(8192, 256), 1)
        ids = token_ids(setup, model.config, 1, period * (rounds + 1))

        def step(index: int, cache: Any = cache, ids: Tensor = ids) -> None:
            newest_logits(model, cache, ids[:, index : index + 1])

        times = [milliseconds(setup, functools.partial(step, index)) for index in range(ids.shape[1])]
        # The first round compiles kernels.
        rest = times[period:]
        slowest = median([max(rest[start : start + period]) for start in range(0, len(rest), period)])
        found.add(f"{name}: a step", median(rest), "ms")
        found.add(f"{name}: the slowest step of {period}", slowest, "ms")
        found.details[name] = {"ms": times}
    return found


def offloading(setup: Setup) -> Findings:
    """Decode steps with offloaded caches, beside transformers' and beside what the bus allows."""
    found = Findings()
    model = setup.keep("one billion", lambda: llama(setup, ONE_BILLION))
    tokens, block, trials = setup.choose((32768, 16, 3), (256, 2, 2))
    home = torch.empty(setup.choose(1 << 28, 1 << 16), dtype=torch.uint8, pin_memory=setup.on_cuda)
    there = torch.empty_like(home, device=setup.device)
    copies = [milliseconds(setup, lambda: there.copy_(home, non_blocking=True)) for _ in range(25)]
    found.add("pinned memory to the device", len(home) / median(copies) / 1e6, "GB/s")
    names = list(OFFLOADED_CACHES)
    if not setup.on_cuda:
        names.remove(TRANSFORMERS_OFFLOADED)
        found.missing[TRANSFORMERS_OFFLOADED] = f"{NO_DEVICE}: it copies on a stream"
    caches: dict[tuple[str, bool], Any] = {}
    times: dict[str, list[float]] = {name: [] for name in names}
    steps = (trials + 1) * block
    ids = token_ids(setup, model.config, 1, steps)
    dense = functools.partial(filled, setup, model.config, CACHES[REFERENCE], tokens, 1)
    _, allowed = expected_logits(model, dense, ids[:, :1])

    def decode(name: str, is_offloaded: bool, trial: int) -> list[Any]:
        cache = caches[name, is_offloaded]
        return [newest_logits(model, cache, ids[:, [step]]) for step in range(trial * block, (trial + 1) * block)]

    def make(name: str) -> None:
        # With the same states on the device, for the tokens that it must give. No two see the same lengths, for each
        # of which torch's attention may prepare.
        for is_offloaded in (True, False):
            cache = caches[name, is_offloaded] = OFFLOADED_CACHES[name](model.config, is_offloaded)
            fill_with_random(setup, model.config, cache, tokens + names.index(name) * steps)

    def turn(name: str, trial: int) -> None:
        logits: list[list[Any]] = []
        took = milliseconds(setup, lambda: logits.append(decode(name, True, trial))) / block
        times[name] += [took] if trial else []
        logits.append(decode(name, False, trial))
        compare_logits(found, f"{name}, trial {trial}", torch.stack(logits[1]), torch.stack(logits[0]), allowed)

    usable = [name for name in names if found.guarded(name, functools.partial(make, name))]
    for trial in setup.in_time(found, range(trials + 1)):
        for name in interleaved(usable, trial):
            found.guarded(f"{name}, trial {trial}", functools.partial(turn, name, trial))
    for name in filter(times.get, names):
        found.add(f"{name}: a step", median(times[name]), "ms")
        if name != TRANSFORMERS_OFFLOADED:
            moved = caches[name, True].traffic.of_step().to_device
            bus = median(copies) * moved / len(home)
            found.add(f"{name}: copying its {moved / 1e6:,.0f} MB takes", bus, "ms")
    found.details["ms"] = times
    return found


FIRST = (
    Step("decoding", 75, lambda setup: decoding(setup, SHAPES, CACHES), least=20),
    Step("steps in graphs", 50, graphs, isolated=True, least=25),
    Step("first token of 8k", 8, first_token),
    Step("offloading", 45, offloading),
)
"""What is worth most, for a device that one has for a few minutes."""

SPEED = (
    Step("attention, int4, one sequence", 5, lambda setup: attention_beside_flash(setup, 1)),
    Step("attention to evicted tokens", 4, evicted_attention),
    Step("attention to recalled pages", 4, recalled_attention),
    Step("packing", 22, packing),
    Step(
        "eight samples of 32k",
        15,
        lambda setup: decoding(setup, ((32768, 8),), (REFERENCE, DYNAMIC, INT4), is_shared=True),
    ),
    Step("second turn behind 32k", 7, second_turn),
    Step("attention, int4, eight sequences", 5, lambda setup: attention_beside_flash(setup, 8)),
    Step("decoding behind 128k", 15, lambda setup: decoding(setup, ((131072, 1),), (REFERENCE, DYNAMIC, INT4, INT8))),
)
