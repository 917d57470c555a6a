"""Output of commands: JSON for machines, rich for people."""

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
    """Convert a value to types that JSON has. Fields with `repr=False` are left out.

    A float that is not finite becomes null, since JSON has no such number.

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


USAGE_PREFIX = "To use it: "
"""Start of a line whose rest can be pasted into code."""


def usage_line(options: Mapping[str, Any]) -> str:
    """A line of code that asks `generate()` for a cache.

    Example:
        >>> usage_line({"cache_implementation": "int4"})
        "To use it: kvlayers.install(); model.generate(..., cache_implementation='int4')"
    """
    arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"{USAGE_PREFIX}kvlayers.install(); model.generate(..., {arguments})"


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout. It does not go through a rich console, which would wrap the lines."""
    print(json.dumps(plain(value), indent=2, allow_nan=False))


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence the warnings of transformers and of the hub client."""
    before = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before[0])
        hub_logging.set_verbosity(before[1])
