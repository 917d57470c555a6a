"""Finds the head whose keys lose far more in packing than those of other heads, and says what mends it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlayers.attention.packed_tensor import as_dense
from kvlayers.caches.dynamic import DynamicCache
from kvlayers.layers.operations import LayerOperations
from kvlayers.layers.quantized import QuantizedLayer
from kvlayers.layers.token_layer import TokenLayer
from kvlayers.stores.contract import KVPair
from kvlayers.stores.quantization import Quantization
from kvlayers.tools.measuring.predictions import newest_logits

LARGEST_LOSS = 0.1
"""Part of a typical channel's variance that rounding adds as noise, from which on a head is lost."""

TIMES_OTHERS = 8.0
"""How many times the loss of the median head that is, at least. Few bits alone make the loss of all heads large."""

MOST_BITS = 8
"""The bits of keys that are advised if keys are made even already."""


@dataclass(frozen=True)
class UnevenHead:
    """The head that loses most.

    Attributes:
        layer: index of its layer.
        head: index of the KV head.
        loss: noise of rounding in the median channel of its keys, as a part of the variance of that channel.
        times: that as a multiple of the median head's.
        remedy: the setting that mends it.
    """

    layer: int
    head: int
    loss: float
    times: float
    remedy: str

    @property
    def sentence(self) -> str:
        """What is wrong, and what to do."""
        return (
            f"the keys of KV head {self.head} in layer {self.layer} lose {self.times:,.0f} times as much as those of "
            f"the median head, because a few channels are much larger than the others: {self.remedy}"
        )


def attended_states(model: Any, ids: Tensor) -> list[KVPair | None]:
    """Keys and values of a text in full precision, of each layer; `None` for a layer that holds none.

    Args:
        model: in eval mode.
        ids: token ids, int64 `[1, tokens]`.
    """
    cache = DynamicCache(config=model.config)
    newest_logits(model, ids.to(model.device), cache, 1)
    return [_states_of(layer.parts[0]) for layer in cache.adapted_layers()]


def _states_of(layer: LayerOperations) -> KVPair | None:
    if not isinstance(layer, TokenLayer) or layer.keys is None or layer.values is None:
        return None
    return as_dense(layer.keys), as_dense(layer.values)


def uneven_head(cache: Any, states: Sequence[KVPair | None]) -> UnevenHead | None:
    """The head whose keys lose most in the quantized layers of a cache, `None` if it is not far above the others.

    Args:
        cache: an empty cache. Its layers take in the states.
        states: keys and values of each layer, from `attended_states`.
    """
    losses: dict[tuple[int, int], float] = {}
    quantization: dict[int, Quantization] = {}
    for index, (adapted, pair) in enumerate(zip(cache.adapted_layers(), states, strict=False)):
        layer = adapted.parts[0].unwrapped
        if not isinstance(layer, QuantizedLayer) or pair is None:
            continue
        layer.update(*pair)
        quantization[index] = layer.quantization
        found = _losses(pair[0], None if layer.keys is None else as_dense(layer.keys))
        losses |= {(index, head): loss for head, loss in enumerate(found)}
    if not losses:
        return None
    (index, head), loss = max(losses.items(), key=lambda item: item[1])
    median = float(torch.tensor([*losses.values()]).median())
    if loss < LARGEST_LOSS or loss < TIMES_OTHERS * median:
        return None
    return UnevenHead(index, head, loss, loss / max(median, 1e-9), _remedy(quantization[index]))


def _losses(exact: Tensor, seen: Tensor | None) -> list[float]:
    """Of each head: the noise in the median channel, relative to its variance, over the tokens that were rounded."""
    if seen is None or seen.shape != exact.shape:
        return []
    noise = (seen.float() - exact.float()).square()
    rounded = (noise > 0).any(-1, keepdim=True)
    tokens = rounded.sum(2).clamp(min=1)
    variance = exact.float().var(2).clamp(min=torch.finfo(torch.float32).tiny)
    relative: Tensor = ((noise * rounded).sum(2) / tokens / variance).median(-1).values.amax(0)
    return relative.tolist()


def _remedy(quantization: Quantization) -> str:
    if quantization.backend != "native":
        return "pass backend='native', which makes keys even before it packs them"
    if quantization.keys.nbits < MOST_BITS:
        return f"pass key_nbits={MOST_BITS}"
    return "keep this model's cache in full precision"
