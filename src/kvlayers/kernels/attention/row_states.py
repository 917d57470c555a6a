"""Keys or values of a batch of which each row has states of its own, of a length of its own.

Rows are aligned on the right: the newest token of every row is in the last column, as in a batch that is padded on the
left. Attention is computed for one row after another, by whatever its states are: a plain tensor, packed codes, or what
a query chooses from. Other functions get one tensor in full precision, with zeros for padding.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from kvlayers.kernels.attention.gqa import attend_dense
from kvlayers.kernels.attention.state_tensor import (
    UNCHANGED,
    VIEWS,
    HeldStates,
    Implementations,
    StateTensor,
    are_repeated,
    implements,
)


class RowStates(HeldStates):
    """Keys or values `[batch, kv_heads, tokens, head_dim]`, or a view of them that attention takes.

    Attributes:
        rows: the states of each row, `[1, kv_heads, own tokens, head_dim]` whatever the view.
    """

    implementations: ClassVar[Implementations] = dict(VIEWS)

    rows: tuple[Tensor, ...]

    @staticmethod
    def __new__(cls: type["RowStates"], rows: Sequence[Tensor]) -> "RowStates":
        """States of rows, which have the same shape but for their tokens."""
        first = rows[0]
        shape = (len(rows), first.shape[1], max(row.shape[2] for row in rows), first.shape[3])
        states: RowStates = cls.without_memory(shape, first.dtype, first.device, UNCHANGED)
        states.rows = tuple(rows)
        return states

    @override
    def whole(self) -> Tensor:
        # Zeros are in front of the tokens of shorter rows.
        first, tokens = self.rows[0], max(row.shape[2] for row in self.rows)
        shape = (len(self.rows), first.shape[1], tokens, first.shape[3])
        states = torch.zeros(shape, dtype=self.dtype, device=self.device)
        for whole, row in zip(torch.split(states, 1), self.rows, strict=True):
            whole[:, :, tokens - row.shape[2] :] = (
                row.dense() if isinstance(row, StateTensor) else row.as_subclass(Tensor)
            )
        return states


_of_rows = implements(RowStates.implementations)


def _called(func: Callable[..., Any], row: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The result of a function for one row, by the row's own kind of tensor.

    Torch asks for no kind within the function of another.
    """
    kind = type(row)
    return func(*args, **kwargs) if kind is Tensor else kind.__torch_function__(func, (kind,), args, kwargs)  # type: ignore[no-untyped-call]


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
    batch, heads, tokens, _ = key.shape if key.dim() == 4 else (0, 0, 0, 0)
    shares_heads = query.shape[1] == heads or (enable_gqa and heads and query.shape[1] % heads == 0)
    # Torch's causal mask begins at the first key, wherever the row begins.
    starts_apart = is_causal and any(row.shape[2] != tokens for row in key.rows)
    if (
        starts_apart
        or query.shape[0] != batch
        or not shares_heads
        or not are_repeated(key.view_taken, value.view_taken)
    ):
        return "queries do not fit the rows"
    attended = []
    for row, (keys, values) in enumerate(zip(key.rows, value.rows, strict=True)):
        mask = attn_mask
        if mask is not None:
            mask = mask.expand(batch, *mask.shape[1:])[row : row + 1] if mask.dim() == 4 else mask
            mask = mask[..., tokens - keys.shape[2] :] if mask.shape[-1] > 1 else mask
        own = query[row : row + 1], keys, values, mask, dropout_p, is_causal
        attended.append(_called(scaled_dot_product_attention, keys, *own, scale=scale, enable_gqa=True))
    return torch.cat(attended)


@_of_rows(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def _product(left: Tensor, right: Tensor) -> Tensor | str:
    """`queries @ keys.transpose(2, 3)`, or `weights @ values`."""
    if not isinstance(right, RowStates) or isinstance(left, StateTensor) or left.shape[:2] != right.shape[:2]:
        return "it is not a product of attention"
    if right.view_taken.grouped:
        return "its copies have an axis of their own"
    view, found = right.view_taken, []
    for own, row in zip(torch.split(left, 1), right.rows, strict=True):
        tokens, head_dim = row.shape[2:]
        missing = right.shape[3 if view.swapped else 2] - tokens
        shape = (1, right.shape[1], *((head_dim, tokens) if view.swapped else (tokens, head_dim)))
        states = row.viewed(shape, view) if isinstance(row, HeldStates) else view.of(row)
        if view.swapped:
            found.append(torch.nn.functional.pad(_called(torch.matmul, states, own, states), (missing, 0)))
        else:
            found.append(_called(torch.matmul, states, own[..., missing:], states))
    return torch.cat(found)


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
        self._moved: tuple[Tensor, tuple[Any, ...], Tensor] | None = None

    @functools.cached_property
    def are_even(self) -> bool:
        """Whether all rows have as many tokens."""
        return min(self.lengths) == self.tokens

    @functools.cached_property
    def _columns(self) -> tuple[Tensor, Tensor]:
        """For each column of a row the column of a mask, and whether it is a token, both `[batch, 1, 1, tokens]`."""
        padding = torch.tensor([self.tokens - length for length in self.lengths], device=self.device)
        columns = torch.arange(self.tokens, device=self.device) + padding[:, None]
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
        layout = aligned.data_ptr(), aligned.shape, aligned.stride(), aligned.dtype, version
        if known is not None and known[1] == layout:
            return known[2]
        whole = aligned.expand(len(self.lengths), *aligned.shape[-3:-1], self.tokens)
        moved = whole.gather(3, columns.expand_as(whole))
        if moved.dtype == torch.bool:
            moved &= is_token
        else:
            moved.masked_fill_(~is_token, torch.finfo(moved.dtype).min)
        self._moved = aligned, layout, moved
        return moved


class AdjacentRowStates(RowStates):
    """Rows in full precision side by side in one tensor, each from its first column on.

    A view that attention takes of them is not made: copies of KV heads are only counted.

    Attributes:
        together: the tensor, `[batch, kv_heads, tokens, head_dim]`.
        columns: which of its columns are tokens.
    """

    implementations: ClassVar[Implementations] = dict(RowStates.implementations)

    together: Tensor
    columns: RowColumns

    @staticmethod
    def __new__(cls: type["AdjacentRowStates"], together: Tensor, columns: RowColumns) -> "AdjacentRowStates":
        """States of rows in one tensor."""
        states: AdjacentRowStates = cls.without_memory(together.shape, together.dtype, together.device, UNCHANGED)
        states.together, states.columns = together, columns
        return states

    @property
    def rows(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        """The states of each row."""
        own = zip(torch.split(self.together, 1), self.columns.lengths, strict=True)
        return tuple(row.narrow(2, 0, length) for row, length in own)


@implements(AdjacentRowStates.implementations)(scaled_dot_product_attention)
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
    if (
        not isinstance(key, AdjacentRowStates)
        or not isinstance(value, AdjacentRowStates)
        or isinstance(query, StateTensor)
        or dropout_p
        or (is_causal and not key.columns.are_even)
        or not are_repeated(key.view_taken, value.view_taken)
    ):
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return attend_dense(query, key.together, value.together, key.columns.mask(attn_mask), is_causal, scale)
