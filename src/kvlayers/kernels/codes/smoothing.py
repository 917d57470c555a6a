"""Keys are smoothed before they are packed, by two vectors for each KV head that change no attention.

Some models have channels of keys that are much larger than the others. A constant in a channel takes most codes of its
group. A rotation spreads a channel that varies over all others. Two vectors mend that:

- A mean is subtracted from all packed keys of a head. It lowers all their scores by the product of the query and the
  mean, which is added again, as in SageAttention (Zhang et al. 2024, https://arxiv.org/abs/2410.02367).
- Each channel is divided by a factor. The query is multiplied by it, as in QServe's SmoothAttention (Lin et al. 2024,
  https://arxiv.org/abs/2405.04532).

Both are found in the first block that is packed. They must not cost where that block is unusual. Its statistics are
those of most of its tokens, which a few large ones do not move. Other blocks are asked too, when they are packed: a
factor that one of them finds much too large becomes the least that any asks for, and the mean of a channel that costs
one of them is left out. What is packed already keeps its vectors, so a store holds runs of blocks, each with vectors of
its own. Blocks that agree change nothing, so that how a prompt is cut into chunks does not change its vectors then.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.kernels.codes import cpu_packing
from kvlayers.kernels.codes.quantizer_contract import Quantizer

LARGEST_ERROR = 0.44
"""Of the error without factors, the most that may be left with them for queries whose channels are alike.

A head that would gain less gets none. Packing has not seen a query, and no factors serve all queries: what they take
from the errors of some channels they add to those of others. The error of real queries is this one times their
alignment: the mean of the squared factors, weighted by the squares of the queries, relative to their mean without
weights. Of all heads of SmolLM2 and Gemma 3, it is at most 2.5, so this is 1.1 divided by 2.5.
"""

LARGEST_VARIANCE = 8.0
"""The variance that a channel may have at most, relative to the median, after its square root has been taken out.

Square roots leave the least error for queries whose channels are alike (by Cauchy and Schwarz).
"""

LARGE_MEAN = 1.0
"""How many times the variance of the keys the square of their mean must be, for codes without a zero of a rotation.

Measured with turboquant on SmolLM2: the divergence of ten passages is 0.8 of that without means.
"""

LARGEST_FACTOR = 512.0
"""The largest factor of a channel: queries below 128 times it stay within float16."""

PIECES = 8
"""Parts of a block whose statistics are compared. The middle ones are taken, so three tokens may be of any size."""

SORTING_EIGHT = (
    *((0, 1), (2, 3), (4, 5), (6, 7), (0, 2), (1, 3), (4, 6), (5, 7), (1, 2), (5, 6)),
    *((0, 4), (1, 5), (2, 6), (3, 7), (2, 4), (3, 5), (3, 4)),
)
"""Pairs of a network (Batcher 1968, odd-even merge) that brings the middle two of eight numbers to their places.

`sort` of so few numbers at so many places takes ten times as long.
"""

LEAST_TOKENS = 32
"""A block of fewer tokens is one piece: variances of fewer than four tokens say little."""

LARGEST_EXACT = 1e8
"""Times the largest key of most pieces that the keys of a token that counts may be: no square of squares overflows."""

SILENT = 1e-3
"""Of the largest spread of a block, the spread below which a block of zeros or of equal padding is not asked."""

LARGEST_EXCESS = 2.0
"""Times the factor that a block finds for itself that a factor may be.

The factors of blocks with the same distribution differ by less. A channel with twice its factor has four times its
error, which is a twentieth more for all of 64 channels.
"""

LEAST_MEAN = 1 / 32
"""Of the variance of a channel, the least square of a mean that is subtracted.

The mean of a block is not that of the sequence if the channel turns with positions. It then moves the largest keys
outwards, by which codes without a zero are scaled: by this much they lose no more than a tenth.
"""

LARGEST_VARIATION = 0.25
"""The largest variance of the squared radius of a pair of channels that turns, relative to the square of its mean.

It is 1 for random numbers. In blocks of 32 of them or more, it is as little as this in less than one pair of a million.
"""

LARGEST_LOSS = 1.1
"""Times the mean square of a block without a mean that it may have with one. Errors of codes grow with it."""

LARGEST_TURN = 1 / 16
"""Of the square of a channel's mean in a block that loses, the square of the difference up to which a mean is kept.

Constants turn with positions, each pair of channels at its own speed. Where one has turned so far that a block loses,
others follow soon, of all heads. What turned less than a quarter of a radian holds several times as long. So as
sequences grow, runs become rare.
"""

BLOCKS_ASKED = 16
"""Blocks of a prompt that are asked, spread over it: their statistics take memory as one call of a quantizer does."""

MOST_RUNS = 8
"""Runs of blocks with vectors of their own that a sequence has at most. The last of these is not smoothed.

