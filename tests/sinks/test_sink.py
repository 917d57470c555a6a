"""Attention sinks: what is attended to, on a model whose every sum is in float64, and through the cache's options."""

import copy
import itertools
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvlayers
import versions
from kvlayers.kernels.attention.packed_tensor import as_dense
from kvlayers.rope.rotary import Rotary
from models import COMMON, CONFIGS, fresh_model, prompt, read, tiny_model

WINDOW, SINKS = 24, 4
EXACT = {"rtol": 0, "atol": 1e-10}
"""float64 rounds a sum of a few dozen terms of order 1 to 1e-14, and three layers of them to less than this."""


def cos_and_sin(model: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Of RoPE, float64 `[1, tokens, head_dim]`: transformers computes them in float32 whatever the model's dtype."""
    angles = positions.double()[:, None] * model.model.rotary_emb.inv_freq.double()
    angles = torch.cat([angles, angles], dim=-1)[None]
    return angles.cos(), angles.sin()


@pytest.fixture(scope="module")
def model() -> Any:
    """A random llama of three layers that computes everything in float64."""
    exact = fresh_model("llama", num_hidden_layers=3).double()
    exact.model.rotary_emb.forward = lambda states, position_ids: cos_and_sin(exact, position_ids[0])
    return exact


def sink_cache(model: Any, window: int = WINDOW, **options: Any) -> kvlayers.SinkCache:
    return kvlayers.SinkCache(window, SINKS, config=model.config, **options)


class PaperCache(kvlayers.DynamicCache):
    """StreamingLLM as its paper has it: keys are held as they are before RoPE, and rotated at every step by the
    positions that they have among what is held."""

    def __init__(self, model: Any, window: int, sinks: int) -> None:
        super().__init__()
        self.model, self.window, self.sinks = model, window, sinks
        self.plain: dict[int, tuple[Tensor, Tensor]] = {}
        self.seen = dict.fromkeys(range(model.config.num_hidden_layers), 0)

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        cos, sin = cos_and_sin(self.model, positions)
        one, other = keys.chunk(2, dim=-1)
        return keys * cos + torch.cat([-other, one], dim=-1) * sin

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        first, new = self.seen[layer_idx], keys.shape[2]
        keys = self.rotate(keys, -torch.arange(first, first + new))
        if layer_idx in self.plain:
            held_keys, held_values = self.plain[layer_idx]
            keys, values = torch.cat([held_keys, keys], dim=2), torch.cat([held_values, values], dim=2)
        self.seen[layer_idx] = seen = first + new
        # The queries are rotated by their positions in the text: the positions of what is held count back from there.
        attended = self.rotate(keys, torch.arange(seen - keys.shape[2], seen)), values
        if keys.shape[2] >= self.window:
            kept = [*range(self.sinks), *range(keys.shape[2] - (self.window - 1 - self.sinks), keys.shape[2])]
            keys, values = keys[:, :, kept], values[:, :, kept]
        self.plain[layer_idx] = keys, values
        return attended

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen[layer_idx]

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        if isinstance(query_length, Tensor):
            # Until transformers 5.4, their positions.
            query_length = len(query_length)
        held = self.plain[layer_idx][0].shape[2] if layer_idx in self.plain else 0
        return held + query_length, self.seen[layer_idx] - held


def logits_of(model: Any, ids: Tensor, cache: Any, chunks: list[int]) -> Tensor:
    """Logits of every token, `[tokens, vocab]`, read in chunks of such lengths."""
    return torch.cat([read(model, piece, cache)[1][0] for piece in ids.split(chunks, dim=1)])


READINGS = {
    "token by token": [1] * 60,
    "a prompt longer than the window": [60, *[1] * 30],
    "turns of a chat": [10, *[1] * 20, 7, *[1] * 15, 40, *[1] * 10, 13, *[1] * 5],
}


@pytest.mark.parametrize("reading", READINGS)
def test_states_are_those_of_the_paper(model: Any, reading: str) -> None:
    chunks = READINGS[reading]
    ids = prompt(1, sum(chunks))
    expected = logits_of(model, ids, PaperCache(model, WINDOW, SINKS), chunks)
    torch.testing.assert_close(logits_of(model, ids, sink_cache(model), chunks), expected, **EXACT)


def packed_window() -> kvlayers.SinkLayer:
    turn = Rotary(10000.0 ** -(torch.arange(0, 64, 2) / 64).double(), "halves")
    return kvlayers.SinkLayer(
        200,
        4,
        turn,
        store=kvlayers.stores.QuantizedStore(kvlayers.Quantization(nbits=8, residual_length=32, sink_tokens=0)),
    )


@pytest.mark.parametrize("operation", [None, "fork", "select", "state", "recorded draft"])
def test_a_quantized_window_holds_its_sinks_in_full_precision(operation: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 2, 400, 64, generator=generator) for _ in range(2))
    packed = packed_window()
    plain = kvlayers.SinkLayer(200, 4, packed.rotary)
    for start, end in itertools.pairwise([0, *range(190, 401)]):
        if start == 330 and operation == "fork":
            packed = packed.fork()
        if start == 330 and operation == "select":
            for layer in (plain, packed):
                layer.select(torch.tensor([1, 1]))
            keys, values = keys[[1, 1]], values[[1, 1]]
        if start == 330 and operation == "state":
            state, packed = packed.state(), packed_window()
            packed.load_state(state)
        if start == 330 and operation == "recorded draft":
            packed.activate_past_recording()
            packed.update(keys[:, :, 7:30], values[:, :, 7:30])
            packed.truncate(330)
            packed.deactivate_past_recording()
        new = keys[:, :, start:end], values[:, :, start:end]
        expected, seen = plain.update(*new), packed.update(*new)
        for side, close in zip(expected, seen, strict=True):
            dense = close + 0
            if start >= 200:
                assert torch.equal(dense[:, :, :4], side[:, :, :4])
            # 8 bits of a normal distribution: steps of some 6 / 255, of which half is the most that rounding does.
            torch.testing.assert_close(dense, side, rtol=0, atol=0.03)
    # Up to 96 of the 200 tokens are in full precision: the residual, and a block that is not full yet.
    assert packed.nbytes < plain.nbytes * 0.7


