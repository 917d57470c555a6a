"""Values of options that were not given. This module imports nothing, as `--help` shows them."""

FIDELITY_BITS = "8,fp8,k8v4,4,k4v2,3,2"
"""Settings that `kvlayers fidelity` measures."""

FIDELITY_CONTEXT, FIDELITY_SCORED = 1024, 512
"""Tokens that `kvlayers fidelity` reads before it scores, and tokens that it scores."""
