"""The caches that `resilient_generate` tries, in order, and a call of `generate()` that is attempted with each.

The tokens of an attempt are kept for the next one.
"""

import copy
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import (
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    GenerationMixin,
    GenerationMode,
)
from transformers.utils import ModelOutput

from kvlayers.core import named_caches
from kvlayers.errors import KVLayersError, OptionError
from kvlayers.generation import cache_by_name
from kvlayers.generation.cache_by_name import requested_name, resolve_name
from kvlayers.generation.install import call_with_kvlayers, is_installed
from kvlayers.generation.legacy_tuples import kvlayers_view
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
            raise cache_by_name.unknown_name(self.name)
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
        if rung.name is None or not named_caches.is_registered(rung.name):
            raise cache_by_name.unknown_name(rung.name)
    suitable: list[Rung] = [AS_REQUESTED]
    unsuitable: list[str] = []
    for rung in below:
        try:
            # A cache reserves no memory before its first states.
            cache_by_name.cache_for(
                str(rung.name), named_caches.CacheRequest(model.config, rung.options, length_hint=1)
            )
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
    resolve_name(model, config, requested, cache_argument.passed_in(arguments) is not None)
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
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    returns_more = config.return_dict_in_generate and any(vars(config)[name] for name in EXTRA_OUTPUTS)
    is_embedded = arguments.get("inputs_embeds") is not None and not model.config.is_encoder_decoder
    reasons = {
        f"the state of {mode.value} is more than its tokens": mode not in RESUMABLE_MODES,
        f"{type(model).__name__} has its own decoding loop": generate_calls.has_own_loop(model),
        "several processes generate together": is_distributed and torch.distributed.get_world_size() > 1,
        "the scores and states of earlier tokens must be returned as well": returns_more,
        "the prompt is given as embeddings": is_embedded,
        "guidance has its own cache": config.guidance_scale not in (None, 1),
        "a watermark may depend on all steps since the prompt": config.watermarking_config is not None,
        "token healing changes the prompt": config.token_healing,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


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


class OncePerToken(BaseStreamer):  # type: ignore[misc]
    """Passes every token to the caller's streamer once, and the prompt in the first attempt only.

    Attributes:
        tokens: tokens that were passed on after the prompt.
    """

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer = streamer
        self._had_prompt = False
        self._prompt_comes_next = True
        self.tokens = 0

    def begin_attempt(self) -> None:
        """Expect the prompt next."""
        self._prompt_comes_next = True

    def put(self, value: Tensor) -> None:
        """Take a prompt `[batch, tokens]`, or one token of each sequence, `[batch]`, as `generate()` streams them."""
        if not self._prompt_comes_next:
            self._streamer.put(value)
            self.tokens += 1
            return
        self._prompt_comes_next = False
        if not self._had_prompt:
            self._streamer.put(value)
            self._had_prompt = True

    def end(self) -> None:
        """End the stream. Only a successful attempt calls this."""
        self._streamer.end()


class _RecordingCriteria(StoppingCriteriaList):  # type: ignore[misc]
    """Stopping criteria that record in a loop the tokens they have seen, and the sequences they have ended."""

    def __init__(self, criteria: StoppingCriteriaList, loop: "ResumableLoop", ended: Tensor) -> None:
        super().__init__(criteria)
        self._loop, self._ended = loop, ended

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        # A sequence that ended in an earlier attempt has ended for good, whatever the criteria say now.
        self._ended = super().__call__(input_ids, scores, **kwargs) | self._ended
        self._loop.record(input_ids, self._ended)
        return self._ended


class _PadEnded(LogitsProcessor):  # type: ignore[misc]
    """Allows only the padding token in sequences that have ended."""

    def __init__(self, ended: Tensor, padding: int) -> None:
        self._ended, self._padding = ended, padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        only_padding = torch.full_like(scores, -float("inf"))
        only_padding[:, self._padding] = 0
        return torch.where(self._ended.to(scores.device)[:, None], only_padding, scores)


def _padding_token(generation_config: Any) -> int | None:
    """The token with which `generate()` pads: the first that ends a sequence, if there is no other."""
    token = generation_config.pad_token_id
    if token is None and generation_config.eos_token_id is not None:
        token = generation_config.eos_token_id
    return None if token is None else int(torch.as_tensor(token).reshape(-1)[0])


class ResumableLoop:
    """The decoding loop of transformers, which each attempt enters where the last one stopped.

    Every attempt calls `generate()` with the caller's arguments, and `generate()` runs this instead of its own loop.
    Thus everything that depends on where the prompt ends (lengths, masks, positions, logits processors) is as in the
    first attempt.
    """

    def __init__(self, streamer: OncePerToken | None, arguments: Mapping[str, Any]) -> None:
        self._streamer = streamer
        # generate() passes these to its own loop only.
        self._synced_gpus = bool(arguments.get("synced_gpus"))
        self._tokenizer = arguments.get("tokenizer")
        self._prompt_length = 0
        self._sequences: Tensor | None = None
        self._ended: Tensor | None = None

    @property
    def new_tokens(self) -> int:
        """Tokens after the prompt that all criteria have seen."""
        return 0 if self._sequences is None else self._sequences.shape[1] - self._prompt_length

    def record(self, sequences: Tensor, ended: Tensor) -> None:
        """Record the tokens so far, `[batch, tokens]`, and which sequences have ended, `[batch]`."""
        self._sequences, self._ended = sequences, ended

    def take_over_stop_strings(self, config: Any, arguments: dict[str, Any]) -> None:
        """Pass `generate()` the criterion for stop strings, which it makes itself only for its own loop."""
        if config.stop_strings is not None and self._tokenizer is not None:
            criterion = StopStringCriteria(stop_strings=config.stop_strings, tokenizer=self._tokenizer)
            arguments["stopping_criteria"] = StoppingCriteriaList(
                [criterion, *(arguments.get("stopping_criteria") or [])]
            )
            arguments["stop_strings"] = None

    # The argument names are those of generate()'s own loop: other names would take arguments away from the model.
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Run the loop of transformers from the tokens so far, and return what it returns."""
        self._prompt_length = input_ids.shape[1]
        if self._sequences is None or self._ended is None:
            ended = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        else:
            prompt, input_ids, ended = input_ids, self._sequences, self._ended
            self._stream_missing_tokens(input_ids)
            if bool(ended.all()):
                return self._result(model, input_ids, generation_config, model_kwargs)
            model_kwargs = generate_calls.model_kwargs_after(model, prompt, model_kwargs, self.new_tokens)
            # As in the loop: without such a criterion, sequences that have ended continue until all have ended.
            if any(getattr(criterion, "eos_token_id", None) is not None for criterion in stopping_criteria):
                # Without a padding token, the loop refuses to start.
                padding = _padding_token(generation_config)
                processors = [] if padding is None else [_PadEnded(ended, padding)]
                logits_processor = LogitsProcessorList([*logits_processor, *processors])
        return generate_calls.sampling_loop(GenerationMixin)(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=_RecordingCriteria(stopping_criteria, self, ended),
            generation_config=generation_config,
            synced_gpus=self._synced_gpus,
            streamer=self._streamer,
            **model_kwargs,
        )

    def _stream_missing_tokens(self, sequences: Tensor) -> None:
        """Stream tokens that the failed attempt had recorded but not streamed."""
        if self._streamer is not None:
            for position in range(self._prompt_length + self._streamer.tokens, sequences.shape[1]):
                self._streamer.put(sequences[:, position].cpu())

    def _result(self, model: Any, sequences: Tensor, config: Any, model_kwargs: Mapping[str, Any]) -> Any:
        """What the loop returns at its end, if the failed attempt had come this far. The cache is empty."""
        if self._streamer is not None:
            self._streamer.end()
        if not config.return_dict_in_generate:
            return sequences
        output = GenerateEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateDecoderOnlyOutput
        cache = model_kwargs.get(cache_argument.name_in_generate(model))
        return output(sequences=sequences, **cache_argument.as_field(output, cache))
