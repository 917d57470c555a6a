"""Multi-head latent attention (MLA; DeepSeek-AI 2024, arXiv:2405.04434) over a cache of latents.

A model caches a latent for each token, and one rotated key that all heads share. transformers expands the latents of
the whole history to the keys and values of all heads at every step. Here the expansion waits until something reads it.
If attention does, the projection is absorbed into the query and into the result, and only the latents are read.

As transformers writes it, a linear layer makes the keys and values of all heads from the latents. They are viewed by
head and split, and the keys are written to a new tensor, beside the rotated key. What comes out goes to attention.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear, scaled_dot_product_attention
from typing_extensions import override

from kvlayers.kernels.attention import absorption
from kvlayers.kernels.attention.absorption import HeadWeights, Projection
from kvlayers.kernels.attention.packed_ops import packed_like, snapshot_of
from kvlayers.kernels.attention.packed_tensor import Implementations, PackedStates, StateTensor, implements, sizes_of
from kvlayers.kernels.attention.snapshot import Snapshot
from kvlayers.utils.sending import sent_by_value
from kvlayers.utils.transforms import is_changed_by_torch

Axes = Literal["projected", "by token", "by head"]


COMPUTED = "something reads it"
"""Why a function is given the computed tensor."""


class ExpandedLatents(StateTensor):
    """A view of expanded latents. What is written to the computed tensor is not lost: it is the same one each time.

    Attributes:
        projection: the latents, and the weight that expands them.
        axes: what its axes are: `[batch, 1, tokens, heads * head_channels]`, `[batch, tokens, heads, head_channels]` or
            `[batch, heads, tokens, head_channels]`.
        first: first of the channels of a head.
        stop: the channel behind them.
    """

    implementations: ClassVar[Implementations] = {}

    projection: Projection
    axes: Axes
    first: int
    stop: int

    @classmethod
    def view_of(
        cls, projection: Projection, shape: Sequence[int], axes: Axes, first: int, stop: int
    ) -> "ExpandedLatents":
        """A view of this shape."""
        weight = projection.weight
        view: ExpandedLatents = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=weight.dtype, device=weight.device
        )
        view.projection, view.axes, view.first, view.stop = projection, axes, first, stop
        return view

    @override
    def dense(self) -> Tensor:
        product = self.projection.expanded()
        if self.axes == "projected":
            return product
        by_token = product.view(product.shape[0], product.shape[2], self._heads, -1)
        states = by_token if self.axes == "by token" else by_token.transpose(1, 2)
        return states[..., self.first : self.stop]

    @property
    def _heads(self) -> int:
        return self.shape[2] if self.axes == "by token" else self.shape[1]

    @property
    def of_heads(self) -> HeadWeights | None:
        """The part of the weight that the view is made by, `None` if it is not by head, or something has read it."""
        if self.axes != "by head" or self.projection.product is not None:
            return None
        return HeadWeights(self.projection, self._heads, self.first, self.stop)


class NewKeys:
    """The memory that keys are written to, allocated if something reads them.

    Attributes:
        shape: `[batch, heads, tokens, head_dim]`.
        parts: what was written, with the first channel.
        computed: the keys; `None` until something reads them.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.parts: list[tuple[int, Tensor]] = []
        self.computed: Tensor | None = None

    def read(self) -> Tensor:
        """The keys, which are the same tensor at every call."""
        if self.computed is None:
            keys = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            for first, part in self.parts:
                states = part
                if isinstance(part, PackedStates):
                    # One rotated key for all heads, which need not be repeated to be copied.
                    states = part.snapshot.read().dense("values", self.dtype)
                keys[..., first : first + part.shape[3]].copy_(states)
            self.computed = keys
        return self.computed

    @property
    def of_heads(self) -> HeadWeights | None:
        """What the keys are made by, `None` if they are not an expansion with the rotated keys behind it."""
        if self.computed is not None or len(self.parts) != 2:
            return None
        (first, own), (second, rotated) = self.parts
        if not isinstance(own, ExpandedLatents) or not isinstance(rotated, PackedStates):
            return None
        channels = own.stop - own.first
        is_whole = (first, second) == (0, channels) and channels + rotated.shape[3] == self.shape[3]
        return own.of_heads if is_whole else None


class AssembledKeys(StateTensor):
    """A view of new keys, as of `ExpandedLatents`.

    Attributes:
        memory: what the keys are written to.
        first: first channel of the view.
        swapped: whether the axes of tokens and channels are swapped.
    """

    implementations: ClassVar[Implementations] = {}

    memory: NewKeys
    first: int
    swapped: bool

    @classmethod
    def view_of(
        cls, memory: NewKeys, shape: Sequence[int], first: int = 0, *, swapped: bool = False
    ) -> "AssembledKeys":
        """A view of this shape."""
        view: AssembledKeys = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=memory.dtype, device=memory.device)
        view.memory, view.first, view.swapped = memory, first, swapped
        return view

    @override
    def dense(self) -> Tensor:
        keys = self.memory.read()
        if self.swapped:
            return keys.transpose(2, 3)
        return keys[..., self.first : self.first + self.shape[3]]

    def of_heads(self, *, swapped: bool) -> HeadWeights | None:
        """As `NewKeys.of_heads`, if the view is of all channels."""
        is_whole = self.swapped == swapped and self.shape[2 if swapped else 3] == self.memory.shape[3]
        return self.memory.of_heads if is_whole else None


