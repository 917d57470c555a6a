"""Steps that measure kernels and decoding beside torch's attention and transformers' caches."""

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from lib.gpu_check import BITS, QUANTIZATIONS
from lib.gpu_gathered import evicted_attention, recalled_attention
from lib.gpu_model import (
    CACHES,
    DYNAMIC,
    FP8,
    INT4,
    INT8,
    REFERENCE,
    TRANSFORMERS_QUANTIZED,
    compare_logits,
    eight_billion,
    expected_logits,
    filled,
    measure_decoding,
    newest_logits,
    token_ids,
    twin_of,
    usable,
)
from lib.gpu_stage import Findings, Setup, Step
from lib.gpu_timing import copies_of, median, microseconds, milliseconds
from lib.internals import Quantization, QuantizedStore, as_dense
from packed_reference import counted_launches, extended, filled_store, random_pair, relative_error

FLASH = "flash SDPA"
AUDITED = {(1, 8192): "0.6", (1, 32768): "1.2 to 1.6", (1, 131072): "2.3 to 2.7"}
"""Times flash SDPA that a review of the code foresaw for int4 and the kernel of version 0.1, by batch and tokens."""

CLOSE = 4 * torch.finfo(torch.bfloat16).eps
"""How far attention may be from attention to the dequantized states, both in bfloat16, relative to its norm."""


def attention_beside_flash(setup: Setup, formats: Iterable[str], shapes: Iterable[tuple[int, int]]) -> Findings:
    """Attention of one query token to packed states beside flash attention to the same number of dense ones."""
    found = Findings()
    for batch, tokens in setup.in_time(found, shapes):
        _measure_attention(setup, found, formats, batch, tokens)
        setup.free_memory()
    return found


