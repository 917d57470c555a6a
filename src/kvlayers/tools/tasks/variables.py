"""Variable tracking: a chain of assignments over a long text, through which a number must be followed."""

import random

from typing_extensions import override

from kvlayers.tools.tasks.contract import Task, TaskText, register_task
from kvlayers.tools.tasks.haystack import Haystack, Needle
from kvlayers.tools.tasks.vocabulary import NOUNS, enumeration, numbers

VARIABLES = 3
"""Variables of the chain."""


@register_task
class VariableTracking(Task):
    """A variable gets a number, and each further variable the value of the one before. Which have this number?"""

    name = "variables"
    title = "Variable tracking"
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
