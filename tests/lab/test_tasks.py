"""Tasks over long contexts: their samples beside the text that they are made of, and how answers are scored."""

import collections
import hashlib
import random
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typing_extensions import override

from kvlayers.errors import OptionError, RegistryError
from kvlayers_lab.tasks import (
    Haystack,
    Needle,
    Task,
    TaskSample,
    TaskText,
    register_task,
    samples_of,
    task_names,
    unregister_task,
)
from kvlayers_lab.tasks.contract import LEAST_FILLER
from kvlayers_lab.tasks.runner import answer_score
from model_directories import random_text, word_tokenizer

BOS = 1
TASKS = ("keys", "needle", "values", "variables", "words")


class CharacterTokenizer:
    """A token for each character, so that ids can be read. `before` comes before all that is encoded."""

    bos_token_id = BOS

    def __init__(self, before: str = "") -> None:
        self.before = before

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        ids = [ord(character) for character in self.before + text]
        return types.SimpleNamespace(input_ids=[BOS, *ids] if add_special_tokens else ids)


def numbered_sentences(count: int) -> list[str]:
    """Sentences of different lengths, without numbers in digits."""
    letters = random.Random(7)
    return [f"Line {''.join(letters.choices('bcdfg', k=letters.randint(4, 40)))}." for _ in range(count)]


SENTENCES = numbered_sentences(400)
TEXT = "\n".join(SENTENCES)


def made(
    tasks: Any = TASKS,
    lengths: Any = (1600,),
    depths: Any = (0.0, 0.5, 1.0),
    count: int = 1,
    seed: int = 0,
    tokenizer: Any = None,
    text: str = TEXT,
) -> list[TaskSample]:
    return samples_of(tasks, lengths, depths, count, seed, tokenizer or CharacterTokenizer(), text)


def spoken(ids: tuple[int, ...]) -> str:
    return "".join(map(chr, ids))


@pytest.mark.parametrize("tokenizer", [CharacterTokenizer(), word_tokenizer()], ids=["characters", "words"])
def test_samples_have_exactly_the_length_that_was_asked_for(tokenizer: Any) -> None:
    samples = made(lengths=(1600, 1601, 2047), count=3, tokenizer=tokenizer, text=random_text(5000))
    assert len(samples) == 5 * 3 * 3 * 3
    for sample in samples:
        assert len(sample.context_ids) + len(sample.question_ids) == sample.length
        assert len(sample.answer_ids) <= sample.max_answer_tokens


def test_a_sample_begins_with_bos_if_the_tokenizer_begins_so() -> None:
    [sample] = made(["needle"], depths=[1])
    assert sample.context_ids[0] == BOS
    assert spoken(sample.context_ids[1:]).startswith("A magic number")
    # This tokenizer has a BOS token, but does not begin texts with it.
    tokenizer = word_tokenizer()
    assert tokenizer.bos_token_id == BOS
    assert all(BOS not in sample.context_ids for sample in made(lengths=[600], tokenizer=tokenizer))


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.25, 1 / 3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("task", ["needle", "keys"])
def test_the_needle_stands_once_and_at_its_depth(task: str, depth: float) -> None:
    for sample in made([task], depths=[depth], count=5):
        context, [answer] = spoken(sample.context_ids), sample.answers
        needle = re.escape(f"is {answer}.")
        assert len(re.findall(needle, context)) == 1
        before, after = (_filler_in(part) for part in re.split(f" The magic number of the \\w+ \\w+ {needle}", context))
        assert len(before) + len(after) >= LEAST_FILLER
        off = abs(len(before) - depth * (len(before) + len(after)))
        # A sentence has at most 46 characters, and the needle goes to its nearer end.
        assert off <= (46 / 2 if 0 < depth < 1 else 0)


def _filler_in(text: str) -> str:
    """The text without introduction and needles."""
    return re.sub(r" The magic number of the \w+ \w+ is \d+\.|.*Remember (it|them)\.", "", text)


def test_needles_stand_between_whole_sentences_of_the_filler() -> None:
    haystack = Haystack(lambda text: [ord(character) for character in text], TEXT)
    needles = [Needle("<c>", 0.9), Needle("<a>", 0.1), Needle("<b>", 0.1), Needle("<d>", 1), Needle("<0>", 0)]
    for tokens in range(300, 360):
        *whole, last = map(spoken, haystack.filler(tokens, random.Random(tokens)))
        assert {sentence.strip() for sentence in whole} <= set(SENTENCES)
        filler = "".join([*whole, last])
        # It may begin anywhere, and the text begins again behind its end.
        assert filler.strip() in " ".join(SENTENCES * 2)
        hidden = spoken(tuple(haystack.hide(needles, tokens, random.Random(tokens))))
        assert re.sub(" <.>", "", hidden) == filler
        assert re.findall("<.>", hidden) == ["<0>", "<a>", "<b>", "<c>", "<d>"]
        assert all(before in ".>" for before in re.findall("(.) <[abc]>", hidden))


