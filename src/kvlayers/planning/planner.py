"""What each kind of cache costs for a model and a context, and which one to use within a budget."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType

import torch
import transformers
from transformers import PretrainedConfig

from kvlayers.core.arguments import whole_number
from kvlayers.core.named_caches import CacheRequest, cache_names
from kvlayers.errors import CapacityError, KVLayersError, OptionError
from kvlayers.generation.cache_by_name import AUTO, NamedCache, cache_for, named_cache
from kvlayers.planning.cache_bytes import CacheBytes, CacheTrial
from kvlayers.planning.planned_cache import (
    SIMPLEST,
    Plan,
    PlannedCache,
    best_of,
    nothing_fits,
    why_not,
    why_recommended,
)
from kvlayers.planning.shapes import layer_shapes
from kvlayers.upstream import model_types
from kvlayers.utils.options import checked_dtype
from kvlayers.utils.units import bytes_or_share, readable_bytes, tokens

TOKENS_AHEAD = 4096
"""`bytes_per_token` is the mean over this many further tokens, since packed blocks grow by many tokens at a time."""

FIRST_STEP = 32
"""Tokens from a guess to the next number that is tried. Most guesses are wrong by less than a block."""

NO_END = 2**40
"""More tokens than any context has: if so many fit, any number fits."""


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
    """What each kind of cache costs for a model, from its config: nothing is loaded or allocated.

    Bytes are the `nbytes` of a cache that was made for `context_length` tokens and has read them in one forward pass.
    They include spare room, scales, checkpoints and counters.

    Args:
        config: config of the model, or the model.
        context_length: tokens of a sequence, prompt and continuation together: 32768, or "32k".
        batch_size: sequences side by side, beams included.
        dtype: dtype of the model, or its name ("bfloat16"). By default it is that of the config, or float32.
        memory: bytes of the device that the cache may take, such as 2**30, "1GiB", or "50%" of what 'dynamic' takes;
            `None` for no budget.
        names: names of caches, registered ones included, also with options behind them: "sink:window_length=512". By
            default all names are planned, and a cache that the model does not support is left out instead of raising an
            error.
        encoder_length: tokens of the encoder's output, for a model with an encoder: 1024, or "1k".

    Raises:
        OptionError: a number is missing, too small or not a number, or `dtype` is not a dtype.
        ConfigError: `config` is neither a model nor its config, lacks a field, or has layers of an unknown shape.
        CapacityError: no cache that holds the context is within the budget.
        RegistryError: a name is not known.
        UnsupportedLayerError: a cache in `names` is of another package, or has a layer whose memory is not known.

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
    limit = None if memory is None else bytes_or_share(memory, "memory")
    if limit is not None and not isinstance(limit, Fraction):
        limit = checked_count(limit, "memory", "bytes")
    wanted = _Wanted(
        of_model,
        checked_count(tokens(context_length, "context_length"), "context_length", "tokens"),
        checked_count(batch_size, "batch_size", "sequences"),
        _dtype_of(model_types.decoder_config(of_model), dtype),
        None,
        _encoder_length(of_model, encoder_length),
    )
    if limit is not None:
        budget = int(limit * wanted.bytes_in_full()) if isinstance(limit, Fraction) else limit
        wanted = dataclasses.replace(wanted, memory=budget, memory_by_device={None: budget})
    if names is not None and (isinstance(names, str) or not names):
        raise OptionError(
            f"`names` must be a list with at least one name of a cache, got {names!r}: pass one, or leave `names` out."
        )
    caches, refused = wanted.caches(cache_names() if names is None else names)
    if names is not None and refused:
        raise next(iter(refused.values()))
    return wanted.plan(caches, refused)


