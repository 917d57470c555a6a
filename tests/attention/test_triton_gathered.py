"""The kernel reads the pieces of gathered segments, and nothing else. Run by Triton's interpreter."""

from typing import Any

import pytest

import interpreted_kernels
import versions
from matrix import of_cases
from triton_gathered_cases import CASES, FEW_SPLITS

pytestmark = [pytest.mark.slow, versions.interprets_kernels]

LAUNCHES = {
    # More than two segments in full precision besides.
    "dense, four segments around": 3,
    # Tokens that sequences share are read once for all of them.
    "dense, shared tail": 3,
    "dense, unevenly shared tail": 3,
    # Sequences read states of others, and the tail is their own.
    "dense, sequences read others": 3,
    "4 bits, sequences read others": 3,
    # Two segments in blocks.
    "dense, two gathered segments": 3,
    "4 bits, packed tail": 3,
    "rotated, packed tail": 3,
    "rotated, gathered states in full precision": 3,
}
"""Launches of the cases that take more than one, and that of the merge."""


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What the cases gave, in a process in which triton interprets."""
    return interpreted_kernels.results_of("triton_gathered_cases")


@pytest.mark.parametrize("name", [*of_cases(CASES), *(f"{name}, few splits" for name in FEW_SPLITS)])
def test_attention_is_that_of_the_tokens_of_pieces_in_the_launch_of_those_around(
    interpreted: dict[str, Any], name: str
) -> None:
    assert interpreted["cases"][name] == LAUNCHES.get(name, 2)
