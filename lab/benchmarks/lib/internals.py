"""What the benchmarks use of kvlayers beside its public names: one place to change when a module moves."""

# ruff: noqa: F401

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import kvlayers.offload.offloading
from kvlayers.kernels.attention.gqa import marked_for_sdpa
from kvlayers.utils import triton_support
from kvlayers_lab.measuring.decoding import quiet_clock
from kvlayers_lab.measuring.environment import environment
from kvlayers_lab.measuring.nbytes import cache_nbytes
from kvlayers_lab.measuring.scoring import NoRecord, divergences, is_tie, newest_logits, read
from kvlayers_lab.measuring.text import default_text, passages

HELPERS = Path(__file__).parents[3] / "tests" / "helpers"
"""The references and doubles of the tests, which some benchmarks use."""


def tiny_model(family: str) -> Any:
    """A random model of a family in float32, as tests have it."""
    if str(HELPERS) not in sys.path:
        sys.path.append(str(HELPERS))
    import families
    import models

    return families.model_and_inputs(family)[0] if family in families.FAMILIES else models.fresh_model(family)


@contextmanager
def recorded_transfers() -> Iterator[Callable[[], int]]:
    """Let caches that are made within this block offload between two pools of host memory.

    Yields:
        The peak of the bytes on what stands for the device.
    """
    if str(HELPERS) not in sys.path:
        sys.path.append(str(HELPERS))
    from recording_transfers import RecordingTransfers

    transfers: Any = RecordingTransfers(lambda waiting: waiting)
    prefetcher = functools.partial(kvlayers.offload.Prefetcher, transfers=lambda device: transfers)
    with mock.patch.object(kvlayers.offload.offloading, "Prefetcher", prefetcher):
        yield lambda: transfers.peak_bytes