def plan_for(request: CacheRequest, memory: int | Mapping[torch.device, int], names: Sequence[str]) -> Plan:
    """A plan for a cache that is about to be made, over those of `names` that the model supports.

    Args:
        request: what the cache is for; its `length_hint` is the context.
        memory: bytes that the cache may take, of the device or of each device in `request.layer_devices`.
        names: names of caches.

    Raises:
        OptionError: the request has no `length_hint`.
        ConfigError: layers have an unknown shape.
        CapacityError: no cache is within the budget.
    """
    if request.length_hint is None:
        raise OptionError(
            f"`length_hint` must be the number of tokens for which '{AUTO}' chooses, got none: pass it, or name one."
        )
    encoder_length = request.encoder_length
    if encoder_length is None and request.config.is_encoder_decoder:
        encoder_length = request.length_hint
    budgets: dict[torch.device | None, int] = {None: memory} if isinstance(memory, int) else dict(memory.items())
    wanted = _Wanted(
        request.config,
        request.length_hint,
        request.batch_size or 1,
        _dtype_of(model_types.decoder_config(request.config), request.dtype),
        sum(budgets.values()),
        encoder_length,
        () if isinstance(memory, int) else request.layer_devices,
        budgets,
    )
    return wanted.plan(*wanted.caches(names))


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """What caches are planned for: the arguments of `plan`, checked.

    Attributes:
        layer_devices: device of each layer, empty if all are on one device.
        memory_by_device: the budget of each device, of `None` if all layers are on one; empty for no budget.
    """

    config: PretrainedConfig
    context_length: int
    batch_size: int
    dtype: torch.dtype
    memory: int | None
    encoder_length: int | None
    layer_devices: Sequence[torch.device] = ()
    memory_by_device: Mapping[torch.device | None, int] = dataclasses.field(default_factory=dict)

    def bytes_in_full(self) -> int:
        """Bytes of the device that a cache in full precision takes.

        Raises:
            KVLayersError: there is no such cache for the model.
        """
        caches, refused = self.caches([SIMPLEST])
        if refused:
            raise refused[SIMPLEST]
        return caches[0].device_bytes

    def caches(self, names: Sequence[str]) -> tuple[list[PlannedCache], dict[str, KVLayersError]]:
        """The caches that the model supports, without reasons, and the errors of the others."""
        shapes = layer_shapes(self.config, self.batch_size, self.dtype)
        request = CacheRequest(
            self.config, batch_size=self.batch_size, dtype=self.dtype, encoder_length=self.encoder_length
        )
        caches: list[PlannedCache] = []
        refused: dict[str, KVLayersError] = {}
        # "auto" is a choice among the others.
        for name in [name for name in names if name != AUTO]:
            try:
                named = named_cache(name) or NamedCache(name)
                make = functools.partial(_made, named.name, dataclasses.replace(request, options=named.options))
                trial = CacheTrial(make, shapes, self.encoder_length, self.layer_devices)
                caches.append(_planned(name, trial, self.context_length, self.memory_by_device))
            except KVLayersError as error:
                refused[name] = error
        return caches, refused

    def plan(self, caches: Sequence[PlannedCache], refused: Mapping[str, KVLayersError]) -> Plan:
        """The plan: one cache is recommended, and each has its reason."""
        left_out = {name: str(error) for name, error in refused.items()}
        best = best_of(caches)
        if best is None:
            raise nothing_fits(caches, left_out, self.context_length, self.memory)
        reasons = [cache.reason or why_not(cache, best) for cache in caches]
        place = caches.index(best)
        reasons[place] = why_recommended(best, caches, self.memory)
        reasoned = tuple(
            dataclasses.replace(cache, reason=reason) for cache, reason in zip(caches, reasons, strict=True)
        )
        return Plan(
            self.context_length,
            self.batch_size,
            self.dtype,
            self.memory,
            reasoned,
            reasoned[place],
            MappingProxyType(left_out),
            model_types.most_positions(self.config),
        )


def bytes_by_length(name: str, request: CacheRequest) -> Callable[[int], int]:
    """Bytes of the device that a cache takes, as a function of its tokens.

    Args:
        name: name of the cache; its options are those of the request.
        request: what the cache is for.

    Raises:
        ConfigError: layers have an unknown shape.
        UnsupportedLayerError: the cache is of another package, or has a layer whose memory is not known.
    """
    dtype = _dtype_of(model_types.decoder_config(request.config), request.dtype)
    shapes = layer_shapes(request.config, request.batch_size or 1, dtype)
    trial = CacheTrial(functools.partial(_made, name, request), shapes, None)
    return lambda tokens: trial.nbytes(tokens).device


def _made(name: str, request: CacheRequest, length_hint: int) -> transformers.Cache:
    return cache_for(name, dataclasses.replace(request, length_hint=length_hint))


