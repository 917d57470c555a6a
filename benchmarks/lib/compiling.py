"""Compiled forward passes side by side in one process, each as if it were alone."""

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import transformers
from torch._dynamo.utils import counters

INDUCTOR = "inductor"
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


def isolated(model: Any) -> Any:
    """A model with the same modules and weights, which `generate()` compiles independently of any other.

    It decodes greedily and does not stop by itself.
    """
    twin = copy.copy(model)
    twin.__call__ = own_code(model.__call__)
    twin.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    return twin


class Compiled:
    """A forward pass that is compiled in one graph, with counters.

    Args:
        model: the model.
        options: options of `torch.compile`.

    Attributes:
        graphs: graphs compiled so far.
        seconds: seconds of the calls that compiled.
    """

    def __init__(self, model: Any, options: dict[str, str]) -> None:
        self.graphs = 0
        self.seconds = 0.0
        self._compiled = torch.compile(own_code(model.forward), fullgraph=True, **options)

    def __call__(self, **inputs: Any) -> Any:
        before, begin = graphs(), time.perf_counter()
        output = self._compiled(**inputs)
        if graphs() != before:
            self.graphs += graphs() - before
            self.seconds += time.perf_counter() - begin
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
def nothing_in_memory(backend: str, device: torch.device | str = "cpu") -> Iterator[None]:
    """Begin and end without compiled code, but load the compiler first: the first contender should not pay for that."""
    torch._dynamo.reset()
    _load(backend, device)
    try:
        yield
    finally:
        torch._dynamo.reset()


def _load(backend: str, device: torch.device | str) -> None:
    doubled = torch.compile(lambda numbers: 2 * numbers, backend=backend)
    doubled(torch.ones(2, device=device))
