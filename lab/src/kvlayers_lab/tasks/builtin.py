"""The tasks of kvlayers, easiest first. Importing this file registers them."""

import random
from collections.abc import Sequence

from typing_extensions import override

from kvlayers_lab.tasks.contract import Haystack, Needle, Task, TaskText, register_task

ADJECTIVES = (
    *("amber", "ancient", "bitter", "brave", "bright", "broken", "calm", "clever", "crimson", "distant", "early"),
    *("empty", "frozen", "gentle", "golden", "green", "grey", "hidden", "hollow", "humble", "little", "lonely"),
    *("narrow", "noble", "patient", "proud", "purple", "quiet", "rapid", "silver", "simple", "sleepy", "tall", "wild"),
)

NOUNS = (
    *("anchor", "basket", "bridge", "candle", "castle", "desert", "dragon", "engine", "falcon", "forest", "garden"),
    *("hammer", "harbour", "island", "jacket", "kettle", "ladder", "lantern", "market", "meadow", "mirror"),
    *("mountain", "orchard", "palace", "pepper", "pillow", "planet", "rabbit", "river", "rocket", "saddle", "temple"),
    *("tunnel", "valley", "violin", "window", "winter", "wizard"),
)

DIGITS = 6
"""Digits of a number. Many tokenizers have one token for each digit or for each three, so that numbers are alike."""


def things(count: int, chooser: random.Random) -> list[str]:
    """Different things, such as "grey harbour". No two of them share a word."""
    adjectives, nouns = chooser.sample(ADJECTIVES, count), chooser.sample(NOUNS, count)
    return [f"{adjective} {noun}" for adjective, noun in zip(adjectives, nouns, strict=True)]


def numbers(count: int, haystack: Haystack, chooser: random.Random) -> list[str]:
    """Different numbers of `DIGITS` digits that the filler does not contain."""
    found: list[str] = []
    while len(found) < count:
        number = str(chooser.randrange(10 ** (DIGITS - 1), 10**DIGITS))
        if number not in found and number not in haystack.text:
            found.append(number)
    return found


def enumeration(items: Sequence[str], before: str) -> str:
    """At least two items as a sentence lists them, such as "river, a temple and a market" with `before="a"`."""
    first, *middle, last = items
    return f"{first}{''.join(f', {before} {item}' for item in middle)} and {before} {last}"


@register_task
class SingleNeedle(Task):
    """One sentence gives a number, and the question asks for it."""

    name = "needle"

    @override
    def text(self, haystack: Haystack, length: int, depth: float, chooser: random.Random) -> TaskText:
        [thing], [number] = things(1, chooser), numbers(1, haystack, chooser)
        return TaskText(
            introduction="A magic number is hidden in the following text. Remember it.",
            needles=(Needle(f"The magic number of the {thing} is {number}.", depth),),
            question=f"\n\nQuestion: What is the magic number of the {thing}?\n"
            f"Answer: The magic number of the {thing} is",
            answer=f" {number}",
            expected=(number,),
        )


KEYS = 4
"""Things with a number."""


@register_task
class SeveralKeys(Task):
    """Sentences give the numbers of several things, and the question asks for the number of one."""

    name = "keys"

    @override
    def text(self, haystack: Haystack, length: int, depth: float, chooser: random.Random) -> TaskText:
        keys, values = things(KEYS, chooser), numbers(KEYS, haystack, chooser)
        depths = [depth, *(chooser.random() for _ in range(KEYS - 1))]
        return TaskText(
            introduction="Several magic numbers are hidden in the following text. Remember them.",
            needles=tuple(
                Needle(f"The magic number of the {key} is {value}.", place)
                for key, value, place in zip(keys, values, depths, strict=True)
            ),
            question=f"\n\nQuestion: What is the magic number of the {keys[0]}?\n"
            f"Answer: The magic number of the {keys[0]} is",
            answer=f" {values[0]}",
            expected=(values[0],),
        )


VALUES = 3
"""Numbers of the thing."""


@register_task
class SeveralValues(Task):
    """Several sentences each give a number of one thing, and the question asks for all of them."""

    name = "values"
    has_depth = False

    @override
    def text(self, haystack: Haystack, length: int, depth: float, chooser: random.Random) -> TaskText:
        [thing], values = things(1, chooser), numbers(VALUES, haystack, chooser)
        depths = sorted(chooser.random() for _ in values)
        return TaskText(
            introduction="Several magic numbers are hidden in the following text. Remember them.",
            needles=tuple(
                Needle(f"One magic number of the {thing} is the number {value}.", place)
                for value, place in zip(values, depths, strict=True)
            ),
            question=f"\n\nQuestion: What are the {VALUES} magic numbers of the {thing}?\n"
            f"Answer: The {VALUES} magic numbers of the {thing} are: the number",
            answer=f" {enumeration(values, 'the number')}",
            expected=tuple(values),
        )


VARIABLES = 3
"""Variables of the chain."""


@register_task
class VariableTracking(Task):
    """A variable gets a number, and each further variable the value of the one before. Which have this number?"""

    name = "variables"
    has_depth = False

    @override
    def text(self, haystack: Haystack, length: int, depth: float, chooser: random.Random) -> TaskText:
        names, [number] = chooser.sample(NOUNS, VARIABLES), numbers(1, haystack, chooser)
        values = [number, *(f"the variable {name}" for name in names)]
        depths = sorted(chooser.random() for _ in names)
        return TaskText(
            introduction="Several variables are defined in the following text. Remember them.",
            needles=tuple(
                Needle(f"The variable {name} is equal to {value}.", place)
                for name, value, place in zip(names, values[:-1], depths, strict=True)
            ),
            question=f"\n\nQuestion: Which variables have the value {number}?\n"
            f"Answer: There are {VARIABLES} variables with the value {number}: the variable",
            answer=f" {enumeration(names, 'the variable')}",
            expected=tuple(names),
        )


FREQUENT = 3
"""Things that occur often, which are asked for."""

RARE = 8
"""Things that occur seldom."""

TIMES = 10
"""How often each frequent thing occurs for each time that a rare one does."""

SHARE = 0.3
"""Share of the sample's tokens in sentences about things. The others are filler, unless the sample is short."""

THINGS = tuple(noun for noun in NOUNS if noun[0] not in "aeiou")
"""Words that follow "a". They have little in common, so that a model cannot guess one from another."""


@register_task
class FrequentWords(Task):
    """Sentences all over the text each name a thing, and the question asks which things were named most often."""

    name = "words"
    has_depth = False

    @override
    def text(self, haystack: Haystack, length: int, depth: float, chooser: random.Random) -> TaskText:
        things = chooser.sample(THINGS, FREQUENT + RARE)
        frequent, rare = things[:FREQUENT], things[FREQUENT:]
        sentences = [f"We found a {thing}." for thing in frequent * TIMES + rare]
        tokens = sum(len(haystack.tokens(f" {sentence}")) for sentence in sentences)
        sentences *= max(1, int(length * SHARE / tokens))
        chooser.shuffle(sentences)
        return TaskText(
            introduction="We found things in the following text. Remember which things we found most often.",
            needles=tuple(
                Needle(sentence, number / (len(sentences) + 1)) for number, sentence in enumerate(sentences, 1)
            ),
            question=f"\n\nQuestion: Which {FREQUENT} things did we find most often?\n"
            f"Answer: We found {FREQUENT} things most often, a",
            answer=f" {enumeration(frequent, 'a')}",
            expected=tuple(frequent),
        )
