"""Multi-head latent attention (MLA; DeepSeek-AI 2024, arXiv:2405.04434) over a cache of latents.

A model caches a latent for each token, and one rotated key that all heads share. transformers expands the latents of
the whole history to the keys and values of all heads at every step. Here the expansion waits until something reads it.
If attention does, the projection is absorbed into the query and into the result, and only the latents are read.

As transformers writes it, a linear layer makes the keys and values of all heads from the latents. They are viewed by
head and split, and the keys are written to a new tensor, beside the rotated key. What comes out goes to attention.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear, scaled_dot_product_attention
from typing_extensions import override

from kvlayers.kernels.attention import absorption, dense_kernels
from kvlayers.kernels.attention.absorption import HeadWeights, Projection
from kvlayers.kernels.attention.packed_ops import packed_like, snapshot_of
from kvlayers.kernels.attention.packed_tensor import PackedStates
from kvlayers.kernels.attention.state_tensor import (
    HeldStates,
    Implementations,
    StateTensor,
    StateView,
    implements,
    sizes_of,
    unchanged,
)
from kvlayers.utils.sending import sent_by_value
from kvlayers.utils.transforms import is_changed_by_torch

COMPUTED = "something reads it"
"""Why a function is given the computed tensor."""

VIEW_FUNCTIONS = (torch.transpose, Tensor.transpose, torch.split, Tensor.split, Tensor.view)
"""Functions whose results share the memory of their first argument, whatever the others are."""


class DeferredStates(StateTensor):
    """A view of a tensor that is computed when something reads it. What is written to it then is not lost.

    Attributes:
        memory: what the tensor is computed from, once for all of its views.
        outline: a tensor on the meta device, which has the sizes, the strides and the offset of the view.
    """

    implementations: ClassVar[Implementations] = {}

    memory: "Projection | NewKeys"
    outline: Tensor

    @classmethod
    def of(cls, memory: "Projection | NewKeys", view: Tensor, device: torch.device) -> "DeferredStates":
        """The view of a tensor on a device."""
        states: DeferredStates = torch.Tensor._make_wrapper_subclass(cls, view.shape, dtype=view.dtype, device=device)
        states.memory, states.outline = memory, view
        return states

    @override
    def dense(self) -> Tensor:
        return _placed(self.memory.read(), self.outline)


def _placed(memory: Tensor, view: Tensor) -> Tensor:
    """The part of a tensor that a view on the meta device stands for."""
    return memory.as_strided(view.shape, view.stride(), view.storage_offset())


class NewKeys:
    """The memory that keys are written to, allocated if something reads them.

    Attributes:
        whole: the view of all keys, `[batch, heads, tokens, head_dim]`.
        device: device of the keys.
        parts: what was written, and where.
        computed: the keys; `None` until something reads them.
    """

    def __init__(self, whole: Tensor, device: torch.device) -> None:
        self.whole, self.device = whole, device
        self.parts: list[tuple[Tensor, Tensor]] = []
        self.computed: Tensor | None = None

    def read(self) -> Tensor:
        """The keys, which are the same tensor at every call."""
        if self.computed is None:
            self.computed = torch.empty_like(self.whole, device=self.device)
            for place, part in self.parts:
                states = part
                if isinstance(part, PackedStates):
                    # One rotated key for all heads, which need not be repeated to be copied.
                    states = part.snapshot.read().dense("values", self.whole.dtype)
                _placed(self.computed, place).copy_(states)
        return self.computed

    def weights(self, view: Tensor) -> HeadWeights | None:
        """What the keys are made by, `None` if they are not latents of an update with its rotated keys behind them.

        Args:
            view: a view of the keys, which must be that of all.
        """
        shape, strides = self.whole.shape, self.whole.stride()
        if self.computed is not None or len(self.parts) != 2 or not _is_at(view, 0, shape, strides):
            return None
        (own_place, own), (rotated_place, rotated) = self.parts
        if not isinstance(own, DeferredStates) or not isinstance(rotated, PackedStates):
            return None
        channels, weights = own_place.shape[3], heads_of(own)
        if weights is None or not _is_at(own_place, 0, (*shape[:3], channels), strides):
            return None
        is_behind = _is_at(rotated_place, channels, (*shape[:3], shape[3] - channels), strides)
        return weights if is_behind and rotated.snapshot is weights.projection.snapshot else None


def _is_at(view: Tensor, first: int, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a view on the meta device has this offset, shape and strides, but those of dimensions of size 1."""
    if view.storage_offset() != first or view.shape != shape:
        return False
    given = view.stride()
    return given == strides or all(
        size == 1 or one == other for size, one, other in zip(shape, given, strides, strict=True)
    )


def heads_of(states: DeferredStates) -> HeadWeights | None:
    """The part of the weight that a view `[batch, heads, tokens, channels]` of an expansion is made by.

    It is `None` if the view is another one, or something has read the expansion.
    """
    projection, view = states.memory, states.outline
    if not isinstance(projection, Projection) or projection.product is not None or view.dim() != 4:
        return None
    batch, heads, _, channels = view.shape
    (_, _, tokens, width), first = projection.outline.shape, int(view.storage_offset())
    strides = tokens * width, width // heads, width, 1
    if (
        width % heads
        or first + channels > strides[1]
        or not _is_at(view, first, (batch, heads, tokens, channels), strides)
    ):
        return None
    whole = projection.weight
    return HeadWeights(projection, whole.view(heads, -1, whole.shape[1])[:, first : first + channels])


_of_deferred = implements(DeferredStates.implementations)


