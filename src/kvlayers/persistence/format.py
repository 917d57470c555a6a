"""The format of files: JSON of which what is read is exactly what would be written, so that no two readers can differ.

A saved cache has a description, plain facts in JSON beside the tensors.
"""

import contextlib
import hashlib
import json
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import torch

from kvlayers.errors import CacheFileError, OptionError
from kvlayers.rope.rotary import Layout

MOST_FILE_BYTES = 2**50
"""More than any file has, and more tokens than anybody decodes. The first bytes of a text are a larger number."""

MAX_BRACKETS = 200_000
"""The most lists and objects in a JSON text. A tensor has three, and each takes far more memory than its text."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_FILE_BYTES)]
"""Bytes, tokens, or anything else that is counted in a file."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes of states by their names in safetensors."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Form = TypeVar("Form")


def refuse(
    path: str, expected: str, seen: str, remedy: str = "it is damaged, or not made by save_cache(); save it again"
) -> NoReturn:
    """Raise the error for a file that cannot be loaded."""
    raise CacheFileError(f"{path} must have {expected}, got {seen}: {remedy}.")


def shown(text: object) -> str:
    """A value from a file for an error message: short, and without control characters.

    `reprlib` limits the work, since the value may be nested millions of times.
    """
    whole = ascii(text[:80]) if isinstance(text, str) else ascii(reprlib.repr(text))[1:-1]
    return whole if len(whole) <= 80 else f"{whole[:77]}..."


def canonical(content: object) -> str:
    """`content` as JSON, with sorted keys and no spaces.

    Raises:
        OptionError: a text in it is no Unicode, or a number in it is not finite.
    """
    try:
        text = msgspec.json.encode(content, order="sorted", enc_hook=_plain)
        if b"null" in text:
            # As which msgspec writes numbers that are not finite too. The standard library refuses them.
            json.dumps(msgspec.to_builtins(content, enc_hook=_plain), allow_nan=False)
        return text.decode()
    except UnicodeEncodeError as error:
        raise OptionError(
            f"A text must be Unicode without lone surrogates, got {shown(error.object)}: choose another."
        ) from None
    except ValueError:
        raise OptionError(
            f"A number must be finite, got another in {shown(content)}: choose one, or pass it as a text."
        ) from None


def _plain(value: Any) -> str:
    """What is written for a value that JSON does not know: a dtype, or a text of a class of its own."""
    return str(value) if isinstance(value, str) else DTYPE_NAMES[value]


def decoded(path: str, what: str, form: type[Form], text: bytes | str) -> Form:
    """What a text in a file says: nothing is converted, and no field may be missing.

    Args:
        path: name of the file in errors.
        what: what it is, in errors.
        form: what the text describes. A dataclass is an object of its fields, a named tuple is a list, and a
            `torch.dtype` the name of one of `DTYPES`.
        text: the text.

    Raises:
        CacheFileError: it is of another form.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if data.count(b"[") + data.count(b"{") > MAX_BRACKETS:
        refuse(path, f"at most {MAX_BRACKETS} lists and objects in {what}", "more")
    try:
        return msgspec.json.decode(data, type=form, dec_hook=lambda _, name: DTYPES[name])
    except (msgspec.MsgspecError, LookupError, ValueError, RecursionError) as error:
        refuse(path, f"{what} as kvlayers writes it", shown(str(error)))


def parsed(path: str, what: str, form: type[Form], text: str) -> Form:
    """As `decoded`, if the text is what `canonical` writes for it: no name twice, no other field, no number at length.

    Raises:
        CacheFileError: it is another text.
    """
    found = decoded(path, what, form, text)
    # What was nested as deeply as can be read may be too deep to be written.
    with contextlib.suppress(RecursionError):
        if canonical(found) == text:
            return found
    refuse(path, f"{what} as kvlayers writes it", "other words for it")


MAX_METADATA_BYTES, MAX_METADATA_BRACKETS = 2**20, 50_000
"""Of a caller's own texts, which are in the header of a file: a quarter of what a header may have."""

OWN_METADATA = "metadata"
"""In the metadata of a saved cache: texts of the caller's own, as JSON."""

DESCRIPTION = "description"
"""In the metadata of a saved cache: what its tensors mean, as JSON."""

MAX_SETTING = 2**48
"""The largest number that a layer is made with. No window, budget of bytes or group is larger."""

Plain = bool | Annotated[int, msgspec.Meta(ge=-MAX_SETTING, le=MAX_SETTING)] | float | str | None
Facts = dict[str, Plain]
Options = dict[str, Plain | list[Any] | dict[str, Any]]


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
        for part, cache in enumerate(self.caches()):
            for index, layer in enumerate(cache.layers):
                yield layer_prefix(part, index), layer


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


def layer_prefix(part: int, index: int) -> str:
    """The prefix of the names of the tensors of a layer of a cache, or of part 0 or 1 of a pair."""
    return f"{'cross_' if part else ''}layers.{index}."


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
