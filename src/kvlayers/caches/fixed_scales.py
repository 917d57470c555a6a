"""The option `scales` of a quantized cache: scales of float8 numbers that never change, for each layer of a model."""

import os
from collections.abc import Sequence

from torch import Tensor
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvlayers.caches.from_config import FULL, HYBRID, WINDOWED
from kvlayers.errors import OptionError
from kvlayers.quantizers.checkpoint_scales import (
    CHECKPOINT,
    Scales,
    check_config_file,
    check_settings,
    checked_scales,
    read_scales,
)
from kvlayers.quantizers.contract import backend as backend_called
from kvlayers.upstream import model_layers, model_types
from kvlayers.upstream.config_numbers import ConfigNumbers
from kvlayers.upstream.kv_heads import kv_heads

OfSide = float | Sequence[float] | Tensor
"""One number for all KV heads, or one for each."""

GivenScales = str | os.PathLike[str] | Sequence[tuple[OfSide, OfSide]]


def scales_of_layers(
    given: object, backend: str, config: object | None, quantize_sliding: bool
) -> dict[str, list[Scales]]:
    """The options `key_scales` and `value_scales` of a quantization, for each layer.

    Args:
        given: the option `scales`.
        backend: name of the quantizer.
        config: config of the model, `None` if it is not known.
        quantize_sliding: whether windows are quantized, so that they take scales too.

    Raises:
        OptionError: the backend takes no scales, no layer does, the checkpoint lacks some, or they have a wrong shape.
        ConfigError: the config does not describe the model's layers.
    """
    backend_called(backend).check_takes_scales()
    heads_of = None if config is None else _heads_of_layers(config, quantize_sliding)
    if isinstance(given, str | os.PathLike):
        pairs = _from_checkpoint(given, config, heads_of)
    elif isinstance(given, Sequence) and given:
        pairs = [_checked_pair(pair, index, heads_of) for index, pair in enumerate(given)]
    else:
        raise OptionError(
            f"`scales` must be {CHECKPOINT!r}, a checkpoint, or a pair (keys, values) for each layer, got {given!r}."
        )
    if not any(keys for keys, _ in pairs):
        raise OptionError(f"`scales` must have a pair (keys, values) for a layer at least, got {given!r}.")
    return {"key_scales": [keys for keys, _ in pairs], "value_scales": [values for _, values in pairs]}


def _heads_of_layers(config: object, quantize_sliding: bool) -> dict[int, int]:
    """KV heads of each layer whose states are quantized, by its index."""
    specs = model_layers.layer_specs(config)
    has_latents = model_types.caches_latents(config)
    found: dict[int, int] = {}
    for spec, own in zip(specs, model_layers.layer_configs(config), strict=False):
        attention = HYBRID.get(spec.layer_type, spec.layer_type)
        if attention == FULL or (quantize_sliding and attention in WINDOWED):
            found[spec.index] = 1 if has_latents else kv_heads(ConfigNumbers(own, spec.index), attention)
    if not found:
        raise OptionError(
            "`scales` are for layers of full attention, and for windows with quantize_sliding=True, but the layers of "
            f"the model are {', '.join(sorted({spec.layer_type for spec in specs}))}: leave out `scales`."
        )
    return found


def _from_checkpoint(
    given: str | os.PathLike[str], config: object | None, heads_of: dict[int, int] | None
) -> list[tuple[Scales, Scales]]:
    if config is None or heads_of is None:
        raise OptionError(f"`scales={os.fspath(given)!r}` needs the model: pass config=model.")
    model_config = model_types.config_of(config)
    own = model_config.name_or_path
    checkpoint = own if given == CHECKPOINT else given
    if not checkpoint:
        raise OptionError(
            f"`scales={CHECKPOINT!r}` needs to know where the model came from, but its config has no name_or_path: "
            "pass the path of the checkpoint."
        )
    # Another commit may have other scales.
    commit = vars(model_config).get("_commit_hash") if checkpoint == own else None
    if given == CHECKPOINT:
        settings = getattr(model_config, "quantization_config", None)
        check_settings(settings.to_dict() if isinstance(settings, QuantizationConfigMixin) else settings)
    else:
        check_config_file(checkpoint, commit)
    scales = read_scales(checkpoint, heads_of, commit, model_types.caches_latents(config))
    found = dict(zip(heads_of, scales, strict=True))
    return [found.get(spec.index, ((), ())) for spec in model_layers.layer_specs(config)]


def _checked_pair(pair: object, index: int, heads_of: dict[int, int] | None) -> tuple[Scales, Scales]:
    if isinstance(pair, str | bytes) or not isinstance(pair, Sequence) or len(pair) not in (0, 2):
        raise OptionError(f"`scales` must have a pair (keys, values) for each layer, got {pair!r} for layer {index}.")
    if not pair:
        return (), ()
    heads = None if heads_of is None else heads_of.get(index)
    keys, values = (
        checked_scales(side, f"the scale of the {name} of layer {index}", heads)
        for side, name in zip(pair, ("keys", "values"), strict=True)
    )
    return keys, values
