"""From what a file says of a cache to an empty cache like it."""

import contextlib
from collections.abc import Iterator
from typing import Any

from kvlayers.caches.base import Cache
from kvlayers.errors import CacheFileError, KVLayersError, ModelMismatchError
from kvlayers.layers.sliding import window_room
from kvlayers.persistence.format import CacheRecord, LayerRecord, layer_prefix, rotary_name
from kvlayers.persistence.kinds import CACHES, LAYERS, CacheKind, Made
from kvlayers.persistence.safetensors_header import refuse, shown
from kvlayers.persistence.saved_file import SavedFile
from kvlayers.rope.rotary import Rotary
from kvlayers.upstream.model_layers import layer_specs

MAX_SETTING = 2**31
"""Of a number that a layer is made with: no window, reservation or group is larger."""

FREE_RESERVATION = 2**30
RESERVATION_FACTOR = 64
"""Bytes that a file of any size may have reserved for its tokens, and how many times its own size otherwise."""


@contextlib.contextmanager
def file_at_fault(path: str, mismatch_too: bool = True) -> Iterator[None]:
    """Name the file in errors about what it says.

    Args:
        path: the file.
        mismatch_too: whether states that do not fit a cache are the file's fault, and not the caller's.
    """
    try:
        yield
    except CacheFileError:
        raise
    except KVLayersError as error:
        if not mismatch_too:
            raise
        raise CacheFileError(f"expected what a cache can be made from, but {path} says otherwise: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CacheFileError(
            f"expected what a cache can be made from, but {path} has {shown(str(error))}: it is damaged, or not made "
            "by save_cache()."
        ) from error


def read_rotaries(saved: SavedFile, verify: bool) -> dict[str, Rotary]:
    """The rotations in a file, by fingerprint."""
    rotaries = {}
    for fingerprint, (layout, first) in saved.description.rotaries.items():
        rotary = Rotary(saved.tensor(rotary_name(fingerprint), verify=verify), layout, first)  # type: ignore[arg-type]
        if rotary.fingerprint != fingerprint:
            refuse(saved.path, f"frequencies of the rotation {shown(fingerprint)}", f"those of {rotary.fingerprint}")
        rotaries[fingerprint] = rotary
    return rotaries


def rebuilt(saved: SavedFile, part: int | None, rotaries: dict[str, Rotary], config: object | None) -> Cache:
    """An empty cache like the one in a file, or like one part of the pair in it.

    Raises:
        CacheFileError: the file says what no cache can be made from, or does not say enough without a config.
        ModelMismatchError: the model has other layers.
    """
    record = saved.description.caches()[part or 0]
    kind = CACHES.get(record.kind)
    if kind is None:
        refuse(
            saved.path,
            f"a cache that can be made from a file ({', '.join(CACHES)})",
            f"a {shown(record.kind)}",
            "make one yourself, and pass it as into=",
        )
    with file_at_fault(saved.path):
        _check_settings(saved.path, record)
        _check_reservation(saved, record, part)
    made = Made(record.options, rotaries, config)
    if config is not None and not part:
        _check_layers(saved.path, record, config, may_have_fewer=bool(record.options["grows"]))
    unknown = sorted({layer.kind for layer in record.layers} - set(LAYERS))
    layers = _layers(saved.path, record, made, kind, unknown)
    with file_at_fault(saved.path):
        return kind.make(made, layers)


def _layers(path: str, record: CacheRecord, made: Made, kind: CacheKind, unknown: list[str]) -> list[Any]:
    if not unknown:
        with file_at_fault(path):
            return [LAYERS[layer.kind](layer, made) for layer in record.layers]
    if made.config is None:
        refuse(
            path,
            f"layers that can be made from a file ({', '.join(LAYERS)})",
            shown(", ".join(unknown)),
            "pass config=model.config, or a cache of your own as into=",
        )
    with file_at_fault(path):
        return kind.from_config(record, made)


def _check_settings(path: str, record: CacheRecord) -> None:
    options = [record.options[name] for name in ("offloading", "only_non_sliding", "grows")]
    if not all(isinstance(option, bool) for option in options):
        refuse(path, "True or False for offloading, only_non_sliding and grows", shown(options))
    numbers = [record.options, *(layer.facts for layer in record.layers)]
    for names in numbers:
        for name, value in names.items():
            if type(value) is int and name != "length" and "tokens." not in name and abs(value) > MAX_SETTING:
                refuse(path, f"{shown(name)} of at most {MAX_SETTING}", shown(value))


def _check_reservation(saved: SavedFile, record: CacheRecord, part: int | None) -> None:
    """Raise `CacheFileError` where far more memory would be reserved than the file has states for."""
    total = 0
    for index, layer in enumerate(record.layers):
        if "max_cache_len" not in layer.facts:
            continue
        for name in ("keys", "values"):
            entry = saved.header.tensors.get(layer_prefix(part, index) + name)
            if entry is not None and len(entry.shape) == 4:
                batch, kv_heads, _, head_dim = entry.shape
                sequences = max(batch, record.options.get("max_batch_size") or 0)
                total += sequences * kv_heads * head_dim * entry.dtype.itemsize * _reserved_tokens(record, layer)
    most = max(FREE_RESERVATION, RESERVATION_FACTOR * saved.header.file_bytes)
    if total > most:
        refuse(
            saved.path,
            f"a reservation of at most {most} bytes for its states",
            f"one of {total}",
            "if it is meant, make the cache yourself, and pass it as into=",
        )


def _reserved_tokens(record: CacheRecord, layer: LayerRecord) -> int:
    most: Any = layer.facts["max_cache_len"] or record.options.get("max_cache_len") or layer.facts["length"]
    window: Any = layer.facts.get("sliding_window")
    return int(most) if window is None else min(int(most), window_room(window)) if most >= window else int(most)


def _check_layers(path: str, record: CacheRecord, config: object, may_have_fewer: bool) -> None:
    """Raise `ModelMismatchError` where the layers are those of another model, as far as its config says."""
    specs = layer_specs(config)
    if len(record.layers) != len(specs) and not (may_have_fewer and len(record.layers) < len(specs)):
        raise ModelMismatchError(
            f"expected states of {len(specs)} layers, as the config has, but {path} has {len(record.layers)}: load it "
            "for the model that made it."
        )
    for index, (layer, spec) in enumerate(zip(record.layers, specs, strict=False)):
        window, own = layer.facts.get("sliding_window"), spec.options.get("sliding_window")
        if window is not None and window != own:
            raise ModelMismatchError(
                f"expected a sliding_window of {own} at layer {index}, as the config says, but {path} has {window}: "
                "load it for the model that made it."
            )
