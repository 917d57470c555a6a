"""Compiled models whose graphs are counted."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

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
