"""The device of the tests with the marker `cuda`.

`KVLAYERS_CUDA_TESTS=cpu` runs on a CPU what does not need streams or graphs, to see that a test is right.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

REASON = "needs a CUDA device"
DEVICE = torch.device("cpu" if os.environ.get("KVLAYERS_CUDA_TESTS") == "cpu" else "cuda")

has_cuda = torch.cuda.is_available()
on_cuda = [pytest.mark.cuda, pytest.mark.skipif(DEVICE.type == "cuda" and not has_cuda, reason=REASON)]
"""Marks of a file of such tests."""

needs_streams = pytest.mark.skipif(DEVICE.type == "cpu" or not has_cuda, reason=REASON)
"""Mark of a test that a CPU cannot run at all."""


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    if DEVICE.type == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def exact_products() -> Iterator[None]:
    """Products and convolutions of float32 have the precision of float32."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
