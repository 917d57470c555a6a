"""Reads, checks and writes the headers of safetensors files, and the JSON in them."""

import functools
import itertools
import json
import math
import mmap
import os
import reprlib
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, BinaryIO, NoReturn, Union, get_args, get_origin, get_type_hints

import torch

from kvlayers.errors import CacheFileError, CachePathError, OptionError

LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, little-endian."""

MOST_FILE_BYTES = 2**50
"""More than any file has, and more tokens than anybody decodes. The first bytes of a text are a larger number."""

MAX_HEADER_BYTES = 4 * 2**20
"""Far more than any cache needs, and still quick to parse."""

MAX_BRACKETS = 200_000
"""The most lists and objects in a JSON text. A tensor has three, and each takes far more memory than its text."""

MAX_DIGITS = 19
"""The most digits of a whole number: the digits of an int64."""

MAX_DIMS = 8
MAX_EMPTY_ELEMENTS = 2**32
"""The greatest product of the other dimensions of an empty tensor, which the size of the file does not limit."""

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

Content = bytes | bytearray | memoryview
"""The bytes of a file."""


ReadRange = Callable[[int, int], Content]
"""Reads the bytes of a file from a start to an end, or fewer if the file ends before."""


@dataclass(frozen=True)
class TensorEntry:
    """The entry of one tensor in the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Header:
    """The header of a file.

    Attributes:
        content: the bytes of the file up to its tensors.
        metadata: texts by name.
        tensors: entries of the tensors by name.
        ranges: start and end of each tensor in the file, in bytes.
        file_bytes: size of the whole file.
    """

    content: bytes
    metadata: dict[str, str]
    tensors: dict[str, TensorEntry]
    ranges: dict[str, tuple[int, int]]
    file_bytes: int

    @property
    def in_order(self) -> list[str]:
        """The names of the tensors, in the order of their bytes."""
        return sorted(self.tensors, key=self.ranges.__getitem__)


@dataclass(frozen=True)
class _Claim:
    """What a header says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def refuse(path: str, expected: str, seen: str, remedy: str = "it is damaged, or not made by save_cache()") -> NoReturn:
    """Raise the error for a file that cannot be loaded."""
    raise CacheFileError(f"{path} must have {expected}, got {seen}: {remedy}.")


def shown(text: object) -> str:
    """A value from a file for an error message: short, and without control characters.

    `reprlib` limits the work, since the value may be nested millions of times.
    """
    whole = ascii(text[:80]) if isinstance(text, str) else ascii(reprlib.repr(text))[1:-1]
    return whole if len(whole) <= 80 else f"{whole[:77]}..."


def checked_path(path: object) -> str:
    """The path as text.

    Raises:
        OptionError: `path` is not a path.
    """
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        raise OptionError(
            f"`path` must be the path of a file, got a {type(path).__name__}: pass a str or a Path."
        ) from None
    if "\0" in text or not text:
        raise OptionError(f"`path` must be the path of a file, got {text!r}: pass a path without null bytes.")
    return text


def check_regular(path: str, missing_is_fine: bool = False) -> os.stat_result | None:
    """The status of the regular file at `path`, `None` if it may be missing and is.

    Raises:
        CachePathError: the file is missing, or is not a regular file.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        if missing_is_fine:
            return None
        raise CachePathError(f"The file {path} does not exist: save a cache to it first.") from None
    except OSError as error:
        raise CachePathError(f"The path {path} cannot be reached: {error.strerror}.") from error
    if stat.S_ISLNK(found.st_mode):
        raise CachePathError(
            f"`path` must be a regular file, but {path} is a symbolic link, which may lead anywhere: pass "
            "os.path.realpath() of it if you mean its target."
        )
    if not stat.S_ISREG(found.st_mode):
        what = "a directory" if stat.S_ISDIR(found.st_mode) else "a device, a pipe or a socket"
        raise CachePathError(f"`path` must be a regular file, but {path} is {what}: pass the path of a file.")
    return found


def mapped(opened: BinaryIO) -> mmap.mmap | bytes:
    """The content of a file, which stays the same if another process replaces or deletes the file.

    Raises:
        OSError: it cannot be read.
    """
    if not os.fstat(opened.fileno()).st_size:
        return b""
    # A private copy of what is written to, because torch warns of memory that it must not write to.
    return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)


def parse_header(path: str, file_bytes: int, read: ReadRange) -> Header:
    """The header of a file that is read by ranges.

    Args:
        path: name of the file in errors.
        file_bytes: size of the file.
        read: reads a range of bytes. Only the range of the header is read.

    Raises:
        CacheFileError: the header is invalid, or claims more than the file can hold.
    """
    start = bytes(read(0, LENGTH_BYTES))
    room = file_bytes - LENGTH_BYTES
    length = int.from_bytes(start, "little")
    if len(start) < LENGTH_BYTES:
        refuse(path, f"at least {LENGTH_BYTES} bytes", str(file_bytes))
    if length > MOST_FILE_BYTES:
        raise CacheFileError(f"{path} is no saved cache: it does not begin as the files of save_cache() do.")
    if length > min(room, MAX_HEADER_BYTES):
        refuse(path, f"a header of at most {min(room, MAX_HEADER_BYTES)} bytes", f"one that claims {length}")
    text = bytes(read(LENGTH_BYTES, LENGTH_BYTES + length))
    content = parse_json(path, text, "the header")
    if not isinstance(content, dict):
        refuse(path, "a header that names tensors", f"{shown(content)} in its place")
    metadata: dict[str, str] = typed(path, "the metadata", dict[str, str], content.pop("__metadata__", {}))
    entries, ranges = _entries(path, content, LENGTH_BYTES + length, file_bytes)
    return Header(start + text, metadata, entries, ranges, file_bytes)


