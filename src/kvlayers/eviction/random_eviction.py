"""Evicts tokens at random: the control that other rules are compared with."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.errors import OptionError
from kvlayers.eviction.contract import EvictionRule
from kvlayers.eviction.registry import register_eviction_rule

CHANNELS = 4
"""Channels of a key that its score is drawn from."""


@register_eviction_rule("random")
@dataclass(frozen=True)
class RandomEviction(EvictionRule):
    """A token is kept by chance: its score is a hash of its key and the seed.

    So a token has the same score whenever it is scored, beside whatever other heads, and on every device. Heads, layers
    and sequences keep different tokens, as their keys differ. No generator of random numbers is used up.

    Args:
        seed: another seed gives other scores.

    Raises:
        OptionError: the seed is not a whole number.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise OptionError(f"`seed` must be a whole number, got {self.seed!r}.")

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        # Bits of float32, which holds the keys of all narrower dtypes unchanged.
        bits = keys[..., :CHANNELS].float().contiguous().view(torch.int32).long()
        mixed = _mixed(_mixed(torch.full(keys.shape[:3], self.seed % (1 << 31), device=keys.device)))
        for channel in range(bits.shape[-1]):
            mixed = _mixed(mixed ^ bits[..., channel])
        # float32 holds whole numbers up to this one.
        return (mixed % (1 << 24)).float()


def _mixed(numbers: Tensor) -> Tensor:
    """Numbers from 0 to 2^31, spread evenly whatever the given ones are."""
    for _ in range(2):
        low = numbers & 0x7FFFFFFF
        numbers = ((low ^ (low >> 16)) * 0x45D9F3B) & 0x7FFFFFFF
    return numbers ^ (numbers >> 16)
