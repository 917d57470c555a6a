"""One rank of a model that transformers has split by heads: writes the tokens that each kind of cache leads to.

Run by `distributed_ranks.py`, in as many processes as there are ranks.
"""

import json
import pathlib
from typing import Any

import torch
import torch.distributed as dist
import transformers

import kvlayers

NAMES = ("dynamic", "static", "int8", "offloaded", "sink")
OPTIONS: dict[str, Any] = {
    "static": {"max_cache_len": 64},
    "sink": {"window_length": 8, "num_sink_tokens": 2},
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


def main(directory: str, output: pathlib.Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, tp_plan="auto")
    output.with_name(f"{output.name}.{dist.get_rank()}").write_text(json.dumps(continuations(model)))
