"""What each kind of cache costs for a model and a context, which one to use within a budget, and why."""

import bisect
import contextlib
import dataclasses
import functools
import html
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from kvlayers.core.arguments import whole_number
from kvlayers.core.named_caches import CacheRequest, cache_names
from kvlayers.core.token_store import Fidelity, states_on_meta
from kvlayers.errors import CapacityError, ConfigError, KVLayersError, OptionError, RegistryError
from kvlayers.generation.cache_by_name import AUTO, NamedCache, cache_for, named_cache
from kvlayers.planning.cache_bytes import CacheBytes, CacheTrial
from kvlayers.planning.shapes import layer_shapes
from kvlayers.upstream import model_types
from kvlayers.utils.options import check_whole_number, checked_dtype, checks_options
from kvlayers.utils.units import bytes_or_share, exact_bytes, html_table, plain_table, readable_bytes, tokens

PLAIN_NAMES = ("dynamic", "static", "offloaded", "offloaded_static", "evicting")
"""Names that are shown for a group of caches at the same cost, in order of preference."""


COARSE_BITS = 4
"""With fewer bits than this, answers often change: a cache on the host is better."""

SIMPLEST = "dynamic"
"""The name that wins over another one of equal cost and fidelity: it needs no options, and never refuses a token."""


@dataclasses.dataclass(frozen=True)
class PlannedCache:
    """What one cache would cost.

    Attributes:
        name: name of the cache.
        nbytes: the `nbytes` of the cache: each byte once, where it is kept.
        device_bytes: the most bytes that the device must have room for. For an offloaded cache these are the layers
            that stay on the device, and the two others whose states are there at once.
        host_bytes: bytes that are kept on the host. On a machine with an accelerator they are pinned, and include what
            torch's allocator rounds up to.
        bytes_per_token: bytes that each further token adds to `nbytes`, the mean of the next 4096.
        longest_context: the most tokens whose `device_bytes` are within the budget; `None` if any number is, or if
            there is no budget.
        fidelity: "exact" if all states that the model attends to are kept as they came, "rounded" if some are
            quantized, "partial" if a query reads only some of them, "evicting" if tokens are evicted that the model
            would attend to.
        bits: bits of one number of a key or value, with its share of scales and zeros, in the layers with the fewest.
        fits: whether the cache is within the budget.
        reason: why it is recommended or not, in a sentence.
    """

    name: str
    nbytes: int
    device_bytes: int
    host_bytes: int
    bytes_per_token: float
    longest_context: int | None
    fidelity: Fidelity
    bits: float
    fits: bool
    reason: str

    @property
    def is_exact(self) -> bool:
        """Whether the states that the model attends to are kept as they came."""
        return self.fidelity == "exact"

    @property
    def is_coarse(self) -> bool:
        """Whether it has fewer bits than `COARSE_BITS`."""
        return self.bits < COARSE_BITS


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """What caches would cost. Printed, it is a table.

    Attributes:
        context_length: tokens of a sequence, prompt and continuation together.
        batch_size: sequences side by side.
        dtype: dtype of the states.
        memory: the budget in bytes, `None` for none.
        caches: the caches that the model supports, in the order of their names.
        recommended: the cache to use.
        left_out: for each other name, why the model does not support the cache, or why it cannot be planned.
        most_positions: the most tokens that the model has positions for, `None` if its config names no limit.
        within: the cache that stays within `max_bytes`, and what of it stays exact; empty without them.
    """

    context_length: int
    batch_size: int
    dtype: torch.dtype
    memory: int | None
    caches: tuple[PlannedCache, ...]
    recommended: PlannedCache
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    most_positions: int | None = None
    within: str = ""

    def __getitem__(self, name: str) -> PlannedCache:
        """The planned cache called `name`.

        Raises:
            RegistryError: no such cache was planned.
        """
        named = {cache.name: cache for cache in self.caches}
        if name in named:
            return named[name]
        why = self.left_out.get(name)
        raise RegistryError(
            f"{name!r} is not among the planned caches ({', '.join(named)}){'.' if why is None else f': {why}'}"
        )

    @property
    def title(self) -> str:
        """The arguments of the plan, in a line."""
        budget = "" if self.memory is None else f", {readable_bytes(self.memory)} for the cache"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.context_length} tokens, batch {self.batch_size}, {dtype}{budget}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences below the table: which cache to use, names of equal caches, and whether positions are missing."""
        same = [
            f"{first.name} ({', '.join(cache.name for cache in others)})" for first, *others in self.groups() if others
        ]
        most = self.most_positions
        best, bounded = f"{self.recommended.name!r}: {self.recommended.reason}", self.within
        return (
            # The best within `memory` may take more than `max_bytes`.
            f"Use {bounded if bounded and self.memory is None else best}",
            *([f"At the same cost: {', '.join(same)}."] if same else []),
            *([f"Or use {bounded}"] if bounded and self.memory is not None else []),
            *(
                [f"Careful: the model has positions for {most} tokens, and {self.context_length} are planned."]
                if most is not None and self.context_length > most
                else []
            ),
        )

    def groups(self) -> list[tuple[PlannedCache, ...]]:
        """The caches, grouped by equal figures, with the fewest bytes on the device first.

        The first of a group is the recommended one, or the one with the plainest name.
        """
        found: dict[tuple[str, ...], list[PlannedCache]] = {}
        for cache in self.caches:
            found.setdefault(self._figures(cache), []).append(cache)
        for same in found.values():
            same.sort(
                key=lambda cache: (
                    cache.name != self.recommended.name,
                    # Plain names next, in their order.
                    [*PLAIN_NAMES, cache.name].index(cache.name),
                    len(cache.name),
                    cache.name,
                )
            )
        return sorted(
            map(tuple, found.values()), key=lambda same: (same[0].device_bytes, same[0].host_bytes, same[0].bits)
        )

    def rows(self) -> list[tuple[str, ...]]:
        """A header, and a row for the first cache of each group."""
        head = ("cache", "device", "host", "a token", "bits", "states")
        rows = [(first.name, *self._figures(first)) for first, *_ in self.groups()]
        return [head if self.memory is None else (*head, "longest"), *rows]

    def _figures(self, cache: PlannedCache) -> tuple[str, ...]:
        amounts = map(readable_bytes, (cache.device_bytes, cache.host_bytes, cache.bytes_per_token))
        figures = (*amounts, f"{cache.bits:.4g}", cache.fidelity)
        if self.memory is None:
            return figures
        return (*figures, "no end" if cache.longest_context is None else str(cache.longest_context))

    def __repr__(self) -> str:
        return "\n".join([self.title, plain_table(self.rows()), *self.notes])

    def _repr_html_(self) -> str:
        bold = [index for index, group in enumerate(self.groups()) if self.recommended in group]
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return html_table(self.title, self.rows(), bold) + notes


# Which cache to use


def best_of(caches: Sequence[PlannedCache]) -> PlannedCache | None:
    """The best of the caches that fit, `None` if no cache fits.

    First come caches with at least `COARSE_BITS`. Then the device comes before the host, from which every token brings
    the states; exact before rounded; more bits before fewer; and fewer bytes before more. A cache that evicts does not
    hold the context, and is recommended only if all caches evict.
    """
    keeping = [cache for cache in caches if cache.fidelity != "evicting"]
    return min(
        (cache for cache in keeping or caches if cache.fits),
        key=lambda cache: (
            cache.is_coarse,
            cache.host_bytes > 0,
            not cache.is_exact,
            -cache.bits,
            cache.device_bytes,
            cache.name != SIMPLEST,
            cache.name,
        ),
        default=None,
    )


def why_recommended(cache: PlannedCache, caches: Sequence[PlannedCache], memory: int | None) -> str:
    """The reason to use the best of the caches."""
    within = "" if memory is None else f" that fits into {readable_bytes(memory)}"
    kept = "is exact" if cache.is_exact else f"has the most bits, {cache.bits:.3g},"
    reasons = {
        "it is the only one that was asked for.": len(caches) == 1,
        "only caches that evict were asked for, and it is the best of them.": cache.fidelity == "evicting",
        f"no cache on the device{within} has {COARSE_BITS} bits or more, and it {kept} of the caches on the host, "
        "for which every token waits.": cache.host_bytes,
        f"it is exact, and the smallest such cache on the device{within}.": cache.is_exact,
        f"no exact cache on the device fits, and it has the most bits, {cache.bits:.3g}, of any{within}.": True,
    }
    return next(reason for reason, applies in reasons.items() if applies)


def why_not(cache: PlannedCache, best: PlannedCache) -> str:
    """The reason to use the best cache instead of this one, which fits too."""
    reasons = {
        "it evicts tokens that the model would attend to.": cache.fidelity == "evicting",
        f"it rounds states to {cache.bits:.3g} bits, and '{best.name}' keeps more.": cache.is_coarse
        and not best.is_coarse,
        f"it brings states from the host for every token, and '{best.name}' does not.": cache.host_bytes
        and not best.host_bytes,
        f"it changes what attention computes, and '{best.name}' does not.": cache.is_exact != best.is_exact,
        f"it has fewer bits than '{best.name}'.": cache.bits != best.bits,
        f"it takes more memory than '{best.name}'.": cache.device_bytes != best.device_bytes,
        f"it costs and keeps the same as '{best.name}'.": True,
    }
    return next(reason for reason, applies in reasons.items() if applies)


def nothing_fits(
    caches: Sequence[PlannedCache], left_out: Mapping[str, str], context_length: int, memory: int | None
) -> KVLayersError:
    """The error for a budget that is too small for all caches, or for a model that no cache could be planned for."""
    if not caches or memory is None:
        return ConfigError(
            "No cache could be planned for the model: "
            f"{'; '.join(f'{name}: {reason}' for name, reason in left_out.items())}."
        )
    keeping = [cache for cache in caches if cache.fidelity != "evicting"] or caches
    least = min(keeping, key=lambda cache: cache.device_bytes)
    furthest = max(keeping, key=lambda cache: cache.longest_context or 0)
    shorter = (
        f", or plan at most {furthest.longest_context} tokens, with '{furthest.name}'"
        if furthest.longest_context
        else ""
    )
    if least.device_bytes <= memory:
        # There is enough memory, but not where the layers are.
        return CapacityError(
            f"{context_length} tokens do not fit. The smallest cache is '{least.name}', and {least.reason[:-1]}: allow "
            f"more there{shorter}."
        )
    return CapacityError(
        f"`memory` must be at least {exact_bytes(least.device_bytes)} for {context_length} tokens, which "
        f"'{least.name}' takes, got {exact_bytes(memory)}: allow more{shorter}."
    )


# How caches are planned

BudgetsByDevice = dict[torch.device | None, int]
"""Bytes that the cache may take of each device, of `None` if all layers are on one; empty for no budget."""

TOKENS_AHEAD = 4096
"""`bytes_per_token` is the mean over this many further tokens, since packed blocks grow by many tokens at a time."""

FIRST_STEP = 32
"""Tokens from a guess to the next number that is tried. Most guesses are wrong by less than a block."""

NO_END = 2**40
"""More tokens than any context has: if so many fit, any number fits."""


@checks_options
def plan(
    config: object,
    context_length: int | str,
    batch_size: int = 1,
    dtype: torch.dtype | str | None = None,
    memory: int | str | None = None,
    *,
    names: Sequence[str] | None = None,
    encoder_length: int | str | None = None,
    max_bytes: int | str | None = None,
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
        max_bytes: say too what a `DynamicCache` with this option would hold: tokens that are exact, and rounded.

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
    context = checked_count(tokens(context_length, "context_length"), "context_length", "tokens")
    request = CacheRequest(
        of_model,
        batch_size=checked_count(batch_size, "batch_size", "sequences"),
        length_hint=context,
        dtype=_dtype_of(of_model, dtype),
        encoder_length=_encoder_length(of_model, encoder_length),
    )
    budgets: BudgetsByDevice = {}
    if memory is not None:
        limit = bytes_or_share(memory, "memory")
        budgets[None] = (
            int(limit * bytes_by_length(SIMPLEST, request)(context))
            if isinstance(limit, Fraction)
            else checked_count(limit, "memory", "bytes")
        )
    if names is not None and (isinstance(names, str) or not isinstance(names, Sequence) or not names or AUTO in names):
        raise OptionError(
            f"`names` must be a list of at least one cache, without '{AUTO}', which takes what is recommended, got "
            f"{names!r}: pass {[names] if isinstance(names, str) and names else ['int4']}, or leave `names` out."
        )
    caches, refused = _planned_caches(request, cache_names() if names is None else names, budgets)
    if names is not None and refused:
        raise next(iter(refused.values()))
    made = _plan_of(request, caches, refused, budgets)
    return made if max_bytes is None else dataclasses.replace(made, within=_within(request, max_bytes))


def plan_for(request: CacheRequest, budgets: BudgetsByDevice, names: Sequence[str]) -> Plan:
    """A plan for a cache that is about to be made, over those of `names` that the model supports.

    Args:
        request: what the cache is for; its `length_hint` is the context.
        budgets: bytes that the cache may take, of the device or of each device in `request.layer_devices`.
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
    # The other facts of the request are of one call, and no cache that a plan chooses depends on them.
    planned = CacheRequest(
        request.config,
        batch_size=request.batch_size or 1,
        length_hint=request.length_hint,
        dtype=_dtype_of(request.config, request.dtype),
        encoder_length=request.encoder_length or (request.length_hint if request.config.is_encoder_decoder else None),
        layer_devices=() if None in budgets else request.layer_devices,
    )
    return _plan_of(planned, *_planned_caches(planned, names, budgets), budgets)


