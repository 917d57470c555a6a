"""Writes an entry: first the blocks that it is the first to need, then the entry, then a look at whether all is there.

Other processes may delete blocks that no entry refers to, at any time. Why no entry loses a block by that:

1. A writer writes its new blocks, and *touches* the others, before it writes the entry. It touches all of them again if
   more than `TOUCH_SECONDS` have passed since.
2. A collector (`directory.py`) notes the time, lists the entries, and deletes only blocks that none of them refers to
   and that nobody has touched for `GRACE_SECONDS` before that time. So if the entry came too late for the listing, the
   collector sees the touch; and if the touch is too old to count, the entry was there in time for the listing.
3. Some storages cannot be touched, and processes may stop for minutes at any line. So after it has written the
   entry, the writer looks whether its blocks exist, and writes missing ones again, before it reports success.
4. What remains is a collector that stops between its look at a block and the deletion, for as long as a writer
   needs for all of its work. Then an entry lacks a block: its reader notices, reports it, and uses the tokens before.
"""

import time
from collections.abc import Iterator, Sequence

import torch
from safetensors.torch import save
from torch import Tensor

from kvlayers.caches.base import Cache
from kvlayers.errors import CacheFileError, StateMismatchError
from kvlayers.persistence.block_table import BlockTable, Piece
from kvlayers.persistence.format import ModelRecord, layer_prefix
from kvlayers.persistence.safetensors_header import parse_header
from kvlayers.persistence.save import described, with_checksums
from kvlayers.prefix.backends import StorageBackend, StoredFile, UnreachableError
from kvlayers.prefix.blocks import file_of, name_of
from kvlayers.prefix.manifest import EntryStates, Neighbour, NewRows, planned, with_pieces
from kvlayers.prefix.references import BlockReferences, Hold, KnownEntry

ATTEMPTS = 4
"""How often a writer starts again if blocks disappear while it writes."""

TOUCH_SECONDS = 20.0
"""A touch older than this is repeated before the entry is written. Far less than `GRACE_SECONDS_WHEN_FULL`."""

BATCH_BYTES = 32 * 2**20
"""Bytes of new blocks that are looked up together, unless a single one has more."""


