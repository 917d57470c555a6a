"""Bytes moved in each direction, by layer and by step."""

from collections import deque
from dataclasses import dataclass

KEPT_STEPS = 64
"""Number of newest steps that the meter remembers one by one."""


@dataclass
class Traffic:
    """Bytes moved.

    Attributes:
        to_host: bytes from the device to offloaded memory.
        to_device: bytes from offloaded memory to the device.
    """

    to_host: int = 0
    to_device: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.to_host + other.to_host, self.to_device + other.to_device)

    def __iadd__(self, other: "Traffic") -> "Traffic":
        self.to_host += other.to_host
        self.to_device += other.to_device
        return self


class TrafficMeter:
    """Counts the bytes that an offloaded cache and its forks move to their devices and back.

    A step begins when a layer is updated again.

    Attributes:
        total: everything since the cache was made.
        steps: for each of the newest steps, oldest first, the traffic of each layer by its index. Prefetched bytes
            count for the step in which the layer uses them, or in which they are discarded.
    """

    def __init__(self) -> None:
        self.total = Traffic()
        self.steps: deque[dict[int, Traffic]] = deque(maxlen=KEPT_STEPS)
        self._updated: set[int] = set()

    def __repr__(self) -> str:
        return f"TrafficMeter(total={self.total})"

    def begin_update(self, layer: int) -> None:
        """Record that a layer is updated."""
        if layer in self._updated or not self.steps:
            self.steps.append({})
            self._updated = set()
        self._updated.add(layer)

    def count(self, layer: int, traffic: Traffic) -> None:
        """Add the traffic of one layer."""
        self.total += traffic
        if not self.steps:
            self.steps.append({})
        self.steps[-1].setdefault(layer, Traffic()).__iadd__(traffic)

    def of_step(self, step: int = -1) -> Traffic:
        """The traffic of all layers in one step, by default the newest."""
        return sum(self.steps[step].values(), Traffic())
