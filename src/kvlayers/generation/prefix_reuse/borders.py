"""Where a prompt is cut while it is read, so that states that cannot go back are stored where other prompts part."""

from collections.abc import Collection

import numpy as np

from kvlayers.prefix.keys import Tokens

MOST_BETWEEN = 8
"""Most tokens that a template puts behind every end of a message."""

MOST_DROPPED = 4
"""Tokens at the end of a prompt that a template may leave out of the next turn, where no end of a message is known."""

LEAST_TO_BRANCH = 16
"""Tokens before a branch that are worth a snapshot. Fewer are what every prompt begins with."""


def snapshot_lengths(
    ids: Tokens, begin: int, least: int, length: int, branch: int, ends: Collection[int], every: int | None
) -> list[int]:
    """Numbers of tokens behind which states are to be stored.

    Args:
        ids: the prompt.
        begin: tokens whose states are there.
        least: tokens that must be read.
        length: tokens that are to be read, the last of these lengths, unless few stand behind the last border.
        branch: how many of its first tokens other prompts are known to have. Other prompts may part there again.
        ends: ids of tokens that end a message. The next turn begins with this prompt up to its last message, but
            possibly not with what the template puts behind that, in order to ask for an answer.
        every: so many tokens are a snapshot apart at most, for long texts; `None` for no limit.
    """
    border = last_border(ids, ends)
    is_near = max(least, length - MOST_BETWEEN) <= border < length
    lengths = {border} if is_near else {border, length}
    if branch - begin >= LEAST_TO_BRANCH:
        lengths.add(branch)
    stops: list[int] = []
    for stop in sorted(stop for stop in lengths if begin < stop <= (border if is_near else length)):
        while every is not None and stop - begin > every:
            # A multiple, where other prompts that begin alike are cut as well.
            begin += every - begin % every
            stops.append(begin)
        stops.append(stop)
        begin = stop
    return stops


def last_border(ids: Tokens, ends: Collection[int]) -> int:
    """How many tokens there are up to the last border between messages; without one, to where the next turn may part.

    Behind the end of a message stand the tokens that follow every end, such as a line feed and the start of the next
    message: they stand there whatever the next message is.

    Example:
        >>> import numpy as np
        >>> end, line, start, user, assistant = range(5)
        >>> text = [start, user, 7, 8, end, line, start, user, 9, end, line, start, assistant]
        >>> last_border(np.array(text), [end])
        12
    """
    positions = np.flatnonzero(np.isin(ids, list(ends)))
    if not len(positions):
        return max(len(ids) - MOST_DROPPED, 0)
    border = int(positions[-1]) + 1
    while len(positions) > 1 and border < len(ids) and border - positions[-1] <= MOST_BETWEEN:
        following = ids[positions + (border - positions[-1])]
        if (following != ids[border]).any():
            break
        border += 1
    return border
