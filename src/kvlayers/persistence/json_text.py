"""JSON in files: what is read is exactly what would be written, so that no two readers can differ about a text."""

import contextlib
import reprlib
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import torch

from kvlayers.errors import CacheFileError, OptionError

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

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Form = TypeVar("Form")


def refuse(path: str, expected: str, seen: str, remedy: str = "it is damaged, or not made by save_cache()") -> NoReturn:
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
        OptionError: a text in it is no Unicode.
    """
    try:
        return msgspec.json.encode(content, order="sorted", enc_hook=_plain).decode()
    except UnicodeEncodeError as error:
        raise OptionError(
            f"A text must be Unicode without lone surrogates, got {shown(error.object)}: choose another."
        ) from None


def _plain(value: Any) -> str:
    """What is written for a value that JSON does not know: a dtype, or a text of a class of its own."""
    return str(value) if isinstance(value, str) else _DTYPE_NAMES[value]


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
