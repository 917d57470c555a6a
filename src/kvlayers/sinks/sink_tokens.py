"""The first tokens of each sequence, and where they stand in front of a window."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlayers.core.preparation import PADDING_NAME
from kvlayers.core.token_store import KVPair
from kvlayers.errors import OptionError, StateMismatchError
from kvlayers.rope.rotary import Rotary
from kvlayers.utils.options import check_whole_number

NAMES = ("first_keys", "first_values")
"""The names of the sinks in a state."""


@dataclass(frozen=True, eq=False, slots=True)
class Sinks:
    """The first `num_tokens` tokens of each sequence that are not padding. Every change makes a new object.

    Attributes:
        num_tokens: sinks of each sequence.
        rotary: how their keys are rotated to their place, `None` for keys that do not know positions.
        padding: tokens of padding before each sequence, int64 `[batch]`, on the device of the keys as soon as there are
            any; `None` without padding.
        keys: `[batch, kv_heads, num_tokens, key_head_dim]`, rotated as they came; `None` before the first tokens.
        values: `[batch, kv_heads, num_tokens, value_head_dim]`.
        partner: the channels that a rotation mixes into the keys, of the shape of the keys.
        first_start: position before which every token is padding.
        last_start: position from which on no sequence has padding.
    """

    num_tokens: int
    rotary: Rotary | None
    padding: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    partner: Tensor | None = None
    first_start: int = 0
    last_start: int = 0

    def with_padding(self, padding: Tensor | None) -> "Sinks":
        """The same sinks behind other padding."""
        if padding is None:
            return replace(self, padding=None, first_start=0, last_start=0)
        return replace(self, padding=padding, first_start=int(padding.min()), last_start=int(padding.max()))

    def check_batch(self, batch_size: int) -> None:
        """Raise `StateMismatchError` if the padding is for another number of sequences."""
        if self.padding is not None and self.padding.shape[0] != batch_size:
            raise StateMismatchError(
                f"States must be of {self.padding.shape[0]} sequences, since left_padding has as many entries, "
                f"got {batch_size}: give one entry for each sequence, beams included, or reset the cache."
            )

    def with_tokens(self, seen: int, keys: Tensor, values: Tensor) -> "Sinks":
        """The sinks, with any new tokens that fall into sink positions.

        Args:
            seen: position of the first new token.
            keys: `[batch, kv_heads, new, key_head_dim]`.
            values: `[batch, kv_heads, new, value_head_dim]`.
        """
        if not keys.shape[2] or (self.keys is not None and seen >= self.last_start + self.num_tokens):
            return self
        # None of the later tokens is a sink, and a prompt is long.
        first = max(1, self.last_start + self.num_tokens - seen)
        keys, values = keys[:, :, :first], values[:, :, :first]
        tracked = torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)
        # Queries that require gradients could not attend to tensors that were made in inference mode.
        with torch.inference_mode(False), torch.set_grad_enabled(tracked):
            return self._with_tokens(seen, keys.clone(), values.clone())

    def _with_tokens(self, seen: int, keys: Tensor, values: Tensor) -> "Sinks":
        padding = None if self.padding is None else self.padding.to(keys.device)
        if padding is None and seen == 0 and keys.shape[2] == self.num_tokens:
            taken_keys, taken_values = keys, values
        else:
            place = torch.arange(self.num_tokens, device=keys.device)[None] - seen
            place = place.expand(keys.shape[0], -1) if padding is None else place + padding[:, None]
            taken_keys = _taken(keys, place, None if seen == 0 else self.keys)
            taken_values = _taken(values, place, None if seen == 0 else self.values)
        partner = None
        if self.rotary is not None:
            partner = self.rotary.partner(taken_keys)
            # So that the frequencies are on the device before the first step that evicts a token.
            self.rotary.turn(0, keys.shape[-1], partner.dtype, keys.device)
        return replace(self, padding=padding, keys=taken_keys, values=taken_values, partner=partner)

    def rotated_before(self, position: int) -> KVPair:
        """Keys and values of the sinks, rotated to stand in front of the token at `position + num_tokens`.

        The keys of a sequence whose padding reaches beyond `position` stay as they came.
        """
        if self.keys is None or self.values is None:
            raise StateMismatchError("The layer must have seen tokens, got an empty layer: update it first.")
        if self.rotary is None or self.partner is None:
            return self.keys, self.values
        distance = position if self.padding is None else (position - self.padding).clamp(min=0)
        return self.rotary.rotated(self.keys, self.partner, distance), self.values

    def selected(self, indices: Tensor) -> "Sinks":
        """The sinks of the sequences at `indices`, int64 `[new_batch]`."""

        def rows(states: Tensor | None) -> Tensor | None:
            return None if states is None else states.index_select(0, indices.to(states.device))

        padding = rows(self.padding)
        chosen = replace(
            self, padding=padding, keys=rows(self.keys), values=rows(self.values), partner=rows(self.partner)
        )
        # Both positions hold for a selection too. Those of an accelerator are not read back, which would stall it.
        return chosen if padding is None or padding.device.type != "cpu" else chosen.with_padding(padding)

    def emptied(self) -> "Sinks":
        """Sinks of the same number and rotation, before the first tokens."""
        return Sinks(self.num_tokens, self.rotary)

    def held_tensors(self) -> Iterator[Tensor]:
        """Every tensor that keeps memory alive."""
        tensors = (self.padding, self.keys, self.values, self.partner)
        yield from (tensor for tensor in tensors if tensor is not None)

    def state(self) -> dict[str, Tensor]:
        """Copies of the keys, values and padding, by name."""
        held = {NAMES[0]: self.keys, NAMES[1]: self.values, PADDING_NAME: self.padding}
        return {name: tensor.clone() for name, tensor in held.items() if tensor is not None}

    def of_state(self, tensors: dict[str, Tensor]) -> "Sinks":
        """The sinks that `state` returned these tensors for, with the rotation of these sinks.

        Raises:
            StateMismatchError: the tensors are not a state of as many sinks.
        """
        if not tensors:
            return self.emptied()
        keys, values, padding = (tensors.get(name) for name in (*NAMES, PADDING_NAME))
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        batches = {shape[:1] for shape in shapes.values()}
        held = (keys, values) != (None, None)
        if (
            len(batches) != 1
            or (
                held
                and not all(
                    states is not None and states.dim() == 4 and states.shape[2] == self.num_tokens
                    for states in (keys, values)
                )
            )
            or (
                padding is not None
                and (padding.dim() != 1 or padding.dtype != torch.int64 or bool((padding < 0).any()))
            )
        ):
            raise StateMismatchError(
                f"`state` must have the first {self.num_tokens} tokens of each sequence and the padding before "
                f"them, got {shapes}: take the state again."
            )
        sinks = self.emptied()
        if keys is not None and values is not None:
            sinks = sinks.with_tokens(0, keys, values)
        return sinks.with_padding(None if padding is None else padding.clone())


def _taken(states: Tensor, place: Tensor, held: Tensor | None) -> Tensor:
    """For each sink the new state at its `place`, `[batch, num_tokens]`, or the held state if no new token is there."""
    batch, kv_heads, new, head_dim = states.shape
    sinks = place.shape[1]
    index = place.clamp(0, new - 1)[:, None, :, None].expand(batch, kv_heads, sinks, head_dim)
    is_new = ((place >= 0) & (place < new))[:, None, :, None]
    if held is None or held.shape[0] != batch:
        held = states.new_zeros(())
    return torch.where(is_new, states.gather(2, index), held)


def check_sinks(window_length: object, num_sink_tokens: object) -> None:
    """Raise `OptionError` if the two are not the length of a window and a smaller number of sinks."""
    for name, number, least in (("window_length", window_length, 2), ("num_sink_tokens", num_sink_tokens, 1)):
        check_whole_number(number, f"`{name}`", least, of="tokens")
    if window_length <= num_sink_tokens:  # type: ignore[operator]
        raise OptionError(
            f"`window_length` must be larger than `num_sink_tokens`, since the sinks are part of it, got "
            f"window_length={window_length} and num_sink_tokens={num_sink_tokens}: 256 with 4 sinks is usual."
        )
