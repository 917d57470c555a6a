"""Offloading: states are held on the host or on disk, and on the device only while attention needs them."""

from kvlayers.offload.offloading import Offloading
from kvlayers.offload.prefetcher import Prefetcher
from kvlayers.offload.storage import DiskMemory, HomeMemory, HostMemory
from kvlayers.offload.transfers import Traffic, TrafficMeter, Transfers

__all__ = [
    "DiskMemory",
    "HomeMemory",
    "HostMemory",
    "Offloading",
    "Prefetcher",
    "Traffic",
    "TrafficMeter",
    "Transfers",
]
