"""Every file of kvlayers: a safetensors file, whose last tensor has digests of all that comes before it.

Tensors have a digest for each run of tokens, so that the first tokens can be verified without reading the others. The
last digest is that of the header and of all other digests, so it stands for the whole file.
"""

import hashlib
import io
import itertools
import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

import torch
from torch import Tensor

from kvlayers.errors import CachePathError, StateMismatchError
from kvlayers.persistence.format import refuse, shown
from kvlayers.persistence.safetensors_header import (
    DIGEST_BYTES,
    DIGESTS,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    RUN_TOKENS,
    Content,
    Header,
    ReadRange,
    check_regular,
    mapped,
    parse_header,
    ranges_of,
    run_count,
)


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
        self._digests = bytes(self._read(DIGESTS))
        self.checksum = hashlib.sha256(header.content + self._digests[:-DIGEST_BYTES]).hexdigest()
        if self.checksum != self._digests[-DIGEST_BYTES:].hex():
            refuse(path, f"the checksum {self.checksum}", "another", "it is damaged; save it again")
        names = sorted(header.tensors.keys() - {DIGESTS})
        counts = [run_count(header.tensors[name].shape) for name in names]
        self._rows = dict(zip(names, itertools.accumulate(counts, initial=0), strict=False))
        """For each tensor, the row of its first digest."""

    def _read(self, name: str) -> Content:
        start, end = self.header.ranges[name]
        data = self.read(start, end)
        if len(data) != end - start:
            refuse(self.path, f"{end - start} bytes of {shown(name)}", str(len(data)))
        return data

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
        data = self._read(name)
        # Torch warns of memory that must not be written to, and a number must be where one of its dtype can be.
        if isinstance(data, bytes) or self.header.ranges[name][0] % entry.dtype.itemsize:
            data = bytearray(data)
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
        with open(path, "rb") as opened:
            content = mapped(opened)
    except OSError as error:
        raise CachePathError(f"{path} cannot be read: {error.strerror}.") from error
    return file_in(path, content)
