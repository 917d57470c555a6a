"""Steps that measure kernels and decoding beside torch's attention and transformers' caches."""

import functools
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
from kvlayers import Quantization, QuantizedStore
from kvlayers.attention.packed_tensor import as_dense
from lib.compiling import INDUCTOR, Compiled, nothing_in_memory, options_of
from lib.gpu_check import BITS, QUANTIZATIONS
from lib.gpu_gathered import evicted_attention, recalled_attention
from lib.gpu_model import (
    CACHES,
    DYNAMIC,
    FP8,
    INT4,
    INT8,
    REFERENCE,
    STATIC,
    TRANSFORMERS_QUANTIZED,
    TRANSFORMERS_STATIC,
    compare_logits,
    eight_billion,
    fill_with_random,
    measure_decoding,
    token_ids,
    usable,
)
from lib.gpu_stage import Findings, Setup, Step
from lib.gpu_timing import copies_of, median, microseconds, milliseconds
from packed_reference import counted_launches, extended, filled_store, random_pair, relative_error

FLASH = "flash SDPA"
AUDITED = {(1, 8192): "0.6", (1, 32768): "1.2 to 1.6", (1, 131072): "2.3 to 2.7"}
"""Times flash SDPA that a review of the code foresaw for int4 and the kernel of version 0.1, by batch and tokens."""

CLOSE = 4 * torch.finfo(torch.bfloat16).eps
"""How far attention may be from attention to the dequantized states, both in bfloat16, relative to its norm."""


def attention_beside_flash(setup: Setup, formats: Iterable[str], shapes: Iterable[tuple[int, int]]) -> Findings:
    """Attention of one query token to packed states beside flash attention to the same number of dense ones."""
    found = Findings()
    for batch, tokens in shapes:
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
    """Torch's attention takes the flash kernel, on a GPU."""
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if setup.on_cuda else nullcontext()


def decoding(setup: Setup, tokens: int, names: Iterable[str]) -> Findings:
    """Decode steps of an 8B shape behind `tokens` tokens."""
    found = Findings()
    model = eight_billion(setup)
    makers, missing = usable({name: {**CACHES, **TRANSFORMERS_QUANTIZED}[name] for name in names}, model.config)
    found.details["missing"] = missing
    for name, reason in missing.items():
        print(f"          without {name}: {reason}", flush=True)
    tokens = setup.choose(tokens, 256)

    def prepare(cache: Any) -> Any:
        fill_with_random(setup, model.config, cache, tokens)
        return cache

    measure_decoding(setup, model, makers, prepare, tokens + 256, 1, {}, found)
    return found


def first_token(setup: Setup) -> Findings:
    """Time to the first token of a prompt, with kvlayers' caches beside transformers'."""
    found = Findings()
    model = eight_billion(setup)
    prompt = token_ids(setup, model.config, 1, setup.choose(8192, 256))
    names, trials = (REFERENCE, DYNAMIC, INT4, INT8, FP8), setup.choose(4, 2)
    times: dict[str, list[float]] = {name: [] for name in names}
    logits: dict[str, list[Any]] = {name: [] for name in names}
    launches: dict[str, Any] = {}

    def prefill(name: str) -> None:
        cache = CACHES[name](model.config, prompt.shape[1])
        logits[name] = [model(input_ids=prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1]]

    for trial in range(trials):
        for name in names:
            with counted_launches() as counted:
                took = milliseconds(setup, functools.partial(prefill, name))
            launches[name] = counted
            # The first one compiles kernels.
            times[name] += [took] if trial else []
    for name in names:
        # A prompt attends to its own states in full precision, whatever the cache holds afterwards.
        compare_logits(found, DYNAMIC if name != REFERENCE else REFERENCE, logits[REFERENCE], logits[name])
        found.add(f"{name}: first token of {prompt.shape[1]:,}", median(times[name]), "ms")
    found.details |= {"ms": times, "Triton launches": launches}
    extra = median(times[INT4]) - median(times[DYNAMIC])
    found.add("  int4, more than dynamic", extra, "ms", "20,000 with the quantizer of version 0.1")
    return found


def packing(setup: Setup) -> Findings:
    """The slowest step among those in which a block is packed once."""
    found = Findings()
    model = eight_billion(setup)
    period, rounds = 64, setup.choose(3, 1)
    for name in (DYNAMIC, INT4):
        cache = CACHES[name](model.config, 0)
        fill_with_random(setup, model.config, cache, setup.choose(8192, 256))
        ids = token_ids(setup, model.config, 1, period * (rounds + 1))

        def step(index: int, cache: Any = cache, ids: Any = ids) -> None:
            model(input_ids=ids[:, index : index + 1], past_key_values=cache, use_cache=True)

        times = [milliseconds(setup, functools.partial(step, index)) for index in range(ids.shape[1])]
        # The first round compiles kernels.
        rest = times[period:]
        slowest = median([max(rest[start : start + period]) for start in range(0, len(rest), period)])
        found.add(f"{name}: a step", median(rest), "ms")
        predicted = "300 more with the quantizer of version 0.1" if name == INT4 else ""
        found.add(f"{name}: the slowest step of {period}", slowest, "ms", predicted)
        found.details[name] = {"ms": times}
    return found


