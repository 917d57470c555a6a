"""How often tests that look for rare failures repeat what they do."""

import os

ROUNDS = int(os.environ.get("KVLAYERS_TEST_ROUNDS", "1"))
"""1 in the suite. `KVLAYERS_TEST_ROUNDS=20 pytest tests/generation/test_threads.py` makes 3,840 calls of 4 threads: 8
modes of 6 families."""
