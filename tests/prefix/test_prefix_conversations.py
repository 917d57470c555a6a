"""Conversations: each answer with a store is that without one, whatever came before and whatever a template changes.

In random orders; and in chats and with system prompts of which it is known how much must be found.
"""

import random
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import families
import versions
from kvlayers import PrefixStore, generate
from kvlayers.generation.prefix_reuse.borders import snapshot_lengths
from matrix import once
from models import tokens_passed
from rounds import NIGHTLY
from vision_models import SEEING, Piece, inputs, seeing_model

START, END, LINE, THINK, THOUGHT, TOOL = 91, 92, 93, 88, 89, 87
WORDS = range(3, 86)
FAMILIES = ("llama", "gemma3", "qwen3_next", "lfm2", "mamba2", "jamba", "falcon_h1")

# Random conversations

GRIDS = ((4, 4), (4, 8))
ANSWER, LONGEST, STEPS = 6, 190, 40 if NIGHTLY else 7


Template = namedtuple(
    "Template",
    ("start", "end", "generation_prompt", "kept_of_generation_prompt", "thinking_dropped", "tool_result_kept"),
    defaults=(0, None),
)
"""How messages become tokens."""

TEMPLATES = {
    "chatml": Template([START], [END, LINE], [START, 3, LINE], 3),
    "thinking": Template([START], [END, LINE], [START, 3, LINE, THINK, LINE, LINE], 3, thinking_dropped=3),
    "tools cut later": Template([START], [END, LINE], [START, 3, LINE], 3, tool_result_kept=2),
    "no words of its own": Template([], [], [], 0),
    "an end within": Template([START, END], [END], [START, END, 4, THOUGHT], 1, thinking_dropped=1),
}


Message = namedtuple("Message", ("role", "pieces"))
Conversation = list[Message]


class Talk:
    """Conversations with one model and one store, changed by random operations.

    Args:
        family: family of the model.
        template: name of the template.
        seed: of the operations and the words.
        sees: whether messages may have images.
    """

    def __init__(self, family: str, template: str, seed: int, sees: bool = False) -> None:
        self.chance = random.Random(seed)
        self.family, self.template, self.sees = family, TEMPLATES[template], sees
        self.model = seeing_model(family) if sees else families.model_of(family)
        self.store = PrefixStore(self.chance.choice(("1GiB", 150_000, 30_000)))
        system = Message("system", [self._words(24)])
        self.systems = [system, Message("system", [[*system.pieces[0][:12], *self._words(12)]])]
        self.conversations: list[Conversation] = [[system]]

    def step(self) -> None:
        """One operation, which asks the model at least once."""
        self.chance.choice((self._turn, self._turn, self._turn, self._fork, self._edit, self._batch))()

    def _words(self, tokens: int) -> list[int]:
        return self.chance.choices(WORDS, k=tokens)

    def _message(self) -> Message:
        pieces: list[Piece] = [self._words(self.chance.randint(1, 9))]
        if self.sees and self.chance.random() < 0.4:
            pieces += [(self.chance.randint(1, 2), self.chance.choice(GRIDS)), self._words(1)]
        return Message(self.chance.choice(("user", "tool")), pieces)

    def _prompt(self, conversation: Conversation) -> list[Piece]:
        """The pieces of a conversation, and what stands before an answer."""
        template, pieces = self.template, list[Piece]()
        for place, message in enumerate(conversation):
            own = message.pieces
            if message.role == "tool" and template.tool_result_kept is not None and place < len(conversation) - 1:
                own = [own[0][: template.tool_result_kept], *own[1:]]
            start = template.start
            if message.role == "assistant":
                start = template.generation_prompt[: template.kept_of_generation_prompt]
            pieces += [start, *own, template.end]
        return [*pieces, template.generation_prompt]

    def _ask(self, conversations: Sequence[Conversation], **options: Any) -> None:
        """Ask with the store and without, and take the answers into the conversations."""
        prompts = [self._prompt(conversation) for conversation in conversations]
        given = inputs(self.family if self.sees else "a model of text", *prompts)
        options |= {
            "max_new_tokens": ANSWER, "do_sample": False, "eos_token_id": END, "pad_token_id": 0,
            "return_dict_in_generate": True, "output_logits": True,
        }  # fmt: skip
        expected = self.model.generate(**given, **options)
        seen = generate(self.model, **given, prefix_store=self.store, **options)
        assert torch.equal(seen.sequences, expected.sequences)
        torch.testing.assert_close(seen.logits, expected.logits, rtol=0, atol=2e-5)
        new = seen.sequences[:, given["input_ids"].shape[1] :].tolist()
        for conversation, answer in zip(conversations, new, strict=True):
            # A random model writes ids of images, too.
            words = [token for token in answer if token in WORDS]
            conversation.append(Message("assistant", [words[self.template.thinking_dropped :]]))

    def _some(self) -> Conversation:
        """A conversation that has room for another turn."""
        conversation = self.chance.choice(self.conversations)
        tokens = (len(piece) if isinstance(piece, list) else 20 for piece in self._prompt(conversation))
        if sum(tokens) > LONGEST - 50:
            conversation[:] = [self.chance.choice(self.systems)]
        return conversation

    def _turn(self) -> None:
        conversation = self._some()
        conversation.append(self._message())
        beams = 2 if self.chance.random() < 0.15 else 1
        self._ask([conversation], num_beams=beams)

    def _fork(self) -> None:
        """Another user goes on from some message of a conversation."""
        source = self._some()
        taken = source[: self.chance.randint(1, len(source))]
        self.conversations.append([*taken, self._message()])
        self._ask([self.conversations[-1]])

    def _edit(self) -> None:
        """A message is replaced, and what came behind it is forgotten."""
        conversation = self._some()
        del conversation[self.chance.randint(1, len(conversation)) :]
        conversation.append(self._message())
        self._ask([conversation])

    def _batch(self) -> None:
        """Two users at once."""
        conversations = [[self.chance.choice(self.systems), self._message()], list(self._some())]
        conversations[1].append(self._message())
        self.conversations += conversations
        self._ask(conversations)


