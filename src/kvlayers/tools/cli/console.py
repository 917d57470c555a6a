"""What every command does beside its measurement: it reads files, draws progress, and prints JSON."""

import dataclasses
import itertools
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from transformers import PretrainedConfig
from transformers.utils import logging as transformers_logging

from kvlayers.errors import ConfigError, KVLayersError
from kvlayers.tools.cli.common import one_line_errors
from kvlayers.tools.measuring.text import default_text, first_line


def plain(value: Any) -> Any:
    """Convert a value to types that JSON has. Fields with `repr=False` are left out.

    A float that is not finite becomes null, since JSON has no such number.

    Example:
        >>> plain({"dtype": torch.bfloat16, "tokens": (1, 2)})
        {'dtype': 'bfloat16', 'tokens': [1, 2]}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = (field for field in dataclasses.fields(value) if field.repr)
        return {field.name: plain(getattr(value, field.name)) for field in shown}
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value


USAGE_PREFIX = "To use it: "
"""Start of a line whose rest can be pasted into code."""


def usage_line(options: Mapping[str, Any]) -> str:
    """A line of code that asks `generate()` for a cache.

    Example:
        >>> usage_line({"cache_implementation": "int4"})
        "To use it: kvlayers.install(); model.generate(..., cache_implementation='int4')"
    """
    arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"{USAGE_PREFIX}kvlayers.install(); model.generate(..., {arguments})"


def print_sentences(console: Console, sentences: Iterable[str]) -> None:
    """Print sentences, one a line. A line of code to paste is not wrapped."""
    for sentence in sentences:
        console.print(sentence, markup=False, highlight=False, soft_wrap=sentence.startswith(USAGE_PREFIX))


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    styles: Iterable[str | None] = (),
    texts: Collection[int] = (0,),
) -> Table:
    """A table without borders, so that figures are never cut on a console of 80 columns. Long names are folded.

    Args:
        columns: headings.
        rows: cells of each row. Brackets in them are no markup.
        title: title of the table.
        styles: style of each row.
        texts: indices of the columns with text. The others have figures.
    """
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title, title_justify="left")
    for index, column in enumerate(columns):
        is_text = index in texts
        found.add_column(escape(column), justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for row, style in itertools.zip_longest(rows, styles):
        found.add_row(*map(escape, row), style=style)
    return found


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout. It does not go through a rich console, which would wrap the lines."""
    print(json.dumps(plain(value), indent=2, allow_nan=False))


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
def quiet_libraries() -> Iterator[None]:
    """Silence the warnings of transformers and of the hub client."""
    before = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before[0])
        hub_logging.set_verbosity(before[1])


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


class FileError(KVLayersError, OSError):
    """A file cannot be read, or cannot be written."""


def home_expanded(path: Path) -> Path:
    """The path with `~` replaced by the home directory.

    Raises:
        FileError: there is no such user.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise FileError(f"The path {path} names a user who has no home directory ({error}).") from None


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


def config_of(name: str) -> PretrainedConfig:
    """The config in a directory, in a JSON file, or of a model on the hub, without loading weights.

    Raises:
        ConfigError: there is no config, or it cannot be read.
    """
    path = home_expanded(Path(name))
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"`MODEL`: the directory {path} has no config.json: name the directory of a model.")
    if not path.exists() and (name.startswith((".", "~", os.sep)) or len(path.parts) > 2):
        raise ConfigError(f"`MODEL` must be a model's directory or its config.json, but {path} does not exist.")
    try:
        # Without `trust_remote_code`, transformers asks at the terminal whether to run a repository's code.
        return transformers.AutoConfig.from_pretrained(str(path) if path.exists() else name, trust_remote_code=False)
    # A broken config raises any error, from whichever code reads it first.
    except Exception as error:
        raise ConfigError(
            f"`MODEL` must be a model's directory, its config.json, or its name on the hub, but {name} cannot be read "
            f"({first_line(error)}): check the name, or download the config and name the file."
        ) from error
