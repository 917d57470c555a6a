"""Every file of kvlayers: a safetensors file, whose last tensor has digests of all that comes before it.

Tensors have a digest for each run of tokens, so that the first tokens can be verified without reading the others. The
last digest is that of the header and of all other digests, so it stands for the whole file.
"""

import hashlib
import io
import itertools
import math
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import msgspec
import torch
from torch import Tensor

from kvlayers.errors import CacheFileError, CachePathError, OptionError, StateMismatchError
from kvlayers.persistence.format import MOST_FILE_BYTES, Count, canonical, decoded, refuse, shown

FORMAT = "kvlayers.cache"
FORMAT_VERSION = "11"
"""The version of saved caches and of nodes of a prefix store, the only one that is read and written."""

TOKEN_IDS, DIGESTS = "token_ids", "digests"
"""The first tensor, if the file has ids, and the last tensor, uint8 `[digests, 32]`."""

DIGEST_BYTES = 32

RUN_TOKENS = 512
"""Tokens of keys or values that share one digest."""

LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, little-endian."""

MAX_HEADER_BYTES = 4 * 2**20
"""Far more than any cache needs, and still quick to parse."""

MAX_DIMS = 8
MAX_EMPTY_ELEMENTS = 2**32
"""The greatest product of the other dimensions of an empty tensor, which the size of the file does not limit."""

Content = bytes | bytearray | memoryview
"""The bytes of a file."""


ReadRange = Callable[[int, int], Content]
"""Reads the bytes of a file from a start to an end, or fewer if the file ends before."""


@dataclass(frozen=True)
class TensorEntry:
    """The form of one tensor."""

    dtype: torch.dtype
    shape: tuple[Count, ...]


@dataclass(frozen=True)
class Header:
    """The header of a file.

    Attributes:
        content: the bytes of the file up to its tensors.
        metadata: texts by name.
        tensors: forms of the tensors by name, in the order of their bytes.
        ranges: start and end of each tensor in the file, in bytes.
        file_bytes: size of the whole file.
    """

    content: bytes
    metadata: dict[str, str]
    tensors: dict[str, TensorEntry]
    ranges: dict[str, tuple[int, int]]
    file_bytes: int


def checked_path(path: object) -> str:
    """The path as text.

    Raises:
        OptionError: `path` is not a path.
    """
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        raise OptionError(
            f"`path` must be the path of a file, got a {type(path).__name__}: pass a str or a Path."
        ) from None
    if "\0" in text or not text:
        raise OptionError(f"`path` must be the path of a file, got {text!r}: pass a path without null bytes.")
    return text


def check_regular(path: str, missing_is_fine: bool = False) -> os.stat_result | None:
    """The status of the regular file at `path`, `None` if it may be missing and is.

    Raises:
        CachePathError: the file is missing, or is not a regular file.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        if missing_is_fine:
            return None
        raise CachePathError(f"The file {path} does not exist: save a cache to it first.") from None
    except OSError as error:
        raise CachePathError(f"The path {path} cannot be reached: {error.strerror}.") from error
    if stat.S_ISLNK(found.st_mode):
        raise CachePathError(
            f"`path` must be a regular file, but {path} is a symbolic link, which may lead anywhere: pass "
            "os.path.realpath() of it if you mean its target."
        )
    if not stat.S_ISREG(found.st_mode):
        what = "a directory" if stat.S_ISDIR(found.st_mode) else "a device, a pipe or a socket"
        raise CachePathError(f"`path` must be a regular file, but {path} is {what}: pass the path of a file.")
    return found