def _within(request: Any, max_bytes: int | str) -> str:
    """What a cache that stays within a budget holds after one pass, in a sentence.

    Raises:
        CapacityError: the budget is too small.
    """
    own, context = dataclasses.replace(request, options={"max_bytes": max_bytes}), request.length_hint
    cache: Any = cache_for(SIMPLEST, own).self_attention
    # Nothing is rounded here, so that the log says nothing of it.
    cache.budget.said = tuple(cache.budget.bits)
    for index, shape in enumerate(layer_shapes(request.config, request.batch_size, request.dtype)):
        if shape.token is not None:
            cache.update(*states_on_meta(shape.forms(), context), index)
    exact = [layer.length - (layer.exact_from or 0) for layer in cache.adapted_layers() if layer.traits.attends]
    return (
        f"a DynamicCache with max_bytes={max_bytes!r}: of {context} tokens, the newest {min(exact)} are exact after "
        f"one pass ({cache.budget.note})."
    )


def _planned_caches(
    request: Any, names: Sequence[str], budgets: BudgetsByDevice
) -> tuple[list[PlannedCache], dict[str, KVLayersError]]:
    """The caches that the model supports, without reasons, and the errors of the others.

    Args:
        request: what they are for; its `length_hint` is the context.
        names: their names. "auto" is left out, as it is a choice among the others.
        budgets: bytes that a cache may take.
    """
    shapes = layer_shapes(request.config, request.batch_size, request.dtype)
    caches: list[PlannedCache] = []
    refused: dict[str, KVLayersError] = {}
    for name in [name for name in names if name != AUTO]:
        try:
            named = named_cache(name) or NamedCache(name)
            make = functools.partial(_made, named.name, dataclasses.replace(request, options=named.options))
            trial = CacheTrial(make, shapes, request.encoder_length, request.layer_devices)
            caches.append(_planned(name, trial, request.length_hint, budgets))
        except KVLayersError as error:
            refused[name] = error
    return caches, refused


