"""Nodes: files with the states of a few tokens, each of which names the node with the tokens before it.

The name of a node is a digest of the name of its parent, its tokens, the model and the settings. So equal tokens behind
equal tokens have one name, whoever writes them, and a file never changes. Nothing but nodes needs to be written, read
or deleted: the tokens of a prompt are those on the way up from a node, and without its parent nobody can use a node.
"""

import hashlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvlayers.errors import CacheFileError, KVLayersError
from kvlayers.persistence.format import canonical
from kvlayers.persistence.inspect import CacheFile
from kvlayers.persistence.node_record import DTYPE_NAMES, NodeRecord
from kvlayers.prefix.backends import GoneError, StorageBackend, StoredFile
from kvlayers.prefix.backends.contract import SUFFIX
from kvlayers.prefix.entry import PrefixEntry
from kvlayers.prefix.keys import LABEL_PREFIX, RadixTree, Tokens


@dataclass(eq=False)
class Node:
    """A node of a directory. Files that earlier versions wrote with a whole cache are nodes without parents.

    Attributes:
        name: name of its file.
        nbytes: bytes of the file.
        label: model and namespace.
        ids: its tokens, from `record.start` on, int64 `[tokens]`. There may be more than it has rows for.
        record: its place, and which rows it has.
        lengths: lengths that it serves if its tokens are the last ones of an entry that cannot be cut.
        needs_config: whether its layers cannot be made without the config of the model.
        file: the file in the last listing, `None` if it was written since.
    """

    name: str
    nbytes: int
    label: str
    ids: Tokens
    record: NodeRecord
    lengths: frozenset[int] = frozenset()
    needs_config: bool = False
    file: StoredFile | None = None

    @property
    def start(self) -> int:
        """Position of its first token."""
        return self.record.start

    @property
    def used(self) -> int:
        """Time of its last use in nanoseconds since 1970, as the last listing said; 0 if nobody knows."""
        return 0 if self.file is None else self.file.used

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + len(self.ids)


def name_of(label: str, record: NodeRecord, ids: Tokens, lengths: Iterable[int], versions: dict[str, str]) -> str:
    """The name of the file of a node. Nodes of one name have the same size, and may stand for one another.

    Args:
        label: model and namespace.
        record: its place, and which rows it has.
        ids: its tokens.
        lengths: as `Node.lengths`.
        versions: what has written it.
    """
    forms = [
        [group.layers, [(form.name, DTYPE_NAMES[form.dtype], *form[2:]) for form in group.tensors], group.settings]
        for group in record.groups
    ]
    runs = [group.runs for group in record.own()]
    place = [record.parent, record.start, record.stop, record.cuttable, record.whole]
    digest = hashlib.sha256(canonical([label, place, forms, runs, sorted(lengths), versions]).encode())
    digest.update(ids.tobytes())
    return digest.hexdigest() + SUFFIX


def label_in(seen: CacheFile) -> str | None:
    """The label of a node, `None` if a file does not belong to a prefix store."""
    if seen.weights_id is None or not seen.weights_id.startswith(LABEL_PREFIX):
        return None
    return seen.weights_id.partition(" ")[0]


def node_of(seen: CacheFile, file: StoredFile) -> Node | None:
    """The node in a file, `None` if it is not a file of a prefix store.

    Raises:
        CacheFileError: it is a file of a store, but damaged, or that of another node.
        CachePathError: it no longer exists.
    """
    label = label_in(seen)
    if label is None:
        return None
    record = seen.node or NodeRecord("", 0, seen.length, cuttable=seen.has_prefixes)
    found = seen.token_ids()
    tokens = seen.length if seen.node is None else record.stop - record.start
    if (
        found is None
        or found.dtype != torch.int64
        or found.dim() != 2
        or found.shape[0] != 1
        or found.shape[1] < tokens
    ):
        raise CacheFileError(f"{seen.path} is damaged: it does not have one id for each of its {tokens} tokens.")
    ids = found[0].numpy()
    texts = str(seen.weights_id).partition(" ")[2].split(",")
    lengths = frozenset(int(text) for text in texts if text.isascii() and text.isdigit() and int(text) <= seen.length)
    if seen.node is not None and name_of(label, record, ids, lengths, seen.versions) != file.name:
        raise CacheFileError(f"{seen.path} was replaced: it no longer holds the tokens of its entry.")
    return Node(file.name, file.nbytes, label, ids, record, lengths, seen.needs_config, file)