_of_latents = implements(ExpandedLatents)
_of_keys = implements(AssembledKeys)
_of_both = implements(ExpandedLatents, AssembledKeys)


@_of_latents(Tensor.view, Tensor.reshape)
def _view(states: Any, *sizes: Any) -> Any:
    shape = sizes_of(sizes)
    if not isinstance(states, ExpandedLatents) or states.axes != "projected" or len(shape) != 4:
        return COMPUTED
    batch, _, tokens, channels = states.shape
    if not all(isinstance(size, int) for size in shape) or shape[3] < 1 or channels % shape[3]:
        return COMPUTED
    heads = channels // shape[3]
    if shape[:2] != (batch, tokens) or shape[2] not in (-1, heads):
        return COMPUTED
    viewed = (batch, tokens, heads, shape[3])
    return ExpandedLatents.view_of(states.projection, viewed, "by token", 0, shape[3])


@_of_latents(Tensor.transpose, torch.transpose)
def _by_head(states: Any, dim0: int, dim1: int) -> Any:
    if not isinstance(states, ExpandedLatents) or states.axes != "by token" or {dim0 % 4, dim1 % 4} != {1, 2}:
        return COMPUTED
    batch, tokens, heads, channels = states.shape
    shape = (batch, heads, tokens, channels)
    return ExpandedLatents.view_of(states.projection, shape, "by head", states.first, states.stop)


@_of_latents(torch.split, Tensor.split)
def _split(states: Any, sizes: Any, dim: int = 0) -> Any:
    if not isinstance(states, ExpandedLatents) or states.axes != "by head" or dim not in (3, -1):
        return COMPUTED
    if not isinstance(sizes, list | tuple) or sum(sizes) != states.shape[3]:
        return COMPUTED
    parts, first = [], states.first
    for size in sizes:
        shape = (*states.shape[:3], size)
        parts.append(ExpandedLatents.view_of(states.projection, shape, "by head", first, first + size))
        first += size
    return tuple(parts)


@_of_latents(Tensor.new_empty)
def _new_empty(states: Any, *sizes: Any, **options: Any) -> Any:
    shape = sizes_of(sizes)
    if options or states.axes != "by head" or len(shape) != 4 or shape[:3] != tuple(states.shape[:3]):
        return COMPUTED
    return AssembledKeys.view_of(NewKeys(shape, states.dtype, states.device), shape)


@_of_keys(Tensor.__getitem__)
def _channels(keys: Any, index: Any) -> Any:
    if keys.swapped or not isinstance(index, tuple) or len(index) != 2 or index[0] is not Ellipsis:
        return COMPUTED
    if not isinstance(index[1], slice) or index[1].step not in (None, 1):
        return COMPUTED
    first, stop, _ = index[1].indices(keys.shape[3])
    shape = (*keys.shape[:3], max(stop - first, 0))
    return AssembledKeys.view_of(keys.memory, shape, keys.first + first)


@_of_keys(Tensor.copy_)
def _write(keys: Any, states: Any, **options: Any) -> Any:
    if options or not isinstance(keys, AssembledKeys) or keys.swapped or keys.memory.computed is not None:
        return COMPUTED
    if states.shape != keys.shape or states.dtype != keys.dtype:
        return COMPUTED
    # Neither changes until attention reads it: the expansion is not computed yet, and packed states are read-only.
    is_expansion = isinstance(states, ExpandedLatents) and states.of_heads is not None
    is_rotated = isinstance(states, PackedStates) and states.side == "values" and not states.view_taken.swapped
    if not is_expansion and not is_rotated:
        return COMPUTED
    keys.memory.parts.append((keys.first, states))
    return keys


@_of_keys(Tensor.transpose, torch.transpose)
def _swapped(keys: Any, dim0: int, dim1: int) -> Any:
    if not isinstance(keys, AssembledKeys) or {dim0 % 4, dim1 % 4} != {2, 3} or keys.swapped:
        return COMPUTED
    batch, heads, tokens, head_dim = keys.shape
    if head_dim != keys.memory.shape[3]:
        return COMPUTED
    return AssembledKeys.view_of(keys.memory, (batch, heads, head_dim, tokens), swapped=True)


@_of_both(Tensor.contiguous, Tensor.detach, Tensor.to)
def _unchanged(states: Any, *args: Any, **kwargs: Any) -> Any:
    wanted = {*args, *kwargs.values()}
    is_same = isinstance(states, StateTensor) and wanted <= {states.dtype, states.device}
    return states if is_same else COMPUTED


