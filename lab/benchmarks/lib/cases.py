"""What claims measure beside steps of a llama: traffic of offloaded caches, models with latents."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

import kvlayers
from lib.internals import recorded_transfers
from lib.workload import RandomModel, Shape

TRAFFIC_SHAPE = Shape(layers=4, heads=4, kv_heads=2, head_dim=32, intermediate=64, vocab=512)
OFFLOADED: dict[str, Callable[[Any, bool], kvlayers.Cache]] = {
    "dynamic": lambda config, offloading: kvlayers.DynamicCache(config=config, offloading=offloading),
    "int4": lambda config, offloading: kvlayers.QuantizedCache(config=config, nbits=4, offloading=offloading),
}


def traffic_of(model: Any, name: str, prompt: Tensor, new: int) -> dict[str, Any]:
    """Bytes that a step moves with an offloaded cache, and the peak on the device, between two pools of host memory.

    Raises:
        RuntimeError: the tokens are others than those of the same cache that is not offloaded.
    """

    def decoded(cache: kvlayers.Cache) -> list[int]:
        ids, found = prompt, []
        with torch.no_grad():
            for _ in range(new):
                ids = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
                found.append(int(ids))
        return found

    with recorded_transfers() as peak:
        cache = OFFLOADED[name](model.config, True)
    if decoded(cache) != decoded(OFFLOADED[name](model.config, False)):
        raise RuntimeError(f"{name} gives other tokens than without offloading")
    steps = [cache.traffic.of_step(step) for step in range(-new + 1, 0)]
    return {
        "to_device": statistics.median(step.to_device for step in steps),
        "to_host": statistics.median(step.to_host for step in steps),
        "peak_on_device": peak(),
        "held": cache.nbytes,
    }


class LatentModel(RandomModel):
    """A model like DeepSeek-V3 with random weights, and caches with the same random latents."""

    latent, rotated = 512, 64

    def __init__(self, dtype: torch.dtype, layers: int) -> None:
        # Caches are filled at once.
        self.name, self.chunk = "random DeepSeek-V3", 1 << 16
        torch.manual_seed(0)
        config = transformers.DeepseekV3Config(
            vocab_size=1024,
            hidden_size=1024,
            intermediate_size=2048,
            num_hidden_layers=layers,
            num_attention_heads=16,
            num_key_value_heads=16,
            q_lora_rank=None,
            kv_lora_rank=self.latent,
            qk_rope_head_dim=self.rotated,
            qk_nope_head_dim=128,
            v_head_dim=128,
            # Without experts: rounding that chooses another expert would hide how near logits are.
            first_k_dense_replace=layers,
            max_position_embeddings=32768,
        )
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval().bfloat16().to(dtype)

    def prepare(self, length: int, batch: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(length)

        def normal(channels: int) -> Tensor:
            return torch.randn(batch, 1, length, channels, generator=generator).bfloat16().to(self.model.dtype)

        self.states = [(normal(self.latent), normal(self.rotated)) for _ in range(self.model.config.num_hidden_layers)]
        return torch.ones(batch, 1, dtype=torch.int64)
