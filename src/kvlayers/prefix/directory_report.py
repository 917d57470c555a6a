"""What the files of a prefix store hold, read without a store, for people."""

from collections.abc import Callable
from dataclasses import dataclass

from kvlayers.errors import KVLayersError
from kvlayers.prefix.backends import GoneError, StorageBackend, StoredFile
from kvlayers.prefix.backends.contract import BLOCK_SUFFIX, SUFFIX
from kvlayers.prefix.blocks import file_of
from kvlayers.prefix.directory import entry_of
from kvlayers.prefix.tree import PrefixTree, TreeEntry, tree_of


@dataclass(frozen=True)
class DirectoryReport:
    """What the files of a store hold.

    Attributes:
        directory: its path or URL, without credentials.
        tree: the tokens of all entries, each once. Who has used them how often is not in the files.
        entries: number of entries.
        tokens: number of tokens of all entries, each counted once.
        nbytes: bytes of the entries and of their blocks, each counted once.
        unshared_nbytes: what they would take if no entry shared blocks with another one.
        unreferenced: blocks to which no entry refers.
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


def report_on(backend: StorageBackend, progress: Callable[[int, int], None]) -> DirectoryReport:
    """Read all entries of a directory. Nothing is written, and the content of blocks is not read.

    Args:
        backend: where they are.
        progress: is called with the number of files that were read, and of all files to read.

    Raises:
        UnreachableError: the directory does not exist, or cannot be reached.
    """
    files = backend.files()
    blocks = {file.name: file for file in files if file.name.endswith(BLOCK_SUFFIX)}
    listed = [file for file in files if file.name.endswith(SUFFIX)]
    entries: list[TreeEntry] = []
    problems: list[str] = []
    wanted: dict[str, int] = {}
    progress(0, len(listed))
    for number, (file, seen) in enumerate(zip(listed, backend.inspect(listed), strict=True), 1):
        progress(number, len(listed))
        if isinstance(seen, GoneError):
            continue
        try:
            if isinstance(seen, KVLayersError):
                raise seen
            entry = entry_of(seen)
        except KVLayersError as error:
            problems.append(str(error))
            continue
        if entry is not None:
            table = {} if seen.blocks is None else seen.blocks.sizes
            named = {file_of(name, nbytes).name: nbytes for name, nbytes in table.items()}
            wanted |= named
            used = file.used / 10**9 if file.used else None
            entries.append(TreeEntry(entry.label, entry.ids, {}, {file.name: file.nbytes, **named}, used=used))
    # Looked up again, since a writer may have written an entry and its blocks after the blocks were listed.
    absent = sorted(wanted.keys() - blocks.keys())
    found = [file for file in backend.find(absent) if file is not None] if absent else []
    blocks |= {file.name: file for file in found}
    problems += [_problem(backend, name, nbytes, blocks.get(name)) for name, nbytes in sorted(wanted.items())]
    tree = tree_of(entries)
    sizes = {name: nbytes for entry in entries for name, nbytes in entry.files.items()}
    return DirectoryReport(
        backend.path_of("").rstrip("/"),
        tree,
        len(entries),
        sum(node.tokens for node in tree.nodes),
        sum(sizes.values()),
        sum(nbytes for entry in entries for nbytes in entry.files.values()),
        tuple(file for name, file in sorted(blocks.items()) if name not in wanted),
        tuple(problem for problem in problems if problem),
    )


def _problem(backend: StorageBackend, name: str, nbytes: int, file: StoredFile | None) -> str:
    """What is wrong with a block that entries need; empty if nothing is."""
    if file is None:
        return f"{backend.path_of(name)} is missing: entries refer to it."
    if file.nbytes != nbytes:
        return f"{backend.path_of(name)} is damaged: it must have {nbytes} bytes, got {file.nbytes}."
    return ""
