"""A single needle: one number in a long text."""

import random

from typing_extensions import override

from kvlayers.tools.tasks.contract import Task, TaskText, register_task
from kvlayers.tools.tasks.haystack import Haystack, Needle
from kvlayers.tools.tasks.vocabulary import numbers, things


@register_task
class SingleNeedle(Task):
    """One sentence gives a number, and the question asks for it."""

    name = "needle"
    title = "Single needle"

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
