"""A file that is either the old one or the new one, whatever happens while it is written."""

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterator

from safetensors import SafetensorError

from kvlayers.errors import CachePathError
from kvlayers.persistence.safetensors_header import check_regular

_TEMPORARY_PREFIX = ".kvlayers-"
_TEMPORARY_SUFFIX = ".tmp"

PERMISSIONS = 0o777
READ_AND_WRITE = 0o666
WRITABLE = 0o222

_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


def temporary_name() -> str:
    """A name for a file that is being written, which no other one has."""
    return f"{_TEMPORARY_PREFIX}{secrets.token_hex(8)}{_TEMPORARY_SUFFIX}"


def clear_temporaries(directory: str, older_than: float) -> None:
    """Delete what killed processes have left behind of files that they were writing.

    Args:
        directory: where to look.
        older_than: seconds since they were last written to: others may be written at this moment.

    Raises:
        OSError: the directory cannot be read, or one of them not be deleted.
    """
    for name in os.listdir(directory):
        if name.startswith(_TEMPORARY_PREFIX) and name.endswith(_TEMPORARY_SUFFIX):
            path = os.path.join(directory, name)
            # Another process may be done with it at this moment.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - os.lstat(path).st_mtime > older_than:
                    os.unlink(path)


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """The path of a new file beside `path`, which takes the place of that when the context ends without an error.

    Its content is on disk before it does, and so is its name before the context has ended.

    Raises:
        CachePathError: the directory is missing or cannot be written to, the disk is full, or `path` is no file.
    """
    existing = check_regular(path, missing_is_fine=True)
    if existing is not None and not existing.st_mode & WRITABLE:
        raise CachePathError(f"expected a file that may be replaced, but {path} is write-protected: choose another.")
    directory = os.path.dirname(path) or os.curdir
    temporary = os.path.join(directory, temporary_name())
    with _named_errors(path, directory):
        # The system's defaults for new files apply to one that it makes; safetensors makes its own for the owner alone.
        made = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, READ_AND_WRITE)
        mode = (os.fstat(made) if existing is None else existing).st_mode & PERMISSIONS
        os.close(made)
        try:
            yield temporary
            _to_disk(temporary)
            os.chmod(temporary, mode)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if os.name == "posix":
            _to_disk(directory)


def _to_disk(path: str) -> None:
    # A file must be open for writing to be flushed on Windows; a directory, elsewhere, cannot be.
    opened = os.open(path, os.O_RDONLY if os.path.isdir(path) else os.O_RDWR)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@contextlib.contextmanager
def _named_errors(path: str, directory: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CachePathError(
            f"expected a directory at {directory}, but there is none: make it before saving to {path}."
        ) from error
    except OSError as error:
        if isinstance(error, CachePathError):
            raise
        way_out = "choose another" if error.errno in _UNWRITABLE else "make room in it, or choose another"
        raise CachePathError(
            f"expected a directory that can be written to, but saw {directory} ({error.strerror}): {way_out}."
        ) from error
    except SafetensorError as error:
        raise CachePathError(
            f"expected a directory that can be written to, but saw {directory} ({error}): make room in it, or choose "
            "another."
        ) from error
