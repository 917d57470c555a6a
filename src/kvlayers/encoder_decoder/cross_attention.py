"""Whether cross-attention has the states of an encoder's output, and of which output they are."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kvlayers.core.cache import Cache


class CrossAttentionFlags(Mapping[int, bool]):
    """For each layer, whether cross-attention has its states. Models ask before they project the encoder's output.

    Looks like the dict of transformers, but asks the layers at every use. A stored flag could be wrong: some models
    (whisper) set it before the update, which may fail.

    Args:
        cross: the cross-attention cache.
    """

    def __init__(self, cross: Cache) -> None:
        self._cross = cross

    def __getitem__(self, layer_idx: int) -> bool:
        if not 0 <= layer_idx < len(self._cross.layers):
            raise KeyError(layer_idx)
        # Not get_seq_length(), which is a tensor in compiled code.
        return bool(self._cross._layer(layer_idx).length)

    def get(self, layer_idx: int, default: Any = None) -> Any:
        """Whether a layer has states; `default` if the cache does not have the layer yet."""
        # Models call this in compiled code too, so it does without the exception that `Mapping.get` would catch.
        return self[layer_idx] if 0 <= layer_idx < len(self._cross.layers) else default

    def __setitem__(self, layer_idx: int, updated: bool) -> None:
        """Let a layer forget its states if `updated` is false. If it is true, nothing changes: the states tell."""
        if not updated and 0 <= layer_idx < len(self._cross.layers):
            self._cross._layer(layer_idx).reset()

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._cross.layers)))

    def __len__(self) -> int:
        return len(self._cross.layers)

    def __repr__(self) -> str:
        return repr(dict(self))


Fingerprint = list[tuple[float, ...]]
"""A few numbers for each sequence of an encoder's output."""


def fingerprint(encoded: Tensor) -> Fingerprint:
    """Numbers that tell one encoder's output, `[batch, tokens, hidden]`, from another."""
    states = encoded.detach().float()
    norm = states.norm(dim=(1, 2)).clamp_min(1e-30)
    tokens, channels = (torch.arange(size, device=states.device) for size in states.shape[1:])
    waves = (torch.cos(pitch * tokens[:, None] + pitch**2 * channels) for pitch in (0.9, 1.7, 2.6))
    rows: list[list[float]] = torch.stack([(states * wave).sum(dim=(1, 2)) / norm for wave in waves], dim=1).tolist()
    return [tuple(row) for row in rows]


def are_alike(read: Fingerprint, other: Fingerprint) -> bool:
    """Whether two fingerprints are of the same output, which may have been rounded differently when encoded again."""
    pairs = zip(itertools.chain(*read), itertools.chain(*other), strict=True)
    return all(abs(one - another) < 0.01 for one, another in pairs)
