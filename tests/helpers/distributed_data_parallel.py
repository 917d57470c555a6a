"""One rank of data-parallel training: writes the logits and gradients of its share, and what its cache decodes on.

Run by `distributed_ranks.py`, in as many processes as there are ranks.
"""

import pathlib
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import kvlayers


def batch() -> tuple[Tensor, Tensor]:
    """What all ranks are trained on together, and one token more for each sequence: int64 `[4, 12]` and `[4, 1]`."""
    ids = torch.randint(3, 96, (4, 13), generator=torch.Generator().manual_seed(0))
    return ids[:, :12], ids[:, 12:]


def train(model: Any, ids: Tensor, following: Tensor, config: Any) -> dict[str, Any]:
    """One backward pass through two chunks and the cache between them, and a step with what the cache holds then."""
    output = model(input_ids=ids[:, :5], past_key_values=kvlayers.DynamicCache(config=config), use_cache=True)
    logits = [output.logits]
    output = model(input_ids=ids[:, 5:], past_key_values=output.past_key_values, use_cache=True)
    logits = torch.cat([*logits, output.logits], dim=1)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    with torch.no_grad():
        decoded = model(input_ids=following, past_key_values=output.past_key_values).logits
    return {
        "logits": logits.detach(),
        "decoded": decoded,
        "gradients": [weight.grad for weight in model.parameters()],
    }


def main(directory: str, output: pathlib.Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    ids, following = (tokens.chunk(dist.get_world_size())[dist.get_rank()] for tokens in batch())
    result = train(DistributedDataParallel(model), ids, following, model.config)
    torch.save(result, output.with_name(f"{output.name}.{dist.get_rank()}"))
