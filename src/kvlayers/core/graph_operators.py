"""Operators by which compiled code calls a layer of a cache, instead of being traced through it.

The update of a packed layer, or of an offloaded layer, is Python over numbers and streams that change with every token.
Traced, it would be compiled anew whenever a block is packed, or break the graph in each layer. So compiled code calls
`take_in` and `attend`, which run the same code as eager mode. One graph then serves a sequence from its first token to
its last, and attention reads the codes as they are held. Of a layer, TorchDynamo sees only the count of tokens.

Every operator is given the handle of a cache. `take_in` and `attend` declare that they write to it, so they stay in the
order in which the model calls them. They run on the host, so they are never captured in a CUDA graph: a replay would
not take in anything.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from kvlayers.core.token_store import KVPair
from kvlayers.errors import ReadOnlyStatesError, StaleStatesError
from kvlayers.kernels.attention.gqa import kv_head_copies
from kvlayers.kernels.attention.packed_tensor import GIVEN_TO_COMPILED_CODE, PackedStates, as_dense
from kvlayers.kernels.attention.state_tensor import METADATA_FUNCTIONS, writes_in_place
from kvlayers.upstream import compat

_numbers = itertools.count()
_handles: "weakref.WeakValueDictionary[int, GraphHandle]" = weakref.WeakValueDictionary()


class GraphHandle:
    """The handle by which compiled code knows a cache.

    A handle belongs to one cache. A copy of the cache has a handle with another number.

    Attributes:
        number: int64 scalar on the host. Since it is a tensor, it is an input of compiled code, and never a constant.
    """

    __slots__ = ("__weakref__", "_cache", "number", "returned")

    def __init__(self, cache: Any) -> None:
        number = next(_numbers)
        # A tensor born in inference mode could not be an argument of compiled code outside of it.
        with torch.inference_mode(False):
            self.number = torch.tensor(number, device="cpu")
        self._cache = weakref.ref(cache)
        self.returned: dict[int, KVPair] = {}
        _handles[number] = self

    def take_in(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Update a layer, and keep the states that its queries attend to."""
        self.returned.pop(layer_idx, None)
        cache = self._cache()
        if cache is None:
            raise _gone()
        layer = cache.layers[layer_idx]
        if cache.offloading:
            # States leave the device when the next layer has arrived. Models that share states between layers share
            # those of the last layer with a window, and those of the last layer without.
            others = self.returned.items()
            self.returned = {at: kept for at, kept in others if cache.layers[at].is_sliding != layer.is_sliding}
        self.returned[layer_idx] = layer.update(keys, values)

    def states(self, layer_idx: int, tokens: int) -> KVPair:
        """The states of `tokens` tokens that the last update of a layer returned."""
        if layer_idx not in self.returned:
            raise StaleStatesError(
                f"Layer {layer_idx} must be read before other offloaded layers are updated, got a call after that, "
                "when its states had left the device: run this function in eager code."
            )
        keys, values = self.returned[layer_idx]
        if keys.shape[2] != tokens:
            raise StaleStatesError(
                f"States must be those of the last update of layer {layer_idx}, of {keys.shape[2]} tokens, got "
                f"states of an earlier update, of {tokens} tokens: read states before the layer is updated again."
            )
        return keys, values


def _handle(number: Tensor) -> GraphHandle:
    handle = _handles.get(int(number))
    if handle is None:
        raise _gone()
    return handle


def _gone() -> StaleStatesError:
    return StaleStatesError(
        "The cache of compiled code must still exist, got one that was deleted: keep it for as long as the code uses "
        "it."
    )


@torch.library.custom_op("kvlayers::take_in", mutates_args=("number",), **compat.OUTSIDE_CUDA_GRAPHS)
def take_in(number: Tensor, layer_idx: int, keys: Tensor, values: Tensor) -> None:
    """Update a layer of a cache with states `[batch, kv_heads, new, head_dim]`."""
    with torch.no_grad():
        _handle(number).take_in(layer_idx, keys.detach(), values.detach())


@take_in.register_fake
def _(number: Tensor, layer_idx: int, keys: Tensor, values: Tensor) -> None:
    return None


