"""What commands print: for machines as JSON, for people through rich."""

import dataclasses
import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as transformers_logging


def plain(value: Any) -> Any:
    """A value in words of JSON: fields that are not for readers (`repr=False`) are left out.

    What is not a number is null, as JSON has no word for it.

    Example:
        >>> plain({"dtype": torch.bfloat16, "tokens": (1, 2)})
        {'dtype': 'bfloat16', 'tokens': [1, 2]}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = (field for field in dataclasses.fields(value) if field.repr)
        return {field.name: plain(getattr(value, field.name)) for field in shown}
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value


PASTE = "To use it: "
"""How a line begins whose rest can be pasted."""


def pasted(options: Mapping[str, Any]) -> str:
    """A line that says how `generate()` is asked for a cache.

    Example:
        >>> pasted({"cache_implementation": "int4"})
        "To use it: kvlayers.install(); model.generate(..., cache_implementation='int4')"
    """
    arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"{PASTE}kvlayers.install(); model.generate(..., {arguments})"


def print_json(value: Any) -> None:
    """A value as JSON on stdout, as it is: a console would wrap it."""
    print(json.dumps(plain(value), indent=2, allow_nan=False))


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep transformers' advice, and the hub's account of its attempts, out of what a command shows."""
    before = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before[0])
        hub_logging.set_verbosity(before[1])
