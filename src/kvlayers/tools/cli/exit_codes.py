"""How commands end: 0 where all is well, 1 where what they measured is not, 2 where they could not begin."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from kvlayers.errors import KVLayersError

NOT_WELL = 1
"""Exit code for a result that is not what was hoped for: other tokens, or nothing within a budget of fidelity."""

NOT_BEGUN = 2
"""Exit code for input that cannot be used, as that of typer's own errors."""


Errors = type[KVLayersError] | tuple[type[KVLayersError], ...]


@contextmanager
def one_line_errors(command: str, errors: Errors = KVLayersError, code: int = NOT_BEGUN) -> Iterator[None]:
    """Errors of kvlayers as one line on stderr, and an exit code.

    Args:
        command: what the line begins with.
        errors: which of them.
        code: the exit code.
    """
    try:
        yield
    except errors as error:
        said = " ".join(str(error).split())
        Console(stderr=True).print(
            f"kvlayers {command}: {said}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        raise typer.Exit(code) from None
