"""What commands print, as JSON and as tables, and the files and configs that they are given."""

import dataclasses
import itertools
import json
import logging
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from rich import box
from rich.markup import escape
from rich.table import Table
from transformers import PretrainedConfig
from transformers.utils import logging as transformers_logging

from kvlayers.errors import ConfigError, KVLayersError

__all__ = ["FileError", "config_of", "first_line", "home_expanded", "plain", "print_json", "quiet_libraries", "table"]


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


def first_line(error: BaseException) -> str:
    """The first line of an error without its full stop, or its class if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")


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