def read_nodes(
    backend: StorageBackend, files: Sequence[StoredFile]
) -> Iterator[tuple[StoredFile, Node | KVLayersError | None]]:
    """The node in each file, or what is wrong with the file; `None` for other files, and for files that are gone."""
    for file, seen in zip(files, backend.inspect(files), strict=True):
        try:
            found = seen if isinstance(seen, KVLayersError) else node_of(seen, file)
        except KVLayersError as error:
            found = error
        yield file, None if isinstance(found, GoneError) else found


class NodeTree:
    """Nodes by name, and what follows from their parents. Not thread-safe by itself.

    Attributes:
        nodes: the nodes.
    """

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.nodes = {node.name: node for node in nodes}

    @property
    def nbytes(self) -> int:
        """Bytes of all nodes."""
        return sum(node.nbytes for node in self.nodes.values())

    def chain(self, name: str) -> list[Node]:
        """A node behind all nodes with the tokens before, the first one first; empty if one of them is missing."""
        chain: list[Node] = []
        start = None
        while name:
            node = self.nodes.get(name)
            if node is None or (start is not None and not node.start < start <= node.end):
                return []
            chain.append(node)
            name, start = node.record.parent, node.start
        return chain[::-1]

    def orphans(self) -> list[Node]:
        """Nodes that nobody can use, because a node with the tokens before is missing."""
        usable: dict[str, Node] = {}
        orphans = []
        for node in sorted(self.nodes.values(), key=lambda node: node.start):
            parent = usable.get(node.record.parent)
            if not node.record.parent or (parent is not None and parent.start < node.start <= parent.end):
                usable[node.name] = node
            else:
                orphans.append(node)
        return orphans

    def ends(self) -> list[Node]:
        """Nodes at whose ends an entry ends, because no longer entry serves the same prompts."""
        served: dict[str, set[int]] = {}
        continued: set[str] = set()
        lost = {node.name for node in self.orphans()}
        ends = []
        # Children begin behind the beginning of their parents.
        for node in sorted(self.nodes.values(), key=lambda node: -node.start):
            serves = served.get(node.name, set())
            is_served = node.name in continued if node.record.cuttable else node.lengths <= serves
            if node.record.whole and not is_served and node.name not in lost:
                ends.append(node)
            parent = self.nodes.get(node.record.parent)
            if parent is not None and parent.end == node.start:
                served.setdefault(parent.name, set()).update(serves, node.lengths)
                continued.add(parent.name)
        return self._of_different_tokens(ends)

    def _of_different_tokens(self, ends: Iterable[Node]) -> list[Node]:
        """Those of these ends whose tokens are not held again by others, as writers write that know only some files."""
        trees: dict[tuple[str, bool], RadixTree[Node]] = {}
        tokens = [(node, self.ids(self.chain(node.name))) for node in ends]
        for node, ids in tokens:
            trees.setdefault((node.label, node.record.cuttable), RadixTree()).insert(ids, node)
        different = []
        for node, ids in tokens:
            begin_alike = trees[node.label, node.record.cuttable].nearest(ids)
            first, second = next(begin_alike), next(begin_alike, None)
            is_served = node.record.cuttable and second is not None and second.tokens == len(ids)
            if first.value is node and not is_served:
                different.append(node)
        return different

    def children(self) -> Counter[str]:
        """How many children each node has, by its name."""
        return Counter(node.record.parent for node in self.nodes.values())

    def unneeded_without(self, names: Iterable[str], kept: Container[str] = ()) -> list[str]:
        """Those of these nodes that have no children, and the nodes before them that no others need; children first.

        Args:
            names: names of nodes.
            kept: names of nodes that stay.
        """
        children = self.children()
        unneeded: dict[str, None] = {}
        for name in names:
            while name in self.nodes and name not in unneeded and name not in kept and not children[name]:
                unneeded[name] = None
                name = self.nodes[name].record.parent
                children[name] -= 1
        return list(unneeded)

    def ids(self, chain: Sequence[Node]) -> Tokens:
        """All tokens that lead to the end of a chain."""
        stops = [node.start for node in chain[1:]] + [chain[-1].end]
        return np.concatenate([node.ids[: stop - node.start] for node, stop in zip(chain, stops, strict=True)])

    def entry(self, node: Node, path: str) -> PrefixEntry:
        """The entry that ends where a node ends."""
        chain = self.chain(node.name)
        nbytes = sum(each.nbytes for each in chain)
        return PrefixEntry(node.label, self.ids(chain), path=path, file_bytes=nbytes, boundaries=set(node.lengths))
