"""Atomic writes: a file has either its old or its new content, even if writing fails or the process dies."""

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterator

from kvlayers.errors import CachePathError
from kvlayers.persistence.tensor_file import check_regular

_TEMPORARY_PREFIX = ".kvlayers-"
_TEMPORARY_SUFFIX = ".tmp"

PERMISSIONS = 0o777
WRITABLE = 0o222

_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


def temporary_name() -> str:
    """A unique name for a file that is being written."""
    return f"{_TEMPORARY_PREFIX}{secrets.token_hex(8)}{_TEMPORARY_SUFFIX}"


def clear_temporaries(directory: str, older_than: float) -> None:
    """Delete the temporary files of processes that died while writing.

    Args:
        directory: the directory to clear.
        older_than: the least seconds since the last write. A newer file may still be in use.

    Raises:
        OSError: the directory cannot be read, or a file cannot be deleted.
    """
    for name in os.listdir(directory):
        if name.startswith(_TEMPORARY_PREFIX) and name.endswith(_TEMPORARY_SUFFIX):
            path = os.path.join(directory, name)
            # Another process may rename or delete the file meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - os.lstat(path).st_mtime > older_than:
                    os.unlink(path)


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """Yield the path of a new file, which replaces `path` if the context ends without an error.

    The content is on disk before the file is renamed, and the new name is on disk before the context ends.

    Raises:
        CachePathError: the directory is missing or cannot be written to, the disk is full, or `path` is not a file.
    """
    existing = check_regular(path, missing_is_fine=True)
    if existing is not None and not existing.st_mode & WRITABLE:
        raise CachePathError(f"`path`: {path} is write-protected: choose another file.")
    directory = os.path.dirname(path) or os.curdir
    temporary = os.path.join(directory, temporary_name())
    try:
        # Made before there is any content, with the system's default permissions.
        open(temporary, "xb").close()
        try:
            yield temporary
            _to_disk(temporary)
            if existing is not None:
                os.chmod(temporary, existing.st_mode & PERMISSIONS)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if os.name == "posix":
            _to_disk(directory)
    except CachePathError:
        raise
    except FileNotFoundError as error:
        raise CachePathError(
            f"`path`: the directory {directory} does not exist: make it before saving to {path}."
        ) from error
    except OSError as error:
        remedy = "choose another" if error.errno in _UNWRITABLE else "make room in it, or choose another"
        raise CachePathError(
            f"`path` must be in a directory that can be written to, got {directory} ({error.strerror}): {remedy}."
        ) from error


def _to_disk(path: str) -> None:
    # On Windows a file must be open for writing to be flushed. A directory cannot be opened for writing.
    opened = os.open(path, os.O_RDONLY if os.path.isdir(path) else os.O_RDWR)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
