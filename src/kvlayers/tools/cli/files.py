"""Files that the user names on the command line."""

import os
from pathlib import Path

import transformers
from transformers import PretrainedConfig

from kvlayers.errors import ConfigError, KVLayersError
from kvlayers.tools.measuring.text import default_text


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
    missing = [parent for parent in file.parents if not parent.exists()]
    made: list[Path] = []
    try:
        for directory in reversed(missing):
            directory.mkdir()
            made.append(directory)
        check_writable(file, option)
    except OSError as error:
        raise error if isinstance(error, FileError) else unwritable(file, error, option) from None
    finally:
        for directory in reversed(made):
            directory.rmdir()


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
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        raise ConfigError(
            f"`MODEL` must be a model's directory, its config.json, or its name on the hub, but {name} cannot be read "
            f"({reason}): check the name, or download the config and name the file."
        ) from error
