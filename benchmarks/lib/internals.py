"""What the benchmarks use of kvlayers beside its public names: one place to change when a module moves."""

# ruff: noqa: F401

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import kvlayers.caches.base
from kvlayers.attention import dispatch, reference
from kvlayers.attention.cuda import kernel as cuda_kernel
from kvlayers.attention.dispatch import CUDA, PathCounter
from kvlayers.attention.gqa import marked_for_sdpa
from kvlayers.attention.packed_tensor import PackedStates, as_dense
from kvlayers.attention.segment_kinds import DENSE_PIECE_TOKENS, DenseSegment, PackedSegment
from kvlayers.attention.segments import GatheredSegment, KVSegments, Segment
from kvlayers.eviction.budgets import AdaptiveHeads, EvenHeads
from kvlayers.eviction.for_model import rules_for
from kvlayers.eviction.selection import KeptTokens, select
from kvlayers.generation.registry import is_registered, named_cache
from kvlayers.offload.transfers import BlockingTransfers
from kvlayers.stores.quantization import Quantization
from kvlayers.stores.quantized import QuantizedStore
from kvlayers.tools.calibration.divergence import DivergenceInUse
from kvlayers.tools.measuring.environment import environment
from kvlayers.tools.measuring.interleave import interleaved, quiet_clock, there_and_back
from kvlayers.tools.measuring.nbytes import cache_nbytes
from kvlayers.tools.measuring.predictions import is_tie, newest_logits
from kvlayers.tools.measuring.scoring import CacheMaker, NoRecord, PassageScores, Scores, read
from kvlayers.tools.measuring.text import default_text, passages
from kvlayers.upstream.cache_argument import name_for, name_in_generate
from kvlayers.utils import triton_support
from kvlayers.utils.triton_support import DeviceFacts, TritonKernel

HELPERS = Path(__file__).parents[2] / "tests" / "helpers"
"""The references and doubles of the tests, which some benchmarks use."""


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
    with mock.patch.object(kvlayers.caches.base, "Prefetcher", prefetcher):
        yield lambda: transfers.peak_bytes
