"""Compiled models whose graphs are counted."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from models import WINDOW

# As few layers as there are kinds in a model, since each one more is compiled as well.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
    "mistral": ("mistral", {"num_hidden_layers": 1}),
    "hybrid": ("qwen2", {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    "llama4": (
        "llama4",
        {"num_hidden_layers": 2, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    ),
    "jamba": ("jamba", {"num_hidden_layers": 2}),
}


@pytest.fixture
def counted() -> Iterator[None]:
    """Nothing is compiled yet, and the limits are those of TorchDynamo: for tests that count graphs."""
    torch._dynamo.reset()
    COUNTS.clear()
    CUDA_GRAPHS.clear()
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        yield
    torch._dynamo.reset()


COUNTS = Counter[str]()


def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Runs a graph as it is, and counts how many there are and how often they run."""
    COUNTS["graphs"] += 1

    def run(*args: Any) -> Any:
        COUNTS["runs"] += 1
        return graph.forward(*args)

    return run


def graphs() -> int:
    """Graphs compiled so far."""
    return COUNTS["graphs"]


CUDA_GRAPHS = set[tuple[int, ...]]()
"""The CUDA graphs that `mode="reduce-overhead"` would have recorded: a graph, and its inputs that are numbers."""


def _record(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    COUNTS["graphs"] += 1
    number = COUNTS["graphs"]
    placeholders = graph.graph.find_nodes(op="placeholder")
    numbers = [at for at, node in enumerate(placeholders) if _is_number(node) and _reaches_a_device(node)]

    def run(*args: Any) -> Any:
        COUNTS["runs"] += 1
        CUDA_GRAPHS.add((number, *(args[at] for at in numbers)))
        return graph.forward(*args)

    return make_boxed_func(run)  # type: ignore[no-any-return]


recording_backend = aot_autograd(fw_compiler=_record)
"""As `backend`, and notes which CUDA graphs would be recorded: inductor records one for each tuple of numbers."""


def _is_number(node: torch.fx.Node) -> bool:
    return isinstance(node.meta["val"], int | torch.SymInt)


def _reaches_a_device(number: torch.fx.Node) -> bool:
    """Whether a number is used by more than numbers and empty tensors on the host, which no CUDA graph contains."""
    for user in number.users:
        on_host = user.op == "output" or user.target is torch.ops.aten.empty.memory_format
        if not on_host and (not _is_number(user) or _reaches_a_device(user)):
            return True
    return False
