"""Compiled forward passes and whole calls of `generate()` side by side in one process, each as if it were alone."""

import copy
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters

import kvlayers
from lib.contenders import KVLAYERS, KVLAYERS_STATIC, REFERENCE, TRANSFORMERS_STATIC, Maker, compiled
from lib.internals import interleaved, quiet_clock
from lib.report import Cell, Session, shown, span
from lib.timing import Disagreements, Measured, Tick, Trials, greedy_reference, measure_decode, step

INDUCTOR = "inductor"
SPARE = 64
"""Tokens that the smallest reservation has beyond those in the cache, unless more steps are timed."""

_numbers = itertools.count()


def options_of(backend: str, mode: str = "default") -> dict[str, str]:
    """The options of `torch.compile` for a backend, and for a mode that only inductor knows."""
    return {"backend": backend, "mode": mode if backend == INDUCTOR else "default"}


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with a code object of its own.

    dynamo stores compiled graphs with the code object, and what it learns about changing sizes under the code's name.
    With a shared code object, the graphs of one contender would be tried for another, and would make its sizes dynamic.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    forward.__code__ = forward.__code__.replace(co_name=f"forward_{next(_numbers)}")
    return forward


class Compiled:
    """A forward pass that is compiled in one graph, with a counter.

    Args:
        model: the model.
        options: options of `torch.compile`.

    Attributes:
        graphs: graphs compiled so far.
    """

    def __init__(self, model: Any, options: dict[str, str]) -> None:
        self.graphs = 0
        self._compiled = torch.compile(own_code(model.forward), fullgraph=True, **options)

    def __call__(self, **inputs: Any) -> Any:
        before = graphs()
        output = self._compiled(**inputs)
        self.graphs += graphs() - before
        return output


def nothing_on_disk(backend: str) -> AbstractContextManager[None]:
    """Empty inductor's caches for a block, so that the first contender to compile has no disadvantage."""
    if backend != INDUCTOR:
        return nullcontext()
    # Imported here, because the import takes long.
    from torch._inductor import utils

    # Its name until torch 2.8.
    fresh = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
    return fresh()  # type: ignore[no-any-return]


@contextmanager
def nothing_in_memory(backend: str) -> Iterator[None]:
    """Begin and end without compiled code, but load the compiler first: the first contender should not pay for that."""
    torch._dynamo.reset()
    torch.compile(lambda numbers: 2 * numbers, backend=backend)(torch.ones(2))
    try:
        yield
    finally:
        torch._dynamo.reset()


# Decode steps with static caches


def reservations(length: int, times: list[int], most: int, steps: int) -> dict[int, int]:
    """The tokens reserved for each multiple of the tokens in the cache: at most `most`, except for the smallest."""
    wanted = {each: max(each * length, length + max(SPARE, steps)) for each in times}
    return {each: tokens for each, tokens in wanted.items() if each == 1 or tokens <= most}


def with_reservation(name: str, times: int) -> str:
    return f"{name}, {times}x"


def measure_static(
    workload: Any, makers: Mapping[str, Maker], length: int, reserved: Mapping[int, int], trials: Trials, backend: str
) -> tuple[Measured, Measured]:
    """Time decode steps of static caches in eager and in compiled code, each beside dynamic caches in eager code.

    Compiled code comes behind a prefill in eager code, and every graph is compiled before the clock starts.

    Returns:
        The results for eager code and for compiled code, as `measure_decode` returns them; of compiled code also
        `graphs`, and `recompiles` during the timed steps.
    """

    def reserving(make: Maker, tokens: int) -> Maker:
        return lambda config, length: make(config, tokens)

    sizes, static = {}, {}
    for of in (KVLAYERS_STATIC, TRANSFORMERS_STATIC):
        for times, tokens in reserved.items():
            name = with_reservation(of, times)
            sizes[name], static[name] = tokens, reserving(makers[of], tokens)
    dynamic = {name: makers[name] for name in (REFERENCE, KVLAYERS)}
    eager = measure_decode(workload, {**dynamic, **static}, length, trials)
    in_graphs = {compiled(name): make for name, make in static.items()}
    forwards = {name: Compiled(workload.model, options_of(backend)) for name in in_graphs}
    tick = trials.ticking(f"compiling at {length}", len(in_graphs))
    for name, make in in_graphs.items():
        # As many steps as will be timed, so that all sizes that they need are compiled.
        with nothing_on_disk(backend), quiet_clock():
            first, cache = workload.prepare(length), make(workload.model.config, length + trials.steps)
            workload.fill(cache)
            greedy_reference(forwards[name], cache, first, trials.steps)
        tick()
    before = {name: forward.graphs for name, forward in forwards.items()}
    measured = measure_decode(workload, {**dynamic, **in_graphs}, length, trials, forwards)
    for name, forward in forwards.items():
        measured[name] |= {"graphs": before[name], "recompiles": forward.graphs - before[name]}
    for name, tokens in sizes.items():
        eager[name]["reserved"] = measured[compiled(name)]["reserved"] = tokens
    return eager, measured


# Whole calls of generate()


