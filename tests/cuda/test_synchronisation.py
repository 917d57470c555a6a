"""No decode step makes the host wait for the device."""

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import cuda_device
from cuda_caches import KINDS
from cuda_device import DEVICE
from packed_reference import random_pair

pytestmark = cuda_device.on_cuda

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
NOT_ATTENDED = ("recurrent", "recurrent and attention", "dynamic, head_dims that differ")
"""Kinds that are not only keys and values of one head_dim."""


@pytest.mark.parametrize("name", [name for name in KINDS if name not in NOT_ATTENDED])
def test_updates_and_attention_wait_for_nothing(name: str) -> None:
    kind = KINDS[name]
    config = kind.model().config
    cache: Any = kind.make(config)
    layers = config.num_hidden_layers
    query = torch.randn(1, HEADS, 1, HEAD_DIM, device=DEVICE)

    def step(tokens: int) -> None:
        pair = random_pair(1, KV_HEADS, tokens, HEAD_DIM, torch.float32, DEVICE)
        for layer in range(layers):
            keys, values = cache.update(*pair, layer)
            if tokens == 1:
                scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    with torch.no_grad():
        step(90)
        # What grows, packs or is compiled for the first time does so here.
        for _ in range(70):
            step(1)
        with cuda_device.no_synchronisation():
            # At 64 tokens to a block, another one is packed.
            for _ in range(80):
                step(1)
