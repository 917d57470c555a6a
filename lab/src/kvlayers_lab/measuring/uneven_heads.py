"""Finds the head whose keys lose far more in packing than those of other heads, and says what mends it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlayers import Cache, DynamicCache, Quantization, QuantizedLayer
from kvlayers.layers import as_dense
from kvlayers_lab.measuring.scoring import newest_logits

LOSS_WARNED_OF = 0.1
"""Part of a typical channel's variance that rounding adds as noise, from which on a head is lost."""

TIMES_OTHERS = 8.0
"""How many times the loss of the median head that is, at least. Few bits alone make the loss of all heads large."""

BITS_OF_REMEDY = 8
"""Bits of keys that are advised if another backend does not help."""

HeldStates = tuple[Tensor | None, Tensor | None]
"""Keys and values of a layer, `None` if it holds none."""


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


def uneven_heads(
    model: Any, ids: Tensor, chunk: int, caches: Mapping[str, Callable[[], Any]]
) -> dict[str, UnevenHead | None]:
    """The `uneven_head` of each cache with quantized layers, by the name of the cache.

    Args:
        model: in eval mode.
        ids: token ids of a text, int64 `[1, tokens]`.
        chunk: tokens of a forward pass.
        caches: makers of empty caches.
    """
    states: list[HeldStates] | None = None
    found: dict[str, UnevenHead | None] = {}
    for name, make in caches.items():
        cache = make()
        if isinstance(cache, Cache) and _quantized_layers(cache):
            states = attended_states(model, ids, chunk) if states is None else states
            found[name] = uneven_head(cache, states)
    return found


def _quantized_layers(cache: Cache) -> dict[int, QuantizedLayer]:
    """The quantized layers, by their indices."""
    parts = ((index, layer.parts[0].unwrapped) for index, layer in enumerate(cache.adapted_layers()))
    return {index: layer for index, layer in parts if isinstance(layer, QuantizedLayer)}


def attended_states(model: Any, ids: Tensor, chunk: int) -> list[HeldStates]:
    """Keys and values of a text in full precision, of each layer.

    Args:
        model: in eval mode.
        ids: token ids, int64 `[1, tokens]`.
        chunk: tokens of a forward pass.
    """
    cache = DynamicCache(config=model.config)
    for some in torch.split(ids.to(model.device), chunk, 1):
        newest_logits(model, some, cache, 1)
    return [layer.parts[0].peek() for layer in cache.adapted_layers()]


def uneven_head(cache: Cache, states: Sequence[HeldStates]) -> UnevenHead | None:
    """The head whose keys lose most in the quantized layers of a cache, `None` if it is not far above the others.

    Args:
        cache: an empty cache. Its layers take in the states.
        states: keys and values of each layer, from `attended_states`.
    """
    losses: dict[tuple[int, int], float] = {}
    layers = _quantized_layers(cache)
    for index, layer in layers.items():
        keys, values = states[index]
        if keys is not None and values is not None:
            layer.update(keys, values)
            found = _losses(keys, None if layer.keys is None else as_dense(layer.keys))
            losses |= {(index, head): loss for head, loss in enumerate(found)}
    if not losses:
        return None
    (index, head), loss = max(losses.items(), key=lambda item: item[1])
    median = float(torch.tensor([*losses.values()]).median())
    if loss < LOSS_WARNED_OF or loss < TIMES_OTHERS * median:
        return None
    return UnevenHead(index, head, loss, loss / max(median, 1e-9), _remedy(layers[index].quantization))


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
    """The setting that mends it: a scale of its own for each channel, or more bits."""
    if quantization.backend != "kivi":
        return "pass backend='kivi', which has a scale for each channel, or compare 'native'"
    if quantization.keys.nbits < BITS_OF_REMEDY:
        return f"pass backend='native' and key_nbits={BITS_OF_REMEDY}"
    return "keep this model's cache in full precision"
