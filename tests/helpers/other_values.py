"""A cache that is wrong, which measurements must name."""

from typing import Any

from torch import Tensor

import kvlayers


class OtherValues(kvlayers.DynamicCache):
    """Returns values of the opposite sign, as no cache should."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(*args, **kwargs)
        return keys, -values
