"""Frequent words: words that occur all over a long text, some of them more often than the others."""

import random

from typing_extensions import override

from kvlayers.tools.tasks.contract import Task, TaskText, register_task
from kvlayers.tools.tasks.haystack import Haystack, Needle
from kvlayers.tools.tasks.vocabulary import NOUNS, enumeration

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
    title = "Frequent words"
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
