"""Blocks: files with the states of at most 256 tokens, and the states of an entry that consists of them."""

import hashlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from kvlayers.errors import CacheFileError, KVLayersError
from kvlayers.layers.operations import LAYER_CLASSES
from kvlayers.persistence.block_table import DTYPE_NAMES, BlockGroup, BlockTable
from kvlayers.persistence.format import LayerRecord, canonical
from kvlayers.persistence.rebuild import loads_prefixes
from kvlayers.persistence.safetensors_header import LENGTH_BYTES, TensorEntry, parse_header, refuse
from kvlayers.persistence.saved_file import SavedFile
from kvlayers.prefix.backends.contract import BLOCK_SUFFIX, Content, StorageBackend, StoredFile
from kvlayers.quantizers.smoothing import NAMES as SMOOTHING_NAMES
from kvlayers.stores.contract import KVPair
from kvlayers.stores.packed_blocks import PACKED_NAMES

BLOCK_TOKENS = 256
"""Blocks are cut where the position of a token is a multiple of this, so that equal tokens fill equal blocks."""

DENSE_NAMES = ("keys", "values")
CODE_NAMES = tuple(name for name in PACKED_NAMES if name != "block_ends")
"""Tensors with a row for each token, and tensors with a row for each packed block of tokens."""

FORMAT = {"format": "kvlayers.block", "format_version": "1"}

ALIGNMENT = 8
"""Bytes. The data of a block begins at a multiple of this, and so does each of its tensors."""

CHECKING_THREADS = 2
"""Threads that compare the content of blocks with their names, while others arrive."""

BLOCKS_AHEAD = 8
"""Blocks that are being checked, or wait for it, while the caller uses those before."""

BlockTensors = Mapping[str, Tensor]
"""The tensors of a block by name, `[layers, batch, kv_heads, rows, width]`."""


def name_of(content: Content) -> str:
    """The name of the block with this content."""
    return hashlib.sha256(content).hexdigest()


def file_of(name: str, nbytes: int) -> StoredFile:
    """The file of a block."""
    return StoredFile(name + BLOCK_SUFFIX, nbytes)


def opened_block(path: str, name: str, content: Content) -> BlockTensors:
    """The tensors of a block, as views of its content.

    Raises:
        CacheFileError: the content is not that of a block with this name.
    """
    seen = name_of(content)
    if seen != name:
        refuse(path, f"content with the SHA-256 {name[:16]}...", f"{seen[:16]}...", "it is damaged, and is not used")
    return _tensors(content, path)


def _tensors(content: Content, path: str) -> dict[str, Tensor]:
    whole = memoryview(content)
    if whole.readonly:
        # Bytes of a remote file: torch warns of memory that must not be written to.
        whole = memoryview(bytearray(whole))
    header = parse_header(path, len(whole), lambda start, end: bytes(whole[start:end]))
    tensors = {}
    for name, entry in header.tensors.items():
        begin, end = header.ranges[name]
        if begin == end or begin % entry.dtype.itemsize:
            refuse(path, "tensors with states", f"{name} at {begin} to {end}")
        count = (end - begin) // entry.dtype.itemsize
        tensors[name] = torch.frombuffer(whole, dtype=entry.dtype, count=count, offset=begin).view(entry.shape)
    return tensors


def check_form(path: str, group: BlockGroup, tensors: BlockTensors, rows: int) -> None:
    """Raise `CacheFileError` unless a block has at least `rows` rows of this group."""
    held = {states.shape[3] if states.dim() == 5 else 0 for states in tensors.values()}
    found = {name: TensorEntry(states.dtype, tuple(states.shape)) for name, states in tensors.items()}
    if len(held) != 1 or found != group.shapes(most := held.pop()) or most < rows:
        refuse(path, f"at least {rows} rows of {[*group.shapes(rows).values()]}", str([*found.values()]))


