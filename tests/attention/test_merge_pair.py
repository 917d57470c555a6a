"""The Triton kernel that merges two parts of attention does what plain torch does. Run by Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys

import pytest
from packaging.version import Version

from kvlayers.utils.triton_support import MINIMUM_VERSION, triton_version

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
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or triton_version() < Version(MINIMUM_VERSION),
    reason=f"triton {MINIMUM_VERSION} or later is not installed",
)
def test_two_parts_are_merged_as_by_plain_torch() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", CASES], capture_output=True, text=True, env=environment, timeout=250, check=False
    )
    assert ran.returncode == 0, ran.stderr