Attention reads each run apart. A sequence whose blocks disagree so often has no vectors that hold.
"""

VECTOR_NAMES = ("smoothing_factor", "smoothing_mean")
"""Names of the vectors in the state of a store."""

STARTS_NAME = "smoothing_starts"
"""Name of the first block of each run in the state of a store."""

NAMES = (*VECTOR_NAMES, STARTS_NAME)


@dataclass(frozen=True, eq=False)
class KeySmoothing:
    """How the packed keys of each sequence and KV head were smoothed: `packed = (key - mean) / factor`.

    Attributes:
        factor: `[batch, kv_heads, 1, head_dim]` in the dtype of the keys, at least 1; `None` without factors.
        mean: likewise, `None` without a mean.
    """

    factor: Tensor | None = None
    mean: Tensor | None = None

    @classmethod
    def for_keys(cls, keys: Tensor, quantizer: Quantizer) -> "KeySmoothing":
        """What suits the first block of keys and their quantizer, and costs no other one of them.

        Tokens that are not finite do not count.

        Args:
            keys: of blocks, `[batch, kv_heads, blocks, tokens, head_dim]`.
            quantizer: the quantizer of the keys.
        """
        factors, means = vectors_for(quantizer)
        if not keys.numel() or not (factors or means):
            return cls()
        if keys.is_meta:
            # A plan asks for bytes alone.
            shape = (*keys.shape[:2], 1, keys.shape[4])
            return cls(*(keys.new_empty(shape) if wanted else None for wanted in (factors, means)))
        found = _Blocks(keys, quantizer)
        # The first block that is asked.
        first = (found.asked.cumsum(2) == 0).sum(2, keepdim=True).expand(-1, -1, -1, keys.shape[4])
        mean, variance = found.mean, found.variance
        factor = None
        if factors:
            channels, error = found.factors
            factor = torch.where(error <= LARGEST_ERROR, channels, 1.0).gather(2, first)
        subtracted = None
        if means:
            is_large = mean.square() >= LEAST_MEAN * variance
            if found.spreads:
                is_large &= mean.square().sum(-1, keepdim=True) >= LARGE_MEAN * variance.sum(-1, keepdim=True)
            subtracted = torch.where(is_large, mean * found.unit, 0.0).gather(2, first)
        return found.lowered(cls(factor, subtracted)).mapped(lambda vectors: vectors.to(keys.dtype))

    def for_more_keys(self, keys: Tensor, quantizer: Quantizer) -> "KeySmoothing":
        """What costs no block of keys that are packed later: itself if it does not.

        The host waits for an accelerator to know that, as it decides whether attention reads one more run.

        Args:
            keys: as of `for_keys`.
            quantizer: likewise.
        """
        if keys.is_meta or not self.state():
            return self
        found = _Blocks(keys, quantizer).lowered(self).mapped(lambda vectors: vectors.to(keys.dtype))
        return self if found.is_same(self) else found

    def emptied(self) -> Self:
        """Vectors of the same form that change nothing."""
        return self.__class__(
            None if self.factor is None else torch.ones_like(self.factor),
            None if self.mean is None else torch.zeros_like(self.mean),
        )

    @classmethod
    def of_state(cls, tensors: dict[str, Tensor]) -> Self:
        """The one in the state of a store, which has been checked. Older states have no vectors."""
        return cls(*(tensors.get(name) for name in VECTOR_NAMES))

    def state(self) -> dict[str, Tensor]:
        """The vectors by their names."""
        pairs = zip(VECTOR_NAMES, (self.factor, self.mean), strict=True)
        return {name: vector for name, vector in pairs if vector is not None}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """One with changed vectors."""
        return self.__class__(*(None if vector is None else change(vector) for vector in (self.factor, self.mean)))

    def applied(self, keys: Tensor) -> Tensor:
        """Keys `[batch, kv_heads, tokens, head_dim]` as they are packed, in their dtype.

        A number that is not finite stays so.
        """
        if self.mean is None:
            return keys if self.factor is None else (keys.float() / self.factor.float()).to(keys.dtype)
        exact, most = keys.float(), torch.finfo(keys.dtype).max
        smooth = exact - self.mean.float()
        if self.factor is not None:
            smooth = smooth / self.factor.float()
        # The difference of two finite keys must not become infinite, nor an infinite one finite.
        return (smooth.clamp(-most, most) + exact * 0).to(keys.dtype)

    def restored(self, keys: Tensor) -> Tensor:
        """Inverse of `applied`."""
        if self.factor is not None:
            keys = keys * self.factor.to(keys.dtype)
        return keys if self.mean is None else keys + self.mean.to(keys.dtype)

    def queries(self, query: Tensor) -> Tensor:
        """Queries `[batch, heads, queries, head_dim]`, for products with keys as they are packed."""
        if self.factor is None:
            return query
        return (_by_kv_head(query, self.factor) * self.factor.unsqueeze(2).to(query.dtype)).flatten(1, 2)

    def offsets(self, query: Tensor) -> Tensor | None:
        """What is added to products with packed keys for their mean, float32 `[batch, heads, queries, 1]`.

        `None` without a mean.
        """
        if self.mean is None:
            return None
        products = _by_kv_head(query, self.mean).float() * self.mean.unsqueeze(2).float()
        return products.sum(-1, keepdim=True).flatten(1, 2)

    def is_same(self, other: Self) -> bool:
        """Whether it is the same as another one, of as many sequences."""
        mine, others = self.state(), other.state()
        return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


UNSMOOTHED = KeySmoothing()
"""Of keys that were packed as they are, or not packed."""


def _by_kv_head(query: Tensor, vectors: Tensor) -> Tensor:
    """Queries `[batch, kv_heads, heads of a group, queries, head_dim]`."""
    return torch.unflatten(query, 1, (vectors.shape[1], -1))


def vectors_for(quantizer: Quantizer) -> tuple[bool, bool]:
    """Whether the keys of a quantizer are smoothed by factors, and by a mean.

    Factors are for channels that share a scale, at once or by a rotation. A mean is for codes that cannot take out a
    constant, as a zero of each channel does.
    """
    code_format = quantizer.format
    shares_scales = code_format.group_channels > 1
    return (
        quantizer.smooths_keys and (code_format.rotated or shares_scales),
        quantizer.smooths_keys and (shares_scales or not code_format.has_zero),
    )


class _Blocks:
    """What blocks of keys say of vectors.

    Args:
        keys: `[batch, kv_heads, blocks, tokens, head_dim]`.
        quantizer: the quantizer of the keys.

    Attributes:
        spreads: whether all channels of a token share a scale by a rotation, which spreads what is large among them.
        unit: of the others, since squares of the largest keys would overflow; `[batch, kv_heads, blocks, 1]`, float32.
        mean: of channels, `[batch, kv_heads, blocks, head_dim]`, float32.
        variance: likewise.
        middle: its median over the channels, `[batch, kv_heads, blocks, 1]`.
        asked: which blocks are asked, bool `[batch, kv_heads, blocks, 1]`.
    """

    def __init__(self, keys: Tensor, quantizer: Quantizer) -> None:
        self.spreads = quantizer.format.rotated and not quantizer.format.has_zero
        pieces = PIECES if keys.shape[3] >= LEAST_TOKENS else 1
        self.unit, self.mean, self.variance, self._around_circles = cpu_packing.describe_keys(
            keys, pieces, LARGEST_EXACT, LARGEST_VARIATION
        ) or _described(keys, pieces, has_factors=vectors_for(quantizer)[0])
        self.middle = self.variance.median(-1, keepdim=True).values
        spread = self.middle.sqrt() * self.unit
        self.asked = spread >= SILENT * spread.amax(2, keepdim=True)

    @functools.cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        """Factors of channels `[batch, kv_heads, blocks, head_dim]`, and what they leave of the error `[..., 1]`.

        Nothing says that the queries of a constant that turns are small, and attention goes by them. So a constant
        takes no part in what factors gain, and its factor takes out no more than the factors of the others do.
        """
        tiny, varies = torch.finfo(torch.float32).tiny, self._around_circles
        relative = (torch.stack([varies, self.variance]) / self.middle.clamp(min=tiny)).clamp(1.0, LARGEST_FACTOR**4)
        # Factors divide deviations, so the square of a factor divides a variance.
        squares, of_all = torch.maximum(relative.sqrt(), relative / LARGEST_VARIANCE).clamp(max=LARGEST_FACTOR**2)
        gain = (varies.sum(-1, keepdim=True) / (varies / squares).sum(-1, keepdim=True).clamp(min=tiny)).clamp(min=1.0)
        return torch.maximum(squares, torch.minimum(of_all, gain)).sqrt(), squares.mean(-1, keepdim=True) / gain

    def lowered(self, smoothing: KeySmoothing) -> KeySmoothing:
        """A smoothing without what costs a block, in float32."""
        factor, mean = smoothing.factor, smoothing.mean
        # Zeros that are packed alone lose nothing by any factor.
        asked = self.asked & (self.variance.amax(-1, keepdim=True) > 0)
        if factor is not None:
            # However uneven a block is: channels at the threshold are below it in some.
            least = torch.where(asked, self.factors[0], torch.inf).amin(2, keepdim=True)
            factor = torch.where(factor.float() > LARGEST_EXCESS * least, least, factor.float())
        if mean is not None:
            before, turn = self.mean.square(), (self.mean - mean.float() / self.unit).square()
            loses = self._loses(before + self.variance, turn + self.variance, factor)
            loses = (asked & loses).any(1, keepdim=True)
            costs = (asked & loses & (turn > LARGEST_TURN * before)).any(2, keepdim=True)
            mean = torch.where(costs, 0.0, mean.float())
        return KeySmoothing(factor, mean)

    @staticmethod
    def _loses(before: Tensor, after: Tensor, factor: Tensor | None) -> Tensor:
        """Which blocks lose by a mean, bool `[batch, kv_heads, blocks, 1]`.

        Args:
            before: mean squares of channels without it, `[batch, kv_heads, blocks, head_dim]`.
            after: likewise, with it.
            factor: the factors of channels that share scales; `None` if each channel has its own.
        """
        if factor is None:
            shares = after / before.clamp(min=torch.finfo(torch.float32).tiny)
            return (shares.mean(-1, keepdim=True) > LARGEST_LOSS) | (
                after.sum(-1, keepdim=True) > LARGEST_LOSS * before.sum(-1, keepdim=True)
            )
        squares = factor.square()
        return (after / squares).sum(-1, keepdim=True) > LARGEST_LOSS * (before / squares).sum(-1, keepdim=True)


def _described(keys: Tensor, pieces: int, has_factors: bool) -> tuple[Tensor, ...]:
    """Unit, means, variances, and variances around circles, of the channels of blocks; see `_Blocks`.

    Means and variances are medians over pieces of a block. Pieces take turns, token by token, so that each has the
    drift of the whole block. Tokens that are not finite, or far larger than those of most pieces, do not count.

    Args:
        keys: `[batch, kv_heads, blocks, tokens, head_dim]`.
        pieces: of a block.
        has_factors: whether variances around circles are asked for, which take half of the time.
    """
    # A copy that is changed in place: every layer of a prompt waits for this.
    exact = keys[:, :, :, : keys.shape[3] // pieces * pieces].to(torch.float32, copy=True)
    largest = exact.abs().amax(4)
    of_pieces = torch.unflatten(torch.where(largest.isfinite(), largest, 0.0), 3, (-1, pieces)).amax(3)
    unit = _middle(of_pieces.unsqueeze(4)).clamp(min=torch.finfo(torch.float32).tiny)
    counts = (largest / unit <= LARGEST_EXACT).unsqueeze(4)
    exact.div_(unit.unsqueeze(4)).nan_to_num_(0.0, 0.0, 0.0).mul_(counts)
    of_piece, which = (torch.unflatten(side, 3, (-1, pieces)) for side in (exact, counts))
    tokens = which.sum(3).clamp(min=1)
    mean = of_piece.sum(3) / tokens
    squares = (of_piece - mean.unsqueeze(3)).square_().mul_(which)
    mean, variance = _middle(mean), _middle(squares.sum(3) / tokens)
    # In place: nothing else reads them.
    around = (
        _around_circles(exact.sub_(mean.unsqueeze(3)).square_().mul_(counts), variance) if has_factors else variance
    )
    return unit, mean, variance, around


def _around_circles(squares: Tensor, variance: Tensor) -> Tensor:
    """Variances of channels, without constants that positions turn, such as a bias in a fast rotary pair.

    Around their mean, the two channels of such a pair go in a circle, and what varies is its radius. Of random
    numbers the squared radius would vary as much as it is large. Pairs are neighbours or half a head apart. Other
    pairs are not found.

    Args:
        squares: of the deviations from the mean, `[batch, kv_heads, blocks, tokens, head_dim]`.
        variance: of channels, `[batch, kv_heads, blocks, head_dim]`.

    Returns:
        as `variance`.
    """
    found, head_dim = variance, variance.shape[3]
    for inner in (head_dim // 2, 1) if head_dim % 2 == 0 else ():
        first, second = torch.unflatten(squares, 4, (-1, 2, inner)).unbind(5)
        radius = first + second
        mean = radius.mean(3)
        turns = radius.square().mean(3) < (1 + LARGEST_VARIATION) * mean.square()
        of_radius = (mean - radius.sqrt_().mean(3).square()).clamp(min=0.0)
        of_pair = torch.where(turns, of_radius, torch.inf)
        found = torch.minimum(found, of_pair.unsqueeze(4).expand(*of_pair.shape[:4], 2, inner).flatten(3))
    return found


def _middle(of_pieces: Tensor) -> Tensor:
    """The median over 1 piece or `PIECES`, `[batch, kv_heads, blocks, pieces, any]`."""
    pieces = list(of_pieces.unbind(3))
    for first, second in SORTING_EIGHT if len(pieces) == PIECES else ():
        low, high = pieces[first], pieces[second]
        pieces[first], pieces[second] = torch.minimum(low, high), torch.maximum(low, high)
    # Halved first: the sum of two of the largest numbers would overflow.
    return pieces[(len(pieces) - 1) // 2] / 2 + pieces[len(pieces) // 2] / 2
