"""Attention in which the query heads of a group read the keys together.

transformers leaves grouped-query attention of one query to `scaled_dot_product_attention(..., enable_gqa=True)`, which
on a CPU walks through the keys once for every query head. The query heads of a group attend to the same keys, so a
kernel reads these once (`dense_kernels.py`), and where torch takes less time they are rows of one product:
`[batch, heads, 1, head_dim]` becomes `[batch, kv_heads, heads / kv_heads, head_dim]`. The sums are the same, at most in
another order.

If there is a mask, transformers repeats keys and values for every query head of a group (`repeat_kv`) before it calls
`scaled_dot_product_attention`: for several query tokens, and in compiled code, which always has a mask. That copies all
tokens at every step, once for each query head of a group. `SharedStates` delay the repetition until attention asks for
it. TorchDynamo traces them: nothing of them is left when the compiled function runs.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from kvlayers.kernels.attention import dense_kernels
from kvlayers.upstream import compat
from kvlayers.utils.sending import sent_by_value

CPU_MINIMUM_FLOAT32_TOKENS = 128
"""Tokens from which grouping saves time in float32, measured on a CPU."""

CPU_MINIMUM_FLOAT32_GROUP = 4
"""Query heads of a KV head from which grouping saves time in float32, measured on a CPU."""


class MarkedTensor(Tensor):
    """A tensor in memory, for which some functions of torch do something else. To all others it is a plain one.

    Attributes:
        implementations: by function of torch, what is called in its place, with the same arguments.
        reserved: columns of the masks that keys cut, and scores; `None` if they cut none. See `custom_masks`.
    """

    implementations: ClassVar[dict[Any, Callable[..., Any]]] = {}
    reserved: ClassVar[int | None] = None

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with DisableTorchFunctionSubclass():
            return cls.implementations.get(func, func)(*args, **({} if kwargs is None else kwargs))


class MarkedStates(MarkedTensor):
    """Keys or values in the shape that they have, which are copied and sent as a plain tensor."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


@sent_by_value
class GroupedKeys(MarkedStates):
    """Keys for SDPA with `enable_gqa` of one query on a CPU."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape, without the detour by `__torch_function__`: models read it several times in each layer."""
        with DisableTorchFunctionSubclass():
            return self.size()


@sent_by_value
class SharedStates(MarkedStates):
    """States `[batch, kv_heads, tokens, head_dim]`, or `[batch, kv_heads, n, ...]` while they are being repeated."""


class RepeatedStates(MarkedTensor):
    """States `[batch, kv_heads, n, tokens, head_dim]` that report the shape `[batch, kv_heads * n, tokens, ...]`.

    A function that would read another shape gets them really repeated, and so does what is called after it: what was
    written to them is not lost.
    """

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
        if func not in RepeatedStates.implementations:
            with DisableTorchFunctionSubclass():
                args = tuple(map(_written_out, args))
                kwargs = {name: _written_out(value) for name, value in kwargs.items()}
        return super().__torch_function__(func, types, args, kwargs)


