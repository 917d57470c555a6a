"""Scales of keys and values that a checkpoint brings, as compressed-tensors and vLLM write them.

A checkpoint with a `kv_cache_scheme` was calibrated with one scale for all keys of a layer, and one for all values:
`code = float8(state / scale)` (https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache.html).
"""

import json
import os
import pathlib
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file

from kvlayers.errors import OptionError
from kvlayers.kernels.codes.quantizer_contract import Side, fits_heads

CHECKPOINT = "checkpoint"
"""The option `scales` for the checkpoint that the model was loaded from."""

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"

Scales = tuple[float, ...]
"""One number for all KV heads, or one for each."""

_NAME = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.(?:self_attn|self_attention|attention|attn)\."
    r"(?:(?:attn\.)?(?P<scale>k|v|kv)_scale"
    r"|(?P<projection>k|v)_proj\.(?:(?P=projection)_scale|output_scale))$"
)

_OTHER_MODULES = re.compile(r"vision|visual|audio|encoder|(?:^|\.)mtp\.")
"""Modules whose layers are not those of the decoder, although they have the same names."""

_SIDES: dict[str, tuple[Side, ...]] = {"k": ("keys",), "v": ("values",), "kv": ("keys", "values")}

_FLOAT8 = {
    "type": ("float",),
    "num_bits": (8,),
    "symmetric": (True, None),
    "dynamic": (False, None),
    "strategy": ("tensor", "attn_head", None),
}
"""What a `kv_cache_scheme` must say, and which of it may be left out (`None`)."""


def read_scales(
    checkpoint: str | os.PathLike[str],
    kv_heads: Mapping[int, int],
    revision: str | None = None,
    has_latents: bool = False,
) -> list[tuple[Scales, Scales]]:
    """The scales of keys and of values of some layers.

    No other tensor of the checkpoint is read. A file that lies on the Hub is downloaded as a whole.

    Args:
        checkpoint: a directory with safetensors files, such a file, or the name of a repository on the Hub.
        kv_heads: KV heads of each layer, by its index in the model.
        revision: commit of a repository on the Hub; its newest one if it is not given.
        has_latents: whether the layers cache the latents and the rotated keys of multi-head latent attention, which
            other engines divide by the scale of the keys alone.

    Raises:
        OptionError: a file is missing, damaged or out of reach, a layer has no scales or has two, or scales are not
            positive numbers, one for the layer or one for each KV head.
    """
    found: dict[tuple[int, Side], tuple[str, Scales]] = {}
    for name, layer, side, tensor in _tensors(checkpoint, kv_heads, revision):
        if (layer, side) in found:
            raise OptionError(
                f"`scales`: the checkpoint {os.fspath(checkpoint)!r} has two scales for the {side} of layer {layer}, "
                f"{found[layer, side][0]} and {name}: pass one pair of numbers for each layer instead."
            )
        found[layer, side] = name, checked_scales(tensor, name, kv_heads[layer])
    sides: tuple[Side, Side] = ("keys", "keys" if has_latents else "values")
    missing = [(layer, side) for layer in kv_heads for side in dict.fromkeys(sides) if (layer, side) not in found]
    if missing:
        layer, side = missing[0]
        raise OptionError(
            f"`scales`: the checkpoint {os.fspath(checkpoint)!r} has no scale for the {side} of layer {layer}"
            f"{f', nor {len(missing) - 1} others' if len(missing) > 1 else ''} (such as "
            f"model.layers.{layer}.self_attn.{side[0]}_scale): leave out `scales`, which gives each group a scale of "
            "its own."
        )
    return [(found[layer, sides[0]][1], found[layer, sides[1]][1]) for layer in kv_heads]


def check_config_file(checkpoint: str | os.PathLike[str], revision: str | None = None) -> None:
    """Raise `OptionError` if the config.json of a checkpoint says that its scales are not those of float8 codes.

    Args:
        checkpoint: as in `read_scales`. It need not have a config.json.
        revision: as in `read_scales`.
    """
    place = pathlib.Path(checkpoint)
    path = _file(place.parent if place.is_file() else checkpoint, CONFIG, revision)
    if path is None:
        return
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"`scales`: {path} cannot be read: {error!r}") from error
    settings = content.get("quantization_config") if isinstance(content, Mapping) else None
    inner = settings.get("quantization_config") if isinstance(settings, Mapping) else None
    for part in (settings, inner):
        if isinstance(part, Mapping) and part.get("kv_cache_scheme"):
            check_scheme(part["kv_cache_scheme"])
            return