class EntryWriter:
    """Writes one entry.

    Args:
        backend: where to.
        references: which blocks are in use.
        cache: the cache, to which nobody writes.
        neighbours: entries that begin with the same tokens, the best first.
    """

    def __init__(
        self,
        backend: StorageBackend,
        references: BlockReferences,
        cache: Cache,
        neighbours: Sequence[Neighbour],
    ) -> None:
        self._backend = backend
        self._references = references
        self._cache = cache
        self._states = EntryStates(cache)
        self._neighbours = neighbours
        self._touched = 0.0
        self._sole: set[str] = set()

    @torch.no_grad()
    def write(self, name: str, weights_id: str, token_ids: Tensor) -> KnownEntry:
        """Write the entry and its blocks.

        Args:
            name: name of its file.
            weights_id: what the file says about the label and the boundaries of the entry.
            token_ids: int64 `[1, tokens]`.

        Raises:
            CachePathError: the files cannot be written.
            StateMismatchError: the cache has more than a file can hold.
        """
        for _ in range(ATTEMPTS):
            with self._references.holding() as hold:
                table = self._with_blocks(hold)
                if table is None:
                    continue
                content = self._content(name, weights_id, token_ids, table)
                self._touch_again(table)
                self._backend.write(name, content)
                if self._is_complete(table):
                    known = KnownEntry(len(content), table)
                    self._references.put(self._backend.path_of(name), known)
                    return known
        raise UnreachableError(
            f"{self._backend.path_of(name)} is incomplete, because its blocks were deleted {ATTEMPTS} "
            "times meanwhile: use one directory_max_bytes for all stores of a directory."
        )

    def _with_blocks(self, hold: Hold) -> BlockTable | None:
        """The table of the entry, after all of its blocks were touched or written; `None` if some were missing."""
        plans = [planned(group, self._neighbours, self._references.unusable) for group in self._states.groups]
        sizes = {name: nbytes for table, _ in self._neighbours for name, nbytes in table.sizes.items()}
        shared = {piece.block: sizes[piece.block] for plan in plans for piece in plan if isinstance(piece, Piece)}
        hold(shared)
        self._touched = time.monotonic()
        if not self._touch_shared(shared):
            return None
        new: dict[tuple[int, NewRows], str] = {}
        for number, rows, name, nbytes in self._write_new(plans, hold):
            new[number, rows] = name
            shared[name] = nbytes
        groups = []
        for number, (group, plan) in enumerate(zip(self._states.groups, plans, strict=True)):
            pieces = [piece if isinstance(piece, Piece) else Piece(new[number, piece], 0, piece.rows) for piece in plan]
            groups.append(with_pieces(group, pieces))
        return BlockTable(shared, tuple(groups))

    def _touch_shared(self, sizes: dict[str, int]) -> bool:
        """Touch blocks of other entries, and return whether all of them are there."""
        if not sizes:
            return True
        files = {name: file_of(name, nbytes) for name, nbytes in sizes.items()}
        found = dict(zip(files, self._backend.find([file.name for file in files.values()]), strict=True))
        # Those that cannot be touched may be there all the same.
        self._backend.missing(list(files.values()))
        there = {name for name, file in found.items() if file is not None and file.nbytes == sizes[name]}
        self._references.add_unusable(set(files) - there)
        name_of_file = {file.name: name for name, file in files.items()}
        present = [file for file in found.values() if file is not None]
        self._sole = set(self._references.used_by_this_process_alone(present, name_of_file))
        self._references.forget_uses(set(files) - self._sole)
        return len(there) == len(files)

    def _write_new(
        self, plans: Sequence[Sequence[Piece | NewRows]], hold: Hold
    ) -> Iterator[tuple[int, NewRows, str, int]]:
        """Write the blocks that are not there. Yields group, rows, name and bytes of each."""
        wanted = [(number, rows) for number, plan in enumerate(plans) for rows in plan if isinstance(rows, NewRows)]
        batch: dict[StoredFile, tuple[str, bytearray]] = {}
        for number, rows in wanted:
            content = self._states.block(number, rows)
            name = name_of(content)
            hold([name])
            batch[file_of(name, len(content))] = name, content
            yield number, rows, name, len(content)
            if sum(file.nbytes for file in batch) > BATCH_BYTES:
                self._write_batch(batch)
                batch = {}
        self._write_batch(batch)

    def _write_batch(self, batch: dict[StoredFile, tuple[str, bytearray]]) -> None:
        if not batch:
            return
        missing = set(self._backend.missing(list(batch)))
        for file, (name, content) in batch.items():
            if file in missing or name in self._references.unusable:
                self._backend.write(file.name, content)
                self._references.discard_unusable(name)
                self._sole.add(name)

    def _content(self, name: str, weights_id: str, token_ids: Tensor, table: BlockTable) -> bytes:
        model = ModelRecord(weights_id=weights_id)
        description, tensors = described(self._cache, self._states.state, model, token_ids)
        for index, names in enumerate(self._states.in_blocks):
            for states in names:
                del tensors[layer_prefix(None, index) + states]
        tensors, metadata = with_checksums(description, tensors, table)
        content = save(tensors, metadata)
        try:
            parse_header(name, len(content), lambda start, end: content[start:end])
        except CacheFileError as error:
            raise StateMismatchError(f"The cache has more than a file can hold: {error}") from error
        return content

    def _touch_again(self, table: BlockTable) -> None:
        if time.monotonic() - self._touched > TOUCH_SECONDS:
            self._backend.missing([file_of(name, nbytes) for name, nbytes in table.sizes.items()])

    def _is_complete(self, table: BlockTable) -> bool:
        """Whether all blocks exist, now that everybody can see that the entry refers to them."""
        found = self._backend.find([file_of(name, nbytes).name for name, nbytes in table.sizes.items()])
        uses: dict[str, int] = {}
        missing = set()
        for (name, nbytes), file in zip(table.sizes.items(), found, strict=True):
            if file is None or file.nbytes != nbytes:
                missing.add(name)
            elif name in self._sole:
                uses[name] = file.used
        self._references.set_uses(uses)
        self._references.add_unusable(missing)
        return not missing