@_of_both(scaled_dot_product_attention)
def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if not isinstance(key, AssembledKeys) or not isinstance(value, ExpandedLatents) or dropout_p or enable_gqa:
        return COMPUTED
    keys = key.of_heads(swapped=False)
    values = value.of_heads
    if keys is None or values is None or not _is_one_update(key, keys, values):
        return COMPUTED
    if not _fits(query, key) or query.shape[3] != key.shape[3]:
        return COMPUTED
    if attn_mask is not None and (
        is_causal
        or attn_mask.dtype not in (torch.bool, torch.float32, query.dtype)
        or attn_mask.device != query.device
        or _needs_gradients(attn_mask)
    ):
        return COMPUTED
    if not absorption.pays(query.shape[2], keys, values, key.shape[3] - keys.stop + keys.first):
        return COMPUTED
    return absorption.attend(query, keys, values, attn_mask, is_causal, scale)


@_of_both(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def _product(left: Any, right: Any) -> Any:
    """`queries @ keys.transpose(2, 3)`, or `weights @ values`, as eager attention is written."""
    if not _fits(left, right) or left.shape[3] != right.shape[2]:
        return COMPUTED
    if isinstance(right, AssembledKeys):
        keys = right.of_heads(swapped=True)
        if keys is None or not _is_one_update(right, keys, keys) or not absorption.pays_in_product(left.shape[2], keys):
            return COMPUTED
        return absorption.scores(left, keys)
    values = right.of_heads
    if values is None or not absorption.pays_in_product(left.shape[2], values):
        return COMPUTED
    return absorption.combine(left, values)


def _is_one_update(key: AssembledKeys, keys: HeadWeights, values: HeadWeights) -> bool:
    """Whether the latents of the keys and of the values, and the rotated keys, are those of one update."""
    rotated = key.memory.parts[1][1]
    is_one = isinstance(rotated, PackedStates) and rotated.snapshot is keys.projection.snapshot
    return is_one and values.projection is keys.projection


def _fits(query: Any, states: Any) -> bool:
    """Whether queries, or weights, are plain ones of these sequences and heads, which autograd does not follow."""
    return (
        not isinstance(query, StateTensor)
        and query.dim() == 4
        and query.shape[:2] == states.shape[:2]
        and query.dtype == states.dtype
        and query.device == states.device
        and not _needs_gradients(query)
        and not is_changed_by_torch(query)
    )


def _needs_gradients(states: Tensor) -> bool:
    return torch.is_grad_enabled() and states.requires_grad


@sent_by_value
class LatentStates(PackedStates):
    """Latents `[batch, 1, tokens, latent_dim]` that a linear layer expands when the result is read.

    To every other function they are the states of a cache.
    """

    @staticmethod
    def __new__(cls: type["LatentStates"], snapshot: Snapshot, shape: Sequence[int]) -> "LatentStates":
        """Latents of a snapshot."""
        states: LatentStates = PackedStates.__new__(cls, snapshot, "keys", shape)  # type: ignore[assignment]
        return states

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not linear or torch.compiler.is_dynamo_compiling():
            return super().__torch_function__(func, types, args, kwargs)
        # Other kinds of tensors, such as quantized weights, have their own linear layers.
        return _linear(*args, **(kwargs or {}))


def _linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(states, LatentStates):
        dense = [tensor.dense() if isinstance(tensor, LatentStates) else tensor for tensor in (weight, bias)]
        return linear(states, *dense)  # type: ignore[arg-type]
    snapshot = states.snapshot
    is_plain = type(weight) in (Tensor, Parameter) and weight.dtype == states.dtype and weight.is_contiguous()
    follows = snapshot.follows_gradients or (torch.is_grad_enabled() and weight.requires_grad)
    if bias is None and is_plain and not follows and not is_changed_by_torch(states) and weight.device == states.device:
        shape = (*states.shape[:3], weight.shape[0])
        return ExpandedLatents.view_of(Projection(snapshot, weight), shape, "projected", 0, weight.shape[0])
    return linear(snapshot.read().dense("keys", snapshot.dtype), weight, bias)


def as_latents(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The states of an update of multi-head latent attention, of which attention may read the latents themselves.

    Args:
        keys: latents `[batch, 1, tokens, latent_dim]`, plain or packed.
        values: rotated keys `[batch, 1, tokens, rotated_channels]`, as the latents.
    """
    if isinstance(keys, StateTensor) and not isinstance(keys, PackedStates):
        # Rows of a batch that have latents of their own.
        return keys, values
    snapshot = snapshot_of(keys, values)
    # Somebody who looks at queries, or chooses tokens by them, knows no queries of latents.
    chooses = snapshot.observe is not None or snapshot.choose is not None or snapshot.segments.holds_gathered
    if chooses or snapshot.follows_gradients:
        return keys, values
    rotated = values if isinstance(values, PackedStates) else packed_like(keys, values, snapshot)[1]
    return LatentStates(snapshot, keys.shape), rotated
