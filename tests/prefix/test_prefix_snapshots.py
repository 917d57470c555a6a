"""Chats whose templates change what is near the end, and users who share a system prompt, for states of all kinds."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import families
import kvlayers
from kvlayers import PrefixStore
from kvlayers.generation.prefix_reuse.borders import last_border, snapshot_lengths
from models import tokens_passed

START, END, LINE, WORDS = 91, 92, 93, range(3, 90)
SYSTEM, QUESTION, ANSWER, THINKING = 60, 30, 16, 12
GENERATION_PROMPT, KEPT_OF_IT = [START, 94, LINE, 95, LINE, LINE], 3
FAMILIES = ["llama", "gemma3", "qwen3_next", "lfm2", "mamba2", "jamba", "falcon_h1"]


class Chats:
    """Messages of random words between the tokens that a template puts around them.

    Attributes:
        reads: passes in which the last prompt was read.
    """

    def __init__(self, family: str, store: PrefixStore, namespace: str = "") -> None:
        self.model, self.store, self.namespace = families.model_of(family), store, namespace
        self.chance, self.reads = random.Random(0), 0

    def message(self, tokens: int) -> list[int]:
        return [START, *self.chance.choices(WORDS, k=tokens - 3), END, LINE]

    def ask(self, ids: Sequence[int]) -> tuple[list[int], int]:
        """The answer, which is that of a call without a store, and how many tokens the store had."""
        how = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False, "eos_token_id": END}
        how |= {
            "return_dict_in_generate": True,
            "pad_token_id": 0,
            "attention_mask": torch.ones(1, len(ids), dtype=torch.int64),
        }
        prompt = torch.tensor([ids])
        with tokens_passed(self.model) as passes:
            output = kvlayers.generate(self.model, prompt, prefix_store=self.store, namespace=self.namespace, **how)
        # Some models read tokens behind others one by one.
        self.reads = 1 if max(passes) == 1 else len(passes) - (ANSWER - 1)
        plain = self.model.generate(prompt, **how)
        assert torch.equal(output.sequences, plain.sequences)
        return output.sequences[0, len(ids) :].tolist(), output.cached_tokens[0]


# falcon_h1 itself says how many logits a pass of generate() has.
@pytest.mark.parametrize("family", FAMILIES[:-1])
def test_a_pass_for_states_alone_makes_no_logits(family: str) -> None:
    chats, logits = Chats(family, PrefixStore()), list[int]()
    with chats.model.register_forward_hook(lambda module, given, output: logits.append(output.logits.shape[1])):
        chats.ask([*chats.message(SYSTEM), *GENERATION_PROMPT])
    # With a store the prompt is read in two passes or more, without one at once.
    assert logits == [*[0] * (chats.reads - 1), *[1] * ANSWER, *[1] * ANSWER]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_finds_all_messages_before_it_though_the_template_drops_what_was_thought(family: str) -> None:
    chats = Chats(family, PrefixStore())
    chat = [*chats.message(SYSTEM), *chats.message(QUESTION)]
    before = 0
    for turn in range(3):
        answer, found = chats.ask([*chat, *GENERATION_PROMPT])
        assert not turn or found >= before
        # The border behind its last message takes the place of the end that its answer begins from.
        assert not turn or chats.reads <= 2
        before = len(chat)
        chat += [*GENERATION_PROMPT[:KEPT_OF_IT], *answer[THINKING:], END, LINE, *chats.message(QUESTION)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_second_other_user_finds_the_system_prompt(family: str) -> None:
    store = PrefixStore()
    chats = Chats(family, store)
    system = chats.message(SYSTEM)
    found = [chats.ask([*system, *chats.message(QUESTION), *GENERATION_PROMPT])[1] for _ in range(3)]
    # The first one has nothing, and the second one shows where prompts part.
    assert found[0] == 0
    assert found[2] >= SYSTEM
    # Another tenant's prompts say nothing, and nothing of theirs is served.
    chats.namespace = "another tenant"
    assert chats.ask([*system, *chats.message(QUESTION)])[1] == 0
    ids = torch.tensor([*system, 5])
    asked = store.lookup(ids, config=chats.model.config, namespace="a third one")
    assert (asked.cache, asked.covered, asked.known) == (None, 0, 0)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next", "jamba"])
def test_without_ends_of_messages_what_parts_is_found_the_third_time(family: str) -> None:
    chats = Chats(family, PrefixStore())
    words = [chats.chance.choice(WORDS) for _ in range(200)]
    found = [chats.ask([*words[:70], *(chats.chance.choice(WORDS) for _ in range(20))])[1] for _ in range(3)]
    assert (found[0], found[2]) == (0, 70)


def test_snapshots_leave_before_the_conversation_that_they_are_of() -> None:
    chats = Chats("gemma3", PrefixStore())
    chat = [*chats.message(SYSTEM), *chats.message(QUESTION)]
    answer, _ = chats.ask([*chat, *GENERATION_PROMPT])
    whole = [*chat, *GENERATION_PROMPT, *answer]
    end = next(node for node in chats.store.tree().nodes if node.is_entry and node.tokens)
    assert end.in_memory
    while chats.store.statistics.evictions == 0:
        chats.store.evict(1)
    # The last token of an answer was never passed to the model.
    assert chats.ask([*whole, *chats.message(QUESTION)])[1] == len(whole) - 1


def borders_of(ids: Sequence[int]) -> list[int]:
    """By plain comparison: the ends of messages, with the tokens that all of them have behind them."""
    ends = [place + 1 for place, token in enumerate(ids) if token == END]
    common = 0
    while len(ends) > 1 and all(place + common < len(ids) for place in ends) and common < 8:
        if len({ids[place + common] for place in ends}) > 1:
            break
        common += 1
    return [place + common for place in ends]


def test_the_last_border_is_that_of_plain_comparison() -> None:
    chance = random.Random(1)
    for _ in range(300):
        ids = chance.choices((START, END, LINE, 5), k=chance.randint(1, 30))
        assert last_border(np.array(ids), [END]) == max(borders_of(ids), default=max(len(ids) - 4, 0))
    assert last_border(np.array([5, END, 6, 7, 8]), []) == 1


def test_a_prompt_is_cut_behind_what_is_there() -> None:
    ids = np.array([5] * 40 + [END, LINE] + [6] * 58)
    assert snapshot_lengths(ids, 0, 99, 99, 0, [END], None) == [41, 99]
    assert snapshot_lengths(ids, 0, 99, 99, 70, [END], 32) == [32, 41, 70, 99]
    assert snapshot_lengths(ids, 41, 99, 99, 20, [END], None) == [99]
    # What every prompt begins with is no branch.
    assert snapshot_lengths(ids, 0, 99, 99, 3, [END], None) == [41, 99]
    # Where no end is known, the next turn may leave out some of the last tokens.
    assert snapshot_lengths(ids, 0, 99, 99, 3, [], None) == [96, 99]
    assert snapshot_lengths(ids, 99, 99, 99, 60, [END], 32) == []
    # Few tokens behind the last border need no snapshot, unless they must be read.
    assert snapshot_lengths(ids, 0, 0, 99, 3, [], None) == [96]
    assert snapshot_lengths(ids, 0, 97, 99, 3, [], None) == [96, 99]
    assert snapshot_lengths(ids, 0, 0, 99, 3, [END], 32) == [32, 41, 64, 96, 99]
    assert snapshot_lengths(ids[:50], 0, 0, 49, 45, [END], 24) == [24, 41]
    # Snapshots for long texts are no further apart than asked for. No other is made beside those that are there anyway.
    assert snapshot_lengths(ids, 41, 99, 99, 0, [END], 58) == [99]
    assert snapshot_lengths(ids, 41, 99, 99, 0, [END], 57) == [57, 99]
    assert snapshot_lengths(ids, 0, 99, 99, 0, [], 40) == [40, 80, 96, 99]
