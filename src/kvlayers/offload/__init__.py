"""Where states are held: at home on the host or on disk, and on the device for as long as attention needs them."""

from .memory import DiskMemory, HomeMemory, HostMemory
from .offloading import Offloading
from .prefetcher import Prefetcher
from .recording import RecordingTransfers
from .traffic import Traffic, TrafficMeter
from .transfers import Transfers

__all__ = [
    "DiskMemory",
    "HomeMemory",
    "HostMemory",
    "Offloading",
    "Prefetcher",
    "RecordingTransfers",
    "Traffic",
    "TrafficMeter",
    "Transfers",
]
