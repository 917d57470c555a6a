"""The devices of a model that is spread over several of them."""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from kvlayers.upstream import model_types


def layer_devices(model: object) -> tuple[torch.device, ...]:
    """The device on which each layer of the decoder is computed; empty if all are on the model's device.

    Args:
        model: a model, which accelerate may have spread over devices (`device_map`), or its config.

    Weights that accelerate brings from elsewhere for each forward pass are on no device in between. Their layers count
    as layers of the model's device.
    """
    if not isinstance(model, PreTrainedModel) or len(vars(model).get("hf_device_map", ())) < 2:
        return ()
    device: torch.device = model.device
    devices = tuple(_device(layer, device) for layer in _decoder_layers(model))
    return devices if set(devices) - {device} else ()


def _decoder_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    count = model_types.decoder_config(model).num_hidden_layers
    lists = (part for part in model.get_decoder().modules() if isinstance(part, nn.ModuleList))
    return next((list(layers) for layers in lists if len(layers) == count), [])


def _device(layer: nn.Module, otherwise: torch.device) -> torch.device:
    devices = (weight.device for weight in layer.parameters())
    return next((device for device in devices if device.type != "meta"), otherwise)