def read_blocks(
    backend: StorageBackend, sizes: Mapping[str, int], wait_seconds: float | None
) -> Iterator[tuple[str, BlockTensors | KVLayersError]]:
    """Read and check blocks. Yields each with its name, in order.

    Args:
        backend: where they are.
        sizes: bytes of each block, by name.
        wait_seconds: see `StorageBackend.read`.
    """
    files = [file_of(name, nbytes) for name, nbytes in sizes.items()]
    coming: deque[tuple[str, Future[BlockTensors] | KVLayersError]] = deque()
    with ThreadPoolExecutor(CHECKING_THREADS, thread_name_prefix="kvlayers-check") as threads:
        contents = zip(sizes, files, backend.read(files, wait_seconds), strict=True)
        while True:
            for name, file, content in itertools.islice(contents, BLOCKS_AHEAD - len(coming)):
                if isinstance(content, KVLayersError):
                    coming.append((name, content))
                else:
                    path = backend.path_of(file.name)
                    coming.append((name, threads.submit(opened_block, path, name, content)))
            if not coming:
                return
            name, found = coming.popleft()
            try:
                yield name, found if isinstance(found, KVLayersError) else found.result()
            except CacheFileError as error:
                yield name, error


def filled_block(group: BlockGroup, rows: Sequence[Mapping[str, Tensor]], position: int) -> bytearray:
    """The content of a block.

    Args:
        group: the layers.
        rows: the tensors of each layer, `[batch, kv_heads, rows, width]`.
        position: position of the first token. With it in the content, equal states of other tokens are another block.
    """
    entries = group.shapes(rows[0][group.tensors[0].name].shape[2])
    header: dict[str, object] = {"__metadata__": {**FORMAT, "position": str(position)}}
    end = 0
    # Wide numbers first, so that all are aligned.
    for name in sorted(entries, key=lambda name: (-entries[name].dtype.itemsize, name)):
        entry = entries[name]
        begin, end = end, end + math.prod(entry.shape) * entry.dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
    text = canonical(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    content = bytearray(LENGTH_BYTES + len(text) + end)
    content[: LENGTH_BYTES + len(text)] = len(text).to_bytes(LENGTH_BYTES, "little") + text
    for name, target in _tensors(content, "").items():
        for number, states in enumerate(rows):
            target[number].copy_(states[name])
    return content


_OF_PACKED_LAYERS = {"keys", "values", "sink_keys", "sink_values", *PACKED_NAMES, *SMOOTHING_NAMES}


def can_be_cut(saved: SavedFile) -> bool:
    """Whether the first tokens of all layers can be loaded without the others."""
    for prefix, layer in saved.description.layers():
        in_file = [saved.header.tensors.get(prefix + name) for name in DENSE_NAMES]
        if any(entry is not None and math.prod(entry.shape) for entry in in_file):
            return False
        if not (loads_prefixes(layer) or _is_packed(layer)):
            return False
    return True


def _is_packed(record: LayerRecord) -> bool:
    layer_class = LAYER_CLASSES.get(record.kind)
    keeps_all = layer_class is not None and layer_class.keeps_every_token is True
    return keeps_all and record.facts.get("store") == "QuantizedStore" and set(record.tensors) <= _OF_PACKED_LAYERS


class BlockStates:
    """The states of an entry in blocks.

    Args:
        table: its blocks.
        length: how many of the first tokens are needed.
        cuttable: whether fewer tokens than the entry has can be used.

    Attributes:
        length: how many tokens can be used, at most as many as are needed.
        failures: what was wrong, by the name of the block.
    """

    def __init__(self, table: BlockTable, length: int, cuttable: bool) -> None:
        self.length = length
        self.failures: dict[str, KVLayersError] = {}
        self._cuttable = cuttable
        self._groups = table.groups
        self._positions = [group.positions() for group in table.groups]
        self._blocks: dict[str, BlockTensors] = {}
        self._of_layer = {
            (layer, form.name): number
            for number, group in enumerate(table.groups)
            for layer in group.layers
            for form in group.tensors
        }
        self._sizes = table.sizes
        self._waiting = set(self.needed_blocks)

    def _needed(self, number: int) -> int:
        """How many of the first rows of a group are needed."""
        group = self._groups[number]
        if not self._cuttable:
            return group.rows
        begins, _ = self._positions[number]
        # A layer whose first tokens are packed needs a block of codes. It is cropped after it was loaded.
        return max(int(np.searchsorted(begins, self.length)), 1 if _has_codes(group) else 0)

    @property
    def needed_blocks(self) -> dict[str, int]:
        """Bytes of the needed blocks, by name, in the order of their tokens."""
        wanted: list[tuple[int, str]] = []
        for number, group in enumerate(self._groups):
            begins, needed, first = self._positions[number][0], self._needed(number), 0
            for piece in group.pieces:
                if first < needed:
                    wanted.append((int(begins[first]), piece.block))
                first += piece.rows
        return {block: self._sizes[block] for _, block in sorted(wanted, key=lambda each: each[0])}

    def take(self, path: str, name: str, found: BlockTensors | KVLayersError) -> bool:
        """Take in a block, or what was wrong with it.

        Returns:
            Whether more blocks are needed.
        """
        if name not in self._waiting:
            return bool(self._waiting)
        self._waiting.discard(name)
        try:
            if isinstance(found, KVLayersError):
                raise found
            for group in self._groups:
                ends = [piece.first + piece.rows for piece in group.pieces if piece.block == name]
                if ends:
                    check_form(path, group, found, max(ends))
        except KVLayersError as error:
            self.failures[name] = error
            self._cut_before(name)
            self._waiting &= set(self.needed_blocks) if self.length else set()
        else:
            self._blocks[name] = found
        return bool(self._waiting)

    def _cut_before(self, name: str) -> None:
        """Use only the tokens before the first row in this block."""
        for number, group in enumerate(self._groups):
            begins, needed, first = self._positions[number][0], self._needed(number), 0
            for piece in group.pieces:
                if piece.block == name and first < needed:
                    self.length = 0 if not self._cuttable else min(self.length, int(begins[first]))
                    if _has_codes(group) and not first:
                        self.length = 0
                    break
                first += piece.rows

    def _rows(self, number: int, layer: int, name: str) -> Iterator[Tensor]:
        """The needed rows of one tensor, `[batch, kv_heads, rows, width]`, piece by piece."""
        group, missing = self._groups[number], self._needed(number)
        place = group.layers.index(layer)
        for piece in group.pieces:
            rows = min(piece.rows, missing)
            if rows:
                yield self._blocks[piece.block][name][place, :, :, piece.first : piece.first + rows]
            missing -= rows

    def pairs(self, index: int) -> list[KVPair]:
        """Keys and values of the needed tokens of a layer, piece by piece, as views of the blocks."""
        number = self._of_layer.get((index, "keys"))
        if number is None:
            return []
        return list(zip(self._rows(number, index, "keys"), self._rows(number, index, "values"), strict=True))

    def state(
        self, index: int, record: LayerRecord, small: Callable[[str], Tensor]
    ) -> tuple[dict[str, Tensor], Mapping[str, object]]:
        """The tensors and the facts of a layer with the needed tokens.

        Args:
            index: the layer.
            record: what the file says about it.
            small: the tensors that are in the file, by name.
        """
        tensors: dict[str, Tensor] = {}
        dropped = 0
        codes = 0
        numbers = {number for (layer, _), number in self._of_layer.items() if layer == index}
        for number in numbers:
            group, needed = self._groups[number], self._needed(number)
            begins, ends = self._positions[number]
            dropped += int((ends - begins)[needed:].sum())
            codes = needed if _has_codes(group) else codes
            for form in group.tensors:
                rows = list(self._rows(number, index, form.name))
                empty = (form.batch, form.kv_heads, 0, form.width)
                tensors[form.name] = torch.cat(rows, 2) if rows else torch.empty(empty, dtype=form.dtype)
        for name in record.tensors:
            if name not in tensors:
                tensors[name] = small(name)
        if codes:
            tensors["block_ends"] = tensors["block_ends"][: 1 + codes]
        facts = dict(record.facts)
        if dropped and isinstance(facts["length"], int):
            facts["length"] -= dropped
        return tensors, facts


def _has_codes(group: BlockGroup) -> bool:
    return any(form.name in CODE_NAMES for form in group.tensors)
