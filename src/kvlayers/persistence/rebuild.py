"""A file of a cache whose description was checked, and an empty cache that is made from it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from kvlayers.core.cache import CACHE_CLASSES, Cache
from kvlayers.core.cache_layer import LAYER_CLASSES, layer_from_description, layer_names
from kvlayers.core.description import DescriptionContext
from kvlayers.core.token_store import STORE_CLASSES, KVPair
from kvlayers.errors import CacheFileError, KVLayersError, ModelMismatchError, RegistryError
from kvlayers.persistence.format import (
    DESCRIPTION,
    OWN_METADATA,
    CacheRecord,
    LayerRecord,
    layer_prefix,
    parsed,
    read_description,
    refuse,
    rotary_name,
    shown,
)
from kvlayers.persistence.node_file import NODE
from kvlayers.persistence.safetensors_header import DIGESTS, TOKEN_IDS
from kvlayers.persistence.tensor_file import TensorFile
from kvlayers.rope.rotary import Rotary
from kvlayers.upstream.model_layers import layer_specs

MAX_SETTING = 2**48
"""The largest number that a layer is made with. No window, budget of bytes or group is larger."""

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


@contextlib.contextmanager
def file_at_fault(path: str, mismatch_too: bool = True) -> Iterator[None]:
    """Name the file in errors about its content.

    Args:
        path: the file.
        mismatch_too: whether states that do not fit the cache are the file's fault, rather than the caller's.
    """
    try:
        yield
    except CacheFileError:
        raise
    except KVLayersError as error:
        if not mismatch_too:
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
    _check_settings(path, record)
    # Before any layer is made: a static layer makes something for each slot that it may reserve.
    _check_reservation(saved, record, part, [_reserved_by_facts(layer) for layer in record.layers])
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
    _check_reservation(saved, record, part, [type(layer).reserved_by(layer.describe()) for layer in finished])
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


def _check_settings(path: str, record: CacheRecord) -> None:
    options = [record.options[name] for name in ("offloading", "only_non_sliding", "grows")]
    if not all(isinstance(option, bool) for option in options):
        refuse(path, "True or False for offloading, only_non_sliding and grows", shown(options))
    for names in (record.options, *(layer.facts for layer in record.layers)):
        for name, value in names.items():
            if type(value) is int and name != "length" and "tokens." not in name and abs(value) > MAX_SETTING:
                refuse(path, f"{shown(name)} of at most {MAX_SETTING}", shown(value))
    # Layers that are made from a config reserve what the options say.
    _check_amount(path, "reserved tokens", record.options.get("max_cache_len") or 0, MAX_RESERVED_TOKENS)


def _reserved_by_facts(layer: LayerRecord) -> tuple[int, int]:
    """Tokens, and sequences, that a layer reserves that is made from these facts; none is if they are incomplete."""
    layer_class = LAYER_CLASSES.get(layer.kind)
    with contextlib.suppress(KeyError):
        if layer_class is not None:
            return layer_class.reserved_by(layer.facts)
    return 0, 0


def _check_reservation(saved: SavedFile, record: CacheRecord, part: int, layers: Sequence[tuple[int, int]]) -> None:
    """Raise `CacheFileError` if far more memory would be reserved than the file has states for.

    Args:
        saved: the file.
        record: the cache in it.
        part: 0, or 1 for the cross-attention of a pair.
        layers: tokens, and sequences, that each layer reserves.
    """
    total, most_rows = 0, record.options.get("max_batch_size") or 0
    for index, (tokens, sequences) in enumerate(layers):
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


def _check_amount(path: str, what: str, amount: object, most: int) -> None:
    """Raise `CacheFileError` unless `amount` is a whole number from 0 to `most`."""
    if type(amount) is not int or not 0 <= amount <= most:
        refuse(
            path,
            f"{what} from 0 to {most}",
            shown(amount),
            "if it is meant, make the cache yourself, and pass it as into=",
        )


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
