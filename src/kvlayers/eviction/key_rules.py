"""Rules that look at keys alone, or at nothing."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize
from typing_extensions import override

from kvlayers.errors import OptionError
from kvlayers.eviction.rule import EvictionRule, register_eviction_rule


@register_eviction_rule("keydiff")
@dataclass(frozen=True)
class KeyDiff(EvictionRule):
    """A token is kept if its key points elsewhere than the mean key.

    Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
    Resource-Constrained Environments" (arXiv:2504.15364): the score is minus the cosine similarity of a key to the mean
    of the normalized keys. Keys that differ from the others tend to receive much attention.
    """

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        unit = normalize(keys.to(torch.promote_types(keys.dtype, torch.float32)), dim=-1)
        anchor = normalize(unit.mean(dim=2), dim=-1)
        similarities: Tensor = (unit @ anchor[..., None]).squeeze(-1)
        return -similarities


@register_eviction_rule("knorm")
@dataclass(frozen=True)
class KNorm(EvictionRule):
    """A token is kept for the small L2 norm of its key.

    Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (arXiv:2406.11430):
    keys of a small norm tend to receive much attention.
    """

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        wide = torch.promote_types(keys.dtype, torch.float32)
        norms: Tensor = torch.linalg.vector_norm(keys, dim=-1, dtype=wide)
        return -norms


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
            raise OptionError(f"`seed` must be a whole number, got {self.seed!r}: pass an integer.")

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


@register_eviction_rule("streaming")
@dataclass(frozen=True)
class Streaming(EvictionRule):
    """A token is kept for being new. With the sinks, which the layer keeps, that is a window behind sinks.

    Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks" (arXiv:2309.17453). Other than in the
    paper, and in `SinkCache`, tokens keep the positions that they have in the text.
    """

    shares_heads: ClassVar[bool] = True

    @override
    def scores(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Tensor:
        return torch.arange(keys.shape[2], dtype=torch.float32, device=keys.device).expand(keys.shape[:3])
