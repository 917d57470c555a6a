"""Load a cache from a file whose description was checked, and continue decoding."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.core.cache import CACHE_CLASSES, Cache, described_origin
from kvlayers.core.cache_layer import (
    LAYER_CLASSES,
    CacheLayer,
    LayerState,
    adapted,
    layer_from_description,
    layer_names,
)
from kvlayers.core.cache_operations import CacheState
from kvlayers.core.dense_store import may_share
from kvlayers.core.description import DescriptionContext
from kvlayers.core.token_layer import TokenLayer
from kvlayers.core.token_store import STORE_CLASSES, KVPair
from kvlayers.errors import (
    CacheFileError,
    KVLayersError,
    ModelMismatchError,
    OptionError,
    RegistryError,
    RollbackError,
    StateMismatchError,
)
from kvlayers.persistence.fingerprint import check_model
from kvlayers.persistence.format import (
    DESCRIPTION,
    MAX_SETTING,
    OWN_METADATA,
    CacheRecord,
    Facts,
    LayerRecord,
    layer_prefix,
    parsed,
    read_description,
    refuse,
    rotary_name,
    shown,
)
from kvlayers.persistence.node_file import NODE
from kvlayers.persistence.tensor_file import DIGESTS, TOKEN_IDS, TensorFile, checked_path, opened_file
from kvlayers.rope.rotary import Rotary
from kvlayers.upstream.model_layers import layer_specs
from kvlayers.upstream.model_types import config_of
from kvlayers.utils.options import checked_device, checks_options

MAX_RESERVED_TOKENS = 2**22
"""The most tokens that a layer may reserve. On the host, each slot costs some hundred bytes before any state."""

FREE_RESERVATION = 2**30
RESERVATION_FACTOR = 64
"""A file may reserve `FREE_RESERVATION` bytes for its tokens, or `RESERVATION_FACTOR` times its size if more."""

_STATES = ("keys", "values", "first_keys", "first_values")
"""Tensors of a layer that the model has computed."""


class SavedFile:
    """An open file whose content was checked, except for the bytes of its states, which are checked when they are read.

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
        if NODE in file.header.metadata:
            remedy = "open its directory with PrefixStore(directory=...)"
            refuse(path, "the states of its cache", "a node of a prefix store, which has a part of them", remedy)
        self.description = read_description(path, metadata.get(DESCRIPTION, ""))
        self.metadata = parsed(path, "metadata of texts", dict[str, str], metadata.get(OWN_METADATA, "{}"))
        self.nbytes = file.header.file_bytes
        names = [prefix + name for prefix, layer in self.description.layers() for name in layer.tensors]
        names += [rotary_name(fingerprint) for fingerprint in self.description.rotaries]
        if sorted([*names, DIGESTS]) != sorted(name for name in tensors if name != TOKEN_IDS):
            refuse(path, "the tensors that it describes, and no others", f"{len(tensors)} of other names")
        states = {prefix + name for prefix, _ in self.description.layers() for name in _STATES} & tensors.keys()
        for name, entry in ((name, tensors[name]) for name in sorted(states)):
            if not entry.dtype.is_floating_point or len(entry.shape) != 4 or not entry.shape[0]:
                form = f"{shown(name)} [batch, kv_heads, tokens, head_dim] of a floating-point dtype"
                refuse(path, form, f"{shown(entry.shape)} of {entry.dtype}")

    def pieces(self, prefix: str) -> list[KVPair]:
        """Keys and values of a layer in several pieces, to be copied one after another; empty if each is one tensor."""
        return []

    def tensor(self, name: str, tokens: int | None = None, verify: bool = True) -> Tensor:
        """As `TensorFile.tensor`."""
        return self._file.tensor(name, tokens, verify)


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
        # Whether both are pairs is checked with the whole state.
        for part, (held, record) in enumerate(zip(cache.parts(), description.caches(), strict=False)):
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


