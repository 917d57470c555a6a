"""What benchmarks share measures what it says."""

from typing import Any

import pytest
import torch
from torch import Tensor

import versions

pytestmark = [pytest.mark.slow, versions.benchmarks_of_transformers]


def test_bytes_of_transformers_quantized_layers_are_those_of_codes_scales_zeros_and_residual(script: Any) -> None:
    pytest.importorskip("optimum.quanto")
    from lib.contenders import measure_bytes, quanto
    from lib.workload import RandomModel, Shape

    config = RandomModel(Shape(layers=2, heads=2, kv_heads=2, head_dim=64, intermediate=64, vocab=64)).model.config
    tokens = 32 + 128 + 64
    # The first chunk is quantized at once, the next four when their residual is full, the last two not yet.
    quantized, residual = 32 + 128, 64
    of_a_vector = 64 // 2 + 2 + 2
    expected = 2 * 2 * 2 * (quantized * of_a_vector + residual * 64 * 2) / tokens
    assert measure_bytes(quanto(4), config, tokens - 64, 64, 32)["last_bytes"] == expected


def test_compiled_contenders_have_nothing_to_do_with_one_another(script: Any) -> None:
    from lib import compiled

    def doubling(numbers: Tensor) -> Tensor:
        return 2 * numbers

    inputs: list[Any] = []

    def backend(graph: Any, example_inputs: list[Any]) -> Any:
        inputs.append(example_inputs)
        return graph.forward

    first, second = (torch.compile(compiled.own_code(doubling), backend=backend) for _ in range(2))
    for _ in range(2):
        assert first(numbers=torch.ones(2)).tolist() == [2, 2]
        assert second(numbers=torch.ones(3)).tolist() == [2, 2, 2]
    # Where sizes are dynamic, they are inputs as well.
    assert [len(each) for each in inputs] == [1, 1]
    first(numbers=torch.ones(4))
    assert [len(each) for each in inputs] == [1, 1, 2]
