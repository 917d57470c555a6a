"""The Triton kernel that merges two parts of attention does what plain torch does. Run by Triton's interpreter."""

import pytest

import interpreted_kernels
import versions

CASES = """
import torch
from kvlayers.attention import fused
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    for batch, heads, queries, width in ((1, 1, 1, 16), (3, 5, 1, 80), (2, 3, 7, 24)):
        # One part with queries before heads in memory, as kernels return it; scores of hidden tokens among others.
        first = (
            torch.randn(batch, queries, heads, width).to(dtype).transpose(1, 2),
            torch.randn(batch, queries, heads).transpose(1, 2).clone(),
        )
        second = torch.randn(batch, heads, queries, width).to(dtype), torch.randn(batch, heads, queries) * 9
        first[1][0, 0, 0] = -1e30
        wanted = fused.merge([first, second])
        seen = fused._merge_two(first, second)
        assert seen.shape == wanted.shape and seen.dtype == dtype, (seen.shape, seen.dtype)
        # Computed in float32, and rounded once.
        torch.testing.assert_close(seen.float(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert torch.equal(seen[0, 0, 0], second[0][0, 0, 0])
"""


@pytest.mark.slow
@versions.interprets_kernels
def test_two_parts_are_merged_as_by_plain_torch() -> None:
    interpreted_kernels.run("-c", CASES)
