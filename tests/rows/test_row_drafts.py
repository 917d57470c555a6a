"""Drafts for several prompts: the tokens are those of plain decoding, and each row goes on with what it accepts."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvlayers
from kvlayers.errors import (
    OptionError,
    PromptMismatchError,
    ReadOnlyStatesError,
    RollbackError,
    StateMismatchError,
    UnsupportedLayerError,
)
from matrix import once
from models import fresh_model, prompt, tiny_model

NEW = 14


def prompts() -> tuple[Tensor, Tensor]:
    """Prompts that repeat themselves, of which two are padded on the left, and their mask."""
    ids = torch.cat([prompt(4, 6, 1)] * 3, 1)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :9] = 0
    return ids.masked_fill(mask == 0, 0), mask


def generated(model: Any, **how: Any) -> Any:
    ids, mask = prompts()
    with kvlayers.installed():
        options = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True, **how}
        return model.generate(ids, attention_mask=mask, **options)


DRAFTS: dict[str, Callable[[], dict[str, Any]]] = {
    "look-up": lambda: {"prompt_lookup_num_tokens": 3},
    "draft model": lambda: {"assistant_model": tiny_model("llama", 1)},
    "its own draft model": lambda: {"assistant_model": tiny_model("llama")},
}


HOW: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"cache_implementation": "int4"},
    {"cache_implementation": "static"},
    {"cache_implementation": "offloaded"},
    {"eos_token_id": [5, 7, 11, 13, 17, 23, 29, 31, 37, 41]},
]


@pytest.mark.parametrize(("drafts", "how"), once(DRAFTS, HOW), ids=str)
def test_a_batch_with_drafts_has_the_tokens_of_plain_decoding(drafts: str, how: dict[str, Any]) -> None:
    model = tiny_model("llama")
    expected, output = generated(model, **how), generated(model, **how, **DRAFTS[drafts]())
    assert torch.equal(output.sequences, expected.sequences)


@pytest.mark.parametrize("family", ["gemma3", "mistral", "deepseek_v3", "gpt2"])
def test_windows_latents_and_absolute_positions_are_rolled_back_by_row(family: str) -> None:
    model = tiny_model(family)
    expected, output = generated(model), generated(model, prompt_lookup_num_tokens=4)
    assert torch.equal(output.sequences, expected.sequences)


def test_the_cache_goes_on_behind_the_answer() -> None:
    model = tiny_model("llama")
    cache, ids = kvlayers.DynamicCache(config=model.config), prompts()[0][[1, 3]]
    with kvlayers.installed():
        first = model.generate(
            ids, past_key_values=cache, max_new_tokens=6, do_sample=False, prompt_lookup_num_tokens=3
        )
        assert cache.row_lengths == (first.shape[1] - 1,) * 2
        again = model.generate(first, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(again, model.generate(ids, max_new_tokens=10, do_sample=False))


def test_what_rows_have_seen_is_known_whatever_padding_they_had_and_wherever_they_ended() -> None:
    """A further turn drops the padding that all rows have, and rows that have ended before others begin later."""
    model = tiny_model("llama")
    ids, mask = (each[[0, 2]] for each in prompts())
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    for ends in (None, plain[1, -NEW + 3].item()):
        cache = kvlayers.DynamicCache(config=model.config)
        asked = {"do_sample": False, "eos_token_id": ends, "pad_token_id": 0, "past_key_values": cache}
        with kvlayers.installed(strict_prompts=True):
            first = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, prompt_lookup_num_tokens=3, **asked)
            rows = [
                own[padding:][: length + 1]
                for own, padding, length in zip(first, (4, 9), cache.row_lengths, strict=True)
            ]
            turn = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
            turn = torch.cat([turn, prompt(2, 3)], 1)
            seen = torch.tensor([[3 + len(own)] for own in rows])
            turn_mask = (torch.arange(turn.shape[1]) >= turn.shape[1] - seen).long()
            other = turn.clone()
            other[1, -8] += 1
            with pytest.raises(PromptMismatchError, match="of sequence 1"):
                model.generate(other, attention_mask=turn_mask, max_new_tokens=4, **asked)
            again = model.generate(turn, attention_mask=turn_mask, max_new_tokens=4, **asked)
        del asked["past_key_values"]
        assert torch.equal(again, model.generate(turn, attention_mask=turn_mask, max_new_tokens=4, **asked))


def test_several_answers_to_each_prompt() -> None:
    model = tiny_model("llama")
    how = {"num_return_sequences": 2, "do_sample": True, "top_k": 1}
    assert torch.equal(generated(model, prompt_lookup_num_tokens=3, **how).sequences, generated(model, **how).sequences)


def test_fewer_passes_are_needed() -> None:
    model, passes = fresh_model("llama"), []
    model.register_forward_hook(lambda *_: passes.append(1))
    generated(model)
    plain = len(passes)
    generated(model, assistant_model=tiny_model("llama"))
    # The draft model is the model, so nearly every draft is accepted.
    assert len(passes) - plain < plain


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["look-up", "draft model"])
def test_samples_with_drafts_are_distributed_as_without(drafts: str) -> None:
    model, ids = tiny_model("llama"), torch.tensor([[3, 4, 5, 3, 4], [6, 7, 8, 6, 7]])
    how: dict[str, Any] = {"do_sample": True, "top_k": 3, "temperature": 2.0, "max_new_tokens": 3}
    counts: list[Counter[Any]] = []
    many = 150
    with kvlayers.installed():
        for each in ({}, DRAFTS[drafts]()):
            torch.manual_seed(0)
            repeated = ids.repeat_interleave(many, 0)
            counts.append(Counter(map(tuple, model.generate(repeated, **how, **each)[:, 5:].tolist())))
    # Two samples of one distribution: the statistic has as many degrees of freedom as kinds of answers less one.
    kinds = counts[0] | counts[1]
    statistic = sum((counts[0][kind] - counts[1][kind]) ** 2 / (counts[0][kind] + counts[1][kind]) for kind in kinds)
    freedom = len(kinds) - 1
    # Six standard deviations.
    assert statistic < freedom + 6 * (2 * freedom) ** 0.5


ALONE = "must come with a mask alone"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"output_scores": True}, "`output_scores"),
        ({"output_hidden_states": True}, "`output_hidden"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [row + 5]}, ALONE),
        ({"inputs_embeds": torch.zeros(4, 18, 32)}, ALONE),
        ({"position_ids": torch.arange(18).expand(4, 18)}, ALONE),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_what_rows_with_drafts_do_not_take_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        generated(tiny_model("llama"), prompt_lookup_num_tokens=3, **given)


def test_recurrent_states_are_refused_for_batches() -> None:
    with pytest.raises((RollbackError, ValueError)):
        generated(tiny_model("jamba"), prompt_lookup_num_tokens=3)


def test_a_turn_behind_padded_rows_is_refused_rather_than_answered_wrongly() -> None:
    model = tiny_model("llama")
    first = generated(model, prompt_lookup_num_tokens=3, max_new_tokens=4)
    cache, mask = first.to_tuple()[-1], torch.ones_like(first.sequences)
    with (
        kvlayers.installed(),
        pytest.raises(StateMismatchError, match="`attention_mask` must have the tokens of each row"),
    ):
        model.generate(first.sequences, attention_mask=mask, past_key_values=cache, max_new_tokens=2)


def test_windows_forget_what_they_have_recorded_for_drafts() -> None:
    model = tiny_model("mistral")
    cache = kvlayers.DynamicCache(config=model.config)
    ids = prompts()[0][[1, 3]]
    with kvlayers.installed():
        model.generate(ids, past_key_values=cache, max_new_tokens=40, do_sample=False, assistant_model=model)
    assert max(layer.held_tokens for layer in cache.layers) < 30


def test_no_address_is_given_of_rows_and_nothing_is_written_to_them() -> None:
    cache = kvlayers.merge([filled(3), filled(2)])
    keys, _ = cache.update(torch.ones(2, 2, 1, 8), torch.ones(2, 2, 1, 8), 0)
    with pytest.raises(ReadOnlyStatesError):
        keys.mul_(2)
    with pytest.raises(UnsupportedLayerError, match="no address"):
        keys.data_ptr()


def filled(tokens: int) -> Any:
    cache = kvlayers.DynamicCache()
    cache.update(torch.ones(1, 2, tokens, 8), torch.ones(1, 2, tokens, 8), 0)
    return cache


@pytest.mark.parametrize("limit", ["positions", "room"])
def test_the_draft_of_another_row_needs_no_room_behind_a_row_that_has_one_token_left(limit: str) -> None:
    """A table of positions that ends with the answers, and a reservation that does."""
    model, how = fresh_model("llama"), {"max_new_tokens": 20, "do_sample": False}
    if limit == "positions":
        model = fresh_model("gpt2", n_positions=40)
    for seed in range(3):
        ids = torch.cat([prompt(2, 5, seed=seed)] * 4, dim=1)
        ids[1, 3] = 50
        mask = torch.ones_like(ids)
        expected = model.generate(ids, attention_mask=mask, **how)
        for drafted in (3, 10):
            static = kvlayers.StaticCache(model.config, max_cache_len=39)
            given = {} if limit == "positions" else {"past_key_values": static}
            with kvlayers.installed():
                seen = model.generate(ids, attention_mask=mask, prompt_lookup_num_tokens=drafted, **given, **how)
            assert torch.equal(seen, expected)
