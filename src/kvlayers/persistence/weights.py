"""Which weights a model has."""

import hashlib

import torch

from ..errors import ConfigError

SAMPLES = 256
"""Elements of each weight that an id is made of."""


@torch.no_grad()
def weights_id(model: torch.nn.Module) -> str:
    """An id of a model's weights: the same for the same ones, another for a fine-tune of them.

    Two models may have equal configs and other weights, and the states of the one mean nothing to the other. The id is
    made of up to 256 elements of each weight, so it takes little time, and differs as soon as one of them
    does; an edit of a few single weights may escape it. It depends on the dtype that the model is loaded in, as states
    do.

    Args:
        model: the model, with weights that are in memory.

    Raises:
        ConfigError: weights are not in memory (meta tensors, as those that accelerate has offloaded).

    Example:
        >>> import torch, kvlayers
        >>> one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> kvlayers.weights_id(one) == kvlayers.weights_id(other)
        False
    """
    total = hashlib.sha256()
    # Not the buffers that a model makes anew: some of RoPE change with the length.
    for name, weight in model.state_dict().items():
        if not isinstance(weight, torch.Tensor):
            continue
        if weight.is_meta:
            raise ConfigError(
                f"expected weights in memory, but {name} is a meta tensor: pass a weights_id of your own choice."
            )
        total.update(f"\n{name} {weight.dtype} {list(weight.shape)} ".encode())
        flat = weight.detach().reshape(-1)
        step = max(-(-flat.numel() // SAMPLES), 1)
        sample = flat[::step][:SAMPLES].contiguous().cpu()
        total.update(sample.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