def test_a_short_text_begins_again() -> None:
    [sample] = made(["needle"], depths=[1], text="One short sentence. And another one.")
    assert spoken(sample.context_ids).count(" One short sentence. And another one.") > 20


def test_a_table_without_full_stops_is_divided() -> None:
    haystack = Haystack(lambda text: [len(word) for word in text.split()], " ".join(["word"] * 1000))
    assert max(len(sentence) for sentence in haystack.filler(600, random.Random(0))) == 60


@pytest.mark.parametrize("task", TASKS)
def test_the_right_answer_is_in_the_context_and_has_the_full_score(task: str) -> None:
    for sample in made([task], count=3):
        answer = spoken(sample.answer_ids)
        assert answer.startswith(" ")
        assert answer_score(answer, sample.answers) == 1
        for expected in sample.answers:
            assert expected in spoken(sample.context_ids)
            assert not re.search(rf"\b{expected}\b", spoken(sample.question_ids))


def test_keys_gives_other_numbers_to_other_things() -> None:
    for sample in made(["keys"], count=3):
        given = dict(re.findall(r"magic number of the (\w+ \w+) is (\d{6})\.", spoken(sample.context_ids)))
        [asked] = re.findall(r"Answer: The magic number of the (\w+ \w+) is$", spoken(sample.question_ids))
        assert len(given) == len(set(given.values())) == 4
        assert sample.answers == (given[asked],)


def test_values_asks_for_all_numbers_of_one_thing() -> None:
    for sample in made(["values"], count=3):
        given = re.findall(r"One magic number of the (\w+ \w+) is the number (\d{6})\.", spoken(sample.context_ids))
        assert len({thing for thing, _ in given}) == 1
        assert sample.answers == tuple(number for _, number in given)
        assert len(set(sample.answers)) == 3


def test_variables_asks_for_all_variables_that_lead_to_the_number() -> None:
    for sample in made(["variables"], count=3):
        given = re.findall(r"The variable (\w+) is equal to (?:the variable )?(\w+)\.", spoken(sample.context_ids))
        values: dict[str, str] = {}
        for name, value in given:
            values[name] = values.get(value, value)
        [asked] = re.findall(r"variables have the value (\d{6})\?", spoken(sample.question_ids))
        assert sample.answers == tuple(name for name, value in values.items() if value == asked)
        assert len(sample.answers) >= 3


@pytest.mark.parametrize("length", [1600, 3200])
def test_words_asks_for_the_most_frequent_ones(length: int) -> None:
    for sample in made(["words"], lengths=[length]):
        counts = collections.Counter(re.findall(r"We found a (\w+)\.", spoken(sample.context_ids)))
        assert set(sample.answers) == {thing for thing, _ in counts.most_common(3)}
        assert min(counts[answer] for answer in sample.answers) == 10 * min(counts.values())


def test_samples_are_the_same_on_every_machine() -> None:
    samples = made(lengths=[400], count=2, seed=3, tokenizer=word_tokenizer(), text=random_text(3000))
    recorded = hashlib.sha256(repr([(each.context_ids, each.question_ids, each.answers) for each in samples]).encode())
    assert recorded.hexdigest() == "29a4d587e653729cac7a08f8c466821afb79b9841de9ff35406f4633f695c38c"


def test_a_sample_does_not_depend_on_the_others_and_is_made_once() -> None:
    all_of_them = made(lengths=(1600, 1700), count=3)
    assert made(["keys"], [1700], [1.0], count=1)[0] in all_of_them
    assert made(["words"], [1700], count=2)[-1] in all_of_them
    assert made(["needle", "needle"], [1600, 1600], [1, 1.0]) == made(["needle"], depths=[1])


def test_the_number_is_not_in_the_filler() -> None:
    [answer] = made(["needle"], depths=[0])[0].answers
    [sample] = made(["needle"], depths=[0], text=f"{TEXT} Here is 1{answer}2.")
    assert sample.answers != (answer,)


def test_a_space_that_a_tokenizer_adds_is_only_at_the_beginning() -> None:
    plain, adding = made(["needle"]), made(["needle"], tokenizer=CharacterTokenizer("_"))
    for sample, other in zip(plain, adding, strict=True):
        assert "_" not in spoken(other.context_ids[2:] + other.question_ids + other.answer_ids)
        assert spoken(other.context_ids[1:]).startswith("_A magic number")
        assert other.answer_ids == sample.answer_ids


