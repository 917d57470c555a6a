"""Several values: one key with several numbers in a long text, all of which are asked for."""

import random

from typing_extensions import override

from kvlayers.tools.tasks.contract import Task, TaskText, register_task
from kvlayers.tools.tasks.haystack import Haystack, Needle
from kvlayers.tools.tasks.vocabulary import enumeration, numbers, things

VALUES = 3
"""Numbers of the thing."""


@register_task
class SeveralValues(Task):
    """Several sentences each give a number of one thing, and the question asks for all of them."""

    name = "values"
    title = "Several values"
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
