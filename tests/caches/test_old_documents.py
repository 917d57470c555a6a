"""What the documents about caches of transformers 4.4x to 4.57 taught, on every version that kvlayers supports.

The reference is a model that is given the whole text at every token, and no cache.
"""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvlayers
from models import prompt, tiny_model

ROOM = 64
"""Tokens that static caches reserve: no test but those of quantized caches and sinks has more."""

CacheMaker = Callable[[Any], kvlayers.Cache]

CHATTING: dict[str, tuple[str, CacheMaker]] = {
    "dynamic": ("llama", lambda config: kvlayers.DynamicCache()),
    "dynamic with windows": ("gemma2", lambda config: kvlayers.DynamicCache(config=config)),
    "static": ("llama", lambda config: kvlayers.StaticCache(config=config, max_batch_size=1, max_cache_len=ROOM)),
    "sliding": ("mistral", lambda config: kvlayers.SlidingWindowCache(config, max_cache_len=ROOM)),
    "hybrid": ("gemma2", lambda config: kvlayers.HybridCache(config=config, max_batch_size=1, max_cache_len=ROOM)),
    "chunked": ("llama4", lambda config: kvlayers.HybridChunkedCache(config=config, max_cache_len=ROOM)),
    "offloaded": ("llama", lambda config: kvlayers.OffloadedCache()),
    "offloaded static": ("llama", lambda config: kvlayers.OffloadedStaticCache(config=config, max_cache_len=ROOM)),
    "quantized, but for the newest": ("llama", lambda config: kvlayers.QuantizedCache(residual_length=ROOM)),
    "sinks of a window that is not full": ("llama", lambda config: kvlayers.SinkCache(256, 4, config=config)),
}
"""For each kind a family and what makes a cache for it, which rounds nothing in a text of `ROOM` tokens."""


OLD_CHAT = """
from transformers import SinkCache


def chat(model, turns, new_tokens):
    cache = SinkCache(window_length=256, num_sink_tokens=4)
    text = turns[0][:, :0]
    for turn in turns:
        text = torch.cat([text, turn], dim=1)[:, -cache.get_max_length() :]
        mask = torch.ones_like(text)
        text = model.generate(
            text, attention_mask=mask, past_key_values=cache, do_sample=False, max_new_tokens=new_tokens
        )
    return text, cache
"""
"""A chat as it was written for the sink cache of transformers 4, which crops its inputs."""

pytestmark = pytest.mark.filterwarnings("ignore:.*is from transformers 4:DeprecationWarning")


def generated(model: Any, ids: Tensor, new_tokens: int = 6, **options: Any) -> Any:
    # Random models write the padding token too, and it is no padding here.
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **options)


@torch.no_grad()
def without_cache(model: Any, ids: Tensor, new_tokens: int = 6, **inputs: Any) -> Tensor:
    """The sequences that are the most likely, token by token."""
    own = "decoder_input_ids" if inputs else "input_ids"
    for _ in range(new_tokens):
        logits = model(**{own: ids}, **inputs, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids


def user_turns(*lengths: int) -> list[Tensor]:
    return [prompt(1, tokens, seed=seed) for seed, tokens in enumerate(lengths)]


@pytest.mark.parametrize("kind", CHATTING)
@torch.no_grad()
def test_a_loop_that_grows_its_mask_and_its_positions(kind: str) -> None:
    family, make_cache = CHATTING[kind]
    model, ids = tiny_model(family), prompt(1, 10)
    cache = make_cache(model.config)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    cache_position = torch.arange(ids.shape[1])
    for _ in range(6):
        outputs = model(**inputs, cache_position=cache_position, past_key_values=cache, use_cache=True)
        assert outputs.past_key_values is cache
        next_ids = outputs.logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, next_ids], dim=1)
        mask = torch.cat([inputs["attention_mask"], inputs["attention_mask"].new_ones((1, 1))], dim=1)
        inputs = {"input_ids": next_ids, "attention_mask": mask}
        cache_position = cache_position[-1:] + 1
    assert torch.equal(ids, without_cache(model, prompt(1, 10)))
    assert cache.get_seq_length() == ids.shape[1] - 1


@pytest.mark.parametrize("kind", CHATTING)
def test_a_chat_with_one_cache(kind: str, installed: None) -> None:
    family, make_cache = CHATTING[kind]
    model = tiny_model(family)
    cache = make_cache(model.config)
    text = expected = torch.zeros(1, 0, dtype=torch.long)
    for turn in user_turns(9, 7, 1, 5):
        text = generated(model, torch.cat([text, turn], dim=1), past_key_values=cache)
        expected = without_cache(model, torch.cat([expected, turn], dim=1))
        assert torch.equal(text, expected)
        # The last token has not been passed.
        assert cache.get_seq_length() == text.shape[1] - 1


@pytest.mark.parametrize("by_old_name", [False, True])
def test_the_old_chat_with_sinks(by_old_name: bool) -> None:
    model, turns = tiny_model("llama"), user_turns(9, 7, 5)
    script = types.ModuleType("old_chat")
    vars(script)["torch"] = torch
    with kvlayers.installed(legacy_names=by_old_name):
        exec(OLD_CHAT if by_old_name else OLD_CHAT.replace("transformers", "kvlayers"), vars(script))
        text, cache = script.chat(model, turns, 6)
    assert type(cache) is kvlayers.SinkCache
    expected = turns[0][:, :0]
    for turn in turns:
        expected = without_cache(model, torch.cat([expected, turn], dim=1))
    assert torch.equal(text, expected)
