"""What tests of memory share."""

import pytest

from kvlayers.offload import Prefetcher
from kvlayers.offload.offloading import Offloading
from recording_transfers import RecordingTransfers


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloading as on a machine with an accelerator."""
    monkeypatch.setattr(
        Offloading, "prefetcher", lambda self: Prefetcher(transfers=lambda device: RecordingTransfers())
    )