def _plan_of(
    request: Any, caches: Sequence[PlannedCache], refused: Mapping[str, KVLayersError], budgets: BudgetsByDevice
) -> Plan:
    """The plan: one cache is recommended, and each has its reason. Arguments as of `_planned_caches`."""
    left_out = {name: str(error) for name, error in refused.items()}
    memory, best = sum(budgets.values()) if budgets else None, best_of(caches)
    if best is None:
        raise nothing_fits(caches, left_out, request.length_hint, memory)
    reasons = [
        why_recommended(best, caches, memory) if cache is best else cache.reason or why_not(cache, best)
        for cache in caches
    ]
    reasoned = tuple(dataclasses.replace(cache, reason=reason) for cache, reason in zip(caches, reasons, strict=True))
    return Plan(
        request.length_hint,
        request.batch_size,
        request.dtype,
        memory,
        reasoned,
        reasoned[caches.index(best)],
        MappingProxyType(left_out),
        model_types.most_positions(request.config),
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
    shapes = layer_shapes(request.config, request.batch_size or 1, _dtype_of(request.config, request.dtype))
    trial = CacheTrial(functools.partial(_made, name, request), shapes, request.encoder_length)
    return lambda tokens: trial.nbytes(tokens).device


def _made(name: str, request: CacheRequest, length_hint: int) -> transformers.Cache:
    return cache_for(name, dataclasses.replace(request, length_hint=length_hint))


def _planned(name: str, trial: CacheTrial, context_length: int, memory: BudgetsByDevice) -> PlannedCache:
    costs = trial.nbytes(context_length)
    missing, device = _missing(trial, context_length, memory)
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
        reason=(
            f"it needs {readable_bytes(missing)} more than the budget{'' if device is None else f' of {device}'}."
            if missing > 0
            else ""
        ),
    )


