"""Keys or values of a batch of which each row has states of its own, of a length of its own.

Rows are aligned on the right: the newest token of every row is in the last column, as in a batch that is padded on the
left. Attention, and the views that models take before it, are computed for one row after another, by whatever its
states are: a plain tensor, packed codes, or what a query chooses from. Other functions get one tensor in full
precision, with zeros for padding.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from kvlayers.errors import UnsupportedLayerError
from kvlayers.kernels.attention.gqa import attend_dense, kv_head_copies
from kvlayers.kernels.attention.packed_tensor import NO_ADDRESS, Implementations, StateTensor, implements


class RowStates(StateTensor):
    """Keys or values `[batch, kv_heads, tokens, head_dim]`, or a view of them that attention takes. They are read-only.

    Attributes:
        rows: the states of each row, `[1, kv_heads, own tokens, head_dim]`.
        token_dim: the dimension that counts tokens, -2, or -1 in a transposed view.
    """

    implementations: ClassVar[Implementations] = {}
    is_read_only = True

    rows: tuple[Tensor, ...]
    token_dim: int
    known_shape: torch.Size

    @staticmethod
    def __new__(cls: type["RowStates"], rows: Sequence[Tensor], token_dim: int = -2) -> "RowStates":
        """States of rows, which have the same shape but for their tokens."""
        shape = [len(rows), *rows[0].shape[1:]]
        shape[token_dim] = max(row.shape[token_dim] for row in rows)
        states: RowStates = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=rows[0].dtype, device=rows[0].device)
        states.rows, states.token_dim, states.known_shape = tuple(rows), token_dim, torch.Size(shape)
        return states

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape, without the detour by `__torch_function__`: models read it several times in each layer."""
        return self.known_shape

    @override
    def data_ptr(self) -> int:
        raise UnsupportedLayerError(NO_ADDRESS)

    @override
    def dense(self) -> Tensor:
        """The states in one tensor, with zeros in front of the tokens of shorter rows."""
        states = torch.zeros(self.known_shape, dtype=self.rows[0].dtype, device=self.rows[0].device)
        for whole, row in zip(torch.split(states, 1), self.rows, strict=True):
            self.of_row(whole, row).copy_(row.dense() if isinstance(row, StateTensor) else row.as_subclass(Tensor))
        return states

    def of_row(self, columns: Tensor, row: Tensor) -> Tensor:
        """The last columns of a tensor like these states, as many as a row has tokens."""
        tokens = row.shape[self.token_dim]
        return columns.narrow(self.token_dim, columns.shape[self.token_dim] - tokens, tokens)

    def viewed(self, view: Callable[[Tensor], Tensor], shape: Sequence[int], token_dim: int = -2) -> "RowStates":
        """The same view of each row.

        Args:
            view: makes the view of one row.
            shape: shape of the view of all rows.
            token_dim: which of its dimensions counts tokens.
        """
        return RowStates([view(row) for row in self.rows], token_dim)


_of_rows = implements(RowStates)