@contextlib.contextmanager
def file_at_fault(path: str, mismatch_too: bool = True) -> Iterator[None]:
    """Name the file in errors about its content.

    Args:
        path: the file.
        mismatch_too: whether states that do not fit the cache are the file's fault, rather than the caller's.
    """
    try:
        yield
    except KVLayersError as error:
        if isinstance(error, CacheFileError) or not mismatch_too:
            raise
        raise CacheFileError(f"No cache can be made from {path}: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CacheFileError(
            f"No cache can be made from {path} ({shown(str(error))}): it is damaged, or not made by save_cache()."
        ) from error


def read_rotaries(saved: SavedFile, verify: bool) -> dict[str, Rotary]:
    """The rotations in a file, by fingerprint."""
    rotaries = {}
    for fingerprint, (layout, first) in saved.description.rotaries.items():
        rotary = Rotary(saved.tensor(rotary_name(fingerprint), verify=verify), layout, first)
        if rotary.fingerprint != fingerprint:
            refuse(saved.path, f"frequencies of the rotation {shown(fingerprint)}", f"those of {rotary.fingerprint}")
        rotaries[fingerprint] = rotary
    return rotaries


def rebuilt(saved: SavedFile, part: int, context: DescriptionContext, config: object | None) -> Cache:
    """An empty cache like the one in a file, or like part 0 or 1 of the pair in the file.

    Raises:
        CacheFileError: no cache can be made from the file without a config, or without a package.
        KVLayersError: as the classes that the file names.
    """
    path, record = saved.path, saved.description.caches()[part]
    cache_class = cache_class_of(path, record)
    options = [record.options[name] for name in ("offloading", "only_non_sliding", "grows")]
    if not all(isinstance(option, bool) for option in options):
        refuse(path, "True or False for offloading, only_non_sliding and grows", shown(options))
    # Before any layer is made: a static layer makes something for each slot that it may reserve.
    _check_reservation(saved, record, part, [(LAYER_CLASSES.get(layer.kind), layer.facts) for layer in record.layers])
    layers = [_layer(layer, context) for layer in record.layers]
    missing = [index for index, layer in enumerate(layers) if layer is None]
    if missing and config is None:
        refuse(
            path,
            f"layers that can be made from a file ({', '.join(layer_names())})",
            shown(", ".join(sorted({record.layers[index].kind for index in missing}))),
            "import the package that registers them, pass config=model.config, or a cache of your own as into=",
        )
    if missing:
        of_model = cache_class.from_description(record.options, [], context).layers_of_model(config)
        layers = [of_model[index] if layer is None else layer for index, layer in enumerate(layers)]
    cache = cache_class.from_description(record.options, layers, context)
    # Again for the finished layers: they may have been made from the config, not from the facts in the file.
    finished = [layer.unwrapped for layer in cache.adapted_layers()]
    _check_reservation(saved, record, part, [(type(layer), layer.describe()) for layer in finished])
    return cache


def cache_class_of(path: str, record: CacheRecord) -> type[Cache]:
    """The class that a file names for its cache."""
    cache_class: type[Cache] | None = CACHE_CLASSES.get(record.kind)
    if cache_class is None:
        refuse(
            path,
            f"a cache that can be made from a file ({', '.join(CACHE_CLASSES.names())})",
            f"a {shown(record.kind)}",
            "import the package that registers it, or make one yourself, and pass it as into=",
        )
    return cache_class


def _layer(record: LayerRecord, context: DescriptionContext) -> Any:
    """A layer as in a file; `None` if its kind is not registered, or its facts are incomplete."""
    with contextlib.suppress(KeyError):
        return layer_from_description(record.kind, record.facts, context) if record.kind in LAYER_CLASSES else None


def check_remakeable(cache: Cache) -> None:
    """Raise `CacheFileError` if `load_cache` could not make such a cache, but only load into one."""
    if cache.kind not in CACHE_CLASSES:
        raise CacheFileError(
            f"`cache` must be of a class that a file can name ({', '.join(CACHE_CLASSES.names())}), got a "
            f"{type(cache).__name__}: register it with register_cache_class(), or save it, and load it with into=."
        )
    layers = [layer for layer in cache.adapted_layers() if not layer.traits.is_upstream]
    kinds = [part.unwrapped.kind for layer in layers for part in layer.parts]
    # A file names a hybrid layer as well as its parts, and an offloaded layer by what it wraps alone.
    kinds += [layer.kind for layer in layers if len(layer.parts) > 1]
    for kind in kinds:
        if kind not in LAYER_CLASSES:
            raise CacheFileError(
                f"`cache` must have layers that a file can name ({', '.join(layer_names())}), got a {kind}: register "
                "it with register_layer(), or save the cache, and load it with into=."
            )


