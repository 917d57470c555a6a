"""Which tasks, lengths, depths and caches `kvlayers fidelity --tasks` measures."""

import math
from collections.abc import Sequence
from typing import Any

from kvlayers.errors import OptionError
from kvlayers.tools.names import TASK_LENGTHS
from kvlayers.tools.tasks.contract import TaskSample, task_names
from kvlayers.upstream.model_types import most_positions
from kvlayers.utils.units import tokens

ALL = "all"


def chosen_tasks(text: str) -> list[str]:
    """Names of tasks, without duplicates. Raises `OptionError` if a name is unknown."""
    known = task_names()
    asked = [each.strip() for each in text.split(",")]
    if asked == [ALL]:
        return known
    for name in asked:
        if name not in known:
            raise OptionError(f"`--tasks` must be {', '.join(known)}, separated by commas, or {ALL}, got {name!r}.")
    return list(dict.fromkeys(asked))


def chosen_depths(text: str) -> list[float]:
    """Depths from 0 to 1, ascending. Raises `OptionError` if one is not a percentage."""
    return sorted({_percentage(each) / 100 for each in text.split(",")})


def _percentage(text: str) -> float:
    try:
        percentage = float(text)
    except ValueError:
        percentage = math.nan
    if not 0 <= percentage <= 100:
        raise OptionError(f"`--depths` must be percentages from 0 to 100, separated by commas, got {text.strip()!r}.")
    return percentage


def chosen_lengths(text: str | None) -> list[int] | None:
    """Lengths in tokens, ascending, `None` if the user named none.

    Raises:
        OptionError: a length is not a positive number of tokens.
    """
    if text is None:
        return None
    found = sorted({tokens(each, "--lengths") for each in text.split(",")})
    if found[0] < 1:
        raise OptionError(f"`--lengths` must be at least 1 token each, got {found[0]}.")
    return found


def fitting_lengths(config: Any, asked: Sequence[int] | None) -> list[int]:
    """The lengths as asked, or the default lengths that the model has positions for.

    Raises:
        OptionError: the model has no positions for a length.
    """
    most = most_positions(config)
    if asked is None:
        default = [tokens(each, "--lengths") for each in TASK_LENGTHS.split(",")]
        # Some positions are left for the answer.
        return default if most is None else [each for each in default if each < most] or [most * 3 // 4]
    if most is not None and asked[-1] > most:
        raise OptionError(
            f"`--lengths` must be within the {most} positions of the model, got {asked[-1]}: pass shorter lengths."
        )
    return list(asked)


def needed_tokens(config: Any, samples: Sequence[TaskSample]) -> int:
    """The most tokens that a cache will hold: those of a sample and of its answer.

    Raises:
        OptionError: the model has no positions for an answer.
    """
    longest = max(samples, key=_tokens_with_answer)
    needed, most = _tokens_with_answer(longest), most_positions(config)
    if most is not None and needed > most:
        raise OptionError(
            f"`--lengths` must leave room for the answer within the {most} positions of the model, but {longest.task} "
            f"of {longest.length} tokens needs {needed}: pass shorter lengths."
        )
    return needed


def _tokens_with_answer(sample: TaskSample) -> int:
    asked = len(sample.context_ids) + len(sample.question_ids)
    return asked + max(sample.max_answer_tokens, len(sample.answer_ids))
