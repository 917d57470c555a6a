"""Describes a cache for a file: records, and tensors by name."""

import math
from typing import Any

import torch
import transformers
from torch import Tensor

from kvlayers.caches.base import Cache
from kvlayers.caches.encoder_decoder import EncoderDecoderCache
from kvlayers.caches.operations import CacheState
from kvlayers.errors import OptionError, StateMismatchError
from kvlayers.layers import LayerState
from kvlayers.persistence.format import (
    TOKEN_IDS,
    CacheRecord,
    Description,
    LayerRecord,
    ModelRecord,
    layer_prefix,
    rotary_name,
)
from kvlayers.persistence.safetensors_header import DTYPES
from kvlayers.version import __version__

_STORABLE = frozenset(DTYPES.values())


def described(cache: Cache, model: ModelRecord, token_ids: Tensor | None) -> tuple[Description, dict[str, Tensor]]:
    """The description of a cache, and its tensors on the host.

    Raises:
        OptionError: `token_ids` does not match the tokens of the cache.
        StateMismatchError: a layer holds states that a file cannot hold.
    """
    state = cache.state()
    rotaries = {rotary.fingerprint: rotary for rotary in cache.rotaries}
    if isinstance(cache, EncoderDecoderCache):
        parts = (cache.self_attention_cache, cache.cross_attention_cache)
        own = [_record(part, part_state) for part, part_state in zip(parts, state.parts, strict=True)]
        record = CacheRecord(state.kind, own[0].length, cache.batch_size, cache.describe(), parts=tuple(own))
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
        LayerRecord(layer_state.kind, _facts(layer_state), tuple(sorted(layer_state.tensors)), bool(layer.is_recording))
        for layer, layer_state in zip(cache.adapted_layers(), state.layers, strict=True)
    )
    length = max((layer.length or 0 for layer in cache.adapted_layers()), default=0)
    return CacheRecord(state.kind, length, cache.batch_size, cache.describe(), layers)


def _facts(state: LayerState) -> dict[str, Any]:
    for name, fact in state.facts.items():
        plain = fact is None or isinstance(fact, bool | int | float | str)
        if not plain or (isinstance(fact, float) and not math.isfinite(fact)):
            raise StateMismatchError(
                f"The state of a {state.kind} must have plain facts (finite numbers, texts, True, False, None), got "
                f"{name} of {type(fact).__name__}: keep it in a tensor."
            )
    return dict(state.facts)


def _storable(tensor: Tensor, name: str, kind: str) -> Tensor:
    """The tensor as safetensors needs it: on the host, contiguous and detached."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in _STORABLE:
        raise StateMismatchError(
            f"A file can hold dense tensors of {', '.join(sorted(map(str, _STORABLE)))}, got {name} of a {kind} of "
            f"{tensor.dtype}, {tensor.layout} on {tensor.device}: convert the states first."
        )
    return tensor.detach().to("cpu").contiguous()


def _ids(token_ids: Tensor, record: CacheRecord) -> Tensor:
    whole = isinstance(token_ids, Tensor) and not (token_ids.is_floating_point() or token_ids.dtype == torch.bool)
    expected = [max(record.batch_size, 0), record.length]
    if not whole or list(token_ids.shape) != expected:
        seen = f"{list(token_ids.shape)} of {token_ids.dtype}" if isinstance(token_ids, Tensor) else repr(token_ids)
        raise OptionError(
            f"`token_ids` must be {expected}, one whole number for each token that the cache has seen, got {seen}: the "
            "newest token of generate() has not been seen yet, so pass token_ids[:, :cache.get_seq_length()]."
        )
    return token_ids.detach().to("cpu", torch.int64, copy=True).contiguous()
