"""How many bytes went which way, by layer and by step."""

from collections import deque
from dataclasses import dataclass

KEPT_STEPS = 64
"""Steps that the meter remembers one by one."""


@dataclass
class Traffic:
    """Bytes moved.

    Attributes:
        to_host: bytes from the device to where states are held.
        to_device: bytes the other way.
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
    """Counts what an offloaded cache and its forks move to their devices and from them.

    A step begins when a layer is updated again.

    Attributes:
        total: everything since the cache was made.
        steps: for each of the newest steps, oldest first, the traffic of each layer by its index. What is brought ahead
            for a layer counts for the step in which that layer uses it, or in which it is found to be of no use.
    """

    def __init__(self) -> None:
        self.total = Traffic()
        self.steps: deque[dict[int, Traffic]] = deque(maxlen=KEPT_STEPS)
        self._updated: set[int] = set()

    def __repr__(self) -> str:
        return f"TrafficMeter(total={self.total})"

    def begin_update(self, layer: int) -> None:
        """Note that a layer takes in tokens."""
        if layer in self._updated or not self.steps:
            self.steps.append({})
            self._updated = set()
        self._updated.add(layer)

    def count(self, layer: int, traffic: Traffic) -> None:
        """Add what one layer has moved."""
        self.total += traffic
        if not self.steps:
            self.steps.append({})
        self.steps[-1].setdefault(layer, Traffic()).__iadd__(traffic)

    def of_step(self, step: int = -1) -> Traffic:
        """All that was moved in a step, the newest one where not given."""
        return sum(self.steps[step].values(), Traffic())
