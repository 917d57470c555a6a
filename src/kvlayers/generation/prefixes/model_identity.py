"""What tells the states of one model from those of another: its weights, and what is switched on."""

import sys
from collections.abc import Iterator
from typing import Any

import torch

from kvlayers.persistence import weights_id
from kvlayers.persistence.format import canonical


def model_identity(model: torch.nn.Module) -> str:
    """A text that is another one where a model would compute other states: its weights, adapters and autocast.

    The weights are hashed anew where torch has counted a write to one of them, or a few elements of each are not what
    they were, as after a step of training or a merged adapter; see `weights_id`.

    Raises:
        ConfigError: weights that are not in memory.
    """
    weights = weights_id(model)
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
    return canonical([weights, autocast, list(_adapters(model))])


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
