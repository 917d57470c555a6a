"""How much the tests do: what a change waits for, or what can be done in a night."""

import os

NIGHTLY = os.environ.get("KVLAYERS_NIGHTLY") == "1"
"""Whether tests marked `nightly` run too, and random sequences are many and long, as `make nightly` has it."""

ROUNDS = int(os.environ.get("KVLAYERS_TEST_ROUNDS", "2" if NIGHTLY else "1"))
"""How often tests that look for rare failures repeat what they do: once in the gate, twice in a night.

`KVLAYERS_TEST_ROUNDS=20 pytest tests/generation/test_threads.py` makes 3,840 calls of 4 threads: 8 modes of 6 families.
"""
