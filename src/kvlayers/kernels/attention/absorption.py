"""Attention over latents: the projection to keys and values is absorbed into the query and into the result.

The score of a head is `q · (W_k c) + q_rot · k_rot`, with the latent `c` and the rotated key of a token, which is
`(W_kᵀ q) · c + q_rot · k_rot`. The result is `W_v` times the weighted sum of the latents. So all heads read the same
latents, as the query heads of one KV head (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.2).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from kvlayers.kernels.attention import dispatch
from kvlayers.kernels.attention.packed_tensor import Snapshot
from kvlayers.kernels.attention.segment_kinds import DenseSegment
from kvlayers.kernels.attention.segments import KVSegments
from kvlayers.utils.transforms import without_autocast

CPU_MINIMUM_ROWS = 32
"""Queries of all heads from which torch's attention on dense latents beats the kernel on segments, on a CPU."""

COPY = "a copy of latents"
EXPANDED = "latents expanded to the keys and values of all heads"


@dataclass(eq=False)
class Projection:
    """Latents of a cache, and the weight that expands them, which is done once if something reads the product.

    Attributes:
        snapshot: the tokens. Their keys are the latents, their values the rotated keys that all heads share.
        weight: `[heads * head_channels, latent_dim]`.
        outline: the product on the meta device, `[batch, 1, tokens, heads * head_channels]`.
        product: the product; `None` until something reads it.
    """

    snapshot: Snapshot
    weight: Tensor
    outline: Tensor
    product: Tensor | None = None

    def read(self) -> Tensor:
        """What transformers computes, which is the same tensor at every call."""
        if self.product is None:
            self.snapshot.paths.counts[EXPANDED] += 1
            latents = self.snapshot.read().dense("keys", self.snapshot.dtype)
            self.product = linear(latents, self.weight)
        return self.product


class HeadWeights(NamedTuple):
    """A part of the projection: the channels of each head that are a key, or a value.

    Attributes:
        projection: the whole.
        weight: a view of its weight, `[heads, channels, latent_dim]`.
    """

    projection: Projection
    weight: Tensor


def _product(states: Tensor, weight: Tensor) -> Tensor:
    """Few rows of each head, `[batch, heads, queries, any]`, by its weight.

    On a CPU in float32: torch multiplies few rows in half precision slowly.
    """
    if states.device.type != "cpu":
        return torch.matmul(states, weight)
    return torch.matmul(states.float(), weight.float()).to(states.dtype)


def pays(queries: int, *parts: HeadWeights) -> bool:
    """Whether a product of attention with each of some parts takes fewer multiplications than expanding latents first.

    Args:
        queries: queries of each head.
        *parts: the channels that are keys, or values.
    """
    latent_dim, channels = parts[0].weight.shape[2], sum(part.weight.shape[1] for part in parts)
    return queries * latent_dim * len(parts) < (latent_dim + queries) * channels


