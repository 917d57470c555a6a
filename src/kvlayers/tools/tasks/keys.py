"""Several keys: many numbers in a long text, one of which is asked for."""

import random

from typing_extensions import override

from kvlayers.tools.tasks.contract import Task, TaskText, register_task
from kvlayers.tools.tasks.haystack import Haystack, Needle
from kvlayers.tools.tasks.vocabulary import numbers, things

KEYS = 4
"""Things with a number."""


@register_task
class SeveralKeys(Task):
    """Sentences give the numbers of several things, and the question asks for the number of one."""

    name = "keys"
    title = "Several keys"

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