def _measure_attention(setup: Setup, found: Findings, formats: Iterable[str], batch: int, tokens: int) -> None:
    heads, kv_heads, head_dim = setup.choose((32, 8, 128), (4, 2, 32))
    make_pair = functools.partial(
        random_pair, batch, kv_heads, head_dim=head_dim, dtype=torch.bfloat16, device=setup.device
    )
    query = torch.randn(batch, heads, 1, head_dim, device=setup.device, dtype=torch.bfloat16)
    states, new = make_pair(tokens), make_pair(1, seed=1)
    dense_bytes = 2 * states[0].nbytes
    most_copies = setup.choose(64, 2)
    held: dict[str, list[Any]] = {FLASH: [states]}
    nbytes = {FLASH: dense_bytes}
    for name in formats:
        quantization = Quantization(**QUANTIZATIONS[name])
        copies = min(copies_of(dense_bytes * BITS[name] // 16), most_copies)
        stores = [filled_store(quantization, states) for _ in range(copies)]
        held[name] = [extended(store, new) for store in stores]
        nbytes[name] = sum(tensor.nbytes for tensor in stores[0].state().values())
        _check_attention(setup, found, f"{name}, batch {batch}, {tokens:,} tokens", query, held[name][0], stores[0])
    held[FLASH] += [make_pair(tokens, seed=number) for number in range(1, min(copies_of(dense_bytes), most_copies))]

    def call(name: str, in_graph: bool, turn: int) -> Any:
        keys, values = held[name][turn % len(held[name])]
        # Entering the context takes time on the host, which counts where there is no graph: torch chooses there.
        with flash(setup) if in_graph and name == FLASH else nullcontext():
            return scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    turns = {name: max(len(held[name]), setup.choose(8, 1)) for name in held}
    trials = setup.choose(15, 2)
    for in_graph in (True, False) if setup.on_cuda else (False,):
        calls = {name: functools.partial(call, name, in_graph) for name in held}
        times = microseconds(setup, calls, turns, trials, in_graph)
        how, baseline = ("in a graph", FLASH) if in_graph else ("eager", "SDPA")
        base = median(times[FLASH])
        found.add(f"{baseline}, batch {batch}, {tokens:,} tokens, {how}", base, "us")
        for name in formats:
            took = median(times[name])
            predicted = AUDITED.get((batch, tokens), "") if name == "int4" and in_graph else ""
            found.add(f"{name}, batch {batch}, {tokens:,} tokens, {how}", took, "us")
            found.add(f"  times {baseline}", base / took, "x", predicted)
        for name, each in times.items():
            found.details[f"{name}, {batch} x {tokens}, {how}"] = {
                "us": each,
                "bytes": nbytes[name],
                "gigabytes a second": nbytes[name] / median(each) / 1000,
            }


def _check_attention(
    setup: Setup, found: Findings, what: str, query: Any, packed: tuple[Any, Any], store: QuantizedStore
) -> None:
    """Compare with attention to the dequantized states."""
    before = Counter(store.attention_paths)
    with counted_launches() as launches:
        seen = scaled_dot_product_attention(query, *packed, enable_gqa=True)
    paths = list(Counter(store.attention_paths) - before)
    with flash(setup):
        expected = scaled_dot_product_attention(query, *map(as_dense, packed), enable_gqa=True)
    error = relative_error(seen, expected)
    found.details[f"check of {what}"] = {"error": error, "paths": paths, "launches": launches}
    found.expect(error < CLOSE, f"{what}: attention is {error:.3f} from that to dequantized states")


def flash(setup: Setup) -> AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if setup.on_cuda else nullcontext()


def decoding(setup: Setup, shapes: Sequence[tuple[int, int]], names: Iterable[str]) -> Findings:
    found = Findings()
    model = eight_billion(setup)
    makers, found.missing = usable({name: {**CACHES, **TRANSFORMERS_QUANTIZED}[name] for name in names}, model.config)
    for tokens, batch in setup.in_time(found, setup.choose(shapes, ((256, 1), (320, 2)))):
        measure_decoding(setup, model, makers, tokens, batch, found)
    return found


def first_token(setup: Setup) -> Findings:
    """Time to the first token of a prompt, with kvlayers' caches beside transformers'."""
    found = Findings()
    model = eight_billion(setup)
    prompt = token_ids(setup, model.config, 1, setup.choose(8192, 256))
    names, trials = (REFERENCE, DYNAMIC, INT4, INT8, FP8), setup.choose(4, 2)
    times: dict[str, list[float]] = {name: [] for name in names}
    logits: dict[str, Any] = {}
    launches: dict[str, Any] = {}

    def prefill(name: str) -> None:
        logits[name] = newest_logits(model, CACHES[name](model.config, prompt.shape[1]), prompt)

    for trial in range(trials):
        for name in names:
            with counted_launches() as counted:
                took = milliseconds(setup, functools.partial(prefill, name))
            launches[name] = counted
            # The first one compiles kernels.
            times[name] += [took] if trial else []
    expected, allowed = expected_logits(model, lambda: CACHES[REFERENCE](model.config, 0), prompt)
    for name in names:
        # A prompt attends to its own states in full precision, whatever the cache holds afterwards.
        compare_logits(found, name, expected, logits[name], allowed)
        found.add(f"{name}: first token of {prompt.shape[1]:,}", median(times[name]), "ms")
    found.details |= {"ms": times, "Triton launches": launches}
    found.add("  int4, more than dynamic", median(times[INT4]) - median(times[DYNAMIC]), "ms")
    return found


def packing(setup: Setup) -> Findings:
    """The slowest step among those in which a block is packed once."""
    found = Findings()
    model = eight_billion(setup)
    period, rounds = 64, setup.choose(3, 1)
    for name in (DYNAMIC, INT4):
        cache = filled(setup, model.config, CACHES[name], setup.choose(8192, 256), 1)
        ids = token_ids(setup, model.config, 1, period * (rounds + 1))

        def step(index: int, cache: Any = cache, ids: Any = ids) -> None:
            model(input_ids=ids[:, index : index + 1], past_key_values=cache, use_cache=True)

        times = [milliseconds(setup, functools.partial(step, index)) for index in range(ids.shape[1])]
        # The first round compiles kernels.
        rest = times[period:]
        slowest = median([max(rest[start : start + period]) for start in range(0, len(rest), period)])
        found.add(f"{name}: a step", median(rest), "ms")
        found.add(f"{name}: the slowest step of {period}", slowest, "ms")
        found.details[name] = {"ms": times}
    return found


def samples(setup: Setup) -> Findings:
    found = Findings()
    model = eight_billion(setup)

    def prepare(make: Any, length: int) -> Any:
        cache = filled(setup, model.config, make, length, 1)
        if isinstance(cache, kvlayers.Cache):
            cache.expand(8)
        else:
            cache.batch_repeat_interleave(8)
        return cache

    makers = {name: CACHES[name] for name in (REFERENCE, DYNAMIC, INT4)}
    measure_decoding(setup, model, makers, setup.choose(32768, 256), 8, found, prepare)
    return found


def second_turn(setup: Setup) -> Findings:
    """A second turn of 512 tokens behind a first one."""
    found = Findings()
    model = eight_billion(setup)
    tokens, trials = setup.choose((32768, 5), (256, 2))
    ids = token_ids(setup, model.config, 1, setup.choose(512, 64))
    names = (REFERENCE, DYNAMIC, INT4)
    times: dict[str, list[float]] = {name: [] for name in names}
    logits: dict[str, Any] = {}

    def turn(name: str, cache: Any) -> None:
        logits[name] = newest_logits(model, cache, ids)

    def made(name: str) -> Any:
        return filled(setup, model.config, CACHES[name], tokens, 1)

    for trial in range(trials):
        for name in names:
            took = milliseconds(setup, functools.partial(turn, name, made(name)))
            times[name] += [took] if trial else []
    expected, allowed = expected_logits(model, lambda: made(REFERENCE), ids)
    of_int4 = newest_logits(model, twin_of(made(INT4), model.config), ids)
    for name in names:
        compare_logits(found, name, of_int4 if name == INT4 else expected, logits[name], allowed)
        found.add(f"{name}: {ids.shape[1]} tokens behind {tokens:,}", median(times[name]), "ms")
    found.details["ms"] = times
    return found


def _shapes(setup: Setup, *shapes: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return setup.choose(shapes, ((1, 256),))


DECODING = (*CACHES, *TRANSFORMERS_QUANTIZED)
FIRST_TOKEN = Step("first token of 8k", 8, first_token)

STEPS = (
    Step(
        "attention, int4, one sequence",
        5,
        lambda setup: attention_beside_flash(setup, ["int4"], _shapes(setup, (1, 8192), (1, 32768), (1, 131072))),
    ),
    Step("decoding", 60, lambda setup: decoding(setup, ((32768, 1), (8192, 1)), DECODING), least=20),
    FIRST_TOKEN,
    Step("attention to evicted tokens", 4, evicted_attention),
    Step("attention to recalled pages", 4, recalled_attention),
    Step("packing", 22, packing),
    Step("eight samples of 32k", 15, samples),
    Step("second turn behind 32k", 7, second_turn),
    Step(
        "attention, int4, eight sequences",
        5,
        lambda setup: attention_beside_flash(setup, ["int4"], _shapes(setup, (8, 8192), (8, 32768), (8, 131072))),
    ),
    Step("decoding behind 128k", 15, lambda setup: decoding(setup, ((131072, 1),), (REFERENCE, DYNAMIC, INT4, INT8))),
    Step(
        "attention, other formats",
        15,
        lambda setup: attention_beside_flash(setup, ["int8", "fp8", "int2"], _shapes(setup, (1, 32768), (8, 8192))),
    ),
)