def samples(setup: Setup) -> Findings:
    """A step of eight samples of one prompt."""
    found = Findings()
    model = eight_billion(setup)
    tokens = setup.choose(32768, 256)

    def prepare(cache: Any) -> Any:
        fill_with_random(setup, model.config, cache, tokens)
        if isinstance(cache, kvlayers.Cache):
            cache.expand(8)
        else:
            cache.batch_repeat_interleave(8)
        return cache

    makers = {name: CACHES[name] for name in (REFERENCE, DYNAMIC, INT4)}
    measure_decoding(setup, model, makers, prepare, tokens + 256, 8, {}, found)
    return found


def second_turn(setup: Setup) -> Findings:
    """A second turn of 512 tokens behind a first one."""
    found = Findings()
    model = eight_billion(setup)
    tokens, trials = setup.choose((32768, 5), (256, 2))
    ids = token_ids(setup, model.config, 1, setup.choose(512, 64))
    names = (REFERENCE, DYNAMIC, INT4)
    times: dict[str, list[float]] = {name: [] for name in names}
    logits: dict[str, list[Any]] = {}

    def turn(name: str, cache: Any) -> None:
        logits[name] = [model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]]

    for trial in range(trials):
        for name in names:
            cache = CACHES[name](model.config, tokens)
            fill_with_random(setup, model.config, cache, tokens)
            took = milliseconds(setup, functools.partial(turn, name, cache))
            times[name] += [took] if trial else []
    for name in names:
        compare_logits(found, name, logits[REFERENCE], logits[name])
        found.add(f"{name}: {ids.shape[1]} tokens behind {tokens:,}", median(times[name]), "ms")
    found.details["ms"] = times
    return found


def compiled_decoding(setup: Setup) -> Findings:
    """Decode steps of the 8B shape with static caches, compiled with CUDA graphs."""
    found = Findings()
    model = eight_billion(setup)
    tokens = setup.choose(8192, 256)
    backend = INDUCTOR if setup.on_cuda else "eager"
    makers = {name: CACHES[name] for name in (REFERENCE, STATIC, TRANSFORMERS_STATIC)}

    def prepare(cache: Any) -> Any:
        fill_with_random(setup, model.config, cache, tokens)
        return cache

    with nothing_in_memory(backend, setup.device):
        forwards = {
            name: Compiled(model, options_of(backend, "reduce-overhead")) for name in (STATIC, TRANSFORMERS_STATIC)
        }
        measure_decoding(setup, model, makers, prepare, tokens + 256, 1, forwards, found)
        for name, forward in forwards.items():
            found.add(f"{name}: graphs", forward.graphs, "graphs")
            found.add(f"{name}: compiling", forward.seconds, "s")
    return found


LONG, SHORT = 131072, 8192
ALL = (REFERENCE, DYNAMIC, INT4, INT8, FP8, STATIC, TRANSFORMERS_STATIC, *TRANSFORMERS_QUANTIZED)


def _shapes(setup: Setup, *shapes: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return setup.choose(shapes, ((1, 256),))


STEPS = (
    Step(
        "attention, int4, one sequence",
        40,
        lambda setup: attention_beside_flash(setup, ["int4"], _shapes(setup, (1, 8192), (1, 32768), (1, 131072))),
    ),
    Step("decoding behind 32k", 75, lambda setup: decoding(setup, 32768, ALL)),
    Step("first token of 8k", 35, first_token),
    Step("attention to evicted tokens", 20, evicted_attention),
    Step("attention to recalled pages", 25, recalled_attention),
    Step("packing", 25, packing),
    Step("eight samples of 32k", 40, samples),
    Step("second turn behind 32k", 25, second_turn),
    Step(
        "attention, int4, eight sequences",
        25,
        lambda setup: attention_beside_flash(setup, ["int4"], _shapes(setup, (8, 8192), (8, 32768), (8, 131072))),
    ),
    Step("decoding behind 128k", 40, lambda setup: decoding(setup, LONG, (REFERENCE, DYNAMIC, INT4, INT8))),
    Step(
        "attention, other formats",
        60,
        lambda setup: attention_beside_flash(setup, ["int8", "fp8", "int2"], _shapes(setup, (1, 32768), (8, 8192))),
    ),
    Step("decoding behind 8k", 20, lambda setup: decoding(setup, SHORT, (REFERENCE, DYNAMIC, INT4, STATIC))),
    Step("compiled static caches", 140, compiled_decoding),
)
