"""The option `scales` of a quantized cache: scales of float8 numbers that never change, for each layer of a model."""

import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvlayers.errors import OptionError
from kvlayers.quantizers.checkpoint_scales import CHECKPOINT, Scales, check_scheme, checked_scales, read_scales
from kvlayers.quantizers.registry import backend as backend_called
from kvlayers.upstream import model_layers, model_types

OfSide = float | Sequence[float] | Tensor
"""One number for all KV heads, or one for each."""

GivenScales = str | os.PathLike[str] | Sequence[tuple[OfSide, OfSide]]

ATTENDS_TO_ALL = ("full_attention", "hybrid")
"""Layer types whose states are quantized in any case. Others need no scales."""


def scales_of_layers(given: object, backend: str, config: object | None) -> dict[str, list[Scales]]:
    """The options `key_scales` and `value_scales` of a quantization, for each layer.

    Args:
        given: the option `scales`.
        backend: name of the quantizer.
        config: config of the model, `None` if it is not known.

    Raises:
        OptionError: the backend takes no scales, the checkpoint lacks some, or they have a wrong shape.
    """
    backend_called(backend).check_takes_scales()
    if isinstance(given, str | os.PathLike):
        pairs = _from_checkpoint(given, config)
    elif isinstance(given, Sequence) and given:
        pairs = [_checked_pair(pair, index, config) for index, pair in enumerate(given)]
    else:
        raise OptionError(
            f"`scales` must be {CHECKPOINT!r}, a checkpoint, or a pair (keys, values) for each layer, got {given!r}."
        )
    return {"key_scales": [keys for keys, _ in pairs], "value_scales": [values for _, values in pairs]}


def _from_checkpoint(given: str | os.PathLike[str], config: object | None) -> list[tuple[Scales, Scales]]:
    if config is None:
        raise OptionError(f"`scales={os.fspath(given)!r}` needs the model: pass config=model.")
    model_config = model_types.config_of(config)
    settings: Any = getattr(model_config, "quantization_config", None)
    scheme = _scheme(settings if settings is None or isinstance(settings, dict) else settings.to_dict())
    checkpoint = given
    if given == CHECKPOINT:
        if scheme is not None:
            check_scheme(scheme)
        checkpoint = model_config.name_or_path
        if not checkpoint:
            raise OptionError(
                f"`scales={CHECKPOINT!r}` needs to know where the model came from, but its config has no name_or_path: "
                "pass the path of the checkpoint."
            )
    specs = model_layers.layer_specs(model_config)
    layers = [spec.index for spec in specs if spec.layer_type in ATTENDS_TO_ALL]
    kv_heads = _kv_heads(model_config)
    found = dict(zip(layers, read_scales(checkpoint, layers, kv_heads), strict=True))
    return [found.get(spec.index, ((), ())) for spec in specs]


def _scheme(settings: dict[str, Any] | None) -> dict[str, Any] | None:
    """The `kv_cache_scheme` of a checkpoint, if it says one."""
    settings = settings or {}
    return settings.get("kv_cache_scheme") or (settings.get("quantization_config") or {}).get("kv_cache_scheme")


def _kv_heads(config: object) -> int:
    decoder = model_types.decoder_config(config)
    found = getattr(decoder, "num_key_value_heads", None) or decoder.num_attention_heads
    return int(found)


def _checked_pair(pair: object, index: int, config: object | None) -> tuple[Scales, Scales]:
    if isinstance(pair, str | bytes) or not isinstance(pair, Sequence) or len(pair) not in (0, 2):
        raise OptionError(f"`scales` must have a pair (keys, values) for each layer, got {pair!r} for layer {index}.")
    if not pair:
        return (), ()
    kv_heads = None if config is None else _kv_heads(config)
    keys, values = (
        checked_scales(side, f"the scale of the {name} of layer {index}", kv_heads)
        for side, name in zip(pair, ("keys", "values"), strict=True)
    )
    return keys, values
