"""The format of a saved cache: its description, plain facts in JSON beside the tensors."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import torch

from kvlayers.errors import OptionError
from kvlayers.persistence.json_text import MOST_FILE_BYTES, Count, canonical, parsed, refuse, shown
from kvlayers.rope.rotary import Layout

MAX_METADATA_BYTES, MAX_METADATA_BRACKETS = 2**20, 50_000
"""Of a caller's own texts, which are in the header of a file: a quarter of what a header may have."""

OWN_METADATA = "metadata"
"""In the metadata of a saved cache: texts of the caller's own, as JSON."""

DESCRIPTION = "description"
"""In the metadata of a saved cache: what its tensors mean, as JSON."""

Options = dict[str, Any]
Facts = dict[str, bool | Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | float | str | None]


@dataclass(frozen=True)
class LayerRecord:
    """One layer: its kind, the facts of its state, the names of its tensors, and whether it records its past."""

    kind: str
    facts: Facts = field(default_factory=dict)
    tensors: tuple[str, ...] = ()
    recording: bool = False


@dataclass(frozen=True)
class CacheRecord:
    """One cache: its kind, its options, and its layers; or its parts, for a pair.

    Attributes:
        kind: name of the cache's class.
        length: tokens seen.
        batch_size: sequences side by side, 0 before the first states.
        options: what the cache's `describe()` returned.
        layers: a record for each layer.
        parts: records of self-attention and cross-attention, for a pair.
    """

    kind: str
    length: Count
    batch_size: Count
    options: Options = field(default_factory=dict)
    layers: tuple[LayerRecord, ...] = ()
    parts: "tuple[CacheRecord, ...]" = ()


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
        dtypes: dtypes of the states, sorted by their names.
    """

    versions: dict[str, str]
    cache: CacheRecord
    model: ModelRecord
    rotaries: dict[str, tuple[Layout, Count]]
    dtypes: tuple[torch.dtype, ...]

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


def metadata_text(metadata: Mapping[str, str]) -> str:
    """The caller's own texts as JSON.

    Raises:
        OptionError: they are not texts by their names, or too long.
    """
    if not isinstance(metadata, Mapping) or not {str}.issuperset(map(type, [*metadata, *metadata.values()])):
        raise OptionError(f"`metadata` must map names to texts, got {shown(metadata)}: use json.dumps() for the rest.")
    text = canonical(dict(metadata))
    if len(text) > MAX_METADATA_BYTES or text.count("[") + text.count("{") > MAX_METADATA_BRACKETS:
        raise OptionError(
            f"`metadata` must have at most {MAX_METADATA_BYTES} bytes and {MAX_METADATA_BRACKETS} brackets as JSON, "
            f"got {len(text)} bytes: keep long texts and pictures elsewhere."
        )
    return text


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
    description = parsed(path, "a description", Description, text)
    cache, parts = description.cache, description.cache.parts
    if parts and (len(parts) != 2 or cache.layers or any(part.parts for part in parts)):
        refuse(path, "two parts and no other layers, or layers alone", f"{len(parts)} parts")
    for _, layer in description.layers():
        for name in ("length", "checkpoints", "linear.checkpoints"):
            count = layer.facts.get(name, 0)
            # A count beyond the tensors would be a long loop over nothing.
            most = MOST_FILE_BYTES if name == "length" else len(layer.tensors)
            if count is not None and (type(count) is not int or not 0 <= count <= most):
                refuse(path, f"a {name} of 0 to {most}", shown(count))
    return description
