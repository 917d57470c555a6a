"""A store that grows by a fixed number of tokens."""

import kvlayers


class SteppedStore(kvlayers.stores.DenseStore):
    """A dense store that grows by `step` tokens at a time, however long it is."""

    described = ("step",)
    hints = ()

    def __init__(self, step: int = 16) -> None:
        super().__init__(growth_divisor=2**62, minimum_growth=step)
        self.step = step
