"""What every test may count on: one thread, the same seeds, and transformers left as it was found."""

from collections.abc import Iterator

import hypothesis
import pytest
import torch

import kvlayers

hypothesis.settings.register_profile("kvlayers", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("kvlayers")


@pytest.fixture(autouse=True)
def _reproducible() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    assert not kvlayers.is_installed(), "a test left kvlayers installed"


@pytest.fixture
def installed() -> Iterator[None]:
    """transformers' names resolve to kvlayers for the length of a test."""
    with kvlayers.installed():
        yield
