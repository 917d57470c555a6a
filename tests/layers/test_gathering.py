"""torch's `DataParallel` gathers what replicas return: one cache, of the sequences of all, that decodes on."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import scatter_gather

import kvlayers
from matrix import product
from models import ENCODER_DECODERS, prompt, read, tiny_model

FAMILIES = ("llama", "mistral", "gemma3", "llama4", "deepseek_v3")


class GatherOnTheHost:
    """What torch's own function does for tensors on GPUs. It refuses those of a CPU."""

    @staticmethod
    def apply(target: object, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.cat(tensors, dim)


@pytest.fixture
def gather(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Any]], Any]:
    """torch's gathering, of states in the host's memory."""
    monkeypatch.setattr(scatter_gather, "Gather", GatherOnTheHost)
    return lambda outputs: scatter_gather.gather(outputs, "cpu")


def steps(model: Any, cache: Any, count: int = 4) -> torch.Tensor:
    """Logits of single tokens behind what a cache holds of four sequences."""
    tokens = prompt(4, count, seed=7).split(1, dim=1)
    return torch.cat([model(token, past_key_values=cache).logits for token in tokens], dim=1)


@pytest.mark.parametrize(("family", "from_config", "tokens"), product(FAMILIES, [False, True], [5, 30]))
@torch.no_grad()
def test_a_gathered_cache_decodes_on(
    family: str, from_config: bool, tokens: int, gather: Callable[[list[Any]], Any]
) -> None:
    model, ids = tiny_model(family), prompt(4, tokens)
    options = {"config": model.config} if from_config else {}
    outputs = [model(half, past_key_values=kvlayers.DynamicCache(**options)) for half in ids.chunk(2)]
    gathered = gather(outputs).past_key_values
    expected = model(ids, past_key_values=kvlayers.DynamicCache(**options)).past_key_values
    assert (type(gathered), gathered.is_sliding) == (kvlayers.DynamicCache, expected.is_sliding)
    assert (gathered.get_seq_length(), gathered.batch_size) == (tokens, 4)
    torch.testing.assert_close(steps(model, gathered), steps(model, expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ENCODER_DECODERS)
@torch.no_grad()
def test_a_gathered_pair_decodes_on(family: str, gather: Callable[[list[Any]], Any]) -> None:
    model, ids, first = tiny_model(family), prompt(4), prompt(4, 3, seed=1)

    def forward(rows: slice) -> Any:
        cache = kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), kvlayers.DynamicCache())
        return model(input_ids=ids[rows], decoder_input_ids=first[rows], past_key_values=cache)

    whole, gathered = forward(slice(4)), gather([forward(slice(2)), forward(slice(2, 4))])
    encoded = (whole.encoder_last_hidden_state,)
    seen, expected = (
        model(encoder_outputs=encoded, decoder_input_ids=prompt(4, 1, seed=7), past_key_values=output.past_key_values)
        for output in (gathered, whole)
    )
    torch.testing.assert_close(seen.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_windows_of_a_pair_are_gathered(gather: Callable[[list[Any]], Any]) -> None:
    config = tiny_model("gemma3").config
    pairs = []
    for _ in range(2):
        pair = kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(config=config), kvlayers.DynamicCache())
        for layer in range(len(pair)):
            pair.self_attention_cache.update(*torch.randn(2, 1, 2, 30, 8), layer)
            pair.cross_attention_cache.update(*torch.randn(2, 1, 2, 5, 8), layer)
        pairs.append(pair)
    gathered = gather(pairs)
    assert gathered.is_sliding == pairs[0].is_sliding
    assert [layer.length for layer in gathered.layers] == [30] * len(gathered)
    assert gathered.cross_attention_cache.get_seq_length() == 5


@pytest.mark.parametrize(
    "make",
    [
        kvlayers.DynamicCache.from_legacy_cache,
        lambda states: kvlayers.DynamicCache(states, config=tiny_model("gemma3").config),
        lambda states: kvlayers.DynamicCache.from_legacy_cache(states, config=tiny_model("gemma3").config),
    ],
    ids=["from tuples", "with a config", "from tuples with a config"],
)
@torch.no_grad()
def test_a_cache_made_of_what_another_one_iterates_over_is_at_its_position(make: Callable[[Any], Any]) -> None:
    model = tiny_model("gemma3")
    cache, _ = read(model, prompt(4, 30), kvlayers.DynamicCache(config=model.config))
    torch.testing.assert_close(steps(model, make(tuple(cache))), steps(model, cache), rtol=1e-4, atol=1e-4)


def test_a_window_is_refused_where_every_token_is_attended_to() -> None:
    model = tiny_model("mistral")
    cache, _ = read(model, prompt(1, 30), kvlayers.DynamicCache(config=model.config))
    with pytest.raises(kvlayers.errors.LegacyFormatError, match="a window of 8, which has dropped 23 of 30"):
        kvlayers.DynamicCache(tuple(cache), config=tiny_model("llama").config)


def test_states_of_a_window_are_tuples_to_everyone_else() -> None:
    cache = kvlayers.DynamicCache(config=tiny_model("mistral").config)
    cache.update(*torch.randn(2, 1, 2, 30, 8), 0)
    states = next(iter(cache))
    assert isinstance(states, tuple)
    for copied in (pickle.loads(pickle.dumps(states)), copy.deepcopy(states)):
        assert type(copied) is tuple
        assert all(map(torch.equal, copied, states))


@pytest.mark.parametrize("kind", ["static", "int8", "sink"])
@torch.no_grad()
def test_kinds_that_states_alone_do_not_make_are_refused(kind: str, gather: Callable[[list[Any]], Any]) -> None:
    model, options = tiny_model("llama"), {"static": {"max_cache_len": 32}}.get(kind, {})
    outputs = [model(prompt(2), past_key_values=kvlayers.make_cache(kind, model, **options)) for _ in range(2)]
    with pytest.raises(kvlayers.OptionError):
        gather(outputs)
