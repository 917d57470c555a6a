"""A decode step and its cache as a program of `torch.export`."""

import io

import pytest
import torch

import kvlayers
from kvlayers.upstream import compat
from models import prompt, tiny_model

pytestmark = pytest.mark.slow

LENGTH = 40
TOLERANCE = 1e-5
"""Attention over masked slots adds up the same float32 numbers in another order."""


@pytest.mark.parametrize(("name", "strict"), [("llama", True), ("gemma3", False)])
@torch.no_grad()
def test_one_program_decodes_any_number_of_tokens(name: str, strict: bool) -> None:
    model = tiny_model(name)
    decoder = kvlayers.ExportableDecoder(model, max_cache_len=600, batch_size=2)
    program = torch.export.export(decoder, (torch.full((2, 1), 3), torch.tensor([0])), strict=strict)
    ids, decode = prompt(2, LENGTH), program.module()
    steps = [decode(ids[:, i : i + 1], torch.tensor([i])) for i in range(LENGTH)]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(ids).logits, atol=TOLERANCE, rtol=0)
    assert decoder.cache.get_seq_length() == 0, "exporting takes in no token"


@torch.no_grad()
def test_a_program_starts_anew_and_goes_back_and_is_saved() -> None:
    model = tiny_model("llama")
    decoder = kvlayers.ExportableDecoder(model, max_cache_len=64)
    program, file = torch.export.export(decoder, (torch.tensor([[3, 4]]), torch.tensor([0, 1]))), io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for decode in (program.module(), torch.export.load(file).module()):
        for ids in (prompt(1, LENGTH), prompt(1, LENGTH, seed=1)):
            pairs = [decode(ids[:, i : i + 2], torch.arange(i, i + 2)) for i in (*range(0, LENGTH, 2), LENGTH // 2)]
            expected = model(ids).logits
            torch.testing.assert_close(torch.cat(pairs[:-1], dim=1), expected, atol=TOLERANCE, rtol=0)
            again = expected[:, LENGTH // 2 : LENGTH // 2 + 2]
            torch.testing.assert_close(pairs[-1], again, atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_a_static_cache_that_is_exported_by_hand_is_read_as_a_whole() -> None:
    """Not the bucket that its first token is in: the program would be silently wrong beyond it."""

    class Decoder(torch.nn.Module):
        def __init__(self, model: torch.nn.Module, cache: kvlayers.StaticCache) -> None:
            super().__init__()
            self.model, self.cache = model, cache
            for index, layer in enumerate(cache.layers):
                for name, tensor in layer.tensors().items():
                    self.register_buffer(f"{name}_{index}", tensor)

        def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            for layer in self.cache.layers:
                layer.tensors()["position"].copy_(position)
            told = {"cache_position": position[None]} if compat.MASKS_BY_CACHE_POSITION else {}
            return self.model(token, past_key_values=self.cache, **told).logits

    model = tiny_model("llama")
    config = model.config
    cache = kvlayers.StaticCache(config, max_cache_len=64, buckets=kvlayers.stores.Buckets(8))
    cache.early_initialization(1, config.num_key_value_heads, config.head_dim, torch.float32, "cpu")
    decode = torch.export.export(Decoder(model, cache), (torch.tensor([[3]]), torch.tensor(0))).module()
    ids = prompt(1, LENGTH)
    steps = [decode(ids[:, i : i + 1], torch.tensor(i)) for i in range(LENGTH)]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(ids).logits, atol=TOLERANCE, rtol=0)