def _called(func: Callable[..., Any], row: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The result of a function for one row, by the row's own kind of tensor.

    Torch asks for no kind within the function of another.
    """
    kind = type(row)
    return func(*args, **kwargs) if kind is Tensor else kind.__torch_function__(func, (kind,), args, kwargs)  # type: ignore[no-untyped-call]


NO_VIEW = "attention takes no such view of the states of rows"


@_of_rows(scaled_dot_product_attention)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | str:
    if not isinstance(key, RowStates) or not isinstance(value, RowStates) or isinstance(query, StateTensor):
        return "keys and values are not both of the cache"
    batch, tokens = key.shape[0], key.shape[2]
    # Torch's causal mask begins at the first key, wherever the row begins.
    if (is_causal and any(row.shape[2] != tokens for row in key.rows)) or query.shape[0] != batch:
        return "queries do not fit the rows"
    attended = []
    for row, (keys, values) in enumerate(zip(key.rows, value.rows, strict=True)):
        mask = attn_mask
        if mask is not None:
            mask = mask.expand(batch, *mask.shape[1:])[row : row + 1] if mask.dim() == 4 else mask
            mask = mask[..., mask.shape[-1] - keys.shape[2] :] if mask.shape[-1] > 1 else mask
        attended.append(
            _called(
                scaled_dot_product_attention,
                keys,
                *(query[row : row + 1], keys, values, mask, dropout_p, is_causal),
                scale=scale,
                enable_gqa=enable_gqa,
            )
        )
    return torch.cat(attended)


@_of_rows(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def _product(left: Tensor, right: Tensor) -> Tensor | str:
    """`queries @ keys.transpose(2, 3)`, or `weights @ values`."""
    if not isinstance(right, RowStates) or isinstance(left, StateTensor) or left.shape[:2] != right.shape[:2]:
        return "it is not a product of attention"
    if right.token_dim == -2:
        weighted = zip(torch.split(left, 1), right.rows, strict=True)
        cut = [(row, weights[..., weights.shape[-1] - row.shape[-2] :]) for weights, row in weighted]
        return torch.cat([_called(torch.matmul, row, weights, row) for row, weights in cut])
    scores = left.new_zeros((*left.shape[:-1], right.shape[-1]))
    for queries, row, own in zip(torch.split(left, 1), right.rows, torch.split(scores, 1), strict=True):
        right.of_row(own, row).copy_(_called(torch.matmul, row, queries, row))
    return scores


@_of_rows(Tensor.transpose, torch.transpose, Tensor.swapaxes)
def _transposed(states: Tensor, dim0: int, dim1: int) -> Tensor | str:
    if not isinstance(states, RowStates) or {dim0 % states.dim(), dim1 % states.dim()} != {2, 3} or states.dim() != 4:
        return NO_VIEW
    batch, heads, rows, columns = states.shape
    token_dim = -1 if states.token_dim == -2 else -2
    return states.viewed(
        lambda row: _called(Tensor.transpose, row, row, 2, 3), (batch, heads, columns, rows), token_dim
    )


# The three steps in which modelling code repeats KV heads for the query heads that share them.


@_of_rows(Tensor.__getitem__)
def _item(states: Tensor, index: Any) -> Tensor | str:
    whole = slice(None)
    if not isinstance(states, RowStates) or not isinstance(index, tuple) or index[:3] != (whole, whole, None):
        return NO_VIEW
    if any(part != whole for part in index[3:]) or states.dim() != 4 or states.token_dim != -2:
        return NO_VIEW
    batch, kv_heads, *rest = states.shape
    return states.viewed(lambda row: _called(Tensor.__getitem__, row, row, index), (batch, kv_heads, 1, *rest))


def _resized_by(resize: Callable[..., Tensor]) -> Callable[..., Tensor | str]:
    def resized(states: Tensor, *sizes: Any, **named: Any) -> Tensor | str:
        """The states of a shape in which a KV head stands once for each of its copies."""
        shape = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
        if named or not isinstance(states, RowStates) or states.token_dim != -2:
            return NO_VIEW
        if shape == tuple(states.shape):
            return states
        if not kv_head_copies(states.shape, shape):
            return NO_VIEW
        inner = shape[1:-2]
        return states.viewed(lambda row: _called(resize, row, row, 1, *inner, row.shape[-2], shape[-1]), shape)

    return resized


for _resize in (Tensor.expand, Tensor.reshape, Tensor.view):
    _of_rows(_resize)(_resized_by(_resize))


@_of_rows(Tensor.repeat_interleave, torch.repeat_interleave)
def _repeated(states: Tensor, repeats: Any, dim: int | None = None, **options: Any) -> Tensor | str:
    if not isinstance(states, RowStates) or dim != 1 or not isinstance(repeats, int) or states.dim() != 4:
        return NO_VIEW
    batch, heads, *rest = states.shape
    shape = (batch, heads * repeats, *rest)
    return states.viewed(
        lambda row: _called(Tensor.repeat_interleave, row, row, repeats, dim=1), shape, states.token_dim
    )


@_of_rows(Tensor.contiguous, Tensor.detach, Tensor.to)
def _unchanged(states: Tensor, *args: Any, **kwargs: Any) -> Tensor | str:
    wanted = {*args, *kwargs.values()}
    is_same = isinstance(states, RowStates) and wanted <= {states.dtype, states.device}
    return states if is_same else "they are converted"


class RowColumns:
    """Where the tokens of rows are if each row begins in column 0, rather than ending in the last column.

    All layers of a model read the rows of one step by the same object, so a mask is moved once for all of them.

    Attributes:
        lengths: tokens of each row.
        tokens: tokens of the longest row.
        device: where masks are.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = tuple(lengths)
        self.tokens = max(lengths)
        self.device = device
        self._moved: tuple[Tensor, int | None, Tensor] | None = None

    @functools.cached_property
    def are_even(self) -> bool:
        """Whether all rows have as many tokens."""
        return min(self.lengths) == self.tokens

    @functools.cached_property
    def _padding(self) -> Tensor:
        return torch.tensor([self.tokens - length for length in self.lengths], device=self.device)[:, None]

    @functools.cached_property
    def _columns(self) -> tuple[Tensor, Tensor]:
        """For each column of a row the column of a mask, and whether it is a token, both `[batch, 1, 1, tokens]`."""
        columns = torch.arange(self.tokens, device=self.device) + self._padding
        is_token = columns < self.tokens
        return columns.clamp(max=self.tokens - 1)[:, None, None], is_token[:, None, None]

    def mask(self, aligned: Tensor | None) -> Tensor | None:
        """A mask for rows that begin in column 0, from one for rows that end in the last column.

        Args:
            aligned: bool or additive, broadcast to `[batch, heads, queries, tokens]`, or `None`.
        """
        if self.are_even:
            return aligned
        columns, is_token = self._columns
        if aligned is None:
            return is_token
        version = None if aligned.is_inference() else aligned._version
        # Once: threads share this object.
        known = self._moved
        if known is not None and _is_same(known[0], aligned) and known[1] == version:
            return known[2]
        whole = aligned.expand(len(self.lengths), *aligned.shape[-3:-1], self.tokens)
        moved = whole.gather(3, columns.expand_as(whole))
        if moved.dtype == torch.bool:
            moved &= is_token
        else:
            moved.masked_fill_(~is_token, torch.finfo(moved.dtype).min)
        self._moved = aligned, version, moved
        return moved


def _is_same(first: Tensor, second: Tensor) -> bool:
    return (first.data_ptr(), first.shape, first.stride(), first.dtype) == (
        second.data_ptr(),
        second.shape,
        second.stride(),
        second.dtype,
    )


class AdjacentRowStates(RowStates):
    """Rows in full precision side by side in one tensor, each from its first column on.

    A view that attention takes of them is not made: copies of KV heads are only counted.

    Attributes:
        whole: the tensor, `[batch, kv_heads, tokens, head_dim]`.
        columns: which of its columns are tokens.
    """

    implementations: ClassVar[Implementations] = dict(RowStates.implementations)

    whole: Tensor
    columns: RowColumns

    @staticmethod
    def __new__(
        cls: type["AdjacentRowStates"],
        whole: Tensor,
        columns: RowColumns,
        shape: Sequence[int] | None = None,
        token_dim: int = -2,
    ) -> "AdjacentRowStates":
        """States of rows in one tensor, or a view of them of another shape."""
        shape = whole.shape if shape is None else shape
        states: AdjacentRowStates = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=whole.dtype, device=whole.device
        )
        states.whole, states.columns = whole, columns
        states.token_dim, states.known_shape = token_dim, torch.Size(shape)
        return states

    @property
    def rows(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        """The states of each row."""
        own = zip(torch.split(self.whole, 1), self.columns.lengths, strict=True)
        rows = [row.narrow(2, 0, length) for row, length in own]
        if self.dim() == 5:
            return tuple(row[:, :, None].expand(-1, -1, self.known_shape[2], -1, -1) for row in rows)
        copies = self.known_shape[1] // self.whole.shape[1]
        if copies > 1:
            rows = [row.repeat_interleave(copies, 1) for row in rows]
        return tuple(rows if self.token_dim == -2 else [row.transpose(2, 3) for row in rows])

    @override
    def viewed(self, view: Callable[[Tensor], Tensor], shape: Sequence[int], token_dim: int = -2) -> RowStates:
        return AdjacentRowStates(self.whole, self.columns, shape, token_dim)


@implements(AdjacentRowStates)(scaled_dot_product_attention)
def _attention_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | str:
    if not isinstance(key, AdjacentRowStates) or not isinstance(value, AdjacentRowStates):
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if dropout_p or isinstance(query, StateTensor) or (is_causal and not key.columns.are_even):
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return attend_dense(query, key.whole, value.whole, key.columns.mask(attn_mask), is_causal, scale)
