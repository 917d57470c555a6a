"""Files that are named on the command line."""

from pathlib import Path

from ..errors import KVLayersError
from ..measuring.texts import default_text


class FileError(KVLayersError, OSError):
    """A file cannot be read, or cannot be written."""


def text_in(path: Path | None) -> str:
    """The text in a file; without one, that of Python's help.

    Raises:
        FileError: there is no such file, it is no text in UTF-8, or empty.
    """
    if path is None:
        return default_text()
    try:
        text = path.expanduser().read_text(encoding="utf-8")
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


def check_writable(path: Path) -> None:
    """See that a file can be written, and leave all as it was.

    Raises:
        FileError: it cannot.
    """
    try:
        was_there = path.exists()
        path.open("ab").close()
        if not was_there:
            path.unlink()
    except OSError as error:
        raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError) -> FileError:
    """The error for a file that cannot be written."""
    return FileError(
        f"expected a file that can be written, but {path} cannot ({error.strerror or error}): name another with "
        "--report FILE."
    )