def attend(
    query: Tensor, keys: HeadWeights, values: HeadWeights, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Softmax attention of all heads to the latents.

    Args:
        query: `[batch, heads, queries, key_channels + rotated_channels]`.
        keys: the channels that are keys.
        values: the channels that are values.
        mask: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`.
        is_causal: whether a query attends to the tokens up to its own number alone.
        scale: factor of the scores, `1 / sqrt(head_dim)` of the query if `None`.

    Returns:
        `[batch, heads, queries, value_channels]` in the dtype of the query.
    """
    batch, heads, queries, head_dim = query.shape
    snapshot = keys.projection.snapshot
    on_cpu = query.device.type == "cpu"
    scale = head_dim**-0.5 if scale is None else float(scale)
    with without_autocast(query.device):
        segments = snapshot.read()
        if not segments.are_dense:
            snapshot.paths.counts[COPY] += 1
            # Each segment of its own: the kernel for CPUs reads them where they are.
            segments = (
                segments.in_full_precision(query.dtype)[0]
                if on_cpu
                else KVSegments(
                    (DenseSegment(segments.dense("keys", query.dtype), segments.dense("values", query.dtype)),)
                )
            )
        own, rotated = torch.tensor_split(query, [keys.weight.shape[1]], dim=3)
        # The scores of the rotated keys are added as a mask is.
        added = _rotated_scores(rotated, segments) * scale
        if is_causal:
            mask = torch.ones(queries, segments.tokens, dtype=torch.bool, device=query.device).tril()
        if mask is not None:
            added = added.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else added + mask
        absorbed, only = _product(own, keys.weight), segments.only_dense
        if only is None or (heads * queries < CPU_MINIMUM_ROWS and on_cpu):
            dense = (segment for segment in segments.in_order if isinstance(segment, DenseSegment))
            latents = KVSegments(tuple(DenseSegment(segment.keys, segment.keys, segment.rows) for segment in dense))
            attended = dispatch.attend(absorbed, latents, added, scale, snapshot.paths)
        else:
            rows = absorbed.reshape(batch, 1, heads * queries, -1)
            of_rows = added.reshape(batch, 1, heads * queries, -1).to(query.dtype)
            by = scaled_dot_product_attention if on_cpu else by_products
            attended = by(rows, only.keys, only.keys, of_rows, scale=scale).reshape(absorbed.shape)
        return _product(attended, values.weight.mT)


def by_products(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Attention as two products, with an additive mask. All arguments are `[batch, 1, ...]`.

    The rows are those of one KV head, which torch's fused kernels would give to one multiprocessor of a GPU.
    """
    scores = torch.matmul(query * scale, keys.transpose(2, 3)).float() + mask
    # As in torch, a query that may attend to no token gets zeros.
    weights = torch.softmax(scores, dim=3).masked_fill((scores == -torch.inf).all(3, keepdim=True), 0.0)
    return torch.matmul(weights.to(query.dtype), values)


def scores(query: Tensor, keys: HeadWeights) -> Tensor:
    """The product of queries and all keys, `[batch, heads, queries, tokens]` in the dtype of the query."""
    batch, heads, queries, _ = query.shape
    snapshot = keys.projection.snapshot
    with without_autocast(query.device):
        own, rotated = torch.tensor_split(query, [keys.weight.shape[1]], dim=3)
        segments = snapshot.read()
        snapshot.paths.counts[COPY] += 1
        latents = segments.dense("keys", snapshot.dtype)[:, 0].float()
        rows = _product(own, keys.weight).float().reshape(batch, heads * queries, -1)
        products = torch.matmul(rows, latents.transpose(1, 2)).view(batch, heads, queries, -1)
        return (products + _rotated_scores(rotated, segments)).to(query.dtype)


def combine(weights: Tensor, values: HeadWeights) -> Tensor:
    """The sums of all values, weighted by `[batch, heads, queries, tokens]`: `[batch, heads, queries, channels]`."""
    batch, heads, queries, tokens = weights.shape
    snapshot = values.projection.snapshot
    with without_autocast(weights.device):
        snapshot.paths.counts[COPY] += 1
        latents = snapshot.read().dense("keys", snapshot.dtype)[:, 0].float()
        sums = torch.matmul(weights.float().reshape(batch, heads * queries, tokens), latents)
        return _product(sums.view(batch, heads, queries, -1).to(weights.dtype), values.weight.mT)


def _rotated_scores(query: Tensor, segments: KVSegments) -> Tensor:
    """The product of queries and the rotated keys, float32 `[batch, heads, queries, tokens]`."""
    batch, heads, queries, channels = query.shape
    # In float32, because torch multiplies few rows in half precision slowly on CPUs, and rounds the sums.
    rotated = segments.dense("values", query.dtype)[:, 0].float()
    rows = query.float().reshape(batch, heads * queries, channels)
    return torch.matmul(rows, rotated.transpose(1, 2)).view(batch, heads, queries, -1)
