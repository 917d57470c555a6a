"""How a model rotates its keys, and how a rotated key is moved to another position."""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.errors import ConfigError, OptionError, StateMismatchError

Layout = Literal["halves", "pairs"]
"""Which dimensions are rotated together: `i` with `i + pairs`, or `2 i` with `2 i + 1`."""

_TurnKey = tuple[torch.device, torch.dtype, int]
"""Device, dtype and head_dim of a turn."""


class _Turn(NamedTuple):
    """The last turn for one device, dtype and head_dim, and the frequencies for the next one."""

    frequencies: Tensor
    distance: int | None
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Rotary:
    """A model's rotary position embedding (RoPE), as it appears in cached keys.

    The key of a token at position `p` is the key for position 0 with every pair of dimensions rotated by the angle
    `p * inv_freq`. So a key can be moved by `distance` tokens without knowing its position: it is rotated by
    `distance * inv_freq`. Other factors of the model's keys (the attention scaling of yarn) stay in them.

    A `Rotary` is immutable. It remembers the last turn, so layers that share a `Rotary` compute a turn once per step.

    Args:
        inv_freq: radians per token, `[pairs]`, of any floating-point dtype and on any device; kept as float64 on the
            CPU. A frequency of 0 does not rotate its pair; a negative one rotates it backwards.
        layout: "halves" if dimension `i` is rotated with `i + pairs`, as in Llama; "pairs" if `2 i` is rotated with
            `2 i + 1`, as in Cohere and GLM. Both count from `first`.
        first: the first dimension of head_dim that is rotated. Dimensions before it, and from `first + 2 * pairs` on,
            are not rotated.

    Raises:
        OptionError: an argument has the wrong type.
        ConfigError: there are no frequencies, or they are not finite.
    """

    inv_freq: Tensor
    layout: Layout
    first: int = 0
    _turns: dict[_TurnKey, _Turn] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        inv_freq = self.inv_freq
        if not isinstance(inv_freq, Tensor) or not inv_freq.is_floating_point() or inv_freq.is_meta:
            raise OptionError(
                f"`inv_freq` must be a floating-point tensor, in radians per token, got {inv_freq!r}: pass "
                "model.model.rotary_emb.inv_freq, or its equivalent in the model."
            )
        if self.layout not in get_args(Layout):
            raise OptionError(
                f"`layout` must be one of {', '.join(get_args(Layout))}, got {self.layout!r}: use the layout of the "
                "model's rotate_half."
            )
        if not isinstance(self.first, int) or isinstance(self.first, bool) or self.first < 0:
            raise OptionError(
                f"`first` must be a dimension of the keys (an int from 0 on), got {self.first!r}: pass the first that "
                "is rotated."
            )
        if inv_freq.dim() != 1 or inv_freq.numel() == 0 or not bool(inv_freq.isfinite().all()):
            raise ConfigError(
                f"`inv_freq` must have finite frequencies of shape [pairs], with at least one pair, got {inv_freq!r}: "
                "pass one for each pair of rotated dimensions."
            )
        # An inference tensor could not take part in a later computation with gradients.
        with torch.inference_mode(False):
            own = inv_freq.detach().to("cpu", torch.float64, copy=True)
        object.__setattr__(self, "inv_freq", own)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        # Without the turns, which would tie a copy to devices that it may not have.
        return type(self), (self.inv_freq, self.layout, self.first)

    @property
    def rotated_dims(self) -> int:
        """Number of rotated dimensions of a key: two for each frequency."""
        return 2 * self.inv_freq.numel()

    @property
    def fingerprint(self) -> str:
        """A text that is the same for equal rotations, and differs for others."""
        described = f"{self.layout} {self.first} {self.inv_freq.tolist()}"
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def partner(self, keys: Tensor) -> Tensor:
        """The keys rotated by a quarter turn, so that any rotation of them is `keys * cos + partner * sin`.

        Args:
            keys: `[batch, kv_heads, tokens, head_dim]`, of any floating-point dtype.

        Returns:
            `[batch, kv_heads, tokens, head_dim]`, float32 (float64 for float64 keys), 0 in
            dimensions that are not rotated.

        Raises:
            StateMismatchError: head_dim is smaller than the number of rotated dimensions.
        """
        head_dim = keys.shape[-1]
        after = self._dims_after(head_dim)
        wide = keys.to(torch.promote_types(keys.dtype, torch.float32))[..., self.first : self.first + self.rotated_dims]
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

        The angles are computed in float64 for every `dtype`, so that they stay exact after a million tokens.

        Args:
            distance: tokens to move by: one number for all sequences, or an int64 tensor `[batch]` with a number for
                each. A negative distance moves keys towards the start.
            head_dim: channels of a key.
            dtype: dtype of the result.
            device: device of the result.

        Returns:
            Cosines and sines, each `[1 or batch, 1, 1, head_dim]`: 1 and 0 in dimensions that are not rotated. The
            same two tensors may be returned again, so do not write to them.

        Raises:
            OptionError: `distance` has another type.
            StateMismatchError: head_dim is smaller than the number of rotated dimensions.
        """
        key = device, dtype, head_dim
        last, number = self._turns.get(key), None if isinstance(distance, Tensor) else distance
        if last is not None and number is not None and last.distance == number:
            return last.cos, last.sin
        if isinstance(distance, Tensor):
            is_right = distance.dim() == 1 and distance.dtype == torch.int64
        else:
            is_right = isinstance(distance, int) and not isinstance(distance, bool)
        if not is_right:
            raise OptionError(
                "`distance` must be a whole number of tokens, or an int64 tensor [batch] with a number for each "
                f"sequence, got {distance!r}: pass one of them."
            )
        # Inference tensors could not be read in a computation with gradients.
        with torch.inference_mode(False), torch.no_grad():
            frequencies = self._frequencies(head_dim, device) if last is None else last.frequencies
            if isinstance(distance, Tensor):
                distance = distance.to(frequencies.device).to(frequencies.dtype)[:, None, None, None]
            angles = frequencies * distance
            turn = _Turn(frequencies, number, angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device))
        if last is None or number is not None:
            self._turns[key] = turn
        return turn.cos, turn.sin

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

    def _frequencies(self, head_dim: int, device: torch.device) -> Tensor:
        """Radians per token of each dimension, float64 `[1, 1, 1, head_dim]`, for angles on `device`."""
        after = self._dims_after(head_dim)
        doubled = self.inv_freq.repeat(2) if self.layout == "halves" else self.inv_freq.repeat_interleave(2)
        padded = torch.nn.functional.pad(doubled, (self.first, after))[None, None, None]
        # MPS has no float64.
        return padded if device.type == "mps" else padded.to(device)

    def _dims_after(self, head_dim: int) -> int:
        after = head_dim - self.first - self.rotated_dims
        if after < 0:
            raise StateMismatchError(
                f"Keys must have at least {head_dim - after} dimensions, because {self.rotated_dims} from dimension "
                f"{self.first} on are rotated, got head_dim {head_dim}: use the Rotary of the model's own layer."
            )
        return after
