"""An open file of a cache, whose header and description were checked, and whose tensors were not read yet."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvlayers.core.token_store import KVPair
from kvlayers.errors import CacheFileError
from kvlayers.persistence.checksums import DIGEST_BYTES, checksum, digest_of, first_rows, runs
from kvlayers.persistence.format import (
    DIGESTS,
    FORMAT,
    FORMAT_VERSION,
    NODE_VERSION,
    OWN_METADATA,
    TOKEN_IDS,
    Description,
    read_description,
    read_metadata,
    rotary_name,
)
from kvlayers.persistence.safetensors_header import (
    FileTensors,
    Header,
    TensorEntry,
    refuse,
    shown,
)

METADATA = ("format", "format_version", "description", "checksum")


class UnknownVersionError(CacheFileError):
    """A file has a version of the format that this kvlayers does not know."""


class SavedFile:
    """A file whose content was checked, except for the bytes of its states, which are checked when they are read.

    Args:
        file: its tensors.

    Attributes:
        path: path of the file.
        header: its header.
        description: what it says about its cache.
        nbytes: bytes of the file; a reader of several files sets those of all of them.
        metadata: texts of whoever saved it.
        checksum: SHA-256 of the whole file.

    Raises:
        CacheFileError: it is damaged.
    """

    def __init__(self, file: FileTensors) -> None:
        self.path, self.header, self._file = file.path, file.header, file
        path, header = file.path, file.header
        self.description = _described(path, header)
        self.metadata = read_metadata(path, header.metadata.get(OWN_METADATA, "{}"))
        self.nbytes = header.file_bytes
        self._rows = first_rows(self._covered())
        rows = self._rows[""]
        entry = header.tensors.get(DIGESTS)
        if entry is None or (entry.dtype, entry.shape) != (torch.uint8, (rows, DIGEST_BYTES)):
            refuse(path, f"digests [{rows}, {DIGEST_BYTES}]", str(entry and list(entry.shape)))
        self._digests = file.get_tensor(DIGESTS)
        self.checksum = checksum(covered_text(header.metadata), self._covered(), self._digests)
        if self.checksum != header.metadata["checksum"]:
            refuse(
                path,
                f"the checksum {self.checksum}",
                shown(header.metadata["checksum"]),
                "it is damaged; save it again",
            )

    def _covered(self) -> dict[str, TensorEntry]:
        return {name: entry for name, entry in self.header.tensors.items() if name != DIGESTS}

    @property
    def has_token_ids(self) -> bool:
        """Whether the file has the ids of the tokens."""
        return TOKEN_IDS in self.header.tensors

    def pieces(self, prefix: str) -> list[KVPair]:
        """Keys and values of a layer in several pieces, to be copied one after another; empty if each is one tensor."""
        return []

    def tensor(self, name: str, tokens: int | None = None, verify: bool = True) -> Tensor:
        """A tensor, memory-mapped where that is possible: do not write to it.

        Args:
            name: what it is called.
            tokens: of keys or values, how many of the first tokens; `None` for all that there is.
            verify: whether to compare its bytes with their digests.

        Raises:
            CacheFileError: bytes have changed since it was saved.
        """
        states = self._file.get_tensor(name)
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


def covered_text(metadata: Mapping[str, str]) -> str:
    """The texts of a file that its checksum covers."""
    return "\n".join(metadata[name] for name in ("description", OWN_METADATA) if name in metadata)


def _described(path: str, header: Header) -> Description:
    metadata = header.metadata
    if metadata.get("format") != FORMAT:
        refuse(path, f"the format {FORMAT!r}", shown(metadata.get("format")), "it was not made by save_cache()")
    version = metadata.get("format_version")
    if version == str(NODE_VERSION):
        refuse(
            path,
            "the states of its cache",
            "a node of a prefix store, which has a part of them",
            "open its directory with PrefixStore(directory=...)",
        )
    if version != str(FORMAT_VERSION):
        raise UnknownVersionError(
            f"{path} must have version {FORMAT_VERSION} of the format, got version {shown(version)}: it is damaged, or "
            "of another kvlayers: save it again with this one."
        )
    if set(metadata) - {OWN_METADATA} != set(METADATA):
        refuse(path, f"metadata of {', '.join(METADATA)}", shown(sorted(metadata)))
    description = read_description(path, metadata["description"])
    names = [prefix + name for prefix, layer in description.layers() for name in layer.tensors]
    names += [rotary_name(fingerprint) for fingerprint in description.rotaries]
    names += [DIGESTS]
    if sorted(names) != sorted(name for name in header.tensors if name != TOKEN_IDS):
        refuse(path, "the tensors that it describes, and no others", f"{len(header.tensors)} of other names")
    return description
