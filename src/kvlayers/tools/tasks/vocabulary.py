"""Names, numbers and lists that tasks hide in filler."""

import random
from collections.abc import Sequence

from kvlayers.tools.tasks.haystack import Haystack

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