def test_a_tokenizer_that_merges_with_the_text_before_encodes_the_text_alone() -> None:
    merges = {"a": [5], "a b": [9], " b": [7]}
    assert Haystack(lambda text: merges.get(text, [3]), "Some text.").tokens(" b") == (7,)


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [
        (" 123456.", ("123456",), 1),
        (" 1234567", ("123456",), 0),
        (" 0123456", ("123456",), 0),
        ("x123456", ("123456",), 0),
        ("", ("123456",), 0),
        ("is 222222, and 111111", ("111111", "222222", "333333"), 2 / 3),
        ("A WOLF, a Zebra", ("zebra", "wolf"), 1),
        ("wolves", ("wolf",), 0),
        ("the werewolf", ("wolf",), 0),
        ("It costs 4.5 (about)", ("4.5",), 1),
        ("It costs 415", ("4.5",), 0),
        ("号码是123456号", ("123456",), 1),
    ],
)
def test_scores_of_answers(answer: str, expected: tuple[str, ...], score: float) -> None:
    assert answer_score(answer, expected) == pytest.approx(score)


@pytest.fixture
def task_of() -> Iterator[Callable[..., type[Task]]]:
    """Registers a task of another package, called "other", with a question, an answer and the expected words."""

    def register(answer: str, *expected: str) -> type[Task]:
        @register_task
        class OtherTask(Task):
            name = "other"

            @override
            def text(self, haystack: Haystack, length: int, depth: float, chooser: random.Random) -> TaskText:
                needle = Needle("The password is apple.", depth)
                return TaskText("Remember the password.", (needle,), "\n\nThe password is", answer, expected)

        return OtherTask

    yield register
    unregister_task("other")


def test_a_task_of_another_package(task_of: Any) -> None:
    other = task_of(" apple", "apple")
    assert task_names() == sorted([*TASKS, "other"])
    [sample] = made(["other"], lengths=[300], depths=[1])
    assert spoken(sample.context_ids).endswith(f" The password is {sample.answers[0]}.")
    assert len(sample.context_ids) + len(sample.question_ids) == 300
    with pytest.raises(RegistryError, match="already registered"):
        register_task(other)


def test_what_is_no_task() -> None:
    assert task_names() == list(TASKS)
    with pytest.raises(RegistryError, match="derived from kvlayers_lab.tasks.Task, got <class 'dict'>"):
        register_task(dict)  # type: ignore[type-var]


@pytest.mark.parametrize("texts", [("", "word"), (" word",)])
def test_a_task_without_an_answer(task_of: Any, texts: tuple[str, ...]) -> None:
    task_of(*texts)
    with pytest.raises(OptionError, match="The task 'other' must have an answer"):
        made(["other"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tasks": ["needle", "niddle"]}, "`tasks` must be among keys, needle, .*, got 'niddle'"),
        ({"tasks": []}, "`tasks` must have at least one entry"),
        ({"lengths": []}, "`lengths` must have at least one entry"),
        ({"lengths": [1600, 0]}, "`lengths` must be positive numbers of tokens, got 0"),
        ({"depths": []}, "`depths` must have at least one entry"),
        ({"depths": [0.5, 1.5]}, "`depths` must be from 0 .* to 1 .*, got 1.5"),
        ({"depths": [float("nan")]}, "`depths` must be .* got nan"),
        ({"count": 0}, "`count` must be at least 1"),
        ({"text": " \n\n "}, "`text` must have words"),
        (
            {"text": "unknown", "tokenizer": lambda text, add_special_tokens: types.SimpleNamespace(input_ids=[])},
            "`text`",
        ),
    ],
)
def test_what_samples_cannot_be_made_of(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        made(**changed)


@pytest.mark.parametrize("task", TASKS)
def test_a_length_that_is_too_short_names_the_least_one(task: str) -> None:
    with pytest.raises(OptionError, match=f"at least .* for the task '{task}'") as failure:
        made([task], lengths=[100])
    [least] = re.findall(r"at least (\d+) tokens", str(failure.value))
    made([task], lengths=[int(least)], depths=[0, 0.5, 1], count=20)


def test_a_sample_has_filler_enough_for_depth_to_mean_something() -> None:
    fitting = []
    for length in range(200, 400, 2):
        try:
            fitting += made(["needle"], lengths=[length], depths=[1])
        except OptionError:
            continue
    assert 0 < len(fitting) < 100
    assert all(len(_filler_in(spoken(sample.context_ids))) >= LEAST_FILLER for sample in fitting)
