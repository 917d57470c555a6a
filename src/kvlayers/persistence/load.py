"""Load a cache from a file, and continue decoding."""

import os
from typing import Any

import torch
from torch import Tensor

from kvlayers.core.cache import Cache, described_origin
from kvlayers.core.cache_layer import CacheLayer, LayerState
from kvlayers.core.cache_operations import CacheState
from kvlayers.core.dense_store import may_share
from kvlayers.core.description import DescriptionContext
from kvlayers.core.layer_list import adapted
from kvlayers.core.token_layer import TokenLayer
from kvlayers.core.token_store import KVPair
from kvlayers.errors import OptionError, RollbackError, StateMismatchError
from kvlayers.persistence.fingerprint import check_model
from kvlayers.persistence.format import CacheRecord, LayerRecord, layer_prefix
from kvlayers.persistence.rebuild import (
    SavedFile,
    cache_class_of,
    check_layers,
    file_at_fault,
    loads_prefixes,
    read_rotaries,
    rebuilt,
)
from kvlayers.persistence.safetensors_header import TOKEN_IDS, checked_path
from kvlayers.persistence.tensor_file import opened_file
from kvlayers.upstream.model_types import config_of
from kvlayers.utils.options import checked_device, checks_options


@checks_options
def load_cache(
    path: str | os.PathLike[str],
    *,
    config: object | None = None,
    device: torch.device | str | None = None,
    length: int | None = None,
    into: Cache | None = None,
    weights_id: str | None = None,
    verify: bool = True,
) -> Cache:
    """Load a cache that `save_cache` wrote. Its memory is independent of the file.

    The file is memory-mapped, and only the states are copied, once. With `length`, layers that keep every token in full
    precision copy the states of the first tokens alone.

    Args:
        path: the file.
        config: config of the model that continues, or the model. Needed for layers of transformers.
        device: device of the states, the host if not given.
        length: how many of the first tokens to load, all if not given.
        into: an existing cache to load into, for example of an unregistered class, or with a larger reservation. It
            changes only after every check has passed.
        weights_id: id of the model's weights, to be compared with that in the file; see `weights_id()`.
        verify: whether to compare every state with its checksum. The description is always compared.

    Raises:
        CacheFileError: the file is damaged, is not the file of a cache, has another version of the format, names a kind
            that is not registered, or does not say enough to make a cache without `config` or `into`.
        CachePathError: the file does not exist, cannot be read, or is not a regular file.
        ModelMismatchError: the file was made by another model than that of `config`, or by other weights.
        StateMismatchError: `into` has other layers than the cache in the file.
        RollbackError: the first `length` tokens are not held any more, or not so many are.
        OptionError: an argument that is nothing of the kind.

    Example:
        >>> import tempfile, torch, kvlayers
        >>> cache = kvlayers.DynamicCache()
        >>> _ = cache.update(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), layer_idx=0)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     kvlayers.save_cache(cache, f"{directory}/chat.safetensors")
        ...     kvlayers.load_cache(f"{directory}/chat.safetensors", length=3)
        DynamicCache(1 x DynamicLayer, 3 tokens, batch 1, 768 B)
    """
    path = checked_path(path)
    if config is not None:
        config = config_of(config)
    if into is not None and not isinstance(into, Cache):
        raise OptionError(
            f"`into` must be a cache of kvlayers, got a {type(into).__name__}: pass an empty one, or leave it out."
        )
    place = _device_of(into) if device is None else checked_device(device)
    saved = SavedFile(opened_file(path))
    check_model(path, saved.description, config, weights_id)
    if config is not None and into is None:
        check_layers(path, saved.description.caches()[0], config)
    seen = saved.description.cache.length
    if length is not None and (not isinstance(length, int) or isinstance(length, bool)):
        raise OptionError(
            f"`length` must be a whole number of tokens, got {length!r}: pass one, or leave it out to load all."
        )
    if length is not None and not 0 <= length <= seen:
        raise RollbackError(
            f"`length` must be from 0 to {seen}, the tokens of the cache in {path}, got {length}: pass fewer tokens."
        )
    reader = StateReader(saved, place, length, verify)
    return reader.new(config) if into is None else reader.fill(into)


def _device_of(cache: Cache | None) -> torch.device:
    """The device that a cache computes on; the host if there is none, or it holds no states yet."""
    layers = (layer for part in (() if cache is None else cache.parts()) for layer in part.adapted_layers())
    holding = (layer for layer in layers if layer.batch_size is not None and not layer.traits.is_upstream)
    return torch.device(next((found for layer in holding if (found := layer.parts[0].device) is not None), "cpu"))


