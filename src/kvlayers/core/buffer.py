"""A tensor with room for tokens: the memory of keys, or of values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.errors import ConfigError


class _FormFields(NamedTuple):
    batch_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class StateForm(_FormFields):
    """The form of states. States in one buffer have the same form.

    Attributes:
        batch_size: sequences.
        kv_heads: heads of keys, or of values.
        head_dim: channels of a key, or of a value.
        dtype: dtype of the states.
        device: device that they are computed on.
    """

    __slots__ = ()

    def __new__(cls, *fields: Any) -> Self:  # noqa: D102
        # transformers' exporters rebuild each tuple that they meet from one iterable, as a plain tuple can be.
        return super().__new__(cls, *(fields if len(fields) > 1 else fields[0]))

    def of_batch(self, batch_size: int) -> "StateForm":
        """The same form for another batch size."""
        return self._replace(batch_size=batch_size)


COUNT_DTYPE = torch.int64
"""Dtype of counts of tokens on a device."""


def form_of(states: Tensor) -> StateForm:
    """Form of `states`, `[batch, kv_heads, tokens, head_dim]`."""
    batch, kv_heads, _, head_dim = states.shape
    # Half the time of the initialiser: a form is made for each layer and token.
    return tuple.__new__(StateForm, (batch, kv_heads, head_dim, states.dtype, states.device))


def forms_of_batch(forms: tuple[StateForm, StateForm], batch_size: int) -> tuple[StateForm, StateForm]:
    """The same forms of keys and values, for another batch size."""
    return forms[0].of_batch(batch_size), forms[1].of_batch(batch_size)


def nbytes_of(form: StateForm, tokens: int) -> int:
    """Bytes of a buffer for `tokens` tokens of this form, for all sequences and heads."""
    batch, kv_heads, head_dim, dtype, _ = form
    return batch * kv_heads * tokens * head_dim * dtype.itemsize


MAXIMUM_PIECES = 8
"""Most pieces in which tokens are moved to the front. If it would take more, all tokens are copied at once."""


class TokenBuffer:
    """A tensor `[batch, kv_heads, capacity, head_dim]` that is read and written by ranges of tokens.

    Reads are views; writes are in place. A buffer that autograd follows is never written to: see `tracks_gradients`.
    """

    __slots__ = (
        "_batch",
        "_head_dim",
        "_kv_heads",
        "_offset",
        "_strides",
        "capacity",
        "tensor",
        "tracks_gradients",
    )

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        # Read once: reading these from a tensor costs as much as the view itself.
        self._batch, self._kv_heads, self.capacity, self._head_dim = tensor.shape
        self._strides = tensor.stride()
        self._offset: int | None = None
        self.tracks_gradients = tensor.requires_grad

    def __reduce__(self) -> tuple[Callable[[Tensor], "TokenBuffer"], tuple[Tensor]]:
        return _restored, (self.tensor,)

    @classmethod
    def allocate(cls, form: StateForm, capacity: int, create: Callable[..., Tensor] = torch.empty) -> "TokenBuffer":
        """A buffer for `capacity` tokens of the given form, unfilled unless `create` fills it."""
        batch, kv_heads, head_dim, dtype, device = form
        # A tensor that is made in inference mode could never be written to outside of it.
        with torch.inference_mode(False):
            return cls(create((batch, kv_heads, capacity, head_dim), dtype=dtype, device=device))

    def read(self, start: int, count: int) -> Tensor:
        """View of `count` tokens from `start`: `[batch, kv_heads, count, head_dim]`."""
        if self.tracks_gradients or torch.compiler.is_compiling():
            return self.tensor.narrow(2, start, count)
        return self.view(start, count)

    def view(self, start: int, count: int) -> Tensor:
        """As `read`, in code that is not compiled, if autograd does not follow the buffer."""
        # The same view as `narrow` gives in half its dispatch time, and even faster if the offset stays the same.
        size = (self._batch, self._kv_heads, count, self._head_dim)
        if start == 0:
            return self.tensor.as_strided(size, self._strides)
        offset = self._offset
        if offset is None:
            # Read lazily, because compiled code makes buffers too, and cannot read it.
            offset = self._offset = int(self.tensor.storage_offset())
        return self.tensor.as_strided(size, self._strides, offset + start * self._strides[2])

    def slots(self, start: int, count: int) -> Tensor:
        """As `read`, for a caller that is about to write to all of these slots itself."""
        return self.read(start, count)

    def write(self, start: int, states: Tensor) -> None:
        """Copy `states`, `[batch, kv_heads, tokens, head_dim]`, to the slots from `start` on."""
        self.read(start, states.shape[2]).copy_(states)

    def shift_to_front(self, start: int, count: int) -> None:
        """Move `count` tokens from `start` to the front, without overwriting unmoved ones."""
        if start * MAXIMUM_PIECES < count:
            self.write(0, self.read(start, count).clone())
            return
        for done in range(0, count, start):
            piece = min(start, count - done)
            self.write(done, self.read(start + done, piece))

    def reallocated(self, start: int, count: int, capacity: int) -> "TokenBuffer":
        """A new buffer for `capacity` tokens, the first of which are `count` tokens from `start`."""
        buffer = self.allocate_like(self._batch, capacity, torch.empty)
        with torch.no_grad():
            buffer.write(0, self.read(start, count))
        return buffer

    def selected(self, indices: Tensor, start: int, count: int, capacity: int) -> "TokenBuffer":
        """As `reallocated`, but sequence `i` of the new buffer is sequence `indices[i]` of this one."""
        buffer = self.allocate_like(indices.shape[0], capacity, torch.empty)
        with torch.no_grad():
            torch.index_select(self.read(start, count), 0, indices.to(self.tensor.device), out=buffer.read(0, count))
        return buffer

    def allocate_like(
        self, batch_size: int, capacity: int, create: Callable[..., Tensor] = torch.zeros
    ) -> "TokenBuffer":
        """A buffer in the same kind of memory, for states of the same form except for the batch size."""
        return TokenBuffer.allocate(self.form.of_batch(batch_size), capacity, create)

    @property
    def form(self) -> StateForm:
        """Form of the states, with the device where they are computed."""
        return StateForm(self._batch, self._kv_heads, self._head_dim, self.tensor.dtype, self.tensor.device)

    def first_sequences(self, batch_size: int) -> "TokenBuffer":
        """A buffer over the same memory, for the first `batch_size` sequences only."""
        return self if batch_size == self._batch else TokenBuffer(self.tensor[:batch_size])


def _restored(tensor: Tensor) -> TokenBuffer:
    """A buffer over an unpickled tensor. One of inference mode is copied: it could not be written to outside of it."""
    with torch.inference_mode(False):
        return TokenBuffer(tensor.clone() if tensor.is_inference() else tensor)


NO_DEVICE = torch.device("meta")
"""The device of planned states."""


@dataclass(frozen=True)
class TokenShape:
    """What a layer of attention holds for one token of one sequence.

    Attributes:
        kv_heads: heads of the keys, and of the values.
        key_head_dim: channels of a key.
        value_head_dim: channels of a value.
        indexer_head_dim: channels of the indexer's key, 0 if the layer has no indexer.
        heads: heads of the queries, `None` for as many as `kv_heads`.
    """

    kv_heads: int
    key_head_dim: int
    value_head_dim: int
    indexer_head_dim: int = 0
    heads: int | None = None


@dataclass(frozen=True)
class RecurrentShape:
    """What a recurrent layer holds for one sequence, whatever its length.

    Attributes:
        conv: elements of the convolution state, `channels * kernel`, in the dtype of the model.
        recurrent: elements of the recurrent state, which every model keeps in float32.
    """

    conv: int
    recurrent: int = 0


@dataclass(frozen=True)
class LayerShape:
    """What a layer holds.

    Attributes:
        batch_size: sequences side by side.
        dtype: dtype of the model.
        token: shape for each token, `None` if the layer does not attend.
        recurrent: shape for each sequence, `None` if the layer has no recurrent states.
    """

    batch_size: int
    dtype: torch.dtype
    token: TokenShape | None = None
    recurrent: RecurrentShape | None = None

    def forms(self) -> tuple[StateForm, StateForm]:
        """Forms of the keys and of the values.

        Raises:
            ConfigError: the layer does not attend.
        """
        token = self._attending()
        return (
            StateForm(self.batch_size, token.kv_heads, token.key_head_dim, self.dtype, NO_DEVICE),
            StateForm(self.batch_size, token.kv_heads, token.value_head_dim, self.dtype, NO_DEVICE),
        )

    def query_form(self) -> StateForm:
        """The form of the queries.

        Raises:
            ConfigError: the layer does not attend.
        """
        heads = self._attending().heads
        key_form = self.forms()[0]
        return key_form if heads is None else key_form._replace(kv_heads=heads)

    def indexer_nbytes(self, tokens: int) -> int:
        """Bytes of the indexer's keys of `tokens` tokens, for all sequences."""
        return self.batch_size * tokens * self._attending().indexer_head_dim * self.dtype.itemsize

    def _attending(self) -> TokenShape:
        if self.token is None:
            raise ConfigError(
                "The cache has a layer of attention where the model's layer does not attend: make the cache from the "
                "model's config."
            )
        return self.token
