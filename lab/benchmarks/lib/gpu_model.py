"""Models with random weights on a device, the caches they decode with, their logits and their times."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from kvlayers.layers import as_dense
from kvlayers.models import name_for, name_in_generate
from lib import contenders
from lib.contenders import Maker, fill
from lib.gpu_stage import Findings, Setup
from lib.timing import interleaved
from lib.workload import Shape
from packed_reference import relative_error

EIGHT_BILLION = Shape(layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256)
ONE_BILLION = Shape(layers=16, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab=32768)
QUICK = Shape(layers=2, heads=4, kv_heads=2, head_dim=32, intermediate=64, vocab=256)
POSITIONS = 1 << 18
FILL_CHUNK = 8192

REFERENCE = "transformers dynamic"
WITHOUT_CUDNN = "transformers dynamic, no cuDNN"
DYNAMIC, INT4, INT8, FP8 = "kvlayers dynamic", "kvlayers int4", "kvlayers int8", "kvlayers fp8"

CACHES: dict[str, Maker] = {
    REFERENCE: contenders.CONTENDERS[contenders.REFERENCE],
    WITHOUT_CUDNN: contenders.CONTENDERS[contenders.REFERENCE],
    DYNAMIC: contenders.CONTENDERS[contenders.KVLAYERS],
    INT4: contenders.packed(nbits=4),
    INT8: contenders.packed(nbits=8),
    FP8: contenders.packed("fp8"),
    "kvlayers static": contenders.CONTENDERS[contenders.KVLAYERS_STATIC],
    "transformers static": contenders.CONTENDERS[contenders.TRANSFORMERS_STATIC],
}
"""The reference comes first: logits are compared with its."""

ROUNDS = (INT4, INT8, FP8)
"""Caches of which the reference holds the states that they give back, not those that they were given."""

ALLOWED = 3
"""How many times as far as torch's own kernels are from one another logits may be from the reference's. Two results
that round in other places differ by the rounding of each, and packed states are rounded a third time where the
reference is given them."""

LEAST_ALLOWED = 4 * torch.finfo(torch.bfloat16).eps
"""What is allowed where torch's kernels agree: some roundings of bfloat16."""

WARM = 3
"""Steps that are not timed."""

median = statistics.median


@contextmanager
def settings_of(name: str) -> Iterator[None]:
    """In what a contender decodes. One goes without cuDNN's attention, which may plan for each new length."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before and name != WITHOUT_CUDNN)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def llama(setup: Setup, shape: Shape) -> Any:
    """A llama-like model with random weights, made on the device, in bfloat16."""
    config = setup.choose(shape, QUICK).config(POSITIONS, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    with torch.device(setup.device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def eight_billion(setup: Setup) -> Any:
    """The model of Llama 3.1 8B's shape, made once for all steps in a row that use it."""
    return setup.keep("eight billion", lambda: llama(setup, EIGHT_BILLION))


def token_ids(setup: Setup, config: Any, batch: int, tokens: int) -> Tensor:
    generator = torch.Generator(setup.device).manual_seed(tokens)
    return torch.randint(3, config.vocab_size, (batch, tokens), generator=generator, device=setup.device)


def fill_with_random(setup: Setup, config: Any, cache: Any, tokens: int, batch: int = 1) -> Any:
    """The cache with random states in all layers, the same ones in each, in chunks as a prefill does."""
    shape = (batch, config.num_key_value_heads, tokens, config.head_dim)
    generator = torch.Generator(setup.device).manual_seed(0)
    keys, values = (
        torch.randn(shape, generator=generator, device=setup.device, dtype=torch.bfloat16) for _ in range(2)
    )
    fill(cache, [(keys, values)] * config.num_hidden_layers, FILL_CHUNK)
    return cache


def filled(setup: Setup, config: Any, make: Maker, tokens: int, batch: int, room: int = 256) -> Any:
    """A cache of random states, with room for more tokens if it is static."""
    return fill_with_random(setup, config, make(config, tokens + room), tokens, batch)


def twin_of(cache: Any, config: Any) -> Any:
    """transformers' DynamicCache with the states that a cache gives back, in full precision."""
    twin = transformers.DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        twin.update(as_dense(layer.keys), as_dense(layer.values), index)
    return twin


def newest_logits(model: Any, cache: Any, ids: Tensor) -> Tensor:
    """Logits `[batch, vocab]` behind the tokens `[batch, tokens]`, which a cache takes in."""
    logits: Tensor = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{name_for(model): cache}).logits
    return logits[:, -1]


def expected_logits(model: Any, make: Callable[[], Any], ids: Tensor) -> tuple[Tensor, float]:
    """What a reference in full precision gives for tokens `[batch, tokens]`, and how far from that logits may be.

    The distance is relative to their norm.
    """
    expected = newest_logits(model, make(), ids)
    apart = [0.0]
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        # Not each of them takes every mask.
        with suppress(RuntimeError), sdpa_kernel(backend):
            apart.append(relative_error(newest_logits(model, make(), ids), expected))
    return expected, max(ALLOWED * max(apart), LEAST_ALLOWED)


