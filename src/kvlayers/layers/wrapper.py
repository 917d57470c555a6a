"""A layer around a layer that attends: what both kinds of wrappers pass on to it."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from typing_extensions import override

from kvlayers.layers.contract import CacheLayer
from kvlayers.layers.shape import LayerShape
from kvlayers.rope.rotary import Rotary
from kvlayers.stores.contract import Fidelity


class WrapperLayer(CacheLayer):
    """A layer that attends by another layer, and answers for it.

    Args:
        wrapped: the layer that attends.

    Attributes:
        wrapped: the same layer.
    """

    wrapped: Any

    def __init__(self, wrapped: CacheLayer) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.sliding_window = wrapped.sliding_window

    def __getattr__(self, name: str) -> Any:
        """Further public attributes of the wrapped layer, such as its reservation."""
        # A copy that is being made does not have its wrapped layer yet.
        if not name.startswith("_") and "wrapped" in vars(self):
            return getattr(self.wrapped, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __dir__(self) -> list[str]:
        public = [name for name in dir(self.wrapped) if not name.startswith("_")]
        return sorted({*super().__dir__(), *public})

    @property
    @override
    def length(self) -> int:
        length: int = self.wrapped.length
        return length

    @property
    @override
    def capacity(self) -> int | None:
        capacity: int | None = self.wrapped.capacity
        return capacity

    @property
    @override
    def held_tokens(self) -> int | None:
        held_tokens: int | None = self.wrapped.held_tokens
        return held_tokens

    @property
    @override
    def bits(self) -> tuple[int, int] | None:
        bits: tuple[int, int] | None = self.wrapped.bits
        return bits

    @property
    @override
    def attention_paths(self) -> Mapping[str, int]:
        paths: Mapping[str, int] = self.wrapped.attention_paths
        return paths

    @property
    @override
    def packing_paths(self) -> Mapping[str, int]:
        paths: Mapping[str, int] = self.wrapped.packing_paths
        return paths

    @property
    def dtype(self) -> Any:
        """dtype of the keys, `None` before the first states."""
        return self.wrapped.dtype

    @property
    def device(self) -> Any:
        """Device that computes the states, `None` before the first states."""
        return self.wrapped.device

    @property
    def is_sliding(self) -> bool:  # type: ignore[override]
        """Whether it attends within a window."""
        return bool(self.wrapped.is_sliding)

    @property
    def rotaries(self) -> tuple[Rotary, ...]:  # type: ignore[override]
        """Rotations that its description names by their fingerprints."""
        rotaries: tuple[Rotary, ...] = self.wrapped.rotaries
        return rotaries

    @property
    @override
    def sized_for(self) -> int | None:
        sized_for: int | None = self.wrapped.sized_for
        return sized_for

    @property
    @override
    def fidelity(self) -> Fidelity:
        fidelity: Fidelity = self.wrapped.fidelity
        return fidelity

    @property
    @override
    def exact_from(self) -> int | None:
        exact_from: int | None = self.wrapped.exact_from
        return exact_from

    @override
    def planned_bits(self, shape: LayerShape) -> float:
        return float(self.wrapped.planned_bits(shape))

    @override
    def note_left_padding(self, padding: Tensor | None) -> None:
        self.wrapped.note_left_padding(padding)

    @property
    @override
    def batch_size(self) -> int | None:
        batch_size: int | None = self.wrapped.batch_size
        return batch_size

    @property
    @override
    def can_be_stacked(self) -> bool:
        return bool(self.wrapped.can_be_stacked)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether `crop` can put it back as it was."""
        return bool(self.wrapped.is_croppable)

    @property
    @override
    def is_recording(self) -> bool:
        return bool(self.wrapped.is_recording)

    @override
    def check_truncate(self, length: int) -> None:
        self.wrapped.check_truncate(length)

    @override
    def nearest_restorable(self, length: int) -> int:
        return int(self.wrapped.nearest_restorable(length))

    @override
    def check_select(self, batch_size: int) -> None:
        self.wrapped.check_select(batch_size)

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        yield from self.wrapped.held_tensors()