def _guess(trial: CacheTrial, context_length: int, memory: int) -> int:
    """About how many tokens fit, since nearly all caches grow nearly evenly."""
    tokens = context_length
    with contextlib.suppress(CapacityError):
        # Where a buffer is enlarged, and how much, differs between short and long contexts.
        for _ in range(3):
            here, there = trial.nbytes(tokens).device, trial.nbytes(tokens + TOKENS_AHEAD).device
            tokens = min(max(tokens + (memory - here) * TOKENS_AHEAD // max(there - here, 1), 1), NO_END - 1)
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
    return least + bisect.bisect_left(range(least + 1, most), True, key=lambda tokens: not fits(tokens))


def _missing(trial: CacheTrial, tokens: int, memory: BudgetsByDevice) -> tuple[int, torch.device | None]:
    """Bytes beyond the budget of the device that lacks most, and this device; 0 or fewer if the cache fits."""
    found = trial.nbytes_by_device(tokens).items() if memory else ()
    missing = ((costs.device - memory[device], device) for device, costs in found)
    return max(missing, key=operator.itemgetter(0), default=(0, None))


def _fits(trial: CacheTrial, tokens: int, memory: BudgetsByDevice) -> bool:
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
    check_whole_number(count, f"`{name}`", 1, of=what)
    return count


def _dtype_of(config: PretrainedConfig, dtype: object) -> torch.dtype:
    return checked_dtype((model_types.decoder_config(config).dtype or torch.float32) if dtype is None else dtype)


def _encoder_length(config: PretrainedConfig, encoder_length: int | str | None) -> int | None:
    if encoder_length is not None and not config.is_encoder_decoder:
        raise OptionError(
            f"`encoder_length` must be left out for a model without an encoder, got {encoder_length!r}: its config has "
            "none."
        )
    if encoder_length is None and config.is_encoder_decoder:
        raise OptionError(
            "`encoder_length` is missing, and cross-attention caches the output of the model's encoder: pass the "
            "number of tokens in that output."
        )
    return (
        None
        if encoder_length is None
        else checked_count(tokens(encoder_length, "encoder_length"), "encoder_length", "tokens")
    )
