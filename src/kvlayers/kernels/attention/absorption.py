"""Attention over latents: the projection to keys and values is absorbed into the query and into the result.

The score of a head is `q · (W_k c) + q_rot · k_rot`, with the latent `c` and the rotated key of a token, which is
`(W_kᵀ q) · c + q_rot · k_rot`. The result is `W_v` times the weighted sum of the latents. So all heads read the same
latents, as the query heads of one KV head (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.2).
"""

from dataclasses import dataclass

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

    @property
    def device(self) -> torch.device:
        """Device of the product."""
        return self.weight.device

    def read(self) -> Tensor:
        """What transformers computes, which is the same tensor at every call."""
        if self.product is None:
            self.snapshot.paths.record(EXPANDED)
            latents = self.snapshot.read().dense("keys", self.snapshot.dtype)
            self.product = linear(latents, self.weight)
        return self.product


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """A part of the projection: the channels of each head that are a key, or a value.

    Attributes:
        projection: the whole.
        heads: how many heads there are.
        first: first channel of the part, among those of a head.
        stop: the channel behind it.
    """

    projection: Projection
    heads: int
    first: int
    stop: int

    @property
    def weight(self) -> Tensor:
        """A view of the weight, `[heads, channels, latent_dim]`."""
        whole = self.projection.weight
        return whole.view(self.heads, -1, whole.shape[1])[:, self.first : self.stop]

    def to_latents(self, states: Tensor) -> Tensor:
        """Multiply `[batch, heads, queries, channels]` by the weight: `[batch, heads, queries, latent_dim]`."""
        return _product(states, self.weight)

    def from_latents(self, latents: Tensor) -> Tensor:
        """Multiply `[batch, heads, queries, latent_dim]` by the weight: `[batch, heads, queries, channels]`."""
        return _product(latents, self.weight.transpose(1, 2))


def _product(states: Tensor, weight: Tensor) -> Tensor:
    """Few rows of each head by its weight. On a CPU in float32: torch multiplies few rows in half precision slowly."""
    if states.device.type != "cpu":
        return torch.matmul(states, weight)
    return torch.matmul(states.float(), weight.float()).to(states.dtype)


def pays(queries: int, keys: HeadWeights, values: HeadWeights, rotated_channels: int) -> bool:
    """Whether attention by absorption takes fewer multiplications than expanding the latents first.

    Args:
        queries: queries of each head.
        keys: the channels that are keys.
        values: the channels that are values.
        rotated_channels: channels of the rotated key.
    """
    latent_dim = keys.projection.weight.shape[1]
    channels = keys.stop - keys.first + values.stop - values.first
    return queries * (2 * latent_dim + rotated_channels) < latent_dim * channels + queries * (
        channels + rotated_channels
    )


def pays_in_product(queries: int, part: HeadWeights) -> bool:
    """As `pays`, for one product of eager attention with keys alone, or with values."""
    latent_dim, channels = part.projection.weight.shape[1], part.stop - part.first
    return queries * latent_dim < (latent_dim + queries) * channels


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
            snapshot.paths.record(COPY)
            # Each segment of its own: the kernel for CPUs reads them where they are.
            segments = segments.in_full_precision(query.dtype)[0] if on_cpu else _in_one(segments, query.dtype)
        own, rotated = _parts(query, keys)
        # The scores of the rotated keys are added as a mask is.
        added = _rotated_scores(rotated, segments) * scale
        if is_causal:
            mask = torch.ones(queries, segments.tokens, dtype=torch.bool, device=query.device).tril()
        if mask is not None:
            added = added.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else added + mask
        absorbed, only = keys.to_latents(own), segments.only_dense
        if only is None or (heads * queries < CPU_MINIMUM_ROWS and on_cpu):
            return values.from_latents(dispatch.attend(absorbed, _latents(segments), added, scale, snapshot.paths))
        rows = absorbed.reshape(batch, 1, heads * queries, -1)
        by = scaled_dot_product_attention if on_cpu else by_products
        of_rows = added.reshape(batch, 1, heads * queries, -1).to(query.dtype)
        attended = by(rows, only.keys, only.keys, of_rows, scale=scale)
        return values.from_latents(attended.reshape(absorbed.shape))


def _in_one(segments: KVSegments, dtype: torch.dtype) -> KVSegments:
    """A copy of all tokens in full precision, as one segment."""
    return KVSegments((DenseSegment(segments.dense("keys", dtype), segments.dense("values", dtype)),))


def by_products(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Attention as two products, with an additive mask. All arguments are `[batch, 1, ...]`.

    The rows are those of one KV head, which torch's fused kernels would give to one multiprocessor of a GPU.
    """
    scores = torch.matmul(query * scale, keys.transpose(2, 3)).float() + mask
    # As in torch, a query that may attend to no token gets zeros.
    weights = torch.softmax(scores, dim=3).masked_fill((scores == -torch.inf).all(3, keepdim=True), 0.0)
    return torch.matmul(weights.to(query.dtype), values)


def _latents(segments: KVSegments) -> KVSegments:
    """The latents of dense segments, as keys and as values."""
    dense = (segment for segment in segments.in_order if isinstance(segment, DenseSegment))
    return KVSegments(tuple(DenseSegment(segment.keys, segment.keys, segment.rows) for segment in dense))


def _parts(query: Tensor, keys: HeadWeights) -> tuple[Tensor, Tensor]:
    """The channels of a query for the keys, and for the rotated keys."""
    channels = keys.stop - keys.first
    return query[..., :channels], query[..., channels:]


def scores(query: Tensor, keys: HeadWeights) -> Tensor:
    """The product of queries and all keys, `[batch, heads, queries, tokens]` in the dtype of the query."""
    batch, heads, queries, _ = query.shape
    snapshot = keys.projection.snapshot
    with without_autocast(query.device):
        own, rotated = _parts(query, keys)
        segments = snapshot.read()
        snapshot.paths.record(COPY)
        latents = segments.dense("keys", snapshot.dtype)[:, 0].float()
        rows = keys.to_latents(own).float().reshape(batch, heads * queries, -1)
        products = torch.matmul(rows, latents.transpose(1, 2)).view(batch, heads, queries, -1)
        return (products + _rotated_scores(rotated, segments)).to(query.dtype)


def combine(weights: Tensor, values: HeadWeights) -> Tensor:
    """The sums of all values, weighted by `[batch, heads, queries, tokens]`: `[batch, heads, queries, channels]`."""
    batch, heads, queries, tokens = weights.shape
    snapshot = values.projection.snapshot
    with without_autocast(weights.device):
        snapshot.paths.record(COPY)
        latents = snapshot.read().dense("keys", snapshot.dtype)[:, 0].float()
        sums = torch.matmul(weights.float().reshape(batch, heads * queries, tokens), latents)
        return values.from_latents(sums.view(batch, heads, queries, -1).to(weights.dtype))


def _rotated_scores(query: Tensor, segments: KVSegments) -> Tensor:
    """The product of queries and the rotated keys, float32 `[batch, heads, queries, tokens]`."""
    batch, heads, queries, channels = query.shape
    # In float32, because torch multiplies few rows in half precision slowly on CPUs, and rounds the sums.
    rotated = segments.dense("values", query.dtype)[:, 0].float()
    rows = query.float().reshape(batch, heads * queries, channels)
    return torch.matmul(rows, rotated.transpose(1, 2)).view(batch, heads, queries, -1)
