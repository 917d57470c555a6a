"""An open file of a cache, whose header and description were checked, and whose tensors were not read yet."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvlayers.errors import CacheFileError, CachePathError
from kvlayers.persistence.checksums import DIGEST_BYTES, checksum, digest_of, first_rows, runs
from kvlayers.persistence.format import (
    DIGESTS,
    FORMAT,
    NODE_VERSION,
    OWN_METADATA,
    READ_VERSIONS,
    TOKEN_IDS,
    Description,
    read_description,
    read_metadata,
    rotary_name,
)
from kvlayers.persistence.node_record import NodeRecord, read_node
from kvlayers.persistence.safetensors_header import (
    Header,
    ReadRange,
    TensorEntry,
    parse_header,
    read_header,
    refuse,
    shown,
)

METADATA = ("format", "format_version", "description", "checksum")
NODE = "node"
"""In the metadata of a node of a prefix store: which states it has."""

MAX_RANGE_BYTES = 64 * 2**20
"""The largest tensor that is read into memory from a remote file: the ids of 8 million tokens."""


class UnknownVersionError(CacheFileError):
    """A file has a version of the format that this kvlayers does not know."""


class EarlierEntryError(UnknownVersionError):
    """A file is an entry that an earlier kvlayers has written, whose states are in blocks beside it."""


class Tensors(Protocol):
    """The tensors of a file."""

    def get_tensor(self, name: str) -> Tensor:
        """One tensor, as it is stored in the file."""


class SavedFile:
    """A file whose content was checked, except for the bytes of its states, which are checked when they are read.

    Args:
        path: path of the file.
        file: its tensors, as safetensors has mapped them, or from elsewhere.
        header: what was read from it before.

    Attributes:
        description: what it says about its cache.
        node: which states it has if it is a node of a prefix store; `None` if it has all of them.
        nbytes: bytes of the file; a reader of several files sets those of all of them.
        metadata: texts of whoever saved it.

    Raises:
        CacheFileError: it is damaged.
    """

    def __init__(self, path: str, file: Tensors, header: Header) -> None:
        self.path = path
        self.header = header
        self.description, self.node = _described(path, header)
        self.metadata = read_metadata(path, header.metadata.get(OWN_METADATA, "{}"))
        self._file = file
        self.nbytes = header.file_bytes
        self._in_nodes = {} if self.node is None else dict(self.node.tensors())
        self._rows = first_rows(self._covered())
        rows = self._rows[""]
        entry = header.tensors.get(DIGESTS)
        if entry is None or (entry.dtype, entry.shape) != (torch.uint8, (rows, DIGEST_BYTES)):
            refuse(path, f"digests [{rows}, {DIGEST_BYTES}]", str(entry and list(entry.shape)))
        self._digests = self._mapped(DIGESTS)
        total = checksum(covered_text(header.metadata), self._covered(), self._digests)
        if total != header.metadata["checksum"]:
            refuse(path, f"the checksum {total}", shown(header.metadata["checksum"]), "it is damaged; save it again")

    def _covered(self) -> dict[str, TensorEntry]:
        return {name: entry for name, entry in self.header.tensors.items() if name != DIGESTS}

    def form(self, name: str) -> TensorEntry | None:
        """Dtype and shape of a tensor, in this file or in several; `None` if there is no such tensor."""
        return self.header.tensors.get(name) or self._in_nodes.get(name)

    @property
    def has_token_ids(self) -> bool:
        """Whether the file has the ids of the tokens."""
        return TOKEN_IDS in self.header.tensors

    def tensor(self, name: str, tokens: int | None = None, verify: bool = True) -> Tensor:
        """A tensor, memory-mapped where that is possible: do not write to it.

        Args:
            name: what it is called.
            tokens: of keys or values, how many of the first tokens; `None` for all that there is.
            verify: whether to compare its bytes with their digests.

        Raises:
            CacheFileError: bytes have changed since it was saved.
        """
        states = self._mapped(name)
        needed = states.shape[2] if tokens is None and states.dim() == 4 else (tokens or 0)
        for row, (start, end) in enumerate(runs(tuple(states.shape)), self._rows[name]):
            if verify and (start < needed or start == 0):
                digest = bytes(self._digests[row].tolist())
                if digest != digest_of(states, start, end):
                    refuse(
                        self.path,
                        f"bytes of {name} with the digest {digest.hex()[:16]}...",
                        "others",
                        "it is damaged; save it again",
                    )
        return states if tokens is None else states[:, :, :tokens]

    def _mapped(self, name: str) -> Tensor:
        states = self._file.get_tensor(name)
        entry = self.header.tensors[name]
        if (states.dtype, tuple(states.shape)) != (entry.dtype, entry.shape):
            raise _replaced(self.path)
        return states


@contextlib.contextmanager
def opened(path: str) -> Iterator[SavedFile]:
    """Open and check the file at `path` for the duration of the context.

    Raises:
        CacheFileError: the file is damaged, is not a saved cache, or has a later version of the format.
        CachePathError: the file does not exist, or cannot be read.
    """
    header = read_header(path)
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            # The file was opened a second time, and may have been replaced meanwhile.
            if file.metadata() != header.metadata:
                raise _replaced(path)
        except SafetensorError as error:
            raise CacheFileError(f"{path} is not a safetensors file: {error}.") from error
        except OSError as error:
            raise CachePathError(f"{path} cannot be read: {error}.") from error
        yield SavedFile(path, file, header)


class _RangedTensors:
    """The tensors of a file that is read by ranges."""

    def __init__(self, path: str, header: Header, read: ReadRange) -> None:
        self._path = path
        self._header = header
        self._read = read

    def get_tensor(self, name: str) -> Tensor:
        entry, (start, end) = self._header.tensors[name], self._header.ranges[name]
        if end - start > MAX_RANGE_BYTES:
            refuse(self._path, f"at most {MAX_RANGE_BYTES} bytes of {shown(name)}", str(end - start))
        if start == end:
            return torch.empty(entry.shape, dtype=entry.dtype)
        data = self._read(start, end)
        if len(data) != end - start:
            refuse(self._path, f"{end - start} bytes of {shown(name)}", str(len(data)))
        return torch.frombuffer(bytearray(data), dtype=entry.dtype).view(entry.shape)


@contextlib.contextmanager
def opened_by_ranges(path: str, file_bytes: int, read: ReadRange) -> Iterator[SavedFile]:
    """A remote file, for as long as the context lasts.

    Args:
        path: what errors call it.
        file_bytes: its size.
        read: reads a range of its bytes.

    Raises:
        CacheFileError: as `opened`.
    """
    header = parse_header(path, file_bytes, read)
    yield SavedFile(path, _RangedTensors(path, header, read), header)


def covered_text(metadata: Mapping[str, str]) -> str:
    """The texts of a file that its checksum covers."""
    # No file has both of the others.
    return "\n".join(metadata[name] for name in ("description", NODE, OWN_METADATA) if name in metadata)


def _described(path: str, header: Header) -> tuple[Description, NodeRecord | None]:
    metadata = header.metadata
    if metadata.get("format") != FORMAT:
        refuse(path, f"the format {FORMAT!r}", shown(metadata.get("format")), "it was not made by save_cache()")
    version = metadata.get("format_version")
    if version == "3":
        raise EarlierEntryError(
            f"{path} must be of this version of kvlayers, got an entry of an earlier one, whose states are in blocks "
            "that are not read any more: delete the *.safetensors and *.block files of its directory, or name "
            "another directory. What they held is computed and written again."
        )
    if version not in READ_VERSIONS:
        raise UnknownVersionError(
            f"{path} must have version {' or '.join(READ_VERSIONS)} of the format, got version {shown(version)}: it is "
            "damaged, or of a later kvlayers: update kvlayers, or save it again."
        )
    expected = (*METADATA, NODE) if version == str(NODE_VERSION) else METADATA
    if set(metadata) - ({OWN_METADATA} if version != str(NODE_VERSION) else set()) != set(expected):
        refuse(path, f"metadata of {', '.join(expected)}", shown(sorted(metadata)))
    description = read_description(path, metadata["description"], metadata["format_version"])
    node = read_node(path, metadata[NODE], description, header.tensors) if NODE in metadata else None
    names = [prefix + name for prefix, layer in description.layers() for name in layer.tensors]
    names += [rotary_name(fingerprint) for fingerprint in description.rotaries]
    names += [DIGESTS]
    there = {*header.tensors}
    if node is not None:
        there = (there - node.stored().keys()) | {name for name, _ in node.tensors()}
    if sorted(names) != sorted(name for name in there if name != TOKEN_IDS):
        refuse(path, "the tensors that it describes, and no others", f"{len(header.tensors)} of other names")
    return description, node


def _replaced(path: str) -> CacheFileError:
    return CacheFileError(f"{path} was replaced while it was read: load it again.")
