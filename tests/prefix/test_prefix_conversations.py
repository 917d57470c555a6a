"""Conversations in random orders: each answer with a store is that without one, whatever came before."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

import families
import kvlayers
import versions
from kvlayers import PrefixStore
from matrix import once
from rounds import NIGHTLY
from vision_models import SEEING, Piece, inputs, seeing_model

START, END, LINE, THINK, THOUGHT, TOOL = 91, 92, 93, 88, 89, 87
WORDS = range(3, 86)
GRIDS = ((4, 4), (4, 8))
ANSWER, LONGEST, STEPS = 6, 190, 40 if NIGHTLY else 7
FAMILIES = ("llama", "deepseek_v3", "gemma3", "qwen3_next", "lfm2", "mamba2", "jamba", "falcon_h1")


class Template(NamedTuple):
    """How messages become tokens."""

    start: list[int]
    end: list[int]
    generation_prompt: list[int]
    kept_of_generation_prompt: int
    thinking_dropped: int = 0
    tool_result_kept: int | None = None


TEMPLATES = {
    "chatml": Template([START], [END, LINE], [START, 3, LINE], 3),
    "thinking": Template([START], [END, LINE], [START, 3, LINE, THINK, LINE, LINE], 3, thinking_dropped=3),
    "tools cut later": Template([START], [END, LINE], [START, 3, LINE], 3, tool_result_kept=2),
    "no words of its own": Template([], [], [], 0),
    "an end within": Template([START, END], [END], [START, END, 4, THOUGHT], 1, thinking_dropped=1),
}


class Message(NamedTuple):
    role: str
    pieces: list[Piece]


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
        operation = self.chance.choice((self._turn, self._turn, self._turn, self._fork, self._edit, self._batch))
        operation()

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
        seen = kvlayers.generate(self.model, **given, prefix_store=self.store, **options)
        assert torch.equal(seen.sequences, expected.sequences)
        torch.testing.assert_close(seen.logits, expected.logits, rtol=0, atol=2e-5)
        new = seen.sequences[:, given["input_ids"].shape[1] :].tolist()
        for conversation, answer in zip(conversations, new, strict=True):
            # A random model writes ids of images, too.
            words = [token for token in answer if token in WORDS]
            conversation.append(Message("assistant", [words[self.template.thinking_dropped :]]))

    def _length(self, conversation: Conversation) -> int:
        tokens = (len(piece) if isinstance(piece, list) else 20 for piece in self._prompt(conversation))
        return sum(tokens)

    def _some(self) -> Conversation:
        """A conversation that has room for another turn."""
        conversation = self.chance.choice(self.conversations)
        if self._length(conversation) > LONGEST - 50:
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


@pytest.mark.parametrize(("family", "template"), once(FAMILIES, TEMPLATES))
def test_answers_do_not_depend_on_what_was_asked_before(family: str, template: str) -> None:
    talk = Talk(family, template, seed=len(family) * 7 + len(template))
    for _ in range(STEPS):
        talk.step()
    assert talk.store.statistics.tokens_covered > 0


@versions.images_in_prefixes
@pytest.mark.parametrize(("family", "template"), once(SEEING, TEMPLATES))
def test_answers_about_images_do_not_depend_on_what_was_asked_before(family: str, template: str) -> None:
    talk = Talk(family, template, seed=len(family) * 7 + len(template), sees=True)
    for _ in range(STEPS):
        talk.step()
    assert talk.store.statistics.tokens_covered > 0