def loads_prefixes(record: LayerRecord) -> bool:
    """Whether the first tokens of a layer can be read from a file without the others."""
    try:
        layer_class = LAYER_CLASSES.get(record.kind)
        store_class = STORE_CLASSES.get(record.facts.get("store", "DenseStore"))
    except RegistryError:
        # The package of one of them is broken. The whole layer can be read into a layer of the caller's.
        return False
    if layer_class is None or store_class is None:
        return False
    # Other tensors need not have one row for each token.
    has_states_alone = set(record.tensors) == {"keys", "values"}
    return has_states_alone and layer_class.traits.keeps_every_token is True and store_class.holds_tokens_apart is True


def _check_reservation(saved: SavedFile, record: CacheRecord, part: int, layers: Sequence[tuple[Any, Facts]]) -> None:
    """Raise `CacheFileError` if far more memory would be reserved than the file has states for.

    Args:
        saved: the file.
        record: the cache in it.
        part: 0, or 1 for the cross-attention of a pair.
        layers: class and facts of each layer.
    """
    # Layers that are made from a config reserve what the options say.
    _check_amount(saved.path, "reserved tokens", record.options.get("max_cache_len") or 0, MAX_RESERVED_TOKENS)
    most_rows = _check_amount(saved.path, "reserved sequences", record.options.get("max_batch_size") or 0, MAX_SETTING)
    total = 0
    for index, (layer_class, facts) in enumerate(layers):
        tokens, sequences = 0, 0
        # No layer is made of incomplete facts.
        with contextlib.suppress(KeyError):
            if layer_class is not None:
                tokens, sequences = layer_class.reserved_by(facts)
        _check_amount(saved.path, "reserved tokens", tokens, MAX_RESERVED_TOKENS)
        _check_amount(saved.path, "reserved sequences", sequences, MAX_SETTING)
        for name in ("keys", "values"):
            entry = saved.header.tensors.get(layer_prefix(part, index) + name)
            if entry is not None:
                batch, kv_heads, _, head_dim = entry.shape
                total += max(batch, sequences, most_rows) * kv_heads * head_dim * entry.dtype.itemsize * tokens
    most = max(FREE_RESERVATION, RESERVATION_FACTOR * saved.nbytes)
    if total > most:
        refuse(
            saved.path,
            f"a reservation of at most {most} bytes for its states",
            f"one of {total}",
            "if it is meant, make the cache yourself, and pass it as into=",
        )


def _check_amount(path: str, what: str, amount: object, most: int) -> int:
    """`amount`, or `CacheFileError` unless it is a whole number from 0 to `most`."""
    if type(amount) is not int or not 0 <= amount <= most:
        refuse(
            path,
            f"{what} from 0 to {most}",
            shown(amount),
            "if it is meant, make the cache yourself, and pass it as into=",
        )
    return amount


def check_layers(path: str, record: CacheRecord, config: object) -> None:
    """Raise `ModelMismatchError` if a config shows that the layers in a file are those of another model."""
    specs, layers = layer_specs(config), record.layers
    if len(layers) > len(specs) or (len(layers) < len(specs) and record.options.get("grows") is not True):
        raise ModelMismatchError(
            f"`config` has {len(specs)} layers, but {path} has {len(layers)}: load it for the model that made it."
        )
    for index, (layer, spec) in enumerate(zip(layers, specs, strict=False)):
        window, own = layer.facts.get("sliding_window"), spec.options.get("sliding_window")
        if window is not None and window != own:
            raise ModelMismatchError(
                f"`config` has a sliding_window of {own} at layer {index}, but {path} has {window}: load it for the "
                "model that made it."
            )