class StateReader:
    """Loads the states of a file into caches.

    Args:
        saved: the file.
        device: device of the states.
        length: how many of the first tokens to load, `None` for all.
        verify: whether to compare the states in the file with their checksums.
    """

    def __init__(self, saved: SavedFile, device: torch.device, length: int | None, verify: bool) -> None:
        self.saved = saved
        self.device = device
        self.length = length
        self.verify = verify

    def new(self, config: object | None) -> Cache:
        """A cache like the one in the file, with its states."""
        saved, record = self.saved, self.saved.description.cache
        with file_at_fault(saved.path):
            context = DescriptionContext(read_rotaries(saved, self.verify))
            caches: list[Cache] = []
            for part, own in enumerate(saved.description.caches()):
                caches.append(rebuilt(saved, part, context, config))
                self._load(caches[-1], own, part)
            cache = caches[0]
            if record.parts:
                cache = cache_class_of(saved.path, record).from_description(record.options, caches, context)
        return self._finished(cache)

    def _load(self, cache: Cache, record: CacheRecord, part: int) -> None:
        # One layer at a time, so that the device never holds more than one layer twice.
        for index, (layer, layer_record) in enumerate(zip(cache.adapted_layers(), record.layers, strict=True)):
            pairs = self.saved.pieces(layer_prefix(part, index))
            # States that can be taken in piece by piece, instead of all at once.
            if pairs and loads_prefixes(layer_record) and isinstance(layer, TokenLayer) and may_share(layer.store):
                self._append(layer, layer_record, pairs)
            else:
                layer.load_state(self._state(layer, layer_record, part, index))
        batch_sizes = {layer.batch_size for layer in cache.adapted_layers() if layer.length}
        if len(batch_sizes) > 1:
            raise StateMismatchError(f"All layers must have one batch size, got {sorted(map(str, batch_sizes))}.")

    @torch.no_grad()
    def _append(self, layer: TokenLayer, record: LayerRecord, pairs: list[KVPair]) -> None:
        """Copy the states of a layer into its store, piece by piece and once."""
        tensors = {"keys": pairs[0][0][:, :, :0].to(self.device), "values": pairs[0][1][:, :, :0].to(self.device)}
        layer.load_state(LayerState(record.kind, tensors, {**record.facts, "length": 0}))
        layer.store.reserve(sum(keys.shape[2] for keys, _ in pairs))
        for keys, values in pairs:
            layer.update(keys.to(self.device), values.to(self.device))

    def fill(self, cache: Cache) -> Cache:
        """Load the states of the file into the caller's cache."""
        description, ids = self.saved.description, self._ids()
        states = []
        for part, record in enumerate(description.caches()):
            held = cache.parts()[part if cache.is_pair else 0]
            layers = held.layers_for(len(record.layers))
            if len(layers) != len(record.layers):
                raise StateMismatchError(
                    f"`into` has {len(layers)} layers, but {self.saved.path} has {len(record.layers)}: load it into a "
                    "cache that was made for the same model config."
                )
            pairs = enumerate(zip(map(adapted, layers), record.layers, strict=True))
            found = tuple(self._rehearsed(layer, own, part, index) for index, (layer, own) in pairs)
            states.append(CacheState(record.kind, found, origins=(described_origin(record.options),)))
        state = CacheState(description.cache.kind, parts=tuple(states)) if description.cache.parts else states[0]
        if self.length is not None:
            # On a fork first: only loaded layers know which tokens have left their windows.
            twin = cache.fork()
            twin.load_state(state)
            state = self._finished(twin).state()
        cache.load_state(state)
        return self._followed(cache, ids)

    def _rehearsed(self, layer: CacheLayer, record: LayerRecord, part: int, index: int) -> LayerState:
        state = self._state(layer, record, part, index)
        if layer.traits.is_recurrent or layer.traits.is_upstream:
            # These layers check less of a state than layers of tokens do, and are small enough to be loaded twice.
            with file_at_fault(self.saved.path, mismatch_too=False):
                layer.fork().load_state(state)
        return state

    def _state(self, layer: Any, record: LayerRecord, part: int, index: int) -> LayerState:
        facts = dict(record.facts)
        cut = None
        # A length of 0 also rolls back the encoder's output.
        if self.length and not part and loads_prefixes(record):
            held: Any = facts["length"]
            cut = facts["length"] = min(self.length, held)
        prefix = layer_prefix(part, index)
        tensors = {name: self.saved.tensor(prefix + name, cut, self.verify).to(self.device) for name in record.tensors}
        if "device" in facts:
            facts["device"] = str(self.device)
        if layer.traits.is_upstream:
            _check_upstream(layer, facts)
        return LayerState(record.kind, tensors, facts)

    def _finished(self, cache: Cache) -> Cache:
        """A new cache, cropped to the requested length."""
        if self.length is not None and self.length < self.saved.description.cache.length:
            if self.length:
                cache.crop(self.length)
            else:
                cache.truncate(0)
        return self._followed(cache, self._ids())

    def _ids(self) -> Tensor | None:
        """Ids of the tokens to load, or of the first of them, if the file has any."""
        if TOKEN_IDS not in self.saved.header.tensors:
            return None
        length = self.saved.description.cache.length if self.length is None else self.length
        ids = self.saved.tensor(TOKEN_IDS, verify=self.verify)
        return ids[:, :length].clone() if ids.dim() == 2 else None

    def _followed(self, cache: Cache, ids: Tensor | None) -> Cache:
        """A loaded cache that knows which tokens it has seen, and records its past if the saved one did."""
        if ids is not None and ids.shape[0] == cache.batch_size and not cache.is_pair and not cache.is_recurrent:
            cache.known_ids = ids
        for part, record in zip(cache.parts(), self.saved.description.caches(), strict=True):
            for layer, own in zip(part.adapted_layers(), record.layers, strict=True):
                if own.recording:
                    layer.activate_past_recording()
        return cache


def _check_upstream(layer: CacheLayer, facts: dict[str, Any]) -> None:
    """Raise `StateMismatchError` if facts have other types than those of a layer of transformers."""
    own = layer.state().facts
    for name, value in facts.items():
        known = own.get(name)
        if known is not None and (type(known) is not type(value) or (name.startswith("max_") and known != value)):
            raise StateMismatchError(
                f"The layer has {name} {known!r}, got {value!r} from the file: load it for the same model."
            )
