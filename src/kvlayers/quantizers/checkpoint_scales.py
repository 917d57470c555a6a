"""Scales of keys and values that a checkpoint brings, as compressed-tensors and vLLM write them.

A checkpoint with a `kv_cache_scheme` was calibrated with one scale for all keys of a layer, and one for all values:
`code = float8(state / scale)` (https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache.html).
"""

import json
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvlayers.errors import OptionError
from kvlayers.quantizers.contract import Side

CHECKPOINT = "checkpoint"
"""The option `scales` for the checkpoint that the model was loaded from."""

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

Scales = tuple[float, ...]
"""One number for all KV heads, or one for each."""

_NAME = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.(?:self_attn|self_attention|attention|attn)\."
    r"(?:(?:attn\.)?(?P<scale>k|v|kv)_scale"
    r"|(?P<projection>k|v)_proj\.(?:(?P=projection)_scale|output_scale))$"
)

_SIDES: dict[str, tuple[Side, ...]] = {"k": ("keys",), "v": ("values",), "kv": ("keys", "values")}

_FLOAT8 = {"type": ("float",), "num_bits": (8,), "symmetric": (True, None), "dynamic": (False, None)}
"""What a `kv_cache_scheme` must say, and which of it may be left out (`None`)."""


def read_scales(
    checkpoint: str | os.PathLike[str], layers: Sequence[int], kv_heads: int
) -> list[tuple[Scales, Scales]]:
    """The scales of keys and of values of some layers.

    No other tensor of the checkpoint is read.

    Args:
        checkpoint: a directory with safetensors files, such a file, or the name of a repository on the Hub.
        layers: indices of the layers in the model.
        kv_heads: KV heads of a layer.

    Raises:
        OptionError: a file is missing or damaged, a layer has no scales or has two, or scales are not positive numbers,
            one for the layer or one for each KV head.
    """
    found: dict[tuple[int, Side], tuple[str, Scales]] = {}
    for name, layer, side, tensor in _tensors(checkpoint):
        if (layer, side) in found:
            raise OptionError(
                f"`scales`: the checkpoint {os.fspath(checkpoint)!r} has two scales for the {side} of layer {layer}, "
                f"{found[layer, side][0]} and {name}: pass one pair of numbers for each layer instead."
            )
        found[layer, side] = name, checked_scales(tensor, name, kv_heads)
    sides: tuple[Side, Side] = ("keys", "values")
    missing = [(layer, side) for layer in layers for side in sides if (layer, side) not in found]
    if missing:
        layer, side = missing[0]
        raise OptionError(
            f"`scales`: the checkpoint {os.fspath(checkpoint)!r} has no scale for the {side} of layer {layer}"
            f"{f', nor {len(missing) - 1} others' if len(missing) > 1 else ''} (such as "
            f"model.layers.{layer}.self_attn.{side[0]}_scale): leave out `scales`, which gives each group a scale of "
            "its own."
        )
    return [(found[layer, "keys"][1], found[layer, "values"][1]) for layer in layers]


def check_scheme(scheme: Mapping[str, Any]) -> None:
    """Raise `OptionError` if a `kv_cache_scheme` is not one scale for a layer, or a KV head, of float8 codes."""
    wrong = {name: scheme.get(name) for name, taken in _FLOAT8.items() if scheme.get(name) not in taken}
    if scheme.get("strategy") not in ("tensor", "attn_head", None):
        wrong["strategy"] = scheme["strategy"]
    if wrong:
        raise OptionError(
            "`scales`: the kv_cache_scheme of the checkpoint must be of symmetric, static float8 numbers with one "
            f"scale for a layer or for each KV head, got {wrong}: leave out `scales`."
        )


def checked_scales(given: object, name: str, kv_heads: int | None) -> Scales:
    """One scale, or one for each KV head, as numbers that float32 holds.

    Args:
        given: a number, a tensor, or a sequence of numbers.
        name: what errors call it.
        kv_heads: KV heads of the layer, `None` if that is not known.

    Raises:
        OptionError: it is something else, or a number is not positive and finite in float32.
    """
    flat = given.detach().float().flatten().tolist() if isinstance(given, Tensor) else given
    numbers: list[Any] = list(flat) if isinstance(flat, Sequence) and not isinstance(flat, str | bytes) else [flat]
    if not numbers or (len(numbers) > 1 and kv_heads is not None and len(numbers) != kv_heads):
        shape = list(given.shape) if isinstance(given, Tensor) else len(numbers)
        raise OptionError(f"`scales`: {name} must be one number, or one for each of {kv_heads} KV heads, got {shape}.")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not _SMALLEST <= number <= _LARGEST:
            raise OptionError(f"`scales`: {name} must be positive and finite in float32, got {number!r}.")
    # What is computed with is a float32, so that is what is kept.
    return tuple(_in_float32(float(number)) for number in numbers)


_SMALLEST, _LARGEST = 2.0**-126, 2.0**119
"""Between them, quotients of states and products with float8 numbers stay in the range of float32."""


def _in_float32(number: float) -> float:
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * 2**24), exponent - 24)


def _tensors(checkpoint: str | os.PathLike[str]) -> Iterator[tuple[str, int, Side, Tensor]]:
    """The scales in a checkpoint, as name, layer, side and tensor."""
    for path, names in _files(checkpoint):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys() if names is None else names:
                    if (match := _NAME.search(name)) is None:
                        continue
                    for side in _SIDES[match["scale"] or match["projection"]]:
                        yield name, int(match["layer"]), side, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise OptionError(f"`scales`: {path} cannot be read: {error}") from error


def _files(checkpoint: str | os.PathLike[str]) -> Iterator[tuple[str, list[str] | None]]:
    """The files that may hold scales, and the names in each; `None` for all names."""
    if os.path.isfile(checkpoint):
        yield os.fspath(checkpoint), None
        return
    index = _file(checkpoint, INDEX)
    if index is None:
        weights = _file(checkpoint, WEIGHTS)
        if weights is None:
            raise OptionError(
                f"`scales`: expected a directory, or a repository on the Hub, with {WEIGHTS} or {INDEX}, but saw "
                f"{os.fspath(checkpoint)!r}: pass the checkpoint that the scales are in."
            )
        yield weights, None
        return
    try:
        places: dict[str, str] = json.loads(pathlib.Path(index).read_text(encoding="utf-8"))["weight_map"]
        by_file: dict[str, list[str]] = {}
        for name, file in places.items():
            if _NAME.search(name):
                by_file.setdefault(file, []).append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"`scales`: {index} cannot be read: {error!r}") from error
    for file, names in by_file.items():
        path = _file(checkpoint, file)
        if path is None:
            raise OptionError(f"`scales`: {index} names {file}, which is missing: complete the checkpoint.")
        yield path, names


def _file(checkpoint: str | os.PathLike[str], name: str) -> str | None:
    """The path of a file of a checkpoint, `None` if there is no such file."""
    if os.path.isdir(checkpoint):
        path = pathlib.Path(checkpoint, name)
        return str(path) if path.is_file() else None
    from transformers.utils import cached_file

    try:
        found: str | None = cached_file(os.fspath(checkpoint), name, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):
        return None
    return found
