"""A layer that has other layers as parts, and answers for them."""

from typing import Any

from typing_extensions import override

from kvlayers.layers.contract import CacheLayer


class Forwarded:
    """A member of a layer that one of its parts answers: a method, or an attribute that can be assigned too.

    Args:
        part: name of the attribute that holds the part.
    """

    def __init__(self, part: str) -> None:
        self.part = part
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        return self if layer is None else getattr(getattr(layer, self.part), self.name)

    def __set__(self, layer: Any, value: Any) -> None:
        setattr(getattr(layer, self.part), self.name, value)


def forwarded(part: str) -> Any:
    """A `Forwarded`, which stands for a member of any type."""
    return Forwarded(part)


class WrapperLayer(CacheLayer):
    """A layer that attends by another layer, and answers for it.

    Args:
        wrapped: the layer that attends.

    Attributes:
        wrapped: the same layer.
    """

    wrapped: Any

    length = forwarded("wrapped")
    capacity = forwarded("wrapped")
    held_tokens = forwarded("wrapped")
    batch_size = forwarded("wrapped")
    dtype = forwarded("wrapped")
    device = forwarded("wrapped")
    sliding_window = forwarded("wrapped")
    is_sliding = forwarded("wrapped")
    is_croppable = forwarded("wrapped")
    is_recording = forwarded("wrapped")
    can_be_stacked = forwarded("wrapped")
    rotaries = forwarded("wrapped")
    bits = forwarded("wrapped")
    fidelity = forwarded("wrapped")
    exact_from = forwarded("wrapped")
    attention_paths = forwarded("wrapped")
    packing_paths = forwarded("wrapped")
    sized_for = forwarded("wrapped")
    planned_bits = forwarded("wrapped")
    note_left_padding = forwarded("wrapped")
    nearest_restorable = forwarded("wrapped")
    check_truncate = forwarded("wrapped")
    check_select = forwarded("wrapped")
    held_tensors = forwarded("wrapped")

    def __init__(self, wrapped: CacheLayer) -> None:
        super().__init__()
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        """Further public attributes of the wrapped layer, such as its reservation."""
        # A copy that is being made does not have its wrapped layer yet.
        if not name.startswith("_") and "wrapped" in vars(self):
            return getattr(self.wrapped, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @override
    def __dir__(self) -> list[str]:
        public = [name for name in dir(self.wrapped) if not name.startswith("_")]
        return sorted({*super().__dir__(), *public})
