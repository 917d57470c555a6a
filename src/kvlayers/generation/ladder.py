"""The caches that `resilient_generate` tries, in order, and a call of `generate()` that is attempted with each."""

import copy
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMode
from transformers.utils import ModelOutput

from kvlayers.errors import KVLayersError, OptionError
from kvlayers.generation import registry
from kvlayers.generation.install import call_with_kvlayers, is_installed
from kvlayers.generation.legacy_tuples import kvlayers_view
from kvlayers.generation.resume import OncePerToken, ResumableLoop
from kvlayers.generation.saved_names import requested_name, resolve_name
from kvlayers.upstream import cache_argument, generate_calls
from kvlayers.upstream.generate_calls import bind_arguments, full_generation_config, uses_transformers_generate


@dataclass(frozen=True)
class Rung:
    """One rung of a ladder: the cache to generate with.

    Args:
        name: one of `cache_names()`, or `None` for the cache that the call itself asks for.
        options: options of this cache, as in `cache_config`.

    Raises:
        RegistryError: `name` is empty, or not a string.
        OptionError: `options` is not a mapping from names to values, or is given without a name.

    Example:
        >>> Rung("offloaded_quantized", {"nbits": 4})
        Rung(name='offloaded_quantized', options={'nbits': 4})
    """

    name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name is not None and (not isinstance(self.name, str) or not self.name.strip()):
            raise registry.unknown_name(self.name)
        if not isinstance(self.options, Mapping) or not all(isinstance(key, str) for key in self.options):
            raise OptionError(f"`options` of a Rung must be a mapping from names to values, got {self.options!r}.")
        if self.name is None and self.options:
            raise OptionError(
                f"`options` of a Rung need a `name`, got {dict(self.options)!r} without one: pass the options of the "
                "call's own cache to generate() as cache_config."
            )

    def __str__(self) -> str:
        if self.name is None:
            return "the requested cache"
        return f"cache_implementation={self.name!r}" + (f" with {dict(self.options)!r}" if self.options else "")


AS_REQUESTED = Rung()
DEFAULT_LADDER = (
    AS_REQUESTED,
    Rung("int8"),
    Rung("int4"),
    Rung("offloaded"),
    Rung("offloaded_quantized", {"nbits": 4}),
)
"""The requested cache, then caches that hold less and less on the device."""

RungLike = Rung | str | tuple[str, Mapping[str, Any]] | None


def suitable_rungs(ladder: Iterable[RungLike], model: Any) -> tuple[list[Rung], list[str]]:
    """The rungs whose caches suit `model`, the requested cache first, and why the others do not suit.

    A cache that does not suit the model is an error if the caller chose the ladder, but not in the default ladder.
    """
    if isinstance(ladder, str | Rung) or not isinstance(ladder, Iterable):
        raise OptionError(f"`ladder` must be a sequence of rungs, got {ladder!r}: put it in a list.")
    rungs = [_rung(entry) for entry in ladder]
    if not rungs:
        raise OptionError("`ladder` must have at least one rung, got an empty one: leave it out for the default.")
    below = rungs[1:] if rungs[0] == AS_REQUESTED else rungs
    if AS_REQUESTED in below:
        raise OptionError(
            "None in `ladder` stands for the requested cache, which comes first, but it is further down: put it first."
        )
    for rung in below:
        if rung.name is None or not registry.is_registered(rung.name):
            raise registry.unknown_name(rung.name)
    suitable: list[Rung] = [AS_REQUESTED]
    unsuitable: list[str] = []
    for rung in below:
        try:
            # A cache reserves no memory before its first states.
            registry.cache_for(str(rung.name), registry.CacheRequest(model.config, rung.options, length_hint=1))
            suitable.append(rung)
        except KVLayersError as error:
            if ladder is not DEFAULT_LADDER:
                raise
            unsuitable.append(f"{rung}: {first_line(error)}")
    return suitable, unsuitable


def _rung(entry: object) -> Rung:
    if isinstance(entry, Rung):
        return entry
    if entry is None or isinstance(entry, str):
        return Rung(entry)
    if isinstance(entry, tuple) and len(entry) == 2:
        return Rung(*entry)
    raise OptionError(
        f"a rung must be the name of a cache, a pair (name, options) or a Rung, got {entry!r}: for a cache with "
        "options, write ('offloaded_quantized', {'nbits': 4})."
    )


