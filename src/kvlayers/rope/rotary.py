"""How a model rotates its keys, and how a rotated key is turned on to a later position."""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.errors import ConfigError, OptionError, StateMismatchError

Layout = Literal["halves", "pairs"]
"""Which dimensions are turned with one another: `i` with `i + pairs`, or `2 i` with `2 i + 1`."""

_Place = tuple[torch.device, torch.dtype, int]


class _Turn(NamedTuple):
    """The last turn at a place, and what the next one is made from."""

    frequencies: Tensor
    distance: int
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Rotary:
    """A model's rotary position embedding (RoPE), as its cached keys show it.

    The key of a token at position `p` is that of position 0, with every pair of dimensions turned by the angle
    `p * inv_freq`. So a key can be moved by `distance` tokens without knowing where it is: it is turned by
    `distance * inv_freq`. What the model multiplies its keys by besides (the attention scaling of yarn) stays in them.

    A `Rotary` does not change. It remembers the last turn, so layers that share one compute it once a step.

    Args:
        inv_freq: radians per token, `[pairs]`, of any floating-point dtype and on any device; kept as float64 on the
            CPU. A frequency of 0 leaves its pair alone, a negative one turns it backwards.
        layout: "halves" where dimension `i` is turned with `i + pairs`, as in Llama; "pairs" where `2 i` is turned
            with `2 i + 1`, as in Cohere and GLM. Both count from `first`.
        first: the first dimension of head_dim that is rotated. Those before it, and those from
            `first + 2 * pairs` on, are left alone.

    Raises:
        OptionError: an argument is of the wrong kind.
        ConfigError: there are no frequencies, or they are not finite.
    """

    inv_freq: Tensor
    layout: Layout
    first: int = 0
    _turns: dict[_Place, _Turn] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        inv_freq = self.inv_freq
        if not isinstance(inv_freq, Tensor) or not inv_freq.is_floating_point() or inv_freq.is_meta:
            raise OptionError(
                f"expected inv_freq to be a floating-point tensor, in radians per token, but saw {inv_freq!r}: pass "
                "model.model.rotary_emb.inv_freq, or what takes its place in the model."
            )
        if self.layout not in get_args(Layout):
            raise OptionError(
                f"expected layout to be one of {', '.join(get_args(Layout))}, but saw {self.layout!r}: use the one "
                "that the model's rotate_half has."
            )
        if not isinstance(self.first, int) or isinstance(self.first, bool) or self.first < 0:
            raise OptionError(
                f"expected first to be a dimension of the keys (an int from 0 on), but saw {self.first!r}."
            )
        if inv_freq.dim() != 1 or inv_freq.numel() == 0 or not bool(inv_freq.isfinite().all()):
            raise ConfigError(
                f"expected finite frequencies of shape [pairs], with at least one pair, but saw {inv_freq!r}: pass "
                "one for each pair of dimensions that is rotated."
            )
        # An inference tensor could not take part in a computation with gradients later on.
        with torch.inference_mode(False):
            own = inv_freq.detach().to("cpu", torch.float64, copy=True)
        object.__setattr__(self, "inv_freq", own)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        # Without the turns: they would tie a copy to devices that it may not have.
        return type(self), (self.inv_freq, self.layout, self.first)

    @property
    def rotated_dims(self) -> int:
        """Dimensions of a key that are rotated: two for each frequency."""
        return 2 * self.inv_freq.numel()

    @property
    def fingerprint(self) -> str:
        """What two descriptions of one rotation have in common, and no others."""
        described = f"{self.layout} {self.first} {self.inv_freq.tolist()}"
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def partner(self, keys: Tensor) -> Tensor:
        """What a turn by a quarter makes of `keys`, so that any turn of them is `keys * cos + partner * sin`.

        Args:
            keys: `[batch, kv_heads, tokens, head_dim]`, of any floating-point dtype.

        Returns:
            `[batch, kv_heads, tokens, head_dim]`, float32 (float64 for float64 keys), 0 where nothing is rotated.

        Raises:
            StateMismatchError: head_dim is too small for the dimensions that are rotated.
        """
        head_dim = keys.shape[-1]
        after = self._dims_after(head_dim)
        wide = keys.to(_wide(keys.dtype))[..., self.first : self.first + self.rotated_dims]
        if self.layout == "halves":
            one, other = wide.chunk(2, dim=-1)
            turned = torch.cat((-other, one), dim=-1)
        else:
            one, other = wide[..., 0::2], wide[..., 1::2]
            turned = torch.stack((-other, one), dim=-1).flatten(-2)
        return torch.nn.functional.pad(turned, (self.first, after)) if self.first or after else turned

    def turn(
        self, distance: int | Tensor, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines that move keys by `distance` tokens.

        The angles are computed in float64 whatever `dtype` is, so that a million tokens lose nothing.

        Args:
            distance: tokens to move by: one number for all sequences, or an int64 tensor `[batch]` with one for each.
                Below 0, keys move towards the start.
            head_dim: size of a key.
            dtype: of the result.
            device: of the result.

        Returns:
            Cosines and sines, each `[1 or batch, 1, 1, head_dim]`: 1 and 0 at dimensions that are not rotated. The
            same two tensors may be returned again, so do not write to them.

        Raises:
            OptionError: `distance` is neither.
            StateMismatchError: head_dim is too small for the dimensions that are rotated.
        """
        last = self._turns.get((device, dtype, head_dim))
        if last is None:
            last = self._turned(0, self._frequencies(head_dim, device), (device, dtype, head_dim))
        if isinstance(distance, Tensor):
            with torch.inference_mode(False), torch.no_grad():
                angles = last.frequencies * _by_sequence(distance, last.frequencies)
                return angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)
        if last.distance != distance:
            last = self._turned(distance, last.frequencies, (device, dtype, head_dim))
        return last.cos, last.sin

    def rotated(self, keys: Tensor, partner: Tensor, distance: int | Tensor) -> Tensor:
        """`keys`, moved by `distance` tokens.

        Args:
            keys: `[batch, kv_heads, tokens, head_dim]`, rotated by the model.
            partner: `partner(keys)`, which does not depend on the distance.
            distance: as for `turn`.

        Returns:
            Keys of the shape and dtype of `keys`, computed in the dtype of `partner`.

        Raises:
            OptionError, StateMismatchError: as for `turn`.
        """
        cos, sin = self.turn(distance, keys.shape[-1], partner.dtype, keys.device)
        return torch.addcmul(keys * cos, partner, sin).to(keys.dtype)

    def _turned(self, distance: int, frequencies: Tensor, place: _Place) -> _Turn:
        """The turn by `distance` at a place, which takes the place of the last one there."""
        if not isinstance(distance, int) or isinstance(distance, bool):
            raise _bad_distance(distance)
        device, dtype, _ = place
        # Inference tensors could not be read where gradients are wanted.
        with torch.inference_mode(False), torch.no_grad():
            angles = frequencies * distance
            cos, sin = angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)
        turn = self._turns[place] = _Turn(frequencies, distance, cos, sin)
        return turn

    def _frequencies(self, head_dim: int, device: torch.device) -> Tensor:
        """Radians per token of each dimension, float64 `[1, 1, 1, head_dim]`, for angles that go to `device`."""
        after = self._dims_after(head_dim)
        with torch.inference_mode(False), torch.no_grad():
            doubled = self.inv_freq.repeat(2) if self.layout == "halves" else self.inv_freq.repeat_interleave(2)
            padded = torch.nn.functional.pad(doubled, (self.first, after))[None, None, None]
            # MPS has no float64.
            return padded if device.type == "mps" else padded.to(device)

    def _dims_after(self, head_dim: int) -> int:
        after = head_dim - self.first - self.rotated_dims
        if after < 0:
            raise StateMismatchError(
                f"expected keys of at least {head_dim - after} dimensions, as {self.rotated_dims} from dimension "
                f"{self.first} on are rotated, but saw head_dim {head_dim}: use the Rotary of the model's own layer."
            )
        return after


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _by_sequence(distance: Tensor, frequencies: Tensor) -> Tensor:
    """`distance` as float64 `[batch, 1, 1, 1]`, where the frequencies are."""
    if distance.dim() != 1 or distance.dtype != torch.int64:
        raise _bad_distance(distance)
    return distance.to(frequencies.device).to(frequencies.dtype)[:, None, None, None]


def _bad_distance(distance: object) -> OptionError:
    return OptionError(
        "expected distance to be a whole number of tokens, or an int64 tensor [batch] with one for each sequence, but "
        f"saw {distance!r}."
    )
