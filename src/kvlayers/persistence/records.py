"""From a cache to what is written of it: records, and tensors by their names."""

import dataclasses
from typing import Any

import torch
import transformers
from torch import Tensor

from kvlayers.caches.base import Cache
from kvlayers.caches.encoder_decoder import EncoderDecoderCache
from kvlayers.caches.operations import CacheState
from kvlayers.caches.quantized import QuantizedCache
from kvlayers.caches.sink import SinkCache
from kvlayers.caches.static import StaticCache
from kvlayers.errors import OptionError, StateMismatchError
from kvlayers.layers import LayerState, SinkLayer
from kvlayers.persistence.format import (
    TOKEN_IDS,
    CacheRecord,
    Description,
    LayerRecord,
    ModelRecord,
    Options,
    layer_prefix,
    rotary_name,
)
from kvlayers.persistence.safetensors_header import DTYPES
from kvlayers.rope.rotary import Rotary
from kvlayers.version import __version__

_STORABLE = frozenset(DTYPES.values())


def described(cache: Cache, model: ModelRecord, token_ids: Tensor | None) -> tuple[Description, dict[str, Tensor]]:
    """What is to be written of a cache: the description, and the tensors on the host.

    Raises:
        OptionError: the ids are not those of the tokens that the cache has seen.
        StateMismatchError: a layer holds what a file cannot: see the message.
    """
    state = cache.state()
    rotaries = _rotaries(cache)
    if isinstance(cache, EncoderDecoderCache):
        parts = (cache.self_attention_cache, cache.cross_attention_cache)
        own = [_record(part, part_state) for part, part_state in zip(parts, state.parts, strict=True)]
        record = CacheRecord(state.kind, own[0].length, cache.batch_size, parts=tuple(own))
        states: list[tuple[int | None, CacheState]] = list(enumerate(state.parts))
    else:
        record = _record(cache, state)
        states = [(None, state)]
    tensors = {
        layer_prefix(part, index) + name: _storable(tensor, name, layer.kind)
        for part, part_state in states
        for index, layer in enumerate(part_state.layers)
        for name, tensor in layer.tensors.items()
    }
    dtypes = sorted({str(states.dtype) for states in tensors.values() if states.is_floating_point()})
    for fingerprint, rotary in rotaries.items():
        tensors[rotary_name(fingerprint)] = rotary.inv_freq
    if token_ids is not None:
        tensors[TOKEN_IDS] = _ids(token_ids, record)
    versions = {"kvlayers": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    described_rotaries: dict[str, tuple[str, int]] = {
        fingerprint: (rotary.layout, rotary.first) for fingerprint, rotary in rotaries.items()
    }
    return Description(versions, record, model, described_rotaries, tuple(dtypes)), tensors


def _record(cache: Cache, state: CacheState) -> CacheRecord:
    layers = tuple(
        LayerRecord(layer_state.kind, _facts(layer_state), tuple(sorted(layer_state.tensors)), _is_recording(layer))
        for layer, layer_state in zip(cache.adapted_layers(), state.layers, strict=True)
    )
    length = max((layer.length or 0 for layer in cache.adapted_layers()), default=0)
    return CacheRecord(state.kind, length, cache.batch_size, _options(cache), layers)


def _facts(state: LayerState) -> dict[str, Any]:
    for name, fact in state.facts.items():
        if not (fact is None or isinstance(fact, bool | int | str)):
            raise StateMismatchError(
                f"expected plain facts (whole numbers, texts, True, False, None) in the state of a {state.kind}, but "
                f"saw {name} of {type(fact).__name__}: keep it in a tensor."
            )
    return dict(state.facts)


def _is_recording(layer: Any) -> bool:
    return bool(layer.is_recording)


def _storable(tensor: Tensor, name: str, kind: str) -> Tensor:
    """`tensor` as safetensors takes it: on the host, in one piece, outside of autograd."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in _STORABLE:
        raise StateMismatchError(
            f"expected tensors that a file can hold ({', '.join(sorted(map(str, _STORABLE)))}), but saw {name} of a "
            f"{kind} of {tensor.dtype}, {tensor.layout} on {tensor.device}: convert the states first."
        )
    return tensor.detach().to("cpu").contiguous()


def _ids(token_ids: Tensor, record: CacheRecord) -> Tensor:
    whole = isinstance(token_ids, Tensor) and not (token_ids.is_floating_point() or token_ids.dtype == torch.bool)
    expected = [max(record.batch_size, 0), record.length]
    if not whole or list(token_ids.shape) != expected:
        seen = f"{list(token_ids.shape)} of {token_ids.dtype}" if isinstance(token_ids, Tensor) else repr(token_ids)
        raise OptionError(
            f"expected token_ids {expected}, one whole number for each token that the cache has seen, but saw {seen}: "
            "the newest token of generate() has not been seen yet, so pass token_ids[:, :cache.get_seq_length()]."
        )
    return token_ids.detach().to("cpu", torch.int64, copy=True).contiguous()


def _options(cache: Cache) -> Options:
    """What a cache was made with, as far as its layers do not say it. No paths: a file says nothing of directories."""
    options: Options = {
        "offloading": cache.offloading,
        "only_non_sliding": bool(cache.only_non_sliding),
        "grows": cache.layer_class_to_replicate is not None,
    }
    if isinstance(cache, StaticCache):
        reservation = cache._reservation.options()
        buckets = reservation["buckets"]
        options |= {**reservation, "buckets": None if buckets is None else dataclasses.asdict(buckets)}
        options["compiled"] = cache.compiled
    elif isinstance(cache, QuantizedCache):
        options["quantization"] = cache.quantization.facts()
    elif isinstance(cache, SinkCache):
        options["window_length"], options["num_sink_tokens"] = cache.window_length, cache.num_sink_tokens
        options["quantization"] = None if cache.quantization is None else cache.quantization.facts()
        options["left_padding"] = None if cache._padding is None else cache._padding.tolist()
        options["rotary"] = None if cache._rotary is None else cache._rotary.fingerprint
    return options


def _rotaries(cache: Cache) -> dict[str, Rotary]:
    """How the keys of sink layers are rotated, by fingerprint. No config says it, and no other kind needs it."""
    parts = [cache.self_attention_cache] if isinstance(cache, EncoderDecoderCache) else [cache]
    found = [part._rotary for part in parts if isinstance(part, SinkCache)]
    for held in (layer.parts[0].unwrapped for part in parts for layer in part.adapted_layers()):
        if isinstance(held, SinkLayer):
            found.append(held.rotary)
    return {rotary.fingerprint: rotary for rotary in found if rotary is not None}
