"""The cache that holds most tokens in a few bits."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import transformers
from torch import Tensor
from typing_extensions import override

from kvlayers.core.arguments import checked_hint
from kvlayers.core.cache import Cache
from kvlayers.core.description import NestedArgument
from kvlayers.core.from_config import (
    BUDGET,
    FULL,
    HYBRID,
    RECALL,
    WINDOWED,
    AttentionMaker,
    CheckpointOptions,
    Checkpoints,
    Factory,
    budget_of,
    layers_of,
    recall_of,
)
from kvlayers.core.named_caches import named, register, register_cache_class
from kvlayers.core.token_layer import DynamicLayer, SlidingLayer, window_room
from kvlayers.errors import OptionError
from kvlayers.kernels.codes.quantizer_contract import backend as backend_called
from kvlayers.quantized.quantization import (
    SCALES,
    Quantization,
    QuantizationOfLayers,
    quantization_of_layers,
)
from kvlayers.quantized.quantized_layer import quantized_layer
from kvlayers.quantized.quantized_store import QuantizedStore
from kvlayers.quantized.quantizers.checkpoint_scales import (
    CHECKPOINT,
    Scales,
    check_config_file,
    checked_scales,
    read_scales,
)
from kvlayers.upstream import model_layers, model_types
from kvlayers.upstream.model_layers import LayerSpec
from kvlayers.upstream.model_types import ConfigNumbers, kv_heads
from kvlayers.utils.options import checks_options


def packed_attention_layer(
    quantization: Quantization, length_hint: int | None = None, recall: AttentionMaker | None = None
) -> DynamicLayer:
    """As `full_attention_layer`, with most tokens in packed codes."""
    if recall is None:
        return quantized_layer(quantization, length_hint)
    return recall.layer(length_hint, QuantizedStore(quantization, length_hint))


def quantized_layers(
    config: object,
    quantization: QuantizationOfLayers,
    quantize_sliding: bool,
    length_hint: int | None = None,
    checkpoints: CheckpointOptions = None,
    recall: AttentionMaker | None = None,
) -> list[Any]:
    """As `dynamic_layers`, with full attention quantized, and windows too if `quantize_sliding` is true.

    Raises:
        OptionError: bits were given for another number of layers.
    """
    layers = len(model_layers.layer_specs(config))
    if quantization.count not in (None, layers):
        raise OptionError(
            f"Bits and scales must be given for each of the {layers} layers of the model, got {quantization.count}: "
            "give them for each layer that has a cache, or the same for all."
        )

    def quantized_window(spec: LayerSpec) -> SlidingLayer:
        # A window drops its oldest tokens, so no token could stay as a sink.
        in_window = dataclasses.replace(quantization.of_layer(spec.index), sink_tokens=0)
        window = spec.options["sliding_window"]
        return SlidingLayer(window, QuantizedStore(in_window, window_room(window)))

    kinds: dict[str, Factory] = {
        "full_attention": lambda spec: packed_attention_layer(quantization.of_layer(spec.index), length_hint, recall),
        **dict.fromkeys(
            WINDOWED,
            quantized_window if quantize_sliding else lambda spec: SlidingLayer(spec.options["sliding_window"]),
        ),
    }
    return layers_of(config, kinds, checkpoints)


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
            f"`scales` must be {CHECKPOINT!r}, a checkpoint, or a pair (keys, values) for each layer, got {given!r}: "
            "pass one of them, or leave out `scales`."
        )
    if not any(keys for keys, _ in pairs):
        raise OptionError(
            f"`scales` must have a pair (keys, values) for a layer at least, got {given!r}: leave out `scales`, which "
            "gives each group a scale of its own."
        )
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
            "`scales` must be those of layers of full attention, or of windows with quantize_sliding=True, got a model "
            f"with layers of {', '.join(sorted({spec.layer_type for spec in specs}))} alone: leave out `scales`."
        )
    return found


def _from_checkpoint(
    given: str | os.PathLike[str], config: object | None, heads_of: dict[int, int] | None
) -> list[tuple[Scales, Scales]]:
    if config is None or heads_of is None:
        raise OptionError(f"`config` must be the model for `scales={os.fspath(given)!r}`, got None: pass config=model.")
    model_config = model_types.config_of(config)
    own = model_config.name_or_path
    checkpoint = own if given == CHECKPOINT else given
    if not checkpoint:
        raise OptionError(
            f"`config.name_or_path` must be the model's checkpoint for `scales={CHECKPOINT!r}`, got {own!r}: pass the "
            "path of the checkpoint as `scales`."
        )
    # Another commit may have other scales.
    commit = vars(model_config).get("_commit_hash") if checkpoint == own else None
    check_config_file(checkpoint, commit)
    scales = read_scales(checkpoint, heads_of, commit, model_types.caches_latents(config))
    found = dict(zip(heads_of, scales, strict=True))
    return [found.get(spec.index, ((), ())) for spec in model_layers.layer_specs(config)]


def _checked_pair(pair: object, index: int, heads_of: dict[int, int] | None) -> tuple[Scales, Scales]:
    if isinstance(pair, str | bytes) or not isinstance(pair, Sequence) or len(pair) not in (0, 2):
        raise OptionError(
            f"`scales` must have a pair (keys, values) for each layer, got {pair!r} for layer {index}: pass () for a "
            "layer that has none."
        )
    if not pair:
        return (), ()
    heads = None if heads_of is None else heads_of.get(index)
    keys, values = (
        checked_scales(side, f"the scale of the {name} of layer {index}", heads)
        for side, name in zip(pair, ("keys", "values"), strict=True)
    )
    return keys, values


Bits = int | Sequence[int | None]


class QuantizedCacheConfig(dict[str, Any]):
    """Options of a `QuantizedCache`: a dict of the options that were given. transformers 4 had a class of this name.

    Args:
        backend: see `QuantizedCache`, also for the options that follow.
        nbits: bits of a code.
        axis_key: axis of the keys, for quanto and hqq.
        axis_value: axis of the values, for quanto and hqq.
        q_group_size: states that share a scale.
        residual_length: newest tokens in full precision.
        compute_dtype: accepted for old code, without effect: states keep the dtype that they come in.
        device: accepted for old code, without effect: states stay on the device that they come on.
        key_nbits: bits of the keys, if they differ from `nbits`.
        value_nbits: bits of the values, if they differ from `nbits`.
        key_group_size: group size of the keys, if it differs from `q_group_size`.
        value_group_size: group size of the values, if it differs from `q_group_size`.
        sink_tokens: oldest tokens in full precision.
        quantize_sliding: whether windows are quantized as well.
        scales: scales of float8 numbers that never change, such as "checkpoint".

    Raises:
        OptionError: an option that does not exist, or a value that the backend does not accept. What depends on the
            model, such as the scales of its checkpoint, is checked when the cache is made.

    Example:
        >>> import kvlayers
        >>> kvlayers.QuantizedCacheConfig(nbits=2, residual_length=64)
        {'nbits': 2, 'residual_length': 64}
    """

    @checks_options
    def __init__(
        self,
        backend: str | None = None,
        nbits: Bits | None = None,
        axis_key: int | None = None,
        axis_value: int | None = None,
        q_group_size: int | None = None,
        residual_length: int | None = None,
        compute_dtype: object | None = None,
        device: object | None = None,
        key_nbits: Bits | None = None,
        value_nbits: Bits | None = None,
        key_group_size: int | None = None,
        value_group_size: int | None = None,
        sink_tokens: int | None = None,
        quantize_sliding: bool | None = None,
        scales: GivenScales | None = None,
    ) -> None:
        given = {
            "backend": backend,
            "nbits": nbits,
            "axis_key": axis_key,
            "axis_value": axis_value,
            "q_group_size": q_group_size,
            "residual_length": residual_length,
            "key_nbits": key_nbits,
            "value_nbits": value_nbits,
            "key_group_size": key_group_size,
            "value_group_size": value_group_size,
            "sink_tokens": sink_tokens,
            "quantize_sliding": quantize_sliding,
            "scales": scales,
        }
        super().__init__({name: value for name, value in given.items() if value is not None})
        quantization = quantization_of_layers(
            {name: value for name, value in self.items() if name not in ("quantize_sliding", "scales")}
        )
        # Without a backend here, the name of the cache may choose it.
        if scales is not None and backend is not None:
            backend_called(quantization.of_layer(0).backend).check_takes_scales()


@register_cache_class
class QuantizedCache(Cache, transformers.QuantizedCache):  # type: ignore[misc]
    """Grows with the sequence, and holds most of it in packed codes. Attention reads the codes themselves.

    The oldest `sink_tokens` and the newest `residual_length` tokens stay in full precision. Sliding and chunked
    attention stay in full precision as well, unless `quantize_sliding` is set, as their windows are small already.

    Example:
        >>> import kvlayers, transformers
        >>> config = transformers.LlamaConfig(num_hidden_layers=2)
        >>> kvlayers.QuantizedCache(config=config, nbits=2)
        QuantizedCache(2 x QuantizedLayer of 2 bits, 0 tokens, 0 B)
        >>> kvlayers.QuantizedCache(config=config, nbits=7)
        Traceback (most recent call last):
        kvlayers.errors.OptionError: `nbits` of the native backend must be one of 1, 2, 3, 4, 5, 6, 8, got 7 ...

    Args:
        backend: name of the quantizer. `"native"` needs no other package; `"quanto"` and `"hqq"` are transformers'
            backends; `"fp8"` holds float8 numbers; other names are registered with `register_quantizer`.
        config: config of the model, or the model. Without it, every layer has full attention.
        nbits: bits of a code: 2, 3, 4 (the default), 5, 6 or 8 for native; 2 or 4 for quanto; 1, 2, 3, 4 or 8 for hqq;
            8 for fp8. One number for all layers, or a sequence with a number for each layer of the cache. An entry
            `None` is the default. Layers that are not quantized have an entry too, without effect.
        axis_key: 0 (the default) or -1 for the keys of quanto; 0 or 1 (the default) for those of hqq.
        axis_value: the same for the values.
        q_group_size: states that share a scale; 64 if head_dim allows it. If groups go along the channels and it
            does not divide head_dim, the largest smaller size that does is used, with a warning.
        residual_length: how many of the newest tokens stay in full precision, at least.
        key_nbits: bits of the keys, if they differ from `nbits`.
        value_nbits: bits of the values, if they differ from `nbits`.
        key_group_size: group size of the keys, if it differs from `q_group_size`.
        value_group_size: group size of the values, if it differs from `q_group_size`.
        sink_tokens: oldest tokens that stay in full precision.
        quantize_sliding: whether windows of sliding and chunked attention are quantized too.
        scales: for fp8, scales of keys and values that never change, in place of one for each group of states:
            "checkpoint" for the scales that the model's checkpoint was calibrated with (compressed-tensors and FP8
            checkpoints with a `kv_cache_scheme`), the path or the Hub's name of another checkpoint, or a pair (keys,
            values) for each layer, each of them one number, or one for each KV head. States that exceed 448 times the
            scale are clipped. Files on the Hub that have scales in them are downloaded as a whole.
        length_hint: the most tokens that are expected, if known, such as 4096 or "4k". Memory then grows to that number
            and no further, as long as no more tokens come.
        offloading: hold codes and states on the host, and on their device only while they are attended to.
        offload_only_non_sliding: leave layers that attend within a window on the device.
        offload_device: "cpu" for the host's memory, "disk" for memory-mapped files.
        offload_directory: the directory of these files, for "disk".
        checkpoints: when recurrent layers take checkpoints and how many they keep, `Checkpoints` or a mapping of its
            arguments.
        recall: how a single query chooses the pages that it attends to in layers of full attention, `Recall` or a
            mapping of its arguments. A page is a packed block. Without it, a query attends to every token.
        max_bytes: the bytes that the cache stays within, such as "2GiB"; a share "50%" of what `length_hint` tokens
            take in full precision; or "50% of free", of the memory that is free. The cache is exact until it reaches
            them, and is rounded from its oldest tokens on after that. Without it, it takes as many as it needs.
        ladder: the steps that it may take to stay within `max_bytes`, of "int8", "int4" and "offloaded", in this order;
            all three if it is not given. They say the bits, so `nbits` must be left out.

    Raises:
        OptionError: an option that does not exist, a value that the backend does not accept, bits for another number
            of layers, a backend whose package is missing, or scales that are missing or have a wrong shape.
        ConfigError: the config does not describe the model's layers.
    """

    made_with = (NestedArgument("quantization", made_from=quantization_of_layers), RECALL, BUDGET)
    is_compileable = False
    """Shapes change at every token, and transformers does not compile around such a cache."""

    @checks_options
    def __init__(
        self,
        backend: str = "native",
        config: object | None = None,
        nbits: Bits | None = None,
        axis_key: int | None = None,
        axis_value: int | None = None,
        q_group_size: int | None = None,
        residual_length: int | None = None,
        key_nbits: Bits | None = None,
        value_nbits: Bits | None = None,
        key_group_size: int | None = None,
        value_group_size: int | None = None,
        sink_tokens: int | None = None,
        quantize_sliding: bool = False,
        scales: GivenScales | None = None,
        length_hint: int | str | None = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
        offload_device: str = "cpu",
        offload_directory: str | os.PathLike[str] | None = None,
        checkpoints: Checkpoints | Mapping[str, int | None] | None = None,
        recall: AttentionMaker | Mapping[str, Any] | None = None,
        max_bytes: int | str | None = None,
        ladder: Sequence[str] | None = None,
    ) -> None:
        self.recall = recall_of(recall)
        if not isinstance(backend, str):
            raise OptionError(
                f"`backend` must be the name of a backend, got a {type(backend).__name__}: pass the model's config as "
                "config=...."
            )
        if not isinstance(quantize_sliding, bool):
            raise OptionError(f"`quantize_sliding` must be True or False, got {quantize_sliding!r}: pass one of them.")
        config = None if config is None else model_types.config_of(config)
        hint = checked_hint(length_hint)
        given = {
            "nbits": nbits,
            "axis_key": axis_key,
            "axis_value": axis_value,
            "q_group_size": q_group_size,
            "residual_length": residual_length,
            "key_nbits": key_nbits,
            "value_nbits": value_nbits,
            "key_group_size": key_group_size,
            "value_group_size": value_group_size,
            "sink_tokens": sink_tokens,
        }
        self.budget = budget_of(max_bytes, ladder, hint)
        if self.budget is not None:
            given["nbits"] = self.budget.first_bits(backend, nbits, key_nbits, value_nbits)
        options = {"backend": backend, **{name: value for name, value in given.items() if value is not None}}
        self.quantization = quantization_of_layers(options)
        if scales is not None:
            of_layers = scales_of_layers(scales, self.quantization.of_layer(0).backend, config, quantize_sliding)
            self.quantization = quantization_of_layers({**options, **of_layers})
        placement = offloading, offload_only_non_sliding, offload_device, offload_directory
        if config is None:
            # As many as there are bits for, and any number if they are the same for all.
            layers = [
                packed_attention_layer(self.quantization.of_layer(index), hint, self.recall)
                for index in range(self.quantization.count or 0)
            ] or None
        else:
            head_dims = model_types.head_dims(config)
            if head_dims is not None:
                # What it checks holds for all layers alike.
                self.quantization.of_layer(0).quantizers(*head_dims)
            layers = quantized_layers(config, self.quantization, quantize_sliding, hint, checkpoints, self.recall)
        super().__init__(layers, self._layer_maker(hint) if config is None else None, *placement)

    @override
    def _layer_maker(self, length_hint: int | None = None) -> Callable[[], Any] | None:
        # Bits for each layer are for as many layers.
        if self.quantization.count is not None:
            return None
        return functools.partial(packed_attention_layer, self.quantization.of_layer(0), length_hint, self.recall)

    @override
    def layers_of_model(self, config: Any) -> list[Any]:
        return quantized_layers(config, self.quantization, quantize_sliding=False, recall=self.recall)

    @override
    def for_cross_attention(self, encoder_length: int | None = None) -> Cache:
        # Scales were measured in self-attention.
        facts = {name: fact for name, fact in self.quantization.facts().items() if name not in SCALES}
        return QuantizedCache(**facts, **self.offloading_options())


register("quantized")(named(QuantizedCache, "length_hint"))
_FIXED: dict[str, dict[str, Any]] = {
    "offloaded_quantized": {"offloading": True},
    "fp8": {"backend": "fp8"},
    "int8": {"nbits": 8},
    "int4": {"nbits": 4},
    "int2": {"nbits": 2},
}
for _name, _fixed in _FIXED.items():
    register(_name)(named(QuantizedCache, "length_hint", fixed=_fixed, general="quantized"))