@dataclass
class Job:
    """The task of every contender.

    Args:
        prompt: token ids `[1, tokens]`.
        new: tokens to generate.
        reserve: tokens that static caches reserve.
        backend: the backend of `torch.compile`.
    """

    name: str
    model: Any
    prompt: Tensor
    new: int
    reserve: int
    backend: str = INDUCTOR

    @property
    def prompt_tokens(self) -> int:
        return int(self.prompt.shape[1])

    def kvlayers_static(self) -> dict[str, Any]:
        return {"cache_implementation": "static", "cache_config": {"max_cache_len": self.reserve}}

    def transformers_static(self) -> dict[str, Any]:
        # A new cache for each call, as generate() makes it.
        return {"past_key_values": transformers.StaticCache(self.model.config, max_cache_len=self.reserve)}

    def compiling(self) -> dict[str, Any]:
        """The compile options of `generate()`: transformers' defaults, except for the backend."""
        config = transformers.CompileConfig(**options_of(self.backend, "reduce-overhead"))
        # Without this, transformers compiles only on accelerators.
        config._compile_all_devices = True
        return {"compile_config": config}


Arguments = Callable[[Job], dict[str, Any]]
"""The arguments of `generate()`, besides the prompt and the number of new tokens."""

GENERATORS: dict[str, Arguments] = {
    REFERENCE: lambda job: {"past_key_values": transformers.DynamicCache(config=job.model.config)},
    KVLAYERS: lambda job: {"past_key_values": kvlayers.DynamicCache(config=job.model.config)},
    compiled(KVLAYERS_STATIC): lambda job: {**job.kvlayers_static(), **job.compiling()},
    compiled(TRANSFORMERS_STATIC): lambda job: {**job.transformers_static(), **job.compiling()},
}
"""The reference comes first: tokens and ratios are compared with it."""


class Generator:
    """Calls of `generate()` with a model of its own to compile, which shares the weights, decodes greedily and does
    not stop by itself. The whole call is timed, including making the cache.

    Attributes:
        graphs: graphs compiled so far.
    """

    def __init__(self, job: Job, arguments: Arguments) -> None:
        self.graphs = 0
        self._job, self._arguments = job, arguments
        self._model = copy.copy(job.model)
        self._model.__call__ = own_code(job.model.__call__)
        self._model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)

    def __call__(self) -> tuple[float, list[int]]:
        """Generate once; return the seconds and the new tokens."""
        job, before = self._job, graphs()
        gc.collect()
        with quiet_clock():
            begin = time.perf_counter()
            ids = self._model.generate(job.prompt, max_new_tokens=job.new, **self._arguments(job))
            tokens = ids[0, job.prompt_tokens :].tolist()
            seconds = time.perf_counter() - begin
        self.graphs += graphs() - before
        return seconds, tokens


def compare_tokens(job: Job, where: dict[str, Any], tokens: list[int], disagreements: Disagreements) -> None:
    """Record the new tokens that differ from those of transformers' DynamicCache.

    After one different token, all later ones may differ. So each token is compared with the one that the reference
    gives after the same tokens.
    """
    cache = transformers.DynamicCache(config=job.model.config)
    with torch.no_grad():
        logits = job.model(input_ids=job.prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
        for held, token in enumerate(tokens, job.prompt_tokens):
            disagreements.compare_token({"model": job.name, "tokens": held, **where}, logits[0], token)
            logits = step(job.model, cache, job.prompt.new_full((1, 1), token))[1]


def measure_generate(
    job: Job,
    arguments: Mapping[str, Arguments],
    trials: int,
    disagreements: Disagreements,
    tick: Tick,
) -> Measured:
    """Time calls of `generate()`. Each contender's first call compiles; later calls take turns and must not compile.

    Args:
        job: the task.
        arguments: of the calls of each contender by name, the reference first.
        trials: timed calls of each contender after the first.
        disagreements: where different tokens are recorded.
        tick: called after each contender's first call, and after each trial.

    Returns:
        For each contender `first`, the seconds of its first call, `seconds` of the calls by trial, `new` tokens,
        `graphs` of the first call, and `recompiles` of all later calls.
    """
    measured: Measured = {}
    seen: list[tuple[str, list[int]]] = []

    def compare(name: str, trial: int, tokens: list[int]) -> None:
        # The reference's tokens come first, and the same ones of a contender need no second comparison.
        if seen and tokens != seen[0][1] and (name, tokens) not in seen:
            compare_tokens(job, {"cache": name, "trial": trial}, tokens, disagreements)
        seen.append((name, tokens))

    # For all calls alike; transformers' caches are measured unchanged.
    with kvlayers.installed(replace_empty_caches=False):
        calls = {name: Generator(job, given) for name, given in arguments.items()}
        for name, call in calls.items():
            with nothing_on_disk(job.backend):
                first, tokens = call()
            compare(name, 0, tokens)
            measured[name] = {"first": first, "graphs": call.graphs, "new": job.new, "seconds": []}
            tick()
        for trial in range(trials):
            for name in interleaved(list(calls), trial):
                seconds, tokens = calls[name]()
                measured[name]["seconds"].append([seconds])
                compare(name, trial, tokens)
            tick()
    for name, entry in measured.items():
        entry["recompiles"] = calls[name].graphs - entry["graphs"]
    return measured


def show_calls(run: Session, title: str, calls: Measured) -> None:
    """Print a table of calls of `generate()`."""
    columns: dict[str, Cell] = {
        "s a call": shown("median", ".3f"),
        "tokens/s": lambda entry: f"{entry['new'] / entry['median']:.1f}",
        "times as fast": span("speed"),
        "graphs": lambda entry: f"{entry['graphs'] or ''}",
        "first\ncall, s": shown("first", ".3f"),
        "compiled\nlater": lambda entry: f"{entry['recompiles']}" if entry["graphs"] else "",
    }
    run.table(title, "cache", {"": calls}, columns)