def _entries(
    path: str, content: dict[str, Any], data_start: int, file_bytes: int
) -> tuple[dict[str, TensorEntry], dict[str, tuple[int, int]]]:
    """The tensors of a header, whose bytes must follow one another from the first to the last of the file."""
    entries: dict[str, TensorEntry] = {}
    ranges: dict[str, tuple[int, int]] = {}
    for name, fields in content.items():
        claim: _Claim = typed(path, f"the entry of {shown(name)}", _Claim, fields)
        begin, end = claim.data_offsets
        if len(claim.shape) > MAX_DIMS:
            refuse(path, f"a shape of at most {MAX_DIMS} sizes for {shown(name)}", shown(claim.shape))
        nbytes = math.prod(claim.shape) * claim.dtype.itemsize
        if end - begin != nbytes:
            refuse(path, f"{nbytes} bytes of {shown(name)} {list(claim.shape)}", f"{end - begin}")
        if math.prod(size for size in claim.shape if size) > MAX_EMPTY_ELEMENTS and begin == end:
            refuse(path, f"a shape that states have for {shown(name)}", shown(claim.shape))
        ranges[name] = data_start + begin, data_start + end
        entries[name] = TensorEntry(claim.dtype, claim.shape)
    following = sorted(ranges.values())
    if [begin for begin, _ in following] != [data_start, *(end for _, end in following)][: len(following)]:
        refuse(path, "tensors that follow one another", "some that overlap, or gaps between them")
    last = following[-1][1] if following else data_start
    if last != file_bytes:
        refuse(path, f"{last - data_start} bytes of tensors", str(file_bytes - data_start))
    return entries, ranges


def ranges_of(content: Content | mmap.mmap) -> ReadRange:
    """What reads ranges of bytes in memory, without copies if they may be written to."""
    view = memoryview(bytearray(content) if isinstance(content, bytes) else content)
    return lambda start, end: view[start:end]


def new_header(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> Header:
    """The header of a file of these tensors, in their order. Equal ones have equal bytes.

    Raises:
        CacheFileError: it is larger than a header may be.
    """
    claims: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, entry in tensors.items():
        start, end = end, end + math.prod(entry.shape) * entry.dtype.itemsize
        claims[name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": (start, end)}
    text = json.dumps(claims, separators=(",", ":"), sort_keys=True).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    content = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return parse_header("The file", len(content) + end, lambda start, stop: content[start:stop])


def parse_json(path: str, text: bytes | str, what: str) -> Any:
    """Parse a JSON text from a file. Anything that two parsers could read differently is refused.

    Raises:
        CacheFileError: the text is not JSON, repeats a name, or has numbers that are not finite or far too long.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if data.count(b"[") + data.count(b"{") > MAX_BRACKETS:
        refuse(path, f"at most {MAX_BRACKETS} lists and objects in {what}", "more")
    try:
        return _DECODER.decode(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CacheFileError(
            f"{path} must have {what} in plain JSON, got {shown(str(error))}: it is damaged, or not made by "
            "save_cache()."
        ) from error


def typed(path: str, what: str, form: Any, content: object) -> Any:
    """What a JSON value means where a value of a type is expected: nothing is converted, and no field may be missing.

    Args:
        path: name of the file in errors.
        what: what it is, in errors.
        form: the type. A dataclass is an object of exactly its fields, a named tuple is a list, a `torch.dtype` the
            name of one of `DTYPES`, and each `int` that stands alone is a count of at most `MOST_FILE_BYTES`.
        content: the value, as `parse_json` returns it.

    Raises:
        CacheFileError: it is of another form.
    """
    try:
        return _read_as(form, content)
    except _MALFORMED as error:
        refuse(path, f"{what} as kvlayers writes it", f"{shown(content)} ({shown(str(error))})")


_MALFORMED = (TypeError, ValueError, LookupError)


def _read_as(form: Any, content: Any) -> Any:
    origin, parts = get_origin(form), get_args(form)
    kind = type(content)
    if form is Any or (kind is form and form is not int):
        return content
    if form is int and kind is int and 0 <= content <= MOST_FILE_BYTES:
        return content
    if origin in (Union, UnionType) and kind in {get_origin(part) or part for part in parts}:
        return content
    if form is torch.dtype:
        return DTYPES[content]
    if origin is dict and kind is dict:
        return {name: _read_as(parts[1], value) for name, value in content.items()}
    if origin is tuple and kind is list:
        each = parts[:1] * len(content) if parts[-1] is ... else parts
        return tuple(_read_as(own, value) for own, value in zip(each, content, strict=True))
    if origin is None and kind in (dict, list):
        fields = _fields(form)
        if kind is dict and content.keys() == fields.keys():
            return form(**{name: _read_as(own, content[name]) for name, own in fields.items()})
        if kind is list and issubclass(form, tuple):
            return form(*_read_as(tuple[tuple(fields.values())], content))  # type: ignore[misc]
    raise ValueError(f"{shown(content)} for {form}")


@functools.cache
def _fields(form: type) -> dict[str, Any]:
    """The types of the fields of a dataclass or a named tuple."""
    return get_type_hints(form)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = sorted(name for name, _ in pairs)
        twice = next(name for name, following in itertools.pairwise(names) if name == following)
        raise ValueError(f"{twice} comes twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS + 1 or abs(int(text)) >= 2**63:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


_DECODER = json.JSONDecoder(
    object_pairs_hook=_without_repetition, parse_constant=_no_number, parse_int=_whole, parse_float=_finite
)