def check_scheme(scheme: object) -> None:
    """Raise `OptionError` if a `kv_cache_scheme` is not one scale for a layer, or a KV head, of float8 codes."""
    # AutoFP8 writes a word.
    if scheme == "static":
        return
    if not isinstance(scheme, Mapping):
        raise OptionError(
            f"`scales`: the kv_cache_scheme of the checkpoint must be 'static' or a mapping, got {scheme!r}: leave out "
            "`scales`."
        )
    wrong = {name: scheme.get(name) for name, taken in _FLOAT8.items() if scheme.get(name) not in taken}
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
        OptionError: it is something else, or float32 cannot compute with a number.
    """
    flat = given.detach().float().flatten().tolist() if isinstance(given, Tensor) else given
    numbers: list[Any] = list(flat) if isinstance(flat, Sequence) and not isinstance(flat, str | bytes) else [flat]
    if not numbers or not (kv_heads is None or fits_heads(len(numbers), kv_heads)):
        heads = "KV head" if kv_heads is None else f"of {kv_heads} KV heads"
        shape = list(given.shape) if isinstance(given, Tensor) else len(numbers)
        raise OptionError(
            f"`scales`: {name} must be one number, or one for each {heads}, got {shape}: pass those of the model's "
            "checkpoint."
        )
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise OptionError(
                f"`scales`: {name} must be numbers, got {number!r} ({type(number).__name__}): pass one tensor, or "
                "float(...) of each number."
            )
        if not _SMALLEST <= number <= _LARGEST:
            raise OptionError(
                f"`scales`: {name} must be from {_SMALLEST:.2g} to {_LARGEST:.2g}, with which float32 can compute, got "
                f"{number!r}: calibrate it again."
            )
    # What is computed with is a float32, so that is what is kept.
    return tuple(torch.tensor(numbers, dtype=torch.float32).tolist())


_SMALLEST, _LARGEST = 2.0**-126, 2.0**119
"""Between them, quotients of states and products with float8 numbers stay in the range of float32."""


def _tensors(
    checkpoint: str | os.PathLike[str], layers: Container[int], revision: str | None
) -> Iterator[tuple[str, int, Side, Tensor]]:
    """The scales of some layers of the decoder, as name, layer, side and tensor."""
    for path, names in _files(checkpoint, layers, revision):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys() if names is None else names:
                    for layer, side in _parts_of(name, layers):
                        yield name, layer, side, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise OptionError(f"`scales`: {path} cannot be read: {error}") from error


def _parts_of(name: str, layers: Container[int]) -> list[tuple[int, Side]]:
    """Layer and side that the tensor of this name is a scale of; empty if it is no scale of these layers."""
    match = _NAME.search(name)
    if match is None or int(match["layer"]) not in layers or _OTHER_MODULES.search(name[: match.start() + 1]):
        return []
    return [(int(match["layer"]), side) for side in _SIDES[match["scale"] or match["projection"]]]


def _files(
    checkpoint: str | os.PathLike[str], layers: Container[int], revision: str | None
) -> Iterator[tuple[str, list[str] | None]]:
    """The files that may hold scales of some layers, and the names in each; `None` for all names."""
    if os.path.isfile(checkpoint):
        yield os.fspath(checkpoint), None
        return
    try:
        found = str(_file(checkpoint, WEIGHTS, revision))
    except OptionError as failure:
        try:
            # Also without a network, as there may be many files on disk nevertheless.
            found = str(_file(checkpoint, INDEX, revision))
        except OptionError:
            raise failure from None
    if not found.endswith(INDEX):
        yield found, None
        return
    try:
        places: dict[str, str] = json.loads(pathlib.Path(found).read_text(encoding="utf-8"))["weight_map"]
        by_file: dict[str, list[str]] = {}
        for name, file in places.items():
            if _parts_of(name, layers):
                by_file.setdefault(file, []).append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"`scales`: {found} cannot be read: {error!r}") from error
    for file, names in by_file.items():
        yield str(_file(checkpoint, file, revision)), names


def _file(checkpoint: str | os.PathLike[str], name: str, revision: str | None) -> str | None:
    """The path of a file of a checkpoint, `None` if it has no config.json.

    Raises:
        OptionError: there is no other such file, or neither the Hub nor its files on disk can be read.
    """
    try:
        found: str | None = cached_file(checkpoint, name, revision=revision)
    except (OSError, ValueError) as error:
        # Before transformers 5 a name that cannot be a repository's is a ValueError.
        raise OptionError(
            f"`scales`: {name} of {os.fspath(checkpoint)!r} cannot be read: {error} Pass the path of a checkpoint with "
            f"{WEIGHTS} or {INDEX}, or the name of a repository on the Hub that you have access to."
        ) from error
    return found