@torch.library.custom_op("kvlayers::attend", mutates_args=("number",), **compat.OUTSIDE_CUDA_GRAPHS)
def attend(
    number: Tensor,
    layer_idx: int,
    query: Tensor,
    tokens: int,
    value_head_dim: int,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention of `query`, `[batch, heads, new, head_dim]`, to the states that the last update of a layer returned."""
    with torch.no_grad():
        keys, values = _handle(number).states(layer_idx, tokens)
        shares_heads = query.shape[1] != keys.shape[1]
        options = {"attn_mask": mask, "is_causal": is_causal, "scale": scale, "enable_gqa": shares_heads}
        arguments = (query.detach(), keys, values)
        # Within an operator torch does not dispatch to the `__torch_function__` of an argument.
        kind: Any = type(keys)
        attended: Tensor = kind.__torch_function__(scaled_dot_product_attention, (kind,), arguments, options)
        return attended.contiguous()


@attend.register_fake
def _(
    number: Tensor,
    layer_idx: int,
    query: Tensor,
    tokens: int,
    value_head_dim: int,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    return query.new_empty((*query.shape[:3], value_head_dim))


@torch.library.custom_op("kvlayers::multiply", mutates_args=("number",), **compat.OUTSIDE_CUDA_GRAPHS)
def multiply(
    number: Tensor, layer_idx: int, left: Tensor, tokens: int, is_values: bool, copies: int, width: int
) -> Tensor:
    """One of the two products of eager attention: `queries @ keys.transpose(2, 3)`, or `weights @ values`.

    Args:
        number: number of the cache's handle.
        layer_idx: index of the layer.
        left: queries or weights, `[batch, kv_heads * copies, new, any]`.
        tokens: tokens of the last update's states.
        is_values: whether the other factor is the values.
        copies: copies of each kv head.
        width: length of the last axis of the result.
    """
    with torch.no_grad():
        states = _handle(number).states(layer_idx, tokens)[is_values]
        # Within an operator torch does not dispatch to the `__torch_function__` of an argument.
        kind: Any = type(states)
        if copies > 1:
            states = kind.__torch_function__(Tensor.repeat_interleave, (kind,), (states, copies, 1))
        if not is_values:
            states = kind.__torch_function__(Tensor.transpose, (kind,), (states, 2, 3))
        product: Tensor = kind.__torch_function__(torch.matmul, (kind,), (left.detach(), states))
        return product.contiguous()


@multiply.register_fake
def _(number: Tensor, layer_idx: int, left: Tensor, tokens: int, is_values: bool, copies: int, width: int) -> Tensor:
    return left.new_empty((*left.shape[:3], width))


@torch.library.custom_op("kvlayers::read", mutates_args=("number",), **compat.OUTSIDE_CUDA_GRAPHS)
def read(number: Tensor, layer_idx: int, is_values: bool, like: Tensor, shape: Sequence[int]) -> Tensor:
    """Keys, or values, that the last update of a layer returned, in full precision: a copy, of the dtype of `like`."""
    with torch.no_grad():
        states = _handle(number).states(layer_idx, shape[2])[is_values]
        if isinstance(states, PackedStates):
            states.snapshot.paths.note_dense_read(GIVEN_TO_COMPILED_CODE)
        # A copy, as compiled code may write to the results of operators.
        return as_dense(states).as_subclass(Tensor).clone(memory_format=torch.contiguous_format)


@read.register_fake
def _(number: Tensor, layer_idx: int, is_values: bool, like: Tensor, shape: Sequence[int]) -> Tensor:
    return like.new_empty(shape)


def calls_operators(layer: Any, keys: Tensor, values: Tensor) -> bool:
    """Whether code that is being compiled calls the layer by an operator.

    If autograd follows the states it does not, since no gradient goes through an operator.
    """
    if not compat.COMPILES_TENSOR_SUBCLASSES or not torch.compiler.is_dynamo_compiling() or compat.may_be_exporting():
        return False
    follows = torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)
    return layer.is_opaque and not follows


def updated(handle: GraphHandle, layer: Any, layer_idx: int, keys: Tensor, values: Tensor) -> KVPair:
    """As `layer.update`, for TorchDynamo to trace."""
    batch, new = keys.shape[0], keys.shape[2]
    tokens = layer.mask_sizes(new)[0]
    take_in(handle.number, layer_idx, keys, values)
    layer.count(new)
    attended = []
    for is_values, states in enumerate((keys, values)):
        # It has the right shape and takes no memory: the operators know the attended states.
        shape = (batch, states.shape[1], tokens, states.shape[3])
        # Code that read it all the same would get nothing that looks like a state.
        placeholder = states.new_full((), math.nan).expand(shape)
        attended.append(_called(placeholder, handle.number, layer_idx, tokens, bool(is_values), 0))
    return attended[0], attended[1]


PLACEHOLDER_FUNCTIONS = frozenset({Tensor.stride, Tensor.storage_offset, Tensor.is_contiguous})
"""Functions by which TorchDynamo describes a placeholder that is an argument of code behind a graph break."""

WRITING_FUNCTIONS = frozenset(getattr(Tensor, name) for name in dir(Tensor) if writes_in_place(name))
"""Functions that write to their first argument."""


class CalledStates(Tensor):
    """Stands for keys or values that attention reads by an operator, while TorchDynamo traces.

    Attributes:
        number: number of the cache's handle.
        layer_idx: index of the layer.
        tokens: number of tokens.
        is_values: whether they are values.
        copies: how often each kv head occurs: 0 before the model begins to repeat them.
        swapped: whether the axes of tokens and head_dim are swapped.
    """

    number: Tensor
    layer_idx: int
    tokens: int
    is_values: bool
    copies: int
    swapped: bool

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        with torch._C.DisableTorchFunctionSubclass():
            if func in METADATA_FUNCTIONS or func in PLACEHOLDER_FUNCTIONS:
                return func(*args, **kwargs)
            states, result = args[0], None
            if func is scaled_dot_product_attention and not kwargs.get("dropout_p") and len(args) < 5:
                result = _attend(*args, **kwargs)
            elif func is torch.matmul and len(args) == 2 and not kwargs:
                result = _product(*args)
            elif func is Tensor.contiguous and isinstance(states, CalledStates):
                result = states
            elif func is Tensor.transpose and isinstance(states, CalledStates):
                result = _swapped(states, *args[1:], **kwargs)
            elif func in (Tensor.__getitem__, Tensor.expand, Tensor.reshape) and isinstance(states, CalledStates):
                result = _repeated(states, func(*args, **kwargs))
            elif func in WRITING_FUNCTIONS and isinstance(states, CalledStates):
                raise ReadOnlyStatesError(
                    "The states that this cache returns are read-only, as what is written to them would be lost: "
                    "clone() the states first."
                )
            return (
                func(*map(_in_full, args), **{name: _in_full(value) for name, value in kwargs.items()})
                if result is None
                else result
            )


def _called(
    states: Tensor, number: Tensor, layer_idx: int, tokens: int, is_values: bool, copies: int, swapped: bool = False
) -> Tensor:
    called: Any = states.as_subclass(CalledStates)
    called.number = number
    called.layer_idx = layer_idx
    called.tokens = tokens
    called.is_values = is_values
    called.copies = copies
    called.swapped = swapped
    return called  # type: ignore[no-any-return]


def _repeated(states: CalledStates, result: Tensor) -> Tensor | None:
    """The result of a step in which models repeat kv heads, `None` if the step is another one."""
    copies = kv_head_copies(states.size(), result.size())
    if not copies or states.swapped:
        return None
    return _called(result, states.number, states.layer_idx, states.tokens, states.is_values, copies)


def _swapped(states: CalledStates, dim0: int, dim1: int) -> Tensor | None:
    if states.dim() != 4 or (dim0 % 4, dim1 % 4) not in ((2, 3), (3, 2)):
        return None
    result = states.transpose(dim0, dim1)
    copies, swapped = states.copies, not states.swapped
    return _called(result, states.number, states.layer_idx, states.tokens, states.is_values, copies, swapped)


def _product(left: Tensor, right: Tensor) -> Tensor | None:
    """One of the products of eager attention, `None` if it is another product."""
    if isinstance(left, CalledStates) or not isinstance(right, CalledStates) or right.swapped == right.is_values:
        return None
    if left.dim() != 4 or right.dim() != 4 or left.shape[:2] != right.shape[:2]:
        return None
    if torch.is_grad_enabled() and left.requires_grad:
        return None
    copies, width = max(right.copies, 1), right.size(3)
    product: Tensor = multiply(right.number, right.layer_idx, left, right.tokens, right.is_values, copies, width)
    return product


def _in_full(argument: Any) -> Any:
    """An argument in which the states themselves, in full precision, replace each `CalledStates`."""
    if isinstance(argument, CalledStates):
        batch, heads = argument.size(0), argument.size(1)
        repeated = argument.copies and argument.dim() == 4
        kv_heads = heads // argument.copies if repeated else heads
        shape = batch, kv_heads, argument.tokens, argument.size(2 if argument.swapped else -1)
        states = read(argument.number, argument.layer_idx, argument.is_values, argument.new_empty(()), shape)
        if argument.copies and not repeated:
            return states[:, :, None].expand(argument.size())
        states = states.repeat_interleave(argument.copies, 1) if repeated else states
        return states.transpose(2, 3) if argument.swapped else states
    if isinstance(argument, list | tuple):
        return type(argument)([_in_full(part) for part in argument])
    return argument


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    of_one_update = (
        isinstance(key, CalledStates)
        and isinstance(value, CalledStates)
        and not isinstance(query, CalledStates)
        and not (key.swapped or value.swapped)
        # No gradient goes through an operator.
        and not (torch.is_grad_enabled() and query.requires_grad)
        and query.dim() == key.dim() == 4
        and (key.layer_idx, key.tokens, key.is_values, value.is_values) == (value.layer_idx, value.tokens, False, True)
    )
    if not of_one_update:
        states = _in_full(query), _in_full(key), _in_full(value)
        return scaled_dot_product_attention(
            *states, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    of_keys: Any = key
    arguments = of_keys.tokens, value.size(3), attn_mask, is_causal, scale
    attended: Tensor = attend(of_keys.number, of_keys.layer_idx, query, *arguments)
    return attended