def _planned(
    name: str, trial: CacheTrial, context_length: int, memory: Mapping[torch.device | None, int]
) -> PlannedCache:
    costs = trial.nbytes(context_length)
    missing, device = _missing(trial, context_length, memory)
    where = "" if device is None else f" of {device}"
    guess = _guess(trial, context_length, sum(memory.values())) if memory else 0
    return PlannedCache(
        name=name,
        nbytes=costs.total,
        device_bytes=costs.device,
        host_bytes=costs.host,
        bytes_per_token=_bytes_per_token(trial, costs, context_length),
        longest_context=longest_context(lambda tokens: _fits(trial, tokens, memory), guess) if memory else None,
        fidelity=trial.fidelity,
        bits=trial.bits,
        fits=missing <= 0,
        reason=f"it needs {readable_bytes(missing)} more than the budget{where}." if missing > 0 else "",
    )


def _guess(trial: CacheTrial, context_length: int, memory: int) -> int:
    """About how many tokens fit, since nearly all caches grow nearly evenly."""
    tokens, further = context_length, context_length + TOKENS_AHEAD
    try:
        # Where a buffer is enlarged, and how much, differs between short and long contexts.
        for _ in range(3):
            here, there = trial.nbytes(tokens).device, trial.nbytes(further).device
            growth = max(there - here, 1)
            tokens = min(max(tokens + (memory - here) * (further - tokens) // growth, 1), NO_END - 1)
            further = tokens + TOKENS_AHEAD
    except CapacityError:
        pass
    return tokens


def longest_context(fits: Callable[[int], bool], guess: int = 1) -> int | None:
    """The most tokens that fit, 0 if not even one fits, `None` if any number fits.

    A cache that has just packed a block may be smaller than before. Of several numbers of tokens that fit, while one
    more does not, the result is one that the search meets first.

    Args:
        fits: whether a number of tokens fits.
        guess: where the search begins: the nearer to the result, the shorter it is.

    Example:
        >>> longest_context(lambda tokens: tokens * 3 <= 1000)
        333
    """
    if fits(NO_END):
        return None
    least, most = 0, NO_END
    tokens, step = min(max(guess, 1), NO_END - 1), FIRST_STEP
    # Outwards from the guess in steps that double, until the result is between `least` and `most`.
    while least < tokens < most:
        if fits(tokens):
            least, tokens = tokens, tokens + step
        else:
            most, tokens = tokens, tokens - step
        step *= 2
    while least + 1 < most:
        middle = (least + most) // 2
        if fits(middle):
            least = middle
        else:
            most = middle
    return least


def _missing(
    trial: CacheTrial, tokens: int, memory: Mapping[torch.device | None, int]
) -> tuple[int, torch.device | None]:
    """Bytes beyond the budget of the device that lacks most, and this device; 0 or fewer if the cache fits."""
    if not memory:
        return 0, None
    missing = {device: costs.device - memory[device] for device, costs in trial.nbytes_by_device(tokens).items()}
    return max(((nbytes, device) for device, nbytes in missing.items()), key=operator.itemgetter(0), default=(0, None))


def _fits(trial: CacheTrial, tokens: int, memory: Mapping[torch.device | None, int]) -> bool:
    try:
        return _missing(trial, tokens, memory)[0] <= 0
    except CapacityError:
        return False


def _bytes_per_token(trial: CacheTrial, costs: CacheBytes, context_length: int) -> float:
    try:
        further = trial.nbytes(context_length + TOKENS_AHEAD)
    except CapacityError:
        # What is reserved is reserved.
        return 0.0
    return (further.total - costs.total) / TOKENS_AHEAD


def checked_count(number: object, name: str, what: str) -> int:
    """`number` as an `int`, at least 1. Raises `OptionError` that names the argument, and `what` it counts."""
    count = whole_number(number, f"`{name}`")
    if isinstance(number, bool) or count < 1:
        raise OptionError(f"`{name}` must be a whole number of {what}, at least 1, got {number!r}.")
    return count


def _dtype_of(decoder: PretrainedConfig, dtype: object) -> torch.dtype:
    return checked_dtype((decoder.dtype or torch.float32) if dtype is None else dtype)


def _encoder_length(config: PretrainedConfig, encoder_length: int | str | None) -> int | None:
    if not config.is_encoder_decoder:
        if encoder_length is not None:
            raise OptionError(
                f"`encoder_length` must be left out for a model without an encoder, got {encoder_length!r}."
            )
        return None
    if encoder_length is None:
        raise OptionError(
            "`encoder_length` is missing, and cross-attention caches the output of the model's encoder: pass the "
            "number of tokens in that output."
        )
    return checked_count(tokens(encoder_length, "encoder_length"), "encoder_length", "tokens")
