"""Compiled forward passes side by side in one process, each as if it were alone, and graphs of `generate()`."""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters

import kvlayers
from lib.contenders import KVLAYERS_STATIC, REFERENCE, TRANSFORMERS_STATIC, Maker, compiled
from lib.internals import quiet_clock
from lib.timing import Decoded, Disagreements, Trials, greedy_reference, measure_decode, step

INDUCTOR = "inductor"

_numbers = itertools.count()


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


def with_reservation(name: str, tokens: int) -> str:
    return f"{name}, {tokens:,} reserved"


def measure_static(
    workload: Any, makers: Mapping[str, Maker], length: int, reserved: Sequence[int], trials: Trials, backend: str
) -> tuple[Decoded, Decoded]:
    """Time decode steps of static caches in eager and in compiled code, beside transformers' dynamic cache.

    Compiled code comes behind a prefill in eager code, and every graph is compiled before the clock starts.

    Args:
        workload: the model.
        makers: the dynamic cache, and the static ones.
        length: tokens in the caches.
        reserved: the tokens that each static cache reserves, one cache for each.
        trials: how often.
        backend: of the compiler.

    Returns:
        The results for eager code and for compiled code.
    """

    def reserving(make: Maker, tokens: int) -> Maker:
        return lambda config, length: make(config, tokens)

    static = {
        with_reservation(name, tokens): reserving(makers[name], tokens)
        for name in (KVLAYERS_STATIC, TRANSFORMERS_STATIC)
        for tokens in reserved
    }
    dynamic = {REFERENCE: makers[REFERENCE]}
    eager = measure_decode(workload, {**dynamic, **static}, length, trials)
    in_graphs = {compiled(name): make for name, make in static.items()}
    forward = workload.model.forward
    forwards = {name: torch.compile(own_code(forward), fullgraph=True, backend=backend) for name in in_graphs}
    tick = trials.ticking(f"compiling at {length}", len(in_graphs))
    for name, make in in_graphs.items():
        # As many steps as will be timed, so that all sizes that they need are compiled.
        with nothing_on_disk(backend), quiet_clock():
            first, cache = workload.prepare(length), make(workload.model.config, length + trials.steps)
            workload.fill(cache)
            greedy_reference(forwards[name], cache, first, trials.steps)
        tick()
    return eager, measure_decode(workload, {**dynamic, **in_graphs}, length, trials, forwards)


# Whole calls of generate()


def count_graphs(workload: Any, prompt: int, new: int, reserve: int, disagreements: Disagreements) -> list[int]:
    """Graphs that two calls of `generate()` with a static cache compile, one after the other, without kernels.

    `prompt`, `new` and `reserve` are tokens. Those that differ from transformers' DynamicCache's are recorded.
    """
    # Shares the weights, and has code of its own to compile.
    model, ids = copy.copy(workload.model), workload.prompt(prompt)
    model.__call__ = own_code(workload.model.__call__)
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    options = transformers.CompileConfig(backend="eager", mode="default")
    # Without this, transformers compiles only on accelerators.
    options._compile_all_devices = True
    asked = {"cache_implementation": "static", "cache_config": {"max_cache_len": reserve}, "compile_config": options}
    found = []
    for call in range(2):
        before = graphs()
        with kvlayers.installed(replace_empty_caches=False):
            tokens = model.generate(ids, max_new_tokens=new, **asked)[0, prompt:].tolist()
        found.append(graphs() - before)
        where = {"cache": compiled(KVLAYERS_STATIC), "model": workload.name, "trial": call}
        compare_tokens(workload.model, ids, where, tokens, disagreements)
    return found


def compare_tokens(
    model: Any, prompt: Tensor, where: dict[str, Any], tokens: list[int], disagreements: Disagreements
) -> None:
    """Record the new tokens that differ from those of transformers' DynamicCache.

    After one different token, all later ones may differ. So each token is compared with the one that the reference
    gives after the same tokens.
    """
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        logits = model(input_ids=prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
        for held, token in enumerate(tokens, prompt.shape[1]):
            disagreements.compare_token({"tokens": held, **where}, logits[0], token)
            logits = step(model, cache, prompt.new_full((1, 1), token))[1]
