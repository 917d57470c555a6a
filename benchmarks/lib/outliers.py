"""A model whose keys have outliers, like those of some model families."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def key_outliers(model: Any, bias: float) -> Iterator[None]:
    """Add `bias` to two key channels of every KV head of every layer, within a block.

    The bias is added as a bias of `k_proj` would be. If a model normalises its keys, it is added after `k_norm`,
    because the norm would divide all other channels by it. The channels are the two of the rotary pair with the lowest
    frequency, the last of each half of a head: over some thousand tokens they hardly rotate, so a constant in the keys
    adds nearly the same to all logits of a query, which softmax removes. So in full precision the model reads almost as
    before (the benchmark reports both perplexities). A quantizer that groups these channels with others has to spread
    its levels over them: quanto and hqq group the channels of a token, 64 at a time.

    Raises:
        ValueError: no layer has a `k_proj`.
    """
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    modules = dict(model.named_modules())
    attentions = [name.removesuffix(".k_proj") for name in modules if name.endswith(".k_proj")]
    if not attentions:
        raise ValueError("expected a model with a k_proj in its layers, but found none")
    handles = [
        (modules.get(f"{name}.k_norm") or modules[f"{name}.k_proj"]).register_forward_hook(_adding(head_dim, bias))
        for name in attentions
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _adding(head_dim: int, bias: float) -> Any:
    head = torch.zeros(head_dim)
    head[[head_dim // 2 - 1, head_dim - 1]] = bias

    def hook(module: Any, arguments: Any, output: Tensor) -> Tensor:
        return output + head.to(output.dtype).repeat(output.shape[-1] // head_dim)

    return hook