def first_line(error: BaseException) -> str:
    """The class and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


RESUMABLE_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
"""Decoding modes whose whole state is the tokens so far."""

EXTRA_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class GenerateCall:
    """A call of `generate()` that is attempted with one cache after another.

    Attributes:
        restart_reason: why the tokens of a failed attempt cannot be kept, `None` if they are kept.
        no_other_cache: why no other cache than the caller's can be used, `None` if others can.
    """

    def __init__(self, model: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        self._model = model
        self._cache_name = cache_argument.name_in_generate(model)
        self._unnamed, self._arguments = bind_arguments(model, args, arguments)
        self._config = None
        if uses_transformers_generate(model, arguments):
            self._config = _config_of_call(model, arguments)
        self._started = time.monotonic()
        self.restart_reason = _restart_reason(model, self._config, arguments)
        self.no_other_cache = _no_other_cache_reason(model, self._config, arguments)
        streamer = arguments.get("streamer")
        self._streamer = None if streamer is None else OncePerToken(streamer)
        self._loop = None if self.restart_reason is not None else ResumableLoop(self._streamer, arguments)

    @property
    def tokens_so_far(self) -> int | None:
        """Tokens that the next attempt continues from, `None` if they are not counted."""
        return None if self._loop is None else self._loop.new_tokens

    def rungs_to_try(self, rungs: list[Rung]) -> list[Rung]:
        """The requested cache, and the rungs below it. If it is itself a rung, the rungs above take more memory."""
        if self.no_other_cache is not None:
            return [AS_REQUESTED]
        name = _option("cache_implementation", self._config, self._arguments)
        options = _option("cache_config", self._config, self._arguments) or {}
        same = [position for position, rung in enumerate(rungs) if rung.name == name and rung.options == options]
        return [AS_REQUESTED, *rungs[max(same, default=0) + 1 :]]

    def attempt(self, rung: Rung) -> Any:
        """Call `generate()` once, with the cache of `rung`."""
        arguments = {name: _with_own_containers(value) for name, value in self._arguments.items()}
        if self._streamer is not None:
            self._streamer.begin_attempt()
            arguments["streamer"] = self._streamer
        if self._loop is not None:
            arguments["custom_generate"] = self._loop
            self._loop.take_over_stop_strings(self._config, arguments)
        if rung == AS_REQUESTED:
            return self._model.generate(*self._unnamed, **arguments)
        changes: dict[str, Any] = {"cache_implementation": rung.name, "cache_config": dict(rung.options)}
        max_time = _option("max_time", self._config, arguments)
        if max_time is not None:
            changes["max_time"] = max(max_time - (time.monotonic() - self._started), 0.0)
        _change_options(arguments, changes)
        with call_with_kvlayers():
            return self._model.generate(*self._unnamed, **arguments)

    def drop_callers_cache(self) -> None:
        """Drop the caller's cache, which holds the states of a failed attempt. No other attempt uses it."""
        self._arguments.pop(self._cache_name, None)


def _config_of_call(model: Any, arguments: Mapping[str, Any]) -> Any:
    if not is_installed():
        return full_generation_config(model, arguments)[0]
    requested = requested_name(arguments)
    with call_with_kvlayers():
        config = full_generation_config(model, arguments)[0]
    resolve_name(config, requested, cache_argument.passed_in(arguments) is not None)
    return config


def _option(option: str, config: Any, arguments: Mapping[str, Any]) -> Any:
    return arguments.get(option) if config is None else vars(config)[option]


def _change_options(arguments: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Set options in the config if the caller passed one, since transformers warns about options beside a config."""
    config = arguments.get("generation_config")
    if not isinstance(config, GenerationConfig):
        arguments.update(changes)
        return
    arguments["generation_config"] = config = copy.deepcopy(config)
    for option, value in changes.items():
        arguments.pop(option, None)
        setattr(config, option, value)


def _with_own_containers(value: Any) -> Any:
    """The same tensors in new containers, since `generate()` repeats an encoder's output in place."""
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _with_own_containers(part) for name, part in value.items()})
    if type(value) is dict:
        return {name: _with_own_containers(part) for name, part in value.items()}
    return value


def _restart_reason(model: Any, config: Any, arguments: Mapping[str, Any]) -> str | None:
    if config is None:
        return "this generate() is not the one of transformers"
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    if mode not in RESUMABLE_MODES:
        return f"the state of {mode.value} is more than its tokens"
    if generate_calls.has_own_loop(model):
        return f"{type(model).__name__} has its own decoding loop"
    if _processes() > 1:
        return "several processes generate together"
    if config.return_dict_in_generate and any(vars(config)[name] for name in EXTRA_OUTPUTS):
        return "the scores and states of earlier tokens must be returned as well"
    if arguments.get("inputs_embeds") is not None and not model.config.is_encoder_decoder:
        return "the prompt is given as embeddings"
    if config.guidance_scale not in (None, 1):
        return "guidance has its own cache"
    if config.watermarking_config is not None:
        return "a watermark may depend on all steps since the prompt"
    if config.token_healing:
        return "token healing changes the prompt"
    return None


def _processes() -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1


def _no_other_cache_reason(model: Any, config: Any, arguments: Mapping[str, Any]) -> str | None:
    if _option("use_cache", config, arguments) is False:
        return "use_cache=False leaves no cache to make smaller"
    past = cache_argument.passed_in(arguments)
    if past is None:
        return None
    elsewhere = "the prompt is not complete: only the cache that was passed knows its beginning"
    if not isinstance(past, transformers.Cache) or kvlayers_view(past).is_recurrent:
        return elsewhere
    seen = past.get_seq_length()
    if model.config.is_encoder_decoder:
        ids, mask = arguments.get("decoder_input_ids"), arguments.get("decoder_attention_mask")
    else:
        ids, mask = arguments.get("input_ids", arguments.get("inputs")), arguments.get("attention_mask")
    tokens = 0 if ids is None else ids.shape[1]
    # As in generate(): ids as long as their mask are the whole sequence, other ids are what follows the past. Without a
    # mask it makes one for the ids, except for models with an encoder.
    is_whole = not model.config.is_encoder_decoder if mask is None else mask.shape[1] == tokens
    return None if seen == 0 or (is_whole and seen <= tokens) else elsewhere