def repeating(shared: type[SharedStates], repeated: type[RepeatedStates]) -> dict[Any, Callable[..., Any]]:
    """What is called of `shared` in the steps of `kv_head_copies`, of which the last one makes `repeated` of it."""

    def viewed(func: Callable[..., Any]) -> Callable[..., Any]:
        def view(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result: Tensor = func(states, *args, **kwargs)
            repeats = result.dim() == 5 and kv_head_copies(states.size(), result.size())
            return result.as_subclass(shared) if repeats else result

        return view

    def merged(states: Tensor, *shape: Any, **kwargs: Any) -> Tensor:
        wanted = tuple(shape[0]) if len(shape) == 1 else shape
        if states.dim() == 5 and len(wanted) == 4 and kv_head_copies(states.size(), wanted):
            # Through an operation, since a marked tensor cannot be marked otherwise.
            return states.expand(states.size()).as_subclass(repeated)
        return states.reshape(*shape, **kwargs)

    return {
        Tensor.__getitem__: viewed(Tensor.__getitem__),
        Tensor.expand: viewed(Tensor.expand),
        Tensor.reshape: merged,
    }


def _written_out(argument: Any) -> Any:
    """An argument in which `RepeatedStates` are really repeated."""
    if isinstance(argument, RepeatedStates):
        kept = _kept_beside(argument)
        if "repeated" not in kept:
            kept["repeated"] = argument.reshape(_merged_shape(argument))
        return kept["repeated"]
    if isinstance(argument, list | tuple):
        return type(argument)([_written_out(part) for part in argument])
    return argument


def _kept_beside(states: Tensor) -> dict[str, Any]:
    """The attributes of `RepeatedStates`: among them the repeated ones, once something has read them."""
    # A tensor that TorchDynamo traces has no attributes of its own.
    return vars(states) if isinstance(states, RepeatedStates) and not torch.compiler.is_compiling() else {}


def _merged_shape(states: Tensor) -> torch.Size:
    batch, kv_heads, repeats, tokens, head_dim = states.size()
    return torch.Size((batch, kv_heads * repeats, tokens, head_dim))


def kv_head_copies(before: Sequence[int], after: Sequence[int]) -> int:
    """Copies of each KV head after one of the three steps in which modelling code repeats KV heads, else 0.

    The steps (`repeat_kv` of transformers) add an axis for the copies, expand it, and merge it into the KV heads.

    Args:
        before: shape that the step is given, `[batch, kv_heads, (copies,) tokens, head_dim]`.
        after: shape of its result.
    """
    if len(before) == 4 and after == (*before[:2], 1, *before[2:]):
        return 1
    if len(before) == 5 and len(after) == 5 and (*after[:2], *after[3:]) == (*before[:2], *before[3:]):
        return after[2]
    if len(before) == 5 and after == (before[0], before[1] * before[2], *before[3:]):
        return before[2]
    return 0


def shared_in_graph(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[batch, kv_heads, tokens, head_dim]`, marked for SDPA if that saves time.

    Args:
        keys: the keys that the one new token of each sequence attends to, in code that is being compiled.
        values: the values of the same tokens.
    """
    if keys.device.type != "cpu" or not torch.compiler.is_dynamo_compiling() or not compat.COMPILES_TENSOR_SUBCLASSES:
        return keys, values
    return keys.as_subclass(SharedStates), values.as_subclass(SharedStates)


def marked_for_sdpa(keys: Tensor, values: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[batch, kv_heads, tokens, head_dim]`, marked for SDPA if that saves time.

    Args:
        keys: the keys that the new tokens of each sequence attend to.
        values: the values of the same tokens.
        queries: new tokens of each sequence.
    """
    # First, because a tracer would specialize a program on the sizes that are compared.
    if torch.compiler.is_compiling() or type(keys) is not Tensor:
        return keys, values
    # Of one query not by `marking_pays`, which is one more call at each step.
    if queries == 1:
        return marked_for_one_query(keys, values) if keys.shape[2] >= first_grouped_length(keys) else (keys, values)
    return (
        (keys.as_subclass(SharedStates), values.as_subclass(SharedStates))
        if marking_pays(keys, queries)
        else (keys, values)
    )


def marking_pays(keys: Tensor, queries: int) -> bool:
    """Whether `attend` takes less time for keys and so many queries of each sequence than torch's own attention."""
    if queries == 1:
        return keys.shape[2] >= first_grouped_length(keys)
    if keys.is_cpu:
        return dense_kernels.is_worth_a_kernel(keys, queries)
    return queries <= dense_kernels.GPU_MAXIMUM_QUERIES and dense_kernels.serves_few_queries(keys)


def marked_for_one_query(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """As `marked_for_sdpa`, of at least `first_grouped_length` tokens, for one new token of each sequence."""
    if keys.is_cpu:
        return keys.as_subclass(GroupedKeys), values
    return keys.as_subclass(SharedStates), values.as_subclass(SharedStates)


def first_grouped_length(keys: Tensor) -> int:
    """Tokens from which keys that differ from these in the number of tokens alone are marked, if there is one query.

    On a CPU, from some tokens on, the compiled kernel takes less time than torch. With fewer, torch multiplies
    half-precision rows one by one so slowly that grouping wins at every length. In float32, grouping wins once every
    thread has two heads to read and there are enough tokens.
    """
    if not keys.is_cpu:
        return 0 if dense_kernels.replaces_cudnn(keys) or dense_kernels.serves_few_queries(keys) else sys.maxsize
    if keys.dtype.itemsize <= 2:
        return 0
    batch, kv_heads, _, head_dim = keys.shape
    length = -(-dense_kernels.CPU_MINIMUM_STATES // max(1, batch * kv_heads * head_dim))
    shares_threads = batch * kv_heads < 2 * torch.get_num_threads()
    return length if shares_threads else min(length, CPU_MINIMUM_FLOAT32_TOKENS)


def attend_dense(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Attention to states in full precision, which reads the keys once for a group of heads where that saves time.

    Args:
        query: `[batch, heads, queries, head_dim]`, heads a multiple of `kv_heads`.
        keys: `[batch, kv_heads, tokens, head_dim]`.
        values: `[batch, kv_heads, tokens, value_head_dim]`.
        mask: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`.
        is_causal: whether a query attends to the tokens up to its own number alone.
        scale: factor of the scores, `1 / sqrt(head_dim)` if `None`.
    """
    shares_heads = query.shape[1] != keys.shape[1]
    by = attend if marking_pays(keys, query.shape[2]) else scaled_dot_product_attention
    return by(query, keys, values, mask, 0.0, is_causal, scale=scale, enable_gqa=shares_heads)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Torch's attention, whose keys or values may be `RepeatedStates`, by another way if that takes less time."""
    key, value = (_kept_beside(states).get("repeated", states) for states in (key, value))
    keys = key[:, :, 0] if isinstance(key, RepeatedStates) else key
    values = value[:, :, 0] if isinstance(value, RepeatedStates) else value
    repeats_wait = keys is not key
    shares_heads = enable_gqa or repeats_wait or query.size(1) == keys.size(1)
    if shares_heads and not dropout_p:
        attended = dense_kernels.attend(query, keys, values, attn_mask, scale, is_causal)
        if attended is not None:
            return attended
        group = _group_of_one_query(query.size(), keys.size(), values.size()) if keys.is_cpu and not is_causal else 0
        # In float32, torch's own order takes less time for small groups, unless keys would be copied for it.
        if group >= CPU_MINIMUM_FLOAT32_GROUP or (group and (repeats_wait or query.dtype.itemsize <= 2)):
            if group == 1 and attn_mask is None:
                # Two rows of half precision take less time than one.
                return scaled_dot_product_attention(query.expand(-1, -1, 2, -1), keys, values, scale=scale)[:, :, :1]
            if group > 1 and (attn_mask is None or (attn_mask.dim() == 4 and attn_mask.size(1) in (1, query.size(1)))):
                return dense_kernels.attend_grouped(query, keys, values, attn_mask, scale)
    return scaled_dot_product_attention(
        *(query, _written_out(key), _written_out(value), attn_mask, dropout_p, is_causal),
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _group_of_one_query(query: torch.Size, key: torch.Size, value: torch.Size) -> int:
    """Query heads that share a KV head if there is one query token, and 0 if there are more or shapes do not match."""
    match = len(query) == len(value) == 4 and query[2] == 1 and query[0] == key[0] and value[:3] == key[:3]
    return query[1] // key[1] if match and query[1] % key[1] == 0 else 0


GroupedKeys.implementations = {scaled_dot_product_attention: attend}
SharedStates.implementations = {scaled_dot_product_attention: attend, **repeating(SharedStates, RepeatedStates)}
RepeatedStates.implementations = {
    scaled_dot_product_attention: attend,
    Tensor.shape.__get__: _merged_shape,  # type: ignore[attr-defined]
}
