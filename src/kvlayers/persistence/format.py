"""The format of a saved cache: its description, plain facts in JSON beside the tensors."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from kvlayers.core.description import Fact
from kvlayers.errors import OptionError
from kvlayers.persistence.safetensors_header import parse_json, refuse, shown

FORMAT = "kvlayers.cache"
FORMAT_VERSION = 3
"""The version of whole caches, the only one that is read and written."""

NODE_VERSION = 6
"""The version of a node of a prefix store, which has a part of the states."""

MAX_TOKENS = 2**40
"""Far more than anybody will ever decode. A count of tokens beyond this is refused."""

MAX_METADATA_BYTES, MAX_METADATA_BRACKETS = 2**20, 50_000
"""Of a caller's own texts, which are in the header of a file: a quarter of what a header may have."""

OWN_METADATA = "metadata"
"""In the metadata of a saved cache: texts of the caller's own, as JSON."""

TOKEN_IDS = "token_ids"
DIGESTS = "digests"

Options = dict[str, Any]


@dataclass(frozen=True)
class LayerRecord:
    """One layer: its kind, the facts of its state, the names of its tensors, and whether it records its past."""

    kind: str
    facts: dict[str, Fact] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()
    recording: bool = False


@dataclass(frozen=True)
class CacheRecord:
    """One cache: its kind, its options, and its layers; or its parts, for a pair.

    Attributes:
        kind: name of the cache's class.
        length: tokens seen.
        batch_size: sequences side by side, -1 before the first states.
        options: what the cache's `describe()` returned.
        layers: a record for each layer.
        parts: records of self-attention and cross-attention, for a pair.
    """

    kind: str
    length: int
    batch_size: int
    options: Options = field(default_factory=dict)
    layers: tuple[LayerRecord, ...] = ()
    parts: tuple["CacheRecord", ...] = ()


@dataclass(frozen=True)
class ModelRecord:
    """The model that made the states.

    Attributes:
        fields: what its config says that states depend on.
        name: the name that it was loaded by, for people; `None` for a directory, whose path is private.
        commit: revision of that, for people.
        weights_id: what the caller calls its weights.
    """

    fields: dict[str, Any] | None = None
    name: str | None = None
    commit: str | None = None
    weights_id: str | None = None


@dataclass(frozen=True)
class Description:
    """Everything that a file says beside its tensors.

    Attributes:
        versions: of kvlayers, torch and transformers, for people.
        cache: the cache.
        model: the model that its states are of.
        rotaries: how keys are rotated, by the fingerprint of the rotation: layout and first dimension.
        dtypes: dtypes of the states, sorted.
    """

    versions: dict[str, str]
    cache: CacheRecord
    model: ModelRecord
    rotaries: dict[str, tuple[str, int]]
    dtypes: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """A hash that two files share if one model can continue from the states of both."""
        kinds = [[layer.kind for layer in cache.layers] for cache in self.caches()]
        model = [self.model.fields, self.model.weights_id]
        return hashlib.sha256(canonical([model, self.cache.kind, kinds, self.dtypes]).encode()).hexdigest()

    def caches(self) -> tuple[CacheRecord, ...]:
        """The caches that have layers: both parts of a pair, or the cache itself."""
        return self.cache.parts or (self.cache,)

    def layers(self) -> Iterator[tuple[str, LayerRecord]]:
        """Each layer, with the prefix of the names of its tensors."""
        for number, cache in enumerate(self.caches()):
            for index, layer in enumerate(cache.layers):
                yield layer_prefix(number if self.cache.parts else None, index), layer

    def to_json(self) -> str:
        """The description as text. Equal descriptions give equal texts."""
        return canonical({**dataclasses.asdict(self), "fingerprint": self.fingerprint})


def canonical(content: object) -> str:
    """`content` as JSON, with sorted keys and no spaces."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def metadata_text(metadata: Mapping[str, str]) -> str:
    """The caller's own texts as JSON.

    Raises:
        OptionError: they are not texts by their names, or too long.
    """
    if not isinstance(metadata, Mapping) or not _is_texts([*metadata, *metadata.values()]):
        raise OptionError(f"`metadata` must map names to texts, got {shown(metadata)}: use json.dumps() for the rest.")
    text = canonical(dict(metadata))
    if len(text) > MAX_METADATA_BYTES or text.count("[") + text.count("{") > MAX_METADATA_BRACKETS:
        raise OptionError(
            f"`metadata` must have at most {MAX_METADATA_BYTES} bytes and {MAX_METADATA_BRACKETS} brackets as JSON, "
            f"got {len(text)} bytes: keep long texts and pictures elsewhere."
        )
    return text


def read_metadata(path: str, text: str) -> dict[str, str]:
    """The texts that `metadata_text` wrote.

    Raises:
        CacheFileError: the JSON is something else.
    """
    content = parse_json(path, text.encode("utf-8", "surrogatepass"), "the metadata")
    if not isinstance(content, dict) or not _is_texts(list(content.values())):
        refuse(path, "metadata that map names to texts", shown(content))
    return content


def layer_prefix(part: int | None, index: int) -> str:
    """The prefix of the names of a layer's tensors."""
    return f"layers.{index}." if part is None else f"parts.{part}.layers.{index}."


