"""What tells the states of one model from those of another: its weights, and what is switched on."""

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ..persistence import weights_id
from ..persistence.description import canonical

_Version = tuple[tuple[int, int], ...]
_known: "weakref.WeakKeyDictionary[torch.nn.Module, tuple[_Version, str]]" = weakref.WeakKeyDictionary()


def model_identity(model: torch.nn.Module) -> str:
    """A text that is another one where a model would compute other states: its weights, adapters and modes.

    The weights are looked at again where they were written to since. What is written through `.data` is not seen.

    Raises:
        ConfigError: weights that are not in memory.
    """
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
    return canonical([_weights(model), model.training, autocast, list(_adapters(model))])


def _weights(model: torch.nn.Module) -> str:
    version = tuple(_versions(model))
    known = _known.get(model)
    if known is None or known[0] != version:
        known = _known[model] = version, weights_id(model)
    return known[1]


def _versions(model: torch.nn.Module) -> Iterator[tuple[int, int]]:
    for weight in (*model.parameters(), *model.buffers()):
        # Inference tensors cannot be written to outside of inference mode, and count no writes.
        yield weight.data_ptr(), 0 if weight.is_inference() else weight._version


def _adapters(model: torch.nn.Module) -> Iterator[list[Any]]:
    """Which adapters of PEFT each layer has switched on: their weights are the model's, this is not."""
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        # Nothing can be of a class that nobody has imported.
        return
    for name, module in model.named_modules():
        if isinstance(module, tuners.BaseTunerLayer):
            scaling = vars(module).get("scaling", {})
            yield [
                name,
                sorted(module.active_adapters),
                bool(module.disable_adapters),
                sorted(module.merged_adapters),
                sorted((str(adapter), float(scale)) for adapter, scale in scaling.items()),
            ]
