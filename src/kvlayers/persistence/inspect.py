"""Read what a file says about its cache, without loading it."""

import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvlayers.core.cache_layer import LAYER_CLASSES
from kvlayers.errors import CacheFileError
from kvlayers.persistence.format import refuse
from kvlayers.persistence.load import SavedFile, loads_prefixes
from kvlayers.persistence.node_file import NODE, NodeRecord, read_node
from kvlayers.persistence.tensor_file import TOKEN_IDS, TensorFile, checked_path, opened_file


@dataclass(frozen=True)
class CacheFile:
    """What a file says about its cache.

    Attributes:
        path: path of the file.
        kind: name of the cache's class.
        layers: name of each layer's class; for a pair, the layers of self-attention and then of cross-attention.
        length: tokens that the cache has seen.
        batch_size: sequences side by side, -1 before the first states.
        dtype: dtype of the states; `None` for no states, or for several dtypes.
        nbytes: bytes of the file.
        fingerprint: the same for files whose states one model may go on from: made of the model's config, its
            `weights_id`, the kinds of the layers and the dtypes of the states.
        model: the fields of the model's config that states depend on, `None` if no config was given.
        model_name: the name that the model was loaded by; `None` if it is not known, or a directory.
        model_commit: revision of that.
        weights_id: the id of the model's weights, `None` if none was given.
        versions: of kvlayers, torch and transformers that made it.
        has_token_ids: whether the ids of the tokens are in it.
        metadata: the texts that were passed to `save_cache`.
        bits: for each layer, bits of a key and of a value if its states are quantized, else `None`.
        backends: for each layer, the backend that quantized its states, `None` if they are in full precision.
        checksum: SHA-256 of the whole file. Keep it elsewhere to detect deliberate changes of the file.
        has_prefixes: whether the first tokens can be loaded without the others.
        node: of a node of a prefix store, which states it has; `None` if all states are in the file.
    """

    path: str
    kind: str
    layers: tuple[str, ...]
    length: int
    batch_size: int
    dtype: torch.dtype | None
    nbytes: int
    fingerprint: str
    model: dict[str, Any] | None
    model_name: str | None
    model_commit: str | None
    weights_id: str | None
    versions: dict[str, str]
    has_token_ids: bool
    metadata: dict[str, str]
    bits: tuple[tuple[int, int] | None, ...]
    backends: tuple[str | None, ...]
    checksum: str
    has_prefixes: bool
    node: NodeRecord | None = field(default=None, repr=False, compare=False)

    @property
    def needs_config(self) -> bool:
        """Whether loading needs the config of the model, or a cache to load into."""
        return not all(kind in LAYER_CLASSES for kind in self.layers)

    def token_ids(self) -> Tensor | None:
        """The ids that were saved, int64 `[batch, tokens]`; `None` if there are none in the file.

        The first `length` of them belong to the tokens that the cache has seen. If no ids were passed to
        `save_cache`, the file has what the cache knew, maybe of its first tokens alone.

        Raises:
            CacheFileError: the file is another one by now, or damaged.
            CachePathError: the file is gone.
        """
        if not self.has_token_ids:
            return None
        file = opened_file(self.path)
        if file.checksum != self.checksum:
            raise CacheFileError(
                f"{self.path} is another one by now than the file that was inspected: inspect it again."
            )
        with torch.inference_mode(False):
            return file.tensor(TOKEN_IDS).clone()


def inspect_cache(path: str | os.PathLike[str]) -> CacheFile:
    """Read what a file says about its cache, without reading the states.

    Args:
        path: the file.

    Raises:
        CacheFileError: what it says is damaged, or it is no file of a cache.
        CachePathError: there is no such file, it cannot be read, or is no regular file.
    """
    file = opened_file(checked_path(path))
    return _of_node(file) if NODE in file.header.metadata else _summary(SavedFile(file))


def _of_node(file: TensorFile) -> CacheFile:
    """What a node of a prefix store says, and the node before it that has the saved cache without rows."""
    path, node = file.path, read_node(file)
    holder = node
    while not holder.record.has_cache:
        before = read_node(opened_file(os.path.join(os.path.dirname(path), holder.record.parent)))
        if before.record.start >= holder.record.start:
            refuse(path, "a parent with the tokens before", "one with others")
        holder = before
    record = node.record
    return replace(
        _summary(SavedFile(holder.cache())),
        path=path,
        length=node.head.end,
        nbytes=node.head.header.file_bytes,
        weights_id=record.entry.label,
        versions=record.entry.versions,
        has_token_ids=True,
        checksum=file.checksum,
        node=record,
    )


def _summary(saved: SavedFile) -> CacheFile:
    """What an open file says about its cache."""
    description, header = saved.description, saved.header
    cache, model = description.cache, description.model
    layers = [layer for _, layer in description.layers()]
    # A file may say anything: bits that are no whole numbers are ignored, and so is a backend without a name.
    bits = [(layer.facts.get("key_nbits"), layer.facts.get("value_nbits")) for layer in layers]
    backends = [layer.facts.get("backend") for layer in layers]
    return CacheFile(
        path=saved.path,
        kind=cache.kind,
        layers=tuple(layer.kind for layer in layers),
        length=cache.length,
        batch_size=cache.batch_size or -1,
        dtype=description.dtypes[0] if len(description.dtypes) == 1 else None,
        nbytes=header.file_bytes,
        fingerprint=description.fingerprint,
        model=model.fields,
        model_name=model.name,
        model_commit=model.commit,
        weights_id=model.weights_id,
        versions=description.versions,
        has_token_ids=TOKEN_IDS in header.tensors,
        metadata=saved.metadata,
        bits=tuple((keys, values) if type(keys) is type(values) is int else None for keys, values in bits),
        backends=tuple(backend if isinstance(backend, str) else None for backend in backends),
        checksum=saved.checksum,
        has_prefixes=all(map(loads_prefixes, layers)),
    )
