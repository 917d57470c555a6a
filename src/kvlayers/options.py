"""Misspelt options are errors of ours, with the nearest right name in the message."""

import difflib
import functools
import inspect
from collections.abc import Iterable

from .errors import OptionError


@functools.lru_cache(maxsize=None)
def accepted_options(owner: type) -> tuple[str, ...]:
    """Names of the parameters that constructing `owner` accepts by keyword."""
    parameters = list(inspect.signature(owner.__init__).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def check_options(owner: type, given: Iterable[str]) -> None:
    """Raise `OptionError` when `given` holds a name that constructing `owner` does not accept."""
    accepted = accepted_options(owner)
    for name in given:
        if name not in accepted:
            near = difflib.get_close_matches(name, accepted, n=1)
            advice = f"did you mean '{near[0]}'?" if near else "remove it."
            raise OptionError(
                f"{owner.__name__} takes the options {', '.join(accepted) or '(none)'}, but was given '{name}': {advice}"
            )