def _viewing(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function of which the results are views, of deferred states."""

    def viewed(states: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(states, DeferredStates):
            return COMPUTED
        try:
            views = func(states.outline, *args, **kwargs)
        except (RuntimeError, TypeError, IndexError):
            return COMPUTED
        if isinstance(views, Tensor):
            return DeferredStates.of(states.memory, views, states.device)
        return tuple(DeferredStates.of(states.memory, view, states.device) for view in views)

    return viewed


DeferredStates.implementations.update({func: _viewing(func) for func in VIEW_FUNCTIONS})
DeferredStates.implementations.update(dict.fromkeys((Tensor.contiguous, Tensor.detach, Tensor.to), unchanged))
# A reshape that would copy gives no view.
DeferredStates.implementations[Tensor.reshape] = _viewing(Tensor.view)


@_of_deferred(Tensor.__getitem__)
def _item(states: Any, index: Any) -> Any:
    indices = index if isinstance(index, tuple) else (index,)
    are_slices = {slice, type(Ellipsis)}.issuperset(map(type, indices))
    return _viewing(Tensor.__getitem__)(states, index) if are_slices else COMPUTED


@_of_deferred(Tensor.new_empty)
def _new_empty(states: Any, *sizes: Any, **options: Any) -> Any:
    shape = sizes_of(sizes)
    if options or len(shape) != 4 or shape[:3] != tuple(states.shape[:3]):
        return COMPUTED
    whole = torch.empty(shape, dtype=states.outline.dtype, device="meta")
    return DeferredStates.of(NewKeys(whole, states.device), whole, states.device)


@_of_deferred(Tensor.copy_)
def _write(keys: Any, states: Any, **options: Any) -> Any:
    memory = keys.memory if isinstance(keys, DeferredStates) else None
    if options or not isinstance(memory, NewKeys) or memory.computed is not None:
        return COMPUTED
    # Neither changes until attention reads it: the expansion is not computed yet, and packed states are read-only.
    expansion = states.memory if isinstance(states, DeferredStates) else None
    is_expansion = isinstance(expansion, Projection) and expansion.product is None
    is_rotated = isinstance(states, PackedStates) and states.side == "values" and not states.view_taken.swapped
    if not (is_expansion or is_rotated) or states.shape != keys.shape or states.dtype != keys.dtype:
        return COMPUTED
    memory.parts.append((keys.outline, states))
    return keys


@_of_deferred(scaled_dot_product_attention)
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
    if not isinstance(key, DeferredStates) or not isinstance(value, DeferredStates) or dropout_p or enable_gqa:
        return COMPUTED
    keys = key.memory.weights(key.outline) if isinstance(key.memory, NewKeys) else None
    values = heads_of(value)
    if (
        keys is None
        or values is None
        or values.projection is not keys.projection
        or not _fits(query, key)
        or query.shape[3] != key.shape[3]
        or (attn_mask is not None and (is_causal or not dense_kernels.is_mask_of(attn_mask, query, key)))
        or not absorption.pays(query.shape[2], keys, values)
    ):
        return COMPUTED
    return absorption.attend(query, keys, values, attn_mask, is_causal, scale)


@_of_deferred(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def _product(left: Any, right: Any) -> Any:
    """`queries @ keys.transpose(2, 3)`, or `weights @ values`, as eager attention is written."""
    if not isinstance(right, DeferredStates) or not _fits(left, right) or left.shape[3] != right.shape[2]:
        return COMPUTED
    memory = right.memory
    weights = memory.weights(right.outline.transpose(2, 3)) if isinstance(memory, NewKeys) else heads_of(right)
    if weights is None or not absorption.pays(left.shape[2], weights):
        return COMPUTED
    return (absorption.scores if isinstance(memory, NewKeys) else absorption.combine)(left, weights)


def _fits(query: Any, states: Any) -> bool:
    """Whether queries, or weights, are plain ones of these sequences and heads, which autograd does not follow."""
    return (
        not isinstance(query, StateTensor)
        and query.dim() == 4
        and query.shape[:2] == states.shape[:2]
        and query.dtype == states.dtype
        and query.device == states.device
        and not (torch.is_grad_enabled() and query.requires_grad)
        and not is_changed_by_torch(query)
    )


@sent_by_value
class LatentStates(PackedStates):
    """Latents `[batch, 1, tokens, latent_dim]` that a linear layer expands when the result is read.

    To every other function they are the states of a cache.
    """

    implementations: ClassVar[Implementations] = dict(PackedStates.implementations)

    @override
    def viewed(self, shape: Sequence[int], view: StateView) -> HeldStates:
        return PackedStates(self.snapshot, "keys", shape, view)


@implements(LatentStates.implementations)(linear)
def _linear(states: Any, weight: Any, bias: Tensor | None = None) -> Tensor | str:
    # Other kinds of tensors, such as quantized weights, have their own linear layers.
    if not isinstance(states, LatentStates) or bias is not None or type(weight) not in (Tensor, Parameter):
        return COMPUTED
    follows = states.snapshot.follows_gradients or (torch.is_grad_enabled() and weight.requires_grad)
    is_alike = weight.dtype == states.dtype and weight.device == states.device and weight.is_contiguous()
    if follows or not is_alike or is_changed_by_torch(states):
        return COMPUTED
    view = torch.empty((*states.shape[:3], weight.shape[0]), dtype=weight.dtype, device="meta")
    return DeferredStates.of(Projection(states.snapshot, weight, view), view, weight.device)


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
    return LatentStates(snapshot, "keys", keys.shape), rotated