def rotary_name(fingerprint: str) -> str:
    """The name of the tensor with the frequencies of a rotation."""
    return f"rotary.{fingerprint}"


def read_description(path: str, text: str) -> Description:
    """The description in a file.

    Raises:
        CacheFileError: the text is not a description.
    """
    content = parse_json(path, text.encode("utf-8", "surrogatepass"), "the description")
    content = _record(path, content, _DESCRIPTION)
    model = ModelRecord(**_record(path, content["model"], _MODEL))
    rotaries = {}
    for fingerprint, rotary in content["rotaries"].items():
        if not (isinstance(rotary, list) and len(rotary) == 2 and isinstance(rotary[0], str) and _is_count(rotary[1])):
            refuse(path, "the layout and the first dimension of a rotation", shown(rotary))
        rotaries[fingerprint] = rotary[0], rotary[1]
    cache = _cache_record(path, content["cache"])
    description = Description(content["versions"], cache, model, rotaries, tuple(content["dtypes"]))
    if description.fingerprint != content["fingerprint"]:
        refuse(path, f"the fingerprint {description.fingerprint}", shown(content["fingerprint"]))
    return description


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKENS


def _is_fact(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | bool) or (type(value) is int and abs(value) < 2**63)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_a(*types: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, types)


def _is_facts(value: object) -> bool:
    return isinstance(value, dict) and all(_is_fact(fact) for fact in value.values())


_Checks = dict[str, Callable[[object], bool]]

_DESCRIPTION: _Checks = {
    "versions": lambda value: isinstance(value, dict) and _is_texts(list(value.values())),
    "cache": _is_a(dict),
    "model": _is_a(dict),
    "rotaries": _is_a(dict),
    "dtypes": _is_texts,
    "fingerprint": _is_a(str),
}
_MODEL: _Checks = {
    "fields": _is_a(dict, NoneType),
    "name": _is_a(str, NoneType),
    "commit": _is_a(str, NoneType),
    "weights_id": _is_a(str, NoneType),
}
_CACHE: _Checks = {
    "kind": _is_a(str),
    "length": _is_count,
    "batch_size": lambda value: value == -1 or _is_count(value),
    "options": _is_a(dict),
    "layers": _is_a(list),
    "parts": _is_a(list),
}
_LAYER: _Checks = {
    "kind": _is_a(str),
    "facts": _is_facts,
    "tensors": _is_texts,
    "recording": _is_a(bool),
}


def _record(path: str, content: object, checks: _Checks) -> dict[str, Any]:
    """`content`, if it has exactly these names, each with a value of its kind."""
    if not isinstance(content, dict) or set(content) != set(checks):
        refuse(path, f"a record of {', '.join(checks)}", shown(content))
    for name, is_right in checks.items():
        if not is_right(content[name]):
            refuse(path, f"a valid {name}", shown(content[name]))
    return content


def _cache_record(path: str, content: object, may_have_parts: bool = True) -> CacheRecord:
    found = _record(path, content, _CACHE)
    parts = tuple(_cache_record(path, part, may_have_parts=False) for part in found["parts"])
    if parts and (not may_have_parts or len(parts) != 2 or found["layers"]):
        refuse(path, "two parts and no other layers, or layers alone", f"{len(parts)} parts")
    layers = tuple(_layer_record(path, layer) for layer in found["layers"])
    return CacheRecord(**{**found, "layers": layers, "parts": parts})


def _layer_record(path: str, content: object) -> LayerRecord:
    found = _record(path, content, _LAYER)
    for name in ("length", "checkpoints", "linear.checkpoints"):
        count = found["facts"].get(name)
        if count is not None and not _is_count(count):
            refuse(path, f"a {name} of 0 to {MAX_TOKENS}", shown(count))
        # A count beyond the tensors would be a long loop over nothing.
        if name != "length" and (count or 0) > len(found["tensors"]):
            refuse(path, f"at most as many {name} as tensors", shown(count))
    return LayerRecord(**{**found, "tensors": tuple(found["tensors"])})