def mapped(path: str) -> mmap.mmap | bytes:
    """The content of a file, which stays the same if another process replaces or deletes the file.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as opened:
        if not os.fstat(opened.fileno()).st_size:
            return b""
        # A private copy of what is written to, because torch warns of memory that it must not write to.
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)


def ranges_of(content: Content | mmap.mmap) -> ReadRange:
    """What reads ranges of bytes in memory, without copies if they may be written to."""
    view = memoryview(bytearray(content) if isinstance(content, bytes) else content)
    return lambda start, end: view[start:end]


def run_count(shape: tuple[int, ...]) -> int:
    """The number of digests of a tensor, without iterating over runs, since a header may claim any number of tokens."""
    return max(-(-shape[2] // RUN_TOKENS), 1) if len(shape) == 4 else 1


def file_header(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> Header:
    """The header of a file of these tensors and texts. Equal ones have equal bytes.

    Tensors follow one another by the size of their numbers, so that each begins where numbers of its dtype can be, and
    by name. Ids come first, since they are read to inspect a file.

    Args:
        tensors: their forms, without digests.
        metadata: texts by name. Those that each file has may be left out.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name != TOKEN_IDS, name))
    rows = sum(run_count(entry.shape) for entry in tensors.values()) + 1
    entries = {name: tensors[name] for name in names} | {DIGESTS: TensorEntry(torch.uint8, (rows, DIGEST_BYTES))}
    texts = {"format": FORMAT, "format_version": FORMAT_VERSION, **metadata}
    sizes = [math.prod(entry.shape) * entry.dtype.itemsize for entry in entries.values()]
    offsets = dict(zip(entries, itertools.pairwise(itertools.accumulate(sizes, initial=0)), strict=True))
    claims = {name: {**vars(entry), "data_offsets": offsets[name]} for name, entry in entries.items()}
    text = canonical({"__metadata__": texts, **claims}).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    content = len(text).to_bytes(LENGTH_BYTES, "little") + text
    ranges = {name: (len(content) + start, len(content) + end) for name, (start, end) in offsets.items()}
    return Header(content, texts, entries, ranges, len(content) + sum(sizes))


def parse_header(path: str, file_bytes: int, read: ReadRange) -> Header:
    """The header of a file that is read by ranges.

    Args:
        path: name of the file in errors.
        file_bytes: size of the file.
        read: reads a range of bytes. Only the range of the header is read.

    Raises:
        CacheFileError: it is of another version or no file of kvlayers, or its header is not as kvlayers writes it.
    """
    start = bytes(read(0, LENGTH_BYTES))
    length, most = int.from_bytes(start, "little"), min(file_bytes - LENGTH_BYTES, MAX_HEADER_BYTES)
    if length > MOST_FILE_BYTES:
        raise CacheFileError(
            f"{path} is no saved cache: it does not begin as the files of save_cache() do. Name another file."
        )
    if length > most:
        refuse(
            path,
            f"a header of at most {MAX_HEADER_BYTES} bytes within its {file_bytes}",
            f"one that claims {length}" if file_bytes else "an empty file",
        )
    text = bytes(read(LENGTH_BYTES, LENGTH_BYTES + length))
    claims = decoded(path, "a header", dict[str, msgspec.Raw], text)
    metadata = decoded(path, "metadata", dict[str, str], bytes(claims.pop("__metadata__", msgspec.Raw(b"{}"))))
    if metadata.get("format") != FORMAT:
        refuse(
            path,
            f"the format {FORMAT}",
            shown(metadata.get("format")),
            "it was not made by save_cache(); files of a model's weights have the format 'pt'",
        )
    if metadata.get("format_version") != FORMAT_VERSION:
        version = shown(metadata.get("format_version"))
        refuse(path, f"version {FORMAT_VERSION} of the format", version, "it is of another kvlayers: save it again")
    entries: dict[str, TensorEntry] = {}
    for name, fields in claims.items():
        # Where its bytes are follows from the forms of all tensors.
        entry = entries[name] = decoded(path, f"an entry of {shown(name)}", TensorEntry, bytes(fields))
        is_vast = 0 in entry.shape and math.prod(size or 1 for size in entry.shape) > MAX_EMPTY_ELEMENTS
        if is_vast or len(entry.shape) > MAX_DIMS:
            refuse(path, f"a shape that states have for {shown(name)}", shown(entry.shape))
    entries.pop(DIGESTS, None)
    header = file_header(entries, metadata)
    if header.content != start + text:
        refuse(path, "a header as kvlayers writes it", "other words, or other places of its tensors")
    if header.file_bytes != file_bytes:
        refuse(path, f"{header.file_bytes} bytes", str(file_bytes))
    return header


def _digests_of(states: Tensor) -> Iterator[bytes]:
    """SHA-256 of each run of a tensor on the host."""
    for run in torch.split(states, RUN_TOKENS, 2) if states.dim() == 4 else (states,):
        yield hashlib.sha256(_bytes_of(run)).digest()


