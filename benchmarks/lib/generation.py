"""Whole calls of `generate()`: time, compiled graphs, bytes and tokens."""

import bisect
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

import kvlayers
from lib.compiling import INDUCTOR, graphs, isolated, nothing_on_disk, options_of
from lib.contenders import KVLAYERS, KVLAYERS_STATIC, NO_CACHE, REFERENCE, TRANSFORMERS_STATIC, compiled, is_compiled
from lib.internals import interleaved, quiet_clock
from lib.peak import peak_bytes
from lib.timing import Disagreements, Tick, step


@dataclass
class Job:
    """The task of every contender.

    Args:
        prompt: token ids `[1, tokens]`, on the model's device.
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

    def buckets_reached(self) -> int:
        sizes = kvlayers.stores.Buckets().sizes(self.reserve)
        held = range(self.prompt_tokens + 1, self.prompt_tokens + self.new)
        return len({bisect.bisect_left(sizes, tokens) for tokens in held})

    def compile_config(self) -> transformers.CompileConfig:
        """The compile options of `generate()`: transformers' defaults, except for the backend."""
        return transformers.CompileConfig(**options_of(self.backend, "reduce-overhead"))


Arguments = Callable[[Job], dict[str, Any]]
"""The arguments of `generate()`, besides the prompt and the number of new tokens."""


def _kvlayers_static(job: Job) -> dict[str, Any]:
    return {"cache_implementation": "static", "cache_config": {"max_cache_len": job.reserve}}


def _transformers_static(job: Job) -> dict[str, Any]:
    # A new cache for each call, as generate() makes it.
    return {"past_key_values": transformers.StaticCache(job.model.config, max_cache_len=job.reserve)}


def _everywhere(config: transformers.CompileConfig) -> transformers.CompileConfig:
    """Without this, transformers compiles only on accelerators."""
    config._compile_all_devices = True
    return config


GENERATORS: dict[str, Arguments] = {
    REFERENCE: lambda job: {"past_key_values": transformers.DynamicCache(config=job.model.config)},
    KVLAYERS: lambda job: {"past_key_values": kvlayers.DynamicCache(config=job.model.config)},
    compiled(KVLAYERS_STATIC): lambda job: {**_kvlayers_static(job), "compile_config": job.compile_config()},
    compiled(TRANSFORMERS_STATIC): lambda job: {
        **_transformers_static(job),
        "compile_config": _everywhere(job.compile_config()),
    },
    KVLAYERS_STATIC: lambda job: {**_kvlayers_static(job), "disable_compile": True},
    TRANSFORMERS_STATIC: lambda job: {**_transformers_static(job), "disable_compile": True},
    NO_CACHE: lambda job: {"use_cache": False},
}
"""The reference comes first: tokens and ratios are compared with it."""

SERVING = (REFERENCE, KVLAYERS, compiled(KVLAYERS_STATIC), compiled(TRANSFORMERS_STATIC))
"""The contenders that one would decode with."""


class Generator:
    """Calls of `generate()` with a model of its own to compile. The whole call is timed, including making the cache.

    Attributes:
        graphs: graphs compiled so far.
    """

    def __init__(self, job: Job, arguments: Arguments) -> None:
        self.graphs = 0
        self._job, self._arguments = job, arguments
        self._model = isolated(job.model)

    def __call__(self) -> tuple[float, list[int]]:
        """Generate once; return the seconds and the new tokens."""
        job, before = self._job, graphs()
        gc.collect()
        with quiet_clock():
            begin = time.perf_counter()
            ids = self._model.generate(job.prompt, max_new_tokens=job.new, **self._arguments(job))
            # This waits for the accelerator.
            tokens = ids[0, job.prompt_tokens :].tolist()
            seconds = time.perf_counter() - begin
        self.graphs += graphs() - before
        return seconds, tokens


class Expected:
    """The reference's tokens, and the tokens with which it would continue after another contender's tokens.

    Args:
        job: the task.
        tokens: the reference's new tokens.
        disagreements: where different tokens are recorded.
    """

    def __init__(self, job: Job, tokens: list[int], disagreements: Disagreements) -> None:
        self._job, self._tokens, self._disagreements = job, tokens, disagreements
        self._compared: list[tuple[str, list[int]]] = []

    def compare(self, name: str, trial: int, tokens: list[int]) -> None:
        """Record the new tokens that differ from the reference's.

        After one different token, all later ones may differ. So each token is compared with the one that the reference
        gives after the same tokens.
        """
        if tokens == self._tokens or (name, tokens) in self._compared:
            return
        self._compared.append((name, tokens))
        model, prompt = self._job.model, self._job.prompt
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            logits = model(input_ids=prompt, past_key_values=cache, logits_to_keep=1).logits[0, -1].float()
            for index, token in enumerate(tokens):
                held = self._job.prompt_tokens + index
                where = {"model": self._job.name, "cache": name, "tokens": held, "trial": trial}
                self._disagreements.compare_token(where, logits, token)
                logits = step(model, cache, token, prompt.device)[1]


def measure_generate(
    job: Job,
    arguments: Mapping[str, Arguments],
    trials: int,
    disagreements: Disagreements,
    tick: Tick,
    peaks: bool = False,
) -> dict[str, Any]:
    """Time calls of `generate()`. Each contender's first call compiles; later calls take turns and must not compile.

    Args:
        job: the task.
        arguments: of the calls of each contender by name, the reference first.
        trials: timed calls of each contender after the first.
        disagreements: where different tokens are recorded.
        tick: called after each contender's first call, and after each trial.
        peaks: whether to call each contender once more for its bytes.

    Returns:
        For each contender `first`, the seconds of its first call, `seconds` of the calls by trial, `new` tokens,
        `graphs` of the first call, `recompiles` of all later calls and, with `peaks`, `peak`: the peak bytes beyond the
        model's, or `None` if they cannot be counted.
    """
    # For all calls alike; transformers' caches are measured unchanged.
    with kvlayers.installed(replace_empty_caches=False):
        calls = {name: Generator(job, given) for name, given in arguments.items()}
        return _measure_calls(job, calls, trials, disagreements, tick, peaks)


def _measure_calls(
    job: Job, calls: Mapping[str, Generator], trials: int, disagreements: Disagreements, tick: Tick, peaks: bool
) -> dict[str, Any]:
    expected: Expected | None = None
    measured: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():
        allocated = bytes_allocated(job.prompt.device)
        with nothing_on_disk(job.backend):
            first, tokens = call()
        expected = expected or Expected(job, tokens, disagreements)
        expected.compare(name, 0, tokens)
        measured[name] = {"first": first, "graphs": call.graphs, "new": job.new, "seconds": []}
        if peaks:
            measured[name]["peak"] = _peak(name, call, job, allocated)
        tick()
    for trial in range(trials):
        for name in interleaved(list(calls), trial):
            seconds, tokens = calls[name]()
            measured[name]["seconds"].append([seconds])
            expected.compare(name, trial, tokens)  # type: ignore[union-attr]
        tick()
    for name, entry in measured.items():
        entry["recompiles"] = calls[name].graphs - entry["graphs"]
    return measured


def bytes_allocated(device: torch.device) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak(name: str, call: Generator, job: Job, allocated: int) -> int | None:
    """The peak bytes of a call, beyond the bytes before the contender's first call."""
    device = job.prompt.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - allocated
    # Operations in compiled code cannot be counted.
    return None if is_compiled(name) else peak_bytes(call, job.model)
