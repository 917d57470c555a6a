"""What each kind of cache costs for a model and a context, and which to use within a budget."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from transformers import PretrainedConfig

from kvlayers.errors import CapacityError, KVLayersError, OptionError
from kvlayers.generation.registry import AUTO, CacheRequest, cache_names
from kvlayers.layers.contract import whole_number
from kvlayers.planning.cache_bytes import CacheBytes
from kvlayers.planning.longest_context import longest_context
from kvlayers.planning.planned_cache import Plan, PlannedCache
from kvlayers.planning.planned_kind import PlannedKind, planned_kind
from kvlayers.planning.recommend import best_of, nothing_fits, why_not, why_recommended
from kvlayers.planning.shapes import layer_shapes
from kvlayers.upstream import model_types
from kvlayers.utils.options import checked_dtype
from kvlayers.utils.units import amount_of_bytes, tokens

TOKENS_AHEAD = 4096
"""Tokens behind the context over which `bytes_per_token` is the mean, as packed blocks come many tokens at a time."""


def plan(
    config: object,
    context_length: int | str,
    batch_size: int = 1,
    dtype: torch.dtype | str | None = None,
    memory: int | str | None = None,
    *,
    names: Sequence[str] | None = None,
    encoder_length: int | str | None = None,
) -> Plan:
    """What each kind of cache costs for a model, by arithmetic from its config: nothing is loaded or allocated.

    Bytes are the `nbytes` of a cache that `generate()` has made for `context_length` tokens, and that has read them in
    one forward pass: spare room, scales, checkpoints and counters included.

    Args:
        config: config of the model, or the model.
        context_length: tokens of a sequence, prompt and continuation together: 32768, or "32k".
        batch_size: sequences side by side, beams included.
        dtype: dtype of the model, or its name ("bfloat16"); if not given, the config says it, or it is float32.
        memory: bytes of the device that the cache may take, such as 2**30 or "1GiB"; `None` for no budget.
        names: names of caches, those that were registered included; all that there are where not given. Those that
            there cannot be for the model are then left out, rather than an error.
        encoder_length: tokens of the encoder's output, for a model that has one: 1024, or "1k".

    Raises:
        OptionError: a number that is none or too small, a dtype that is none, or a missing encoder_length.
        ConfigError: no model and no model config, one that lacks a field, or layers whose states are not known.
        CapacityError: no cache that holds the context is within the budget.
        RegistryError: a name that is not known.

    Example:
        >>> import kvlayers, torch, transformers
        >>> config = transformers.LlamaConfig(num_hidden_layers=2)
        >>> planned = kvlayers.plan(config, 1000, dtype=torch.bfloat16, names=["dynamic", "int4"])
        >>> planned["dynamic"].nbytes == 2 * 2 * 1000 * 4096 * 2
        True
        >>> planned  # doctest: +NORMALIZE_WHITESPACE
        1000 tokens, batch 1, bfloat16
        cache      device  host   a token  bits   states
        int4     12.6 MiB   0 B  9.00 KiB   4.5  rounded
        dynamic  31.2 MiB   0 B  32.0 KiB    16    exact
        Use 'dynamic': it is exact, and the smallest such cache on the device.
    """
    of_model = model_types.config_of(config)
    wanted = _Wanted(
        of_model,
        _count(tokens(context_length, "context_length"), "context_length", "tokens"),
        _count(batch_size, "batch_size", "sequences"),
        _dtype_of(model_types.decoder_config(of_model), dtype),
        None if memory is None else _count(amount_of_bytes(memory, "memory"), "memory", "bytes"),
        _encoder_length(of_model, encoder_length),
    )
    caches, refused = wanted.caches(cache_names() if names is None else _checked(names))
    if names is not None and refused:
        raise next(iter(refused.values()))
    return wanted.plan(caches, refused)


def plan_for(request: CacheRequest, memory: int, names: Sequence[str]) -> Plan:
    """A plan for a cache that is about to be made, of those of `names` that there can be for the model.

    Args:
        request: what the cache is for; its `length_hint` is the context.
        memory: bytes of the device that the cache may take.
        names: names of caches.

    Raises:
        OptionError: the request does not say for how many tokens.
        ConfigError: layers whose states are not known.
        CapacityError: no cache is within the budget.
    """
    if request.length_hint is None:
        raise OptionError(
            f"expected a length_hint, to choose a cache for so many tokens, but saw none: pass one to '{AUTO}', or the "
            "name of a cache."
        )
    encoder_length = request.encoder_length
    if encoder_length is None and request.config.is_encoder_decoder:
        encoder_length = request.length_hint
    wanted = _Wanted(
        request.config,
        request.length_hint,
        request.batch_size or 1,
        _dtype_of(model_types.decoder_config(request.config), request.dtype),
        memory,
        encoder_length,
    )
    return wanted.plan(*wanted.caches(names))


@dataclass(frozen=True)
class _Wanted:
    """What caches are planned for: the arguments of `plan`, checked."""

    config: PretrainedConfig
    context_length: int
    batch_size: int
    dtype: torch.dtype
    memory: int | None
    encoder_length: int | None

    def caches(self, names: Sequence[str]) -> tuple[list[PlannedCache], dict[str, KVLayersError]]:
        """Those that there can be, without reasons, and why there cannot be the others."""
        shapes = layer_shapes(self.config, self.batch_size, self.dtype)
        request = CacheRequest(
            self.config, batch_size=self.batch_size, dtype=self.dtype, encoder_length=self.encoder_length
        )
        caches: list[PlannedCache] = []
        refused: dict[str, KVLayersError] = {}
        for name in names:
            # What chooses among caches is none.
            if name == AUTO:
                continue
            try:
                kind = planned_kind(name, request, shapes)
                caches.append(_planned(kind, kind.bytes_for(self.context_length), self.context_length, self.memory))
            except KVLayersError as error:
                refused[name] = error
        return caches, refused

    def plan(self, caches: Sequence[PlannedCache], refused: Mapping[str, KVLayersError]) -> Plan:
        """What they come to, once one of them is recommended."""
        left_out = {name: str(error) for name, error in refused.items()}
        best = best_of(caches)
        if best is None:
            raise nothing_fits(caches, left_out, self.context_length, self.memory)
        reasoned = tuple(
            dataclasses.replace(
                cache,
                reason=why_recommended(cache, caches, self.memory)
                if cache is best
                else why_not(cache, best, self.memory),
            )
            for cache in caches
        )
        recommended = reasoned[caches.index(best)]
        return Plan(
            self.context_length,
            self.batch_size,
            self.dtype,
            self.memory,
            reasoned,
            recommended,
            MappingProxyType(left_out),
            model_types.most_positions(self.config),
        )


def _planned(kind: PlannedKind, costs: CacheBytes, context_length: int, memory: int | None) -> PlannedCache:
    return PlannedCache(
        name=kind.name,
        nbytes=costs.held,
        device_bytes=costs.device,
        host_bytes=costs.host,
        bytes_per_token=_bytes_per_token(kind, costs, context_length),
        longest_context=None if memory is None else _longest(kind, costs, context_length, memory),
        fidelity=kind.fidelity,
        bits=kind.bits,
        fits=memory is None or costs.device <= memory,
        reason="",
    )


def _longest(kind: PlannedKind, costs: CacheBytes, context_length: int, memory: int) -> int | None:
    # Nearly all kinds grow nearly evenly.
    guess = context_length * memory // max(costs.device, 1)
    return longest_context(lambda tokens: _fits(kind, tokens, memory), guess)


def _fits(kind: PlannedKind, tokens: int, memory: int) -> bool:
    try:
        return kind.bytes_for(tokens).device <= memory
    except CapacityError:
        return False


def _bytes_per_token(kind: PlannedKind, costs: CacheBytes, context_length: int) -> float:
    try:
        further = kind.bytes_for(context_length + TOKENS_AHEAD)
    except CapacityError:
        # What is reserved is reserved.
        return 0.0
    return (further.held - costs.held) / TOKENS_AHEAD


def _count(number: object, name: str, what: str) -> int:
    count = whole_number(number, name)
    if isinstance(number, bool) or count < 1:
        raise OptionError(f"expected {name} to be a whole number of {what}, at least 1, but saw {number!r}.")
    return count


def _checked(names: Sequence[str]) -> Sequence[str]:
    if isinstance(names, str) or not names:
        raise OptionError(
            f"expected a list of names with at least one name of a cache, but saw {names!r}: pass a list, or leave "
            "names out."
        )
    return names


def _dtype_of(decoder: PretrainedConfig, dtype: object) -> torch.dtype:
    return checked_dtype((decoder.dtype or torch.float32) if dtype is None else dtype)


def _encoder_length(config: PretrainedConfig, encoder_length: int | str | None) -> int | None:
    if not config.is_encoder_decoder:
        if encoder_length is not None:
            raise OptionError(
                f"expected no encoder_length for a model without an encoder, but saw {encoder_length!r}: leave it out."
            )
        return None
    if encoder_length is None:
        raise OptionError(
            "expected encoder_length for a model with an encoder, as cross-attention caches its output, but saw none: "
            "pass the tokens of that output."
        )
    return _count(tokens(encoder_length, "encoder_length"), "encoder_length", "tokens")