@pytest.mark.parametrize(
    ("family", "template", "sees"),
    [
        *once((*FAMILIES, "deepseek_v3"), TEMPLATES, [False]),
        *(
            pytest.param(*case.values, marks=[*case.marks, versions.images_in_prefixes])
            for case in once(SEEING, TEMPLATES, [True])
        ),
    ],
)
def test_answers_do_not_depend_on_what_was_asked_before(family: str, template: str, sees: bool) -> None:
    """Also of models that see, about images."""
    talk = Talk(family, template, seed=len(family) * 7 + len(template), sees=sees)
    for _ in range(STEPS):
        talk.step()
    assert talk.store.statistics.tokens_covered > 0


# What must be found

SYSTEM, QUESTION, LONG_ANSWER, THINKING = 60, 30, 16, 12
GENERATION_PROMPT, KEPT_OF_IT = [START, 94, LINE, 95, LINE, LINE], 3


class Chats:
    """Messages of random words between the tokens that a template puts around them.

    Attributes:
        reads: passes in which the last prompt was read.
    """

    def __init__(self, family: str) -> None:
        self.model, self.store, self.namespace = families.model_of(family), PrefixStore(), ""
        self.chance, self.reads = random.Random(0), 0

    def message(self, tokens: int) -> list[int]:
        return [START, *self.chance.choices(WORDS, k=tokens - 3), END, LINE]

    def ask(self, ids: Sequence[int]) -> tuple[list[int], int]:
        """The answer, which is that of a call without a store, and how many tokens the store had."""
        how: dict[str, Any] = {
            "max_new_tokens": LONG_ANSWER, "min_new_tokens": LONG_ANSWER, "do_sample": False, "eos_token_id": END,
            "return_dict_in_generate": True, "pad_token_id": 0, "attention_mask": torch.ones(1, len(ids)).long(),
        }  # fmt: skip
        prompt = torch.tensor([ids])
        with tokens_passed(self.model) as passes:
            output = generate(self.model, prompt, prefix_store=self.store, namespace=self.namespace, **how)
        # Some models read tokens behind others one by one.
        self.reads = 1 if max(passes) == 1 else len(passes) - (LONG_ANSWER - 1)
        plain = self.model.generate(prompt, **how)
        assert torch.equal(output.sequences, plain.sequences)
        return output.sequences[0, len(ids) :].tolist(), output.cached_tokens[0]


