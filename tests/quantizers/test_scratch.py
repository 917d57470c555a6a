"""Memory that a thread uses again."""

import threading

import pytest
import torch

from kvlayers.kernels.codes import packed_side as module
from kvlayers.kernels.codes.packed_side import scratch


def test_a_thread_gets_its_own_memory_again() -> None:
    first = scratch(3, 5)
    assert scratch(2, 4).data_ptr() == first.data_ptr()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(scratch(3, 5).data_ptr()))
    thread.start()
    thread.join()
    assert found != [first.data_ptr()]


def test_memory_from_inference_mode_can_be_written_to_outside_of_it() -> None:
    with torch.inference_mode():
        made = scratch(module.MOST_KEPT)
    made.fill_(1.0)
    assert scratch(2).fill_(0.0).data_ptr() == made.data_ptr()


def test_memory_is_of_float32_on_the_cpu_whatever_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._memory, "numbers", None)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            made = [scratch(4), scratch(module.MOST_KEPT + 1)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert {(each.dtype, each.device.type) for each in made} == {(torch.float32, "cpu")}


def test_little_memory_is_kept() -> None:
    large = scratch(module.MOST_KEPT + 1)
    assert scratch(2).untyped_storage().nbytes() <= 4 * module.MOST_KEPT
    assert scratch(2).data_ptr() != large.data_ptr()
