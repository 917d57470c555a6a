"""Blocks: files with the states of at most 256 tokens, named by their content."""

import hashlib
import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from kvlayers.errors import CacheFileError, KVLayersError
from kvlayers.persistence.block_table import DTYPE_NAMES, BlockGroup
from kvlayers.persistence.format import canonical
from kvlayers.persistence.safetensors_header import LENGTH_BYTES, TensorEntry, parse_header, refuse
from kvlayers.prefix.backends.contract import BLOCK_SUFFIX, Content, StorageBackend, StoredFile

BLOCK_TOKENS = 256
"""Blocks are cut where the position of a token is a multiple of this, so that equal tokens fill equal blocks."""

FORMAT = {"format": "kvlayers.block", "format_version": "1"}

ALIGNMENT = 8
"""Bytes. The data of a block begins at a multiple of this, and so does each of its tensors."""

CHECKING_THREADS = 2
"""Threads that compare the content of blocks with their names, while others arrive."""

BLOCKS_AHEAD = 8
"""Blocks that are being checked, or wait for it, while the caller uses those before."""

BlockTensors = Mapping[str, Tensor]
"""The tensors of a block by name, `[layers, batch, kv_heads, rows, width]`."""


def empty_block(entries: Mapping[str, TensorEntry], position: int) -> tuple[bytearray, dict[str, Tensor]]:
    """The content of a block with these tensors, and the tensors themselves, to be filled.

    Args:
        entries: their forms.
        position: position of the first token. With it in the content, equal states of other tokens are another block.
    """
    # Wide numbers first, so that all are aligned.
    names = sorted(entries, key=lambda name: (-entries[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {**FORMAT, "position": str(position)}}
    end = 0
    for name in names:
        entry = entries[name]
        begin, end = end, end + math.prod(entry.shape) * entry.dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
    text = canonical(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    content = bytearray(LENGTH_BYTES + len(text) + end)
    content[:LENGTH_BYTES] = len(text).to_bytes(LENGTH_BYTES, "little")
    content[LENGTH_BYTES : LENGTH_BYTES + len(text)] = text
    return content, _tensors(content, "", entries)


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
    return _tensors(content, path, None)


def _tensors(content: Content, path: str, expected: Mapping[str, TensorEntry] | None) -> dict[str, Tensor]:
    whole = memoryview(content)
    if whole.readonly:
        # Bytes of a remote file: torch warns of memory that must not be written to.
        whole = memoryview(bytearray(whole))
    header = parse_header(path, len(whole), lambda start, end: bytes(whole[start:end]))
    if expected is not None and expected.keys() != header.tensors.keys():
        refuse(path, "the tensors of a block", str(list(header.tensors)))
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
        position: position of the first token.
    """
    count = rows[0][group.tensors[0].name].shape[2]
    content, tensors = empty_block(group.shapes(count), position)
    for number, states in enumerate(rows):
        for name, target in tensors.items():
            target[number].copy_(states[name])
    return content
