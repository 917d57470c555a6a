"""The side of kvpress: runs its presses on saved states, in an interpreter of its own.

    PYTHON_WITH_KVPRESS lab/benchmarks/lib/kvpress_side.py STATES.pt FOUND.pt

It imports nothing of kvlayers, whose transformers kvpress does not support.
"""

import sys
from importlib.metadata import version
from typing import Any

import kvpress
import torch
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

PRESSES = {
    "knorm": kvpress.KnormPress,
    "keydiff": kvpress.KeyDiffPress,
    "snapkv": kvpress.SnapKVPress,
    "expected_attention": kvpress.ExpectedAttentionPress,
    "tova": kvpress.TOVAPress,
}
ADAPTIVE = ("knorm", "keydiff", "snapkv", "expected_attention")
"""Rules with which heads are compared that keep different numbers of tokens. `tova` has equal scores in all heads."""


def attention_module(config: Any, layer: dict[str, Tensor], index: int) -> Any:
    """An attention module of the model, of which presses use the query projection and the rotary embedding."""
    module = LlamaAttention(config, index).eval()
    module.q_proj.weight.data = layer["q_proj"]
    module.rotary_emb = LlamaRotaryEmbedding(config)
    return module


def tokens_of(kept: Tensor, keys: Tensor) -> list[list[int]]:
    """Which keys were kept, `[kv_heads]` lists in ascending order. No two keys of a head are equal."""
    found = []
    for own, all_keys in zip(kept[0], keys[0], strict=True):
        numbers = {key.numpy().tobytes(): number for number, key in enumerate(all_keys)}
        found.append(sorted(numbers[key.numpy().tobytes()] for key in own))
    return found


def compressed(press: Any, module: Any, layer: dict[str, Tensor]) -> list[list[int]]:
    """The tokens that a press keeps in each KV head."""
    passed = {"position_embeddings": (layer["cos"], layer["sin"])}
    keys, _ = press.compress(module, layer["hidden"], layer["keys"], layer["values"], None, passed)
    return tokens_of(keys, layer["keys"])


def unmasked(press: Any, module: Any, layer: dict[str, Tensor]) -> list[list[int]]:
    """The tokens that a press with budgets of heads leaves unmasked in each KV head."""
    passed = {"position_embeddings": (layer["cos"], layer["sin"])}
    press.compress(module, layer["hidden"], layer["keys"], layer["values"], None, passed)
    masked = torch.zeros(layer["keys"].shape[:3], dtype=torch.bool)
    masked[module.masked_key_indices] = True
    return [(~head).nonzero().flatten().tolist() for head in masked[0]]


def main(states: str, output: str) -> None:
    saved = torch.load(states, weights_only=True)
    config = transformers.LlamaConfig.from_dict(saved["config"])
    config._attn_implementation = "sdpa"
    found: dict[str, Any] = {"versions": {name: version(name) for name in ("kvpress", "transformers", "torch")}}
    with torch.no_grad():
        for index, layer in enumerate(saved["layers"]):
            module = attention_module(config, layer, index)
            for name, press in PRESSES.items():
                for keep in saved["keeps"]:
                    found[f"{name} {keep} {index}"] = compressed(press(1 - keep), module, layer)
                    if name in ADAPTIVE:
                        adaptive = kvpress.AdaKVPress(press(1 - keep))
                        found[f"{name} {keep} {index} AdaKV"] = unmasked(adaptive, module, layer)
    torch.save(found, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
