"""Exit codes of commands: 0 on success, 1 if a measurement failed its check, 2 if the input cannot be used."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import typer
from rich.console import Console

from kvlayers.errors import KVLayersError

CHECK_FAILED = 1
"""Exit code if the command ran and its result failed a check: wrong tokens, or no setting within the budget."""

INPUT_ERROR = 2
"""Exit code if the input cannot be used. Typer's own errors exit with it as well."""

Errors = type[KVLayersError] | tuple[type[KVLayersError], ...]

NO_OPTIONS: Mapping[str, str] = MappingProxyType({})


@contextmanager
def one_line_errors(
    command: str, options: Mapping[str, str] = NO_OPTIONS, errors: Errors = KVLayersError, code: int = INPUT_ERROR
) -> Iterator[None]:
    """Print an error of kvlayers as one line on stderr, and exit with `code`.

    Args:
        command: name of the command, which begins the line.
        options: the command's option for each argument of the library: `{"context_length": "--context"}`. Errors name
            arguments in backticks; the printed line names the option that the user typed instead.
        errors: the classes to catch.
        code: the exit code.
    """
    try:
        yield
    except errors as error:
        line = " ".join(str(error).split())
        for argument, option in options.items():
            line = line.replace(f"`{argument}`", f"`{option}`")
        Console(stderr=True).print(
            f"kvlayers {command}: {line}", style="red", markup=False, highlight=False, emoji=False, soft_wrap=True
        )
        raise typer.Exit(code) from None
