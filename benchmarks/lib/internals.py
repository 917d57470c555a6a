"""What the benchmarks use of kvlayers beside its public names: one place to change when a module moves."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import kvlayers.caches.base
from kvlayers.attention import dispatch as dispatch
from kvlayers.attention import reference as reference
from kvlayers.attention.dispatch import CUDA as CUDA
from kvlayers.attention.dispatch import PathCounter as PathCounter
from kvlayers.attention.gqa import marked_for_sdpa as marked_for_sdpa
from kvlayers.attention.packed_tensor import PackedStates as PackedStates
from kvlayers.attention.packed_tensor import as_dense as as_dense
from kvlayers.attention.segment_kinds import DENSE_PIECE_TOKENS as DENSE_PIECE_TOKENS
from kvlayers.attention.segment_kinds import DenseSegment as DenseSegment
from kvlayers.attention.segment_kinds import PackedSegment as PackedSegment
from kvlayers.attention.segments import GatheredSegment as GatheredSegment
from kvlayers.attention.segments import KVSegments as KVSegments
from kvlayers.attention.segments import Segment as Segment
from kvlayers.eviction.budgets import AdaptiveHeads as AdaptiveHeads
from kvlayers.eviction.budgets import EvenHeads as EvenHeads
from kvlayers.eviction.for_model import rules_for as rules_for
from kvlayers.eviction.selection import KeptTokens as KeptTokens
from kvlayers.eviction.selection import select as select
from kvlayers.generation.registry import is_registered as is_registered
from kvlayers.generation.registry import named_cache as named_cache
from kvlayers.offload.transfers import BlockingTransfers as BlockingTransfers
from kvlayers.stores.quantization import Quantization as Quantization
from kvlayers.stores.quantized import QuantizedStore as QuantizedStore
from kvlayers.tools.calibration.divergence import DivergenceInUse as DivergenceInUse
from kvlayers.tools.measuring.environment import environment as environment
from kvlayers.tools.measuring.interleave import interleaved as interleaved
from kvlayers.tools.measuring.interleave import quiet_clock as quiet_clock
from kvlayers.tools.measuring.interleave import there_and_back as there_and_back
from kvlayers.tools.measuring.nbytes import cache_nbytes as cache_nbytes
from kvlayers.tools.measuring.predictions import is_tie as is_tie
from kvlayers.tools.measuring.predictions import newest_logits as newest_logits
from kvlayers.tools.measuring.scoring import CacheMaker as CacheMaker
from kvlayers.tools.measuring.scoring import NoRecord as NoRecord
from kvlayers.tools.measuring.scoring import PassageScores as PassageScores
from kvlayers.tools.measuring.scoring import Scores as Scores
from kvlayers.tools.measuring.scoring import read as read
from kvlayers.tools.measuring.text import default_text as default_text
from kvlayers.tools.measuring.text import passages as passages
from kvlayers.upstream.cache_argument import name_for as name_for
from kvlayers.upstream.cache_argument import name_in_generate as name_in_generate
from kvlayers.utils import triton_support as triton_support
from kvlayers.utils.triton_support import DeviceFacts as DeviceFacts
from kvlayers.utils.triton_support import TritonKernel as TritonKernel

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