# falcon_h1 itself says how many logits a pass of generate() has.
@pytest.mark.parametrize("family", FAMILIES[:-1])
def test_a_pass_for_states_alone_makes_no_logits(family: str) -> None:
    chats, logits = Chats(family), list[int]()
    with chats.model.register_forward_hook(lambda module, given, output: logits.append(output.logits.shape[1])):
        chats.ask([*chats.message(SYSTEM), *GENERATION_PROMPT])
    # With a store the prompt is read in two passes or more, without one at once.
    assert logits == [*[0] * (chats.reads - 1), *[1] * LONG_ANSWER, *[1] * LONG_ANSWER]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_finds_all_messages_before_it_though_the_template_drops_what_was_thought(family: str) -> None:
    chats, before = Chats(family), 0
    chat = [*chats.message(SYSTEM), *chats.message(QUESTION)]
    for turn in range(3):
        answer, found = chats.ask([*chat, *GENERATION_PROMPT])
        assert not turn or found >= before
        # The border behind its last message takes the place of the end that its answer begins from.
        assert not turn or chats.reads <= 2
        before = len(chat)
        chat += [*GENERATION_PROMPT[:KEPT_OF_IT], *answer[THINKING:], END, LINE, *chats.message(QUESTION)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_second_other_user_finds_the_system_prompt(family: str) -> None:
    chats = Chats(family)
    system = chats.message(SYSTEM)
    found = [chats.ask([*system, *chats.message(QUESTION), *GENERATION_PROMPT])[1] for _ in range(3)]
    # The first one has nothing, and the second one shows where prompts part.
    assert found[0] == 0
    assert found[2] >= SYSTEM
    # Another tenant's prompts say nothing, and nothing of theirs is served.
    chats.namespace = "another tenant"
    assert chats.ask([*system, *chats.message(QUESTION)])[1] == 0
    ids = torch.tensor([*system, 5])
    asked = chats.store.lookup(ids, config=chats.model.config, namespace="a third one")
    assert (asked.cache, asked.covered, asked.known) == (None, 0, 0)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next", "jamba"])
def test_without_ends_of_messages_what_parts_is_found_the_third_time(family: str) -> None:
    chats = Chats(family)
    words = [chats.chance.choice(WORDS) for _ in range(200)]
    found = [chats.ask([*words[:70], *(chats.chance.choice(WORDS) for _ in range(20))])[1] for _ in range(3)]
    assert (found[0], found[2]) == (0, 70)


def test_snapshots_leave_before_the_conversation_that_they_are_of() -> None:
    chats = Chats("gemma3")
    chat = [*chats.message(SYSTEM), *chats.message(QUESTION)]
    answer, _ = chats.ask([*chat, *GENERATION_PROMPT])
    whole = [*chat, *GENERATION_PROMPT, *answer]
    while chats.store.statistics.evictions == 0:
        chats.store.evict(1)
    # The last token of an answer was never passed to the model.
    assert chats.ask([*whole, *chats.message(QUESTION)])[1] == len(whole) - 1


PROMPT = np.array([5] * 40 + [END, LINE] + [6] * 58)


@pytest.mark.parametrize(
    ("ids", "begin", "least", "length", "branch", "ends", "every", "lengths"),
    [
        (PROMPT, 0, 99, 99, 0, [END], None, [41, 99]),
        (PROMPT, 0, 99, 99, 70, [END], 32, [32, 41, 70, 99]),
        (PROMPT, 41, 99, 99, 20, [END], None, [99]),
        # What every prompt begins with is no branch.
        (PROMPT, 0, 99, 99, 3, [END], None, [41, 99]),
        # Where no end is known, the next turn may leave out some of the last tokens.
        (PROMPT, 0, 99, 99, 3, [], None, [96, 99]),
        (PROMPT, 99, 99, 99, 60, [END], 32, []),
        # Few tokens behind the last border need no snapshot, unless they must be read.
        (PROMPT, 0, 0, 99, 3, [], None, [96]),
        (PROMPT, 0, 97, 99, 3, [], None, [96, 99]),
        (PROMPT, 0, 0, 99, 3, [END], 32, [32, 41, 64, 96, 99]),
        (PROMPT[:50], 0, 0, 49, 45, [END], 24, [24, 41]),
        # Snapshots for long texts are no further apart than asked for. No other is made beside those that are there.
        (PROMPT, 41, 99, 99, 0, [END], 58, [99]),
        (PROMPT, 41, 99, 99, 0, [END], 57, [57, 99]),
        (PROMPT, 0, 99, 99, 0, [], 40, [40, 80, 96, 99]),
    ],
)
def test_a_prompt_is_cut_behind_what_is_there(
    ids: Any, begin: int, least: int, length: int, branch: int, ends: Any, every: Any, lengths: list[int]
) -> None:
    assert snapshot_lengths(ids, begin, least, length, branch, ends, every) == lengths
