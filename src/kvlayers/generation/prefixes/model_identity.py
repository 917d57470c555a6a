"""What distinguishes the states of one model from those of another: its weights, adapters and autocast."""

import sys
from collections.abc import Iterator
from typing import Any

import torch

from kvlayers.persistence import weights_id
from kvlayers.persistence.format import canonical
from kvlayers.utils.transforms import autocast_dtype


def model_identity(model: torch.nn.Module) -> str:
    """A text that differs between models that compute different states.

    It depends on the weights, the active adapters and autocast. Weights are hashed again if torch has counted a write
    to one of them, or if a few sampled elements have changed, as after a training step or after merging an adapter; see
    `weights_id`.

    Raises:
        ConfigError: the weights are not in memory.
    """
    weights = weights_id(model)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    autocast = autocast_dtype(device)
    return canonical([weights, None if autocast is None else str(autocast), list(_adapters(model))])


def _adapters(model: torch.nn.Module) -> Iterator[list[Any]]:
    """The PEFT adapters that are active in each layer. Their weights are weights of the model; this is not."""
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        # No module can be of a class that nobody has imported.
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
