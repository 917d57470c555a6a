"""The attention function "kvlayers" among those of transformers, for `attn_implementation="kvlayers"`."""

from typing import Any

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kvlayers.attention import model_attention

_ADDED = (
    (AttentionInterface, model_attention.attention),
    (AttentionMaskInterface, model_attention.attention_mask),
)


def add() -> None:
    """Let models be set to the attention function."""
    for interface, function in _ADDED:
        interface.register(model_attention.NAME, function)


def remove() -> None:
    """Take the attention function back, unless somebody else has replaced it."""
    for interface, function in _ADDED:
        for functions in _mappings(interface):
            if functions.get(model_attention.NAME) is function:
                del functions[model_attention.NAME]


def _mappings(interface: type) -> list[dict[str, Any]]:
    """The dicts of a class: one has what `register` has added, which has no inverse."""
    return [value for owner in interface.__mro__ for value in vars(owner).values() if type(value) is dict]
