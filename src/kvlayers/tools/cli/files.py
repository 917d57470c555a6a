"""Files that are named on the command line."""

import os
from pathlib import Path

import transformers
from transformers import PretrainedConfig

from kvlayers.errors import ConfigError, KVLayersError
from kvlayers.tools.measuring.text import default_text


class FileError(KVLayersError, OSError):
    """A file cannot be read, or cannot be written."""


def home_expanded(path: Path) -> Path:
    """A path with `~` as the directory that it stands for.

    Raises:
        FileError: there is no such user.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise FileError(f"expected a path, but in {path} there is a user who has no home ({error}).") from None


def text_in(path: Path | None) -> str:
    """The text in a file; without one, that of Python's help.

    Raises:
        FileError: there is no such file, it is no text in UTF-8, or empty.
    """
    if path is None:
        return default_text()
    try:
        text = home_expanded(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileError(
            f"expected a text in UTF-8, but {path} is none ({error.reason}): convert it, or name another file."
        ) from None
    except OSError as error:
        raise FileError(f"expected a text, but {path} cannot be read ({error.strerror}): name another file.") from None
    if "\0" in text:
        raise FileError(f"expected a text, but {path} has zero bytes, as binary files do: name another file.")
    if not text.strip():
        raise FileError(f"expected a text, but {path} is empty: name another file.")
    return text


def check_writable(path: Path, option: str = "--report") -> None:
    """See that a file can be written, and leave all as it was.

    Args:
        path: the file.
        option: what a user names it by.

    Raises:
        FileError: it cannot.
    """
    try:
        # What a link leads to, as that is what is made.
        file = path.resolve()
        was_there = file.exists()
        file.open("ab").close()
        if not was_there:
            file.unlink()
    except OSError as error:
        raise unwritable(path, error, option) from None


def unwritable(path: Path, error: OSError, option: str = "--report") -> FileError:
    """The error for a file that cannot be written."""
    return FileError(
        f"expected a file that can be written, but {path} cannot ({error.strerror or error}): name another with "
        f"{option} FILE."
    )


def config_of(name: str) -> PretrainedConfig:
    """The config in a directory, in a JSON file, or of a model on the hub; its weights are not loaded.

    Raises:
        ConfigError: there is none.
    """
    path = home_expanded(Path(name))
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"expected a directory with a config.json, but saw none in {path}: name that of a model.")
    if not path.exists() and (name.startswith((".", "~", os.sep)) or len(path.parts) > 2):
        raise ConfigError(f"expected a model's directory or its config.json, but there is nothing at {path}.")
    try:
        # Without a word on it, transformers asks whoever is at the terminal whether to run a repository's code.
        return transformers.AutoConfig.from_pretrained(str(path) if path.exists() else name, trust_remote_code=False)
    # What is wrong with a config comes as whatever the code raises that stumbles over it.
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        raise ConfigError(
            f"expected a model's directory, its config.json, or its name on the hub, but {name} is none that can be "
            f"read ({said}): check the name, or download the config and name the file."
        ) from error
