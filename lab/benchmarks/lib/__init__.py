"""What the benchmarks share: models, contenders, timing, and reports. Nothing here is run by itself."""

import os

# A figure must not depend on when a compiler is done.
os.environ.setdefault("KVLAYERS_COMPILE", "wait")