def _bytes_of(states: Tensor) -> memoryview:
    """The bytes of a tensor on the host, in the order of its dimensions; a view if it is contiguous."""
    return states.contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_file(out: BinaryIO, header: Header, tensors: Mapping[str, Sequence[Tensor]]) -> None:
    """Write a file, one tensor after another, without a copy of what is contiguous.

    Args:
        out: where to write it.
        header: from `file_header`.
        tensors: on the host. One that has no tokens of its own may be in several parts along its first dimension.

    Raises:
        StateMismatchError: the header is larger than a file may have.
    """
    if len(header.content) > LENGTH_BYTES + MAX_HEADER_BYTES:
        raise StateMismatchError(
            f"The cache has more than a file can hold: its header must have at most {MAX_HEADER_BYTES} bytes, got "
            f"{len(header.content)}."
        )
    out.write(header.content)
    digests: dict[str, bytes] = {}
    for name in header.tensors:
        if name == DIGESTS:
            continue
        if len(header.tensors[name].shape) == 4:
            (states,) = tensors[name]
            out.write(_bytes_of(states))
            digests[name] = b"".join(_digests_of(states))
        else:
            whole = hashlib.sha256()
            for part in tensors[name]:
                content = _bytes_of(part)
                out.write(content)
                whole.update(content)
            digests[name] = whole.digest()
    table = b"".join(digests[name] for name in sorted(digests))
    out.write(table + hashlib.sha256(header.content + table).digest())


def content_of(header: Header, tensors: Mapping[str, Sequence[Tensor]]) -> Content:
    """What `write_file` writes."""
    out = io.BytesIO()
    write_file(out, header, tensors)
    return out.getbuffer()


class TensorFile:
    """A file whose header was checked, and whose tensors are compared with their digests when they are read.

    Args:
        path: name of the file in errors.
        header: its header.
        read: reads a range of its bytes.

    Attributes:
        checksum: SHA-256 of the header and of all digests, in hexadecimal.

    Raises:
        CacheFileError: header or digests are damaged.
    """

    def __init__(self, path: str, header: Header, read: ReadRange) -> None:
        self.path, self.header, self.read = path, header, read
        # A file that was cut short fails here: the digests are at its end.
        self._digests = bytes(read(*header.ranges[DIGESTS]))
        self.checksum = hashlib.sha256(header.content + self._digests[:-DIGEST_BYTES]).hexdigest()
        if self.checksum != self._digests[-DIGEST_BYTES:].hex():
            refuse(path, f"the checksum {self.checksum}", "another", "it is damaged; save it again")
        names = sorted(header.tensors.keys() - {DIGESTS})
        counts = [run_count(header.tensors[name].shape) for name in names]
        self._rows = dict(zip(names, itertools.accumulate(counts, initial=0), strict=False))
        """For each tensor, the row of its first digest."""

    def tensor(self, name: str, tokens: int | None = None, verify: bool = True) -> Tensor:
        """A tensor, as a view of the content where that is possible: do not write to it.

        Args:
            name: what it is called.
            tokens: of keys or values, how many of the first tokens; `None` for all that there is.
            verify: whether to compare its bytes with their digests.

        Raises:
            CacheFileError: bytes have changed since it was written.
        """
        entry = self.header.tensors[name]
        data = self.read(*self.header.ranges[name])
        states = torch.frombuffer(data, dtype=entry.dtype) if len(data) else torch.empty(0, dtype=entry.dtype)
        states = states.view(entry.shape)
        if verify:
            self._compare(name, states, tokens)
        return states if tokens is None else states[:, :, :tokens]

    def _compare(self, name: str, states: Tensor, tokens: int | None) -> None:
        """Raise `CacheFileError` if the runs of states that have these tokens have other digests than the file says."""
        needed = states if tokens is None else states[:, :, : max(-(-tokens // RUN_TOKENS), 1) * RUN_TOKENS]
        for row, digest in enumerate(_digests_of(needed), self._rows[name]):
            expected = self._digests[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]
            if digest != expected:
                refuse(
                    self.path,
                    f"bytes of {shown(name)} with the digest {expected.hex()[:16]}...",
                    "others",
                    "it is damaged; save it again",
                )


def file_in(path: str, content: Content | mmap.mmap) -> TensorFile:
    """The file with this content.

    Raises:
        CacheFileError: it is of another version or no file of kvlayers, or header or digests are damaged.
    """
    read = ranges_of(content)
    return TensorFile(path, parse_header(path, len(content), read), read)


def opened_file(path: str) -> TensorFile:
    """The file at a path, mapped into memory.

    Raises:
        CacheFileError: as `file_in`.
        CachePathError: the file does not exist, or cannot be read.
    """
    check_regular(path)
    try:
        content = mapped(path)
    except OSError as error:
        raise CachePathError(f"{path} cannot be read: {error.strerror}.") from error
    return file_in(path, content)