def compare_logits(findings: Findings, name: str, expected: Tensor, seen: Tensor, allowed: float) -> None:
    """Say where logits `[batch, vocab]` are farther than is allowed from those of the reference."""
    error = relative_error(seen, expected)
    findings.details.setdefault("logits", {})[name] = {"difference": error, "allowed": allowed}
    findings.expect(
        error <= allowed,
        f"{name}: logits differ from the reference's by {error:.3f} of their norm, and {allowed:.3f} is allowed",
    )


class Clock(StoppingCriteria):  # type: ignore[misc]
    """Notes when `generate()` has chosen a token; stops nothing. `generate()` waits for the device once a step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def milliseconds(self) -> list[float]:
        """Milliseconds of the steps, without the first ones."""
        return [
            1000 * (after - before) for before, after in zip(self.times[WARM:], self.times[WARM + 1 :], strict=False)
        ]


def measure_decoding(
    setup: Setup, model: Any, makers: Mapping[str, Maker], tokens: int, batch: int, findings: Findings
) -> None:
    """Time steps of `generate()` of all contenders in turns, behind some tokens.

    Each turn decodes behind lengths that none has seen: torch's attention may prepare for every new one, as it must in
    a generation, and the next contender would find that done. Findings get figures in a column for this shape.
    """
    steps, trials = setup.choose((10, 2), (2, 1))
    column = column_of(tokens, batch)
    times: dict[str, list[float]] = {name: [] for name in makers}
    peaks = dict.fromkeys(makers, 0)

    def turn(name: str, length: int) -> None:
        before = allocated(setup)
        cache = filled(setup, model.config, makers[name], length, batch)
        ids, clock = token_ids(setup, model.config, batch, length + 1), Clock()
        if setup.on_cuda:
            torch.cuda.reset_peak_memory_stats(setup.device)
        with settings_of(name):
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=WARM + steps + 1,
                do_sample=False,
                disable_compile=True,
                stopping_criteria=StoppingCriteriaList([clock]),
                **{name_in_generate(model): cache},
            )
        times[name] += clock.milliseconds()
        if setup.on_cuda:
            peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated(setup.device) - before)

    lengths = iter(range(tokens + 1, POSITIONS, WARM + steps + 2))
    check_decoding(setup, model, makers, tokens, batch, findings)
    working = list(makers)
    for trial in range(trials):
        for name in interleaved(working, trial):
            if not findings.guarded(f"{name}, {column}", functools.partial(turn, name, next(lengths))):
                working = [other for other in working if other != name]
            setup.free_memory()
    for name in filter(times.get, makers):
        findings.add(name, median(times[name]), "ms a step", column=column)
        low, _, high = statistics.quantiles(times[name], n=4)
        findings.add(name, low, "ms, lower quartile", column=column)
        findings.add(name, high, "ms, upper quartile", column=column)
        if setup.on_cuda:
            findings.add(name, peaks[name] / 1e9, "GB peak beyond the model", column=column)
    findings.details[column] = {"ms": times, "peaks": peaks}


def check_decoding(
    setup: Setup, model: Any, makers: Mapping[str, Maker], tokens: int, batch: int, findings: Findings
) -> None:
    """Compare the logits of one step with those of a cache that holds the same states in full precision."""
    ids, column = token_ids(setup, model.config, batch, 1), column_of(tokens, batch)
    expected: list[tuple[Tensor, float]] = []

    def prepared(make: Maker) -> Any:
        return filled(setup, model.config, make, tokens, batch)

    def reference() -> None:
        expected.append(expected_logits(model, lambda: prepared(CACHES[REFERENCE]), ids))

    def check(name: str) -> None:
        cache = prepared(makers[name])
        wanted, allowed = expected[0]
        if name in ROUNDS:
            wanted = newest_logits(model, twin_of(cache, model.config), ids)
        with settings_of(name):
            compare_logits(findings, f"{name}, {column}", wanted, newest_logits(model, cache, ids), allowed)

    if findings.guarded(f"the reference, {column}", reference):
        for name in makers:
            findings.guarded(f"{name}, {column}", functools.partial(check, name))
            setup.free_memory()


def column_of(tokens: int, batch: int) -> str:
    return f"{tokens:,} x {batch}"


# Times of calls


def recorded(in_a_row: Callable[[], None]) -> Callable[[], None]:
    """Calls in a row as a CUDA graph. Before it is recorded they run once, as kernels may prepare for each call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        in_a_row()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        in_a_row()
    return graph.replay


def device_milliseconds(setup: Setup, run: Callable[[], Any]) -> float:
    """Milliseconds from the first to the last work that a call queues on the device; on a CPU those of the call."""
    if not setup.on_cuda:
        return milliseconds(setup, run)
    setup.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def milliseconds(setup: Setup, run: Callable[[], Any]) -> float:
    """Milliseconds of a call with all work that it queues, by the clock of the host."""
    setup.synchronize()
    begin = time.perf_counter()
    run()
    setup.synchronize()
    return 1000 * (time.perf_counter() - begin)


def allocated(setup: Setup) -> int:
    """Bytes that are allocated on a GPU."""
    setup.synchronize()
    return torch.cuda.memory_allocated(setup.device) if setup.on_cuda else 0
