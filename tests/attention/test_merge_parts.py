"""The Triton kernel that merges parts of attention does what plain torch does. Run by Triton's interpreter."""

import pytest

import interpreted_kernels
import versions

CASES = """
import torch
from kvlayers.kernels.attention import fused
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    for batch, kv_heads, group, queries, width in ((1, 1, 1, 1, 16), (3, 5, 2, 1, 80), (2, 1, 3, 7, 24)):
        # One part with queries before heads in memory, as kernels return it; scores of hidden tokens among others.
        first = (
            torch.randn(batch, queries, kv_heads, group, width).to(dtype).movedim(1, 3),
            torch.randn(batch, queries, kv_heads, group).movedim(1, 3).clone(),
        )
        shape = batch, kv_heads, group, queries
        others = [(torch.randn(*shape, width).to(dtype), torch.randn(shape) * 9) for _ in range(4)]
        first[1][0, 0, 0, 0] = -1e30
        for number in range(1, 5):
            parts = [first, *others[:number]]
            shares = torch.stack([one for _, one in parts]).softmax(0)
            wanted = (torch.stack([out.float() for out, _ in parts]) * shares[..., None]).sum(0)
            seen, _ = fused.merged(parts, dtype, wants_logsumexp=False)
            assert seen.shape == wanted.shape and seen.dtype == dtype, (seen.shape, seen.dtype)
            # Computed in float32, and rounded once.
            torch.testing.assert_close(seen.float(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-6)
            if number == 1:
                assert torch.equal(seen[0, 0, 0, 0], others[0][0][0, 0, 0, 0])
            seen, logsumexp = fused.merged(parts, torch.float32, wants_logsumexp=True)
            assert seen.dtype == logsumexp.dtype == torch.float32
            torch.testing.assert_close(seen, wanted)
            torch.testing.assert_close(logsumexp, torch.stack([one for _, one in parts]).logsumexp(0))
"""


@pytest.mark.slow
@versions.interprets_kernels
def test_parts_are_merged_as_by_plain_torch() -> None:
    interpreted_kernels.run(CASES)
