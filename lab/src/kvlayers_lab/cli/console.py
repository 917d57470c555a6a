"""What every command of the lab does beside its measurement: it reads files, and draws progress."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from kvlayers.commands.common import one_line_errors
from kvlayers.commands.console import FileError, home_expanded, quiet_libraries
from kvlayers.errors import OptionError
from kvlayers.options import tokens
from kvlayers_lab.measuring.text import default_text

USAGE_PREFIX = "To use it: "
"""Start of a line whose rest can be pasted into code."""

WRITTEN_PREFIX = "Written to "
"""Start of a line whose rest is the path of a file."""


def usage_line(options: Mapping[str, Any]) -> str:
    """A line of code that asks `generate()` for a cache.

    Example:
        >>> usage_line({"cache_implementation": "int4"})
        "To use it: kvlayers.generate(model, ..., cache_implementation='int4')"
    """
    arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"{USAGE_PREFIX}kvlayers.generate(model, ..., {arguments})"


def print_sentences(console: Console, sentences: Iterable[str]) -> None:
    """Print sentences, one a line. What is to be pasted, code or the path of a file, is not wrapped."""
    for sentence in sentences:
        is_whole = sentence.startswith((USAGE_PREFIX, WRITTEN_PREFIX))
        console.print(sentence, markup=False, highlight=False, soft_wrap=is_whole)


@contextmanager
def measuring(command: str, options: Mapping[str, str], as_json: bool, threads: int | None) -> Iterator[Console]:
    """What every command that measures does: it sets the threads of torch, is quiet, and says errors in one line.

    Args:
        command: name of the command.
        options: see `one_line_errors`.
        as_json: whether stdout has JSON. People then read stderr.
        threads: CPU threads, `None` for torch's choice.

    Yields:
        The console for people.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    with one_line_errors(command, options), quiet_libraries():
        yield Console(stderr=as_json)


@contextmanager
def bar_between_runs(console: Console, runs: int, when_done: str) -> Iterator[Callable[[str], None]]:
    """Draw a bar over `runs` runs. Yields a function to call before each run, with the run's description.

    The bar shows the time that remains, and when it is full, the time that all runs took.

    Args:
        console: where the bar is drawn.
        runs: the number of runs.
        when_done: description beside the full bar.
    """
    remaining = TimeRemainingColumn(elapsed_when_finished=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), remaining)
    # Drawn between the runs only: a thread that redraws ten times a second would slow down the timed runs.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=runs)
        begun = 0

        def begin(run: str) -> None:
            nonlocal begun
            progress.update(task, completed=begun, description=run)
            progress.refresh()
            begun += 1

        yield begin
        progress.update(task, completed=begun, description=when_done)
        progress.refresh()


def read_text(path: Path | None) -> str:
    """The text of the file that `--text` names; by default the text of Python's help.

    Raises:
        FileError: the file does not exist, is empty, or is not a text in UTF-8.
    """
    if path is None:
        return default_text()
    try:
        text = home_expanded(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileError(
            f"`--text` must be a text in UTF-8, but {path} is not ({error.reason}): convert it, or name another file."
        ) from None
    except OSError as error:
        raise FileError(f"`--text`: {path} cannot be read ({error.strerror}): name another file.") from None
    if "\0" in text:
        raise FileError(f"`--text` must be a text, but {path} has zero bytes, as binary files do: name another file.")
    if not text.strip():
        raise FileError(f"`--text` must not be empty, but {path} is empty: name another file.")
    return text


def checked_lengths(text: str) -> list[int]:
    """The lengths in tokens that `--lengths` names, ascending.

    Raises:
        OptionError: a length is not a positive number of tokens.
    """
    found = sorted({tokens(each, "--lengths") for each in text.split(",")})
    if found[0] < 1:
        raise OptionError(f"`--lengths` must be at least 1 token each, got {found[0]}.")
    return found


def check_writable(path: Path, option: str = "--report") -> None:
    """Check that a file can be written, without changing anything.

    Args:
        path: the file.
        option: the option that names the file.

    Raises:
        FileError: the file cannot be written.
    """
    try:
        # The target of a symbolic link, since that is the file that will be made.
        file = path.resolve()
        existed = file.exists()
        file.open("ab").close()
        if not existed:
            file.unlink()
    except OSError as error:
        raise unwritable(path, error, option) from None


def results_path(asked: Path | None, report: Path | None) -> Path | None:
    """Path of the file of results, `None` for no file. Nothing is changed.

    Args:
        asked: what the user named with `--results`.
        report: the file of the report, `None` for no report.

    Raises:
        FileError: it cannot be written, is a device or the like, or the report would replace it.
    """
    if asked is None:
        return None
    path = home_expanded(asked)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise FileError(f"`--results`: {path} must be a file, but it is a device or a pipe: name another file.")
    check_writable(path, "--results")
    if report is not None and path.resolve() == report.resolve():
        raise FileError(f"`--results` and `--report` must be two files, got {path} for both: name another file.")
    return path


def check_creatable(file: Path, option: str) -> None:
    """Check that a file can be written once its missing directories are made, without leaving any of them behind.

    Args:
        file: the file.
        option: the option that names the file.

    Raises:
        FileError: a directory cannot be made, or the file cannot be written.
    """
    existing = next(parent for parent in file.parents if parent.exists())
    if existing == file.parent:
        check_writable(file, option)
        return
    try:
        with tempfile.TemporaryDirectory(dir=existing) as trial:
            missing = Path(trial, file.relative_to(existing))
            missing.parent.mkdir(parents=True)
            missing.touch()
    except OSError as error:
        raise unwritable(file, error, option) from None


def unwritable(path: Path, error: OSError, option: str = "--report") -> FileError:
    """The error for a file that cannot be written."""
    return FileError(f"`{option}`: {path} cannot be written ({error.strerror or error}): name another file.")
