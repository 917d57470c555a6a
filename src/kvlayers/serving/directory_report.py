"""What the files of a directory hold, without a store."""

from collections.abc import Callable
from dataclasses import dataclass

from kvlayers.errors import KVLayersError
from kvlayers.prefix.backends import StoredFile, existing_backend
from kvlayers.prefix.entry import PrefixEntry
from kvlayers.prefix.nodes import Node, NodeTree, read_nodes
from kvlayers.prefix.report import PrefixTree, tree_of


@dataclass(frozen=True)
class DirectoryReport:
    """What the files of a store hold.

    Attributes:
        directory: its path or URL, without credentials.
        tree: the tokens of all entries, each once. Who has used them how often is not in the files.
        entries: number of entries.
        tokens: number of tokens of all entries, each counted once.
        nbytes: bytes of their files, each counted once.
        unshared_nbytes: what they would take if no entry shared files with another one.
        unreferenced: files that nobody can use, because a file with the tokens before is missing.
        problems: for each file that is damaged, missing or cannot be read, what is wrong with it.
    """

    directory: str
    tree: PrefixTree
    entries: int
    tokens: int
    nbytes: int
    unshared_nbytes: int
    unreferenced: tuple[StoredFile, ...]
    problems: tuple[str, ...]


def report_on(directory: str, progress: Callable[[int, int], None]) -> DirectoryReport:
    """Read all entries of a directory. Nothing is written, and no states are read.

    Args:
        directory: a path or a URL, as for `PrefixStore`.
        progress: is called with the number of files that were read, and of all files to read.

    Raises:
        UnreachableError: the directory does not exist, or cannot be reached.
        OptionError: it is a URL of an unknown scheme, or of one whose package is not installed.
    """
    backend = existing_backend(directory, None)
    files = backend.files()
    nodes: list[Node] = []
    problems: list[str] = []
    progress(0, len(files))
    for number, (_, found) in enumerate(read_nodes(backend, files), 1):
        progress(number, len(files))
        if isinstance(found, KVLayersError):
            problems.append(str(found))
        elif found is not None:
            nodes.append(found)
    held = NodeTree(nodes)
    orphans = held.orphans()
    problems += sorted(
        f"{backend.path_of(parent)} is missing: the tokens behind it are in other files."
        for parent in {node.record.parent for node in orphans} - held.nodes.keys()
    )
    entries = dict[PrefixEntry, dict[str, int]]()
    for node in held.ends():
        entry = held.entry(node, backend.path_of(node.name))
        entry.used = node.used / 10**9 if node.used else None
        entries[entry] = {each.name: each.nbytes for each in held.chain(node.name)}
    tree = tree_of(entries)
    sizes = {name: nbytes for files in entries.values() for name, nbytes in files.items()}
    return DirectoryReport(
        backend.path_of("").rstrip("/"),
        tree,
        len(entries),
        sum(node.tokens for node in tree.nodes),
        sum(sizes.values()),
        sum(nbytes for files in entries.values() for nbytes in files.values()),
        tuple(StoredFile(node.name, node.nbytes) for node in sorted(orphans, key=lambda node: node.name)),
        tuple(problems),
    )