BAD_OPTIONS = {
    "a window as large as the sinks": (
        {"window_length": 4, "num_sink_tokens": 4},
        "`window_length` must be larger than",
    ),
    "no window": ({"window_length": 0}, "`window_length` must be a whole number of tokens"),
    "no sinks": ({"window_length": 8, "num_sink_tokens": 0}, "`num_sink_tokens` must be a whole number of tokens"),
    "half a token": ({"window_length": 8.5}, "whole number"),
    "a misspelt option": ({"window_size": 8}, "did you mean 'window_length'"),
    "padding of no number": ({"window_length": 8, "left_padding": ["a"]}, "left_padding"),
    "negative padding": ({"window_length": 8, "left_padding": [-1]}, "left_padding"),
    "quantization by a number": ({"window_length": 8, "quantization": 4}, "`quantization` must be"),
    "rotary by a name": ({"window_length": 8, "rotary": "halves"}, "`rotary` must be"),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(kvlayers.OptionError, match=message):
        kvlayers.SinkCache(**{"config": tiny_model("llama").config, **options})


FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        *((CONFIGS[family](), "does not rotate its keys") for family in ("gpt2", "jamba", "t5")),
        (CONFIGS["llama4"](), "scales queries by their absolute position"),
        (CONFIGS["mistral"](), "forgets by itself"),
        (tf.LlamaConfig(**COMMON, **versions.rope(rope_type="dynamic", rope_theta=1e4, factor=2.0)), "length"),
        (tf.LlamaConfig(**COMMON, **versions.rope(rope_type="longrope", rope_theta=1e4, **FACTORS)), "length"),
    ],
    ids=["gpt2", "jamba", "t5", "llama4", "mistral", "dynamic RoPE", "longrope"],
)
def test_models_that_have_no_use_for_sinks_or_whose_keys_cannot_be_turned_are_refused(config: Any, says: str) -> None:
    versions.need_recurrent_layers(config.model_type)
    with pytest.raises(kvlayers.errors.ConfigError, match=says):
        kvlayers.SinkCache(64, config=config)


def test_states_of_another_rotation_or_window_are_refused(model: Any) -> None:
    cache = sink_cache(model)
    logits_of(model, prompt(1, 50), cache, [50])
    other = copy.deepcopy(model.config)
    versions.set_rope_theta(other, 5e5)
    for stranger in (
        kvlayers.SinkCache(WINDOW, SINKS, config=other),
        kvlayers.SinkCache(WINDOW + 1, SINKS, config=model.config),
    ):
        with pytest.raises(kvlayers.errors.StateMismatchError):
            stranger.load_state(cache.state())
        assert stranger.get_seq_length() == 0


def test_sinks_of_another_dtype_than_the_window_are_read_in_that_of_the_window() -> None:
    """A prompt under autocast, and tokens outside of it."""
    layer, generator = packed_window(), torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 260, 64, generator=generator)
    layer.update(keys[:, :, :250].bfloat16(), values[:, :, :250].bfloat16())
    for token in range(250, 260):
        states = layer.update(keys[:, :, token : token + 1], values[:, :, token : token + 1])
        query = torch.randn(1, 4, 1, 64, generator=generator)
        found = scaled_dot_product_attention(query, *states, enable_gqa=True)
        dense = [as_dense(side).float() for side in states]
        torch.testing.assert_close(found, scaled_dot_product_attention(query, *dense, enable_gqa=True))


@torch.no_grad()
def test_a_program_that_is_exported_does_not_write_to_its_inputs() -> None:
    layer, sinks = (
        kvlayers.SinkLayer(WINDOW, SINKS, rotary=None),
        (torch.randn(1, 2, SINKS, 8), torch.randn(1, 2, SINKS, 8)),
    )
    layer.update(torch.randn(1, 2, WINDOW - 1, 8), torch.randn(1, 2, WINDOW - 1, 8))

    class Overwriting(torch.nn.Module):
        def forward(self, keys: Tensor, values: Tensor) -> Tensor:
            return keys + layer.store.overwrite(WINDOW - 1, keys, values)

    program = torch.export.export(Overwriting(), sinks, strict=False)
    assert not any("copy_" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(*sinks), sinks[0])
    assert layer.store.overwrite(WINDOW - 1, *sinks)


@torch.no_grad()
def test_held_states_are_plain_tensors() -> None:
    layer = kvlayers.SinkLayer(2048, SINKS, rotary=None)
    # So many that a step's keys are marked for the kernel of one query.
    layer.update(torch.randn(1, 2, 4096, 64), torch.randn(1, 2, 4096, 64))
    assert all(type(states) is Tensor for states in (*layer.peek(), layer.keys, layer.values))
