"""One rank of all that `test_distributed.py` runs on several: DIRECTORY of the model, and OUTPUT, another one."""

import json
import pathlib
import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import kvlayers

NAMES = ("dynamic", "static", "int8", "offloaded", "sink")
OPTIONS: dict[str, Any] = {
    "static": {"max_cache_len": 64},
    "sink": {"window_length": 8, "num_sink_tokens": 2},
}


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


def continuation(model: Any, **options: Any) -> Any:
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, **options
    )


def continuations(model: Any) -> dict[str, tuple[list[list[int]], int]]:
    """For each way to ask for a cache: the tokens, and the kv_heads that the cache holds."""
    found = {"transformers": continuation(model)}
    with kvlayers.installed():
        found["default"] = continuation(model)
        for name in NAMES:
            options = {key: value for key, value in OPTIONS.get(name, {}).items() if key != "max_cache_len"}
            found[f"{name} by name"] = continuation(model, cache_implementation=name, cache_config=options or None)
    for name in NAMES:
        cache = kvlayers.make_cache(name, model, **OPTIONS.get(name, {}))
        found[f"{name} given"] = continuation(model, past_key_values=cache)
    return {
        way: (output.sequences.tolist(), output.past_key_values.layers[0].keys.shape[1])
        for way, output in found.items()
    }


def main(directory: str, output: str) -> None:
    """Write the logits and gradients of a share of a batch, and the tokens of a model that is split by heads."""
    dist.init_process_group("gloo")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    ids, following = (tokens.chunk(dist.get_world_size())[dist.get_rank()] for tokens in batch())
    result = train(DistributedDataParallel(model), ids, following, model.config)
    torch.save(result, pathlib.Path(output) / f"training.{dist.get_rank()}")
    dist.barrier()
    split = transformers.AutoModelForCausalLM.from_pretrained(directory, tp_plan="auto")
    (pathlib.Path(output) / f"tokens.{dist.get_rank()}").write_text(json.dumps(continuations(split)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
