"""What tells the states of one model from those of another: its weights, and what is switched on."""

import secrets
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..persistence import weights_id
from ..persistence.description import canonical

PROBED = 3
"""Places that are looked at in each dimension of a weight, to see whether it is what it was."""


class _Known:
    """What was seen of the weights of a model.

    Attributes:
        probe: a few elements of each.
        writes: how often each parameter had been written to in place.
        text: their id, with a number that nobody else has where one was written to and the id is the same.
    """

    def __init__(self, probe: bytes, writes: Mapping[int, tuple[Any, int]], text: str) -> None:
        self.probe, self.writes, self.text = probe, writes, text


_known: "weakref.WeakKeyDictionary[torch.nn.Module, _Known]" = weakref.WeakKeyDictionary()


def model_identity(model: torch.nn.Module) -> str:
    """A text that is another one where a model would compute other states: its weights, adapters and autocast.

    The weights are hashed anew where a few elements of each are not what they were, as an adapter that is merged or a
    step of training changes about all. Where torch has counted a write that the hash does not see, the text is one that
    no other process can have. A write through `.data` to a few single elements may escape both.

    Raises:
        ConfigError: weights that are not in memory.
    """
    weights = _weights(model)
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
    return canonical([weights, autocast, list(_adapters(model))])


@torch.no_grad()
def _weights(model: torch.nn.Module) -> str:
    tensors = [*model.parameters(), *model.buffers()]
    if any(weight.is_meta for weight in tensors):
        return weights_id(model)
    # One transfer for each device, and no copy of a weight, however it lies in memory.
    probes: dict[torch.device, list[Tensor]] = {}
    for weight in tensors:
        probes.setdefault(weight.device, []).append(_probe(weight.detach()))
    probe = b"".join(torch.cat(each).cpu().numpy().tobytes() for each in probes.values())
    writes = {id(weight): (weakref.ref(weight), weight._version) for weight in tensors if not weight.is_inference()}
    known = _known.get(model)
    if known is not None and known.probe == probe and not _written(known.writes, writes):
        return known.text
    text = weights_id(model)
    if known is not None and known.text.startswith(text) and _written(known.writes, writes):
        text = f"{text} {secrets.token_hex(8)}"
    _known[model] = _Known(probe, writes, text)
    return text


def _written(before: Mapping[int, tuple[Any, int]], now: Mapping[int, tuple[Any, int]]) -> bool:
    """Whether one of the weights that were there has been written to since."""
    return any(
        address in before and before[address][0]() is reference() and before[address][1] != count
        for address, (reference, count) in now.items()
    )


def _probe(weight: Tensor) -> Tensor:
    places = tuple(slice(None, None, max(-(-size // PROBED), 1)) for size in weight.shape)
    return weight[places].reshape(-1).double()


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
