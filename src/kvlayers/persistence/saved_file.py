"""An open file of a cache, whose header and description were checked, and whose tensors were not read yet."""

from torch import Tensor

from kvlayers.core.token_store import KVPair
from kvlayers.persistence.format import DESCRIPTION, OWN_METADATA, TOKEN_IDS, read_description, rotary_name
from kvlayers.persistence.node_file import is_node
from kvlayers.persistence.safetensors_header import parse_json, refuse, shown, typed
from kvlayers.persistence.tensor_file import DIGESTS, TensorFile

_METADATA = {"format", "format_version", DESCRIPTION}


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

    def __init__(self, file: TensorFile) -> None:
        self.path, self.header, self.checksum, self._file = file.path, file.header, file.checksum, file
        path, metadata, tensors = file.path, file.header.metadata, file.header.tensors
        if is_node(file.header):
            remedy = "open its directory with PrefixStore(directory=...)"
            refuse(path, "the states of its cache", "a node of a prefix store, which has a part of them", remedy)
        if set(metadata) - {OWN_METADATA} != _METADATA:
            refuse(path, f"metadata of {', '.join(sorted(_METADATA))}", shown(sorted(metadata)))
        self.description = read_description(path, metadata[DESCRIPTION])
        own = parse_json(path, metadata.get(OWN_METADATA, "{}"), "the metadata")
        self.metadata: dict[str, str] = typed(path, "metadata of texts", dict[str, str], own)
        self.nbytes = file.header.file_bytes
        names = [prefix + name for prefix, layer in self.description.layers() for name in layer.tensors]
        names += [rotary_name(fingerprint) for fingerprint in self.description.rotaries]
        if sorted([*names, DIGESTS]) != sorted(name for name in tensors if name != TOKEN_IDS):
            refuse(path, "the tensors that it describes, and no others", f"{len(tensors)} of other names")

    @property
    def has_token_ids(self) -> bool:
        """Whether the file has the ids of the tokens."""
        return TOKEN_IDS in self.header.tensors

    def pieces(self, prefix: str) -> list[KVPair]:
        """Keys and values of a layer in several pieces, to be copied one after another; empty if each is one tensor."""
        return []

    def tensor(self, name: str, tokens: int | None = None, verify: bool = True) -> Tensor:
        """As `TensorFile.tensor`."""
        return self._file.tensor(name, tokens, verify)
