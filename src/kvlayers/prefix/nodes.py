"""Nodes: files with the states of a few tokens, each of which names the node with the tokens before it.

The name of a node is a digest of the name of its parent, its tokens, the model and the settings. So equal tokens behind
equal tokens have one name, whoever writes them, and a file never changes. Nothing but nodes needs to be written, read
or deleted: the tokens of a prompt are those on the way up from a node, and without its parent nobody can use a node.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvlayers.errors import CacheFileError, KVLayersError
from kvlayers.persistence.node_file import NODE, NodeHead, read_head
from kvlayers.persistence.tensor_file import Content, parse_header
from kvlayers.prefix.backends.contract import ByteRange, GoneError, StorageBackend, StoredFile, UnreachableError
from kvlayers.prefix.entry import PrefixEntry
from kvlayers.prefix.keys import PrefixMap, Tokens

HEAD_BYTES = 2**16
"""Bytes that are read of each file first, which usually have the header and the ids."""

FILES_PER_REQUEST = 64
"""Files whose heads are requested together, which take 4 MiB."""

ATTEMPTS = 3
"""Attempts to read a file that other processes replace meanwhile."""


@dataclass(eq=False)
class Node(NodeHead):
    """A node of a directory.

    Attributes:
        file: the file in the last listing, `None` if it was written since.
    """

    file: StoredFile | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its file."""
        return self.header.file_bytes

    @property
    def used(self) -> int:
        """Time of its last use in nanoseconds since 1970, as the last listing said; 0 if nobody knows."""
        return 0 if self.file is None else self.file.used


def read_nodes(
    backend: StorageBackend, files: Sequence[StoredFile]
) -> Iterator[tuple[StoredFile, Node | KVLayersError | None]]:
    """The node in each file, or what is wrong with the file; `None` for other files, and for files that are gone.

    No states are read. One file does not hide the others.
    """
    for start in range(0, len(files), FILES_PER_REQUEST):
        some = files[start : start + FILES_PER_REQUEST]
        # Servers refuse ranges of nothing, and of what an empty file does not have.
        heads = backend.read_ranges([ByteRange(file.name, 0, min(HEAD_BYTES, max(file.nbytes, 1))) for file in some])
        for file, head in zip(some, heads, strict=True):
            try:
                yield file, _node_in(backend, file, head if head and file.nbytes else b"")
            except KVLayersError as error:
                yield file, None if isinstance(error, GoneError) else error


def _node_in(
    backend: StorageBackend, file: StoredFile, head: Content | KVLayersError, attempts: int = ATTEMPTS
) -> Node | None:
    """The node in a file whose first bytes were read; `None` if it is the file of something else."""
    path = backend.path_of(file.name)

    def read(start: int, end: int) -> Content:
        end, content = min(end, file.nbytes), head
        if not isinstance(content, KVLayersError) and max(start, len(content)) < end:
            content = backend.read_ranges([ByteRange(file.name, start, end)])[0] or b""
            start, end = 0, end - start
        if isinstance(content, KVLayersError):
            raise content
        return content[start:end]

    try:
        header = parse_header(path, file.nbytes, read)
        if NODE not in header.metadata:
            # Somebody has saved a cache there.
            return None
        found = read_head(path, header, read)
        if found.name != file.name:
            raise CacheFileError(f"{path} was replaced: it no longer holds the tokens of its entry.")
        return Node(header, found.record, found.ids, file)
    except (CacheFileError, UnreachableError):
        (now,) = backend.find([file.name])
        if now is None:
            raise GoneError(f"{path} does not exist: it was deleted.") from None
        if now == file or attempts == 1:
            raise
    # Another process has replaced it meanwhile.
    return _node_in(backend, now, b"", attempts - 1)


def _continues(node: Node, parent: Node) -> bool:
    """Whether an entry that ends behind a node begins with all tokens of its parent."""
    # A packed block of the parent may reach into the tokens of the node.
    both = parent.end - node.record.start
    return both <= len(node.ids) and bool((parent.ids[len(parent.ids) - both :] == node.ids[:both]).all())


class NodeTree:
    """Nodes by name, and what follows from their parents. Not thread-safe by itself.

    Attributes:
        nodes: the nodes.
    """

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.nodes = {node.name: node for node in nodes}

    def chain(self, name: str) -> list[Node]:
        """A node behind all nodes with the tokens before, the first one first; empty if one of them is missing."""
        chain: list[Node] = []
        start = None
        while name:
            node = self.nodes.get(name)
            if node is None or (start is not None and not node.record.start < start <= node.end):
                return []
            chain.append(node)
            name, start = node.record.parent, node.record.start
        return chain[::-1]

    def orphans(self) -> list[Node]:
        """Nodes that nobody can use, because a node with the tokens before is missing."""
        return [node for name, node in self.nodes.items() if not self.chain(name)]

    def ends(self) -> list[Node]:
        """Nodes at whose ends an entry ends, because no longer entry serves the same prompts."""
        served: dict[str, set[int]] = {}
        ends = []
        # Children begin behind the beginning of their parents.
        for node in sorted(self.nodes.values(), key=lambda node: -node.record.start):
            serves = served.get(node.name, set())
            is_served = node.name in served if node.record.entry.cuttable else set(node.record.lengths) <= serves
            if node.record.whole and not is_served and (chain := self.chain(node.name)):
                ends.append((node, self.ids(chain)))
            parent = self.nodes.get(node.record.parent)
            if parent is not None and _continues(node, parent):
                served.setdefault(parent.name, set()).update(serves, node.record.lengths)
        # Writers that know only some of the files may have written the same tokens in other nodes.
        different = PrefixMap[Node]()
        for node, ids in sorted(ends, key=lambda end: len(end[1])):
            kind = f"{node.record.entry.label} {node.record.entry.cuttable}"
            for shorter in different.prefixes_of(kind, ids):
                if node.record.entry.cuttable or set(shorter.record.lengths) <= set(node.record.lengths):
                    different.remove(kind, ids[: shorter.record.stop])
            different.insert(kind, ids, node)
        return list(different)

    def unneeded(self, kept: Iterable[str]) -> list[str]:
        """Names of the nodes that neither are nor lead to those of these names; children first."""
        needed = set[str]()
        for name in kept:
            while name in self.nodes and name not in needed:
                needed.add(name)
                name = self.nodes[name].record.parent
        return sorted(self.nodes.keys() - needed, key=lambda name: -self.nodes[name].record.start)

    def ids(self, chain: Sequence[Node]) -> Tokens:
        """All tokens of which a chain has all rows. Packed ones may go on behind them, where other layers have none."""
        stops = [node.record.start for node in chain[1:]] + [chain[-1].record.stop]
        return np.concatenate([node.ids[: stop - node.record.start] for node, stop in zip(chain, stops, strict=True)])

    def entry(self, node: Node, path: str) -> PrefixEntry:
        """The entry that ends where a node ends."""
        chain = self.chain(node.name)
        return PrefixEntry(
            node.record.entry.label,
            self.ids(chain),
            path=path,
            file_bytes=sum(each.nbytes for each in chain),
            boundaries=set(node.record.lengths),
        )
