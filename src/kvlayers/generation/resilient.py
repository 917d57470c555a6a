"""generate() that goes on with a smaller cache where memory runs out, from the token that it had come to."""

import copy
import gc
import inspect
import time
import traceback
import warnings
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

from .. import compat
from ..errors import KVLayersError, OptionError
from . import registry
from .install import installed
from .reservations import free_reservations

OUT_OF_MEMORY_PHRASES = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "alloc_failed",
)
"""What a RuntimeError says where a device has no class for it: MPS, the CPU's allocators, CUDA's libraries."""

KEEPING_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
"""Ways of decoding whose whole state is the tokens so far."""

EXTRA_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class SteppedDownWarning(RuntimeWarning):
    """Memory ran out, and `resilient_generate` goes on with another cache."""


@dataclass(frozen=True)
class Rung:
    """One rung of a ladder: the cache to generate with.

    Args:
        name: a name of `cache_names()`, or `None` for what the call itself asks for.
        options: options of that cache, as `cache_config` has them.

    Raises:
        RegistryError: the name is empty, or no string.
        OptionError: the options are no mapping from names, or belong to no cache.

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
            raise OptionError(f"expected the options of a rung by their names, but saw {self.options!r}.")
        if self.name is None and self.options:
            raise OptionError(
                f"expected options of a cache that has a name, but saw {dict(self.options)!r} for what was asked for: "
                "pass them to generate() as cache_config."
            )

    def __str__(self) -> str:
        if self.name is None:
            return "what was asked for"
        return f"cache_implementation={self.name!r}" + (f" with {dict(self.options)!r}" if self.options else "")


AS_ASKED = Rung()
DEFAULT_LADDER = (
    AS_ASKED,
    Rung("int8"),
    Rung("int4"),
    Rung("offloaded"),
    Rung("offloaded_quantized", {"nbits": 4}),
)
"""As asked, then caches that hold less and less on the device."""

RungLike = Rung | str | tuple[str, Mapping[str, Any]] | None


def resilient_generate(
    model: Any,
    *args: Any,
    ladder: Iterable[RungLike] = DEFAULT_LADDER,
    **kwargs: Any,
) -> Any:
    """`model.generate(*args, **kwargs)`, which steps down to smaller caches where memory runs out.

    Greedy decoding and sampling keep the tokens that they have; other ways of decoding start again from the prompt.
    Each step down is a `SteppedDownWarning`. Smaller caches are made by kvlayers, whether or not it is installed.

    Args:
        model: a model of transformers.
        args: as for `model.generate`.
        ladder: what to try, in order: names of caches, pairs of a name and its options, or `Rung`s. What the call
            itself asks for comes first, whether or not the ladder begins with it (as `None`). Where that is a rung as
            well, what follows is the rung below it.
        kwargs: as for `model.generate`.

    Returns:
        What `model.generate` returns.

    Raises:
        RegistryError: before anything is generated, a rung is empty, or names a cache that there is not.
        OptionError: before anything is generated, the ladder is empty, or a rung's cache does not take its options.
        KVLayersError: before anything is generated, the caller's own ladder has a cache that this model cannot have.
        torch.OutOfMemoryError: memory ran out on every rung. The message says what was tried.

    Example:
        >>> import torch, transformers
        >>> config = transformers.LlamaConfig(
        ...     num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=99
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> ids = torch.tensor([[5, 8, 13]])
        >>> smaller = ["int4", ("offloaded_quantized", {"nbits": 2})]
        >>> output = resilient_generate(model, ids, max_new_tokens=4, ladder=smaller)
        >>> output.shape
        torch.Size([1, 7])
    """
    rungs, impossible = _possible_rungs(ladder, model)
    call = _Call(model, args, kwargs)
    rung, *below = call.rungs_below_what_is_asked_for(rungs)
    history: list[_Failure] = []
    while True:
        try:
            return call.attempt(rung)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            history.append(_Failure(rung, call.tokens_so_far, _first_line(error)))
            if not below:
                raise torch.OutOfMemoryError(_all_failed(error, history, impossible, call)) from error
            _let_go_of_frames(error)
        # Not in the except block, where Python still holds the error.
        call.let_go_of_the_callers_cache()
        free_memory()
        rung, *below = below
        warnings.warn(_stepping_down(history[-1], rung, call), SteppedDownWarning, stacklevel=2)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated.

    Example:
        >>> is_out_of_memory(RuntimeError("MPS backend out of memory")), is_out_of_memory(RuntimeError("bad shape"))
        (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in OUT_OF_MEMORY_PHRASES)


def free_memory() -> None:
    """Let go of what nobody needs: memory kept for the next call, garbage, and what the device's allocator keeps."""
    free_reservations()
    gc.collect()
    # Whatever devices the model is on: there is one kind beside the CPU.
    if torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()


def _let_go_of_frames(error: BaseException) -> None:
    """Empty the frames that an error, and those before it, were raised through: they hold caches and activations."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        following = following.__cause__ or following.__context__
    for raised in chain:
        traceback.clear_frames(raised.__traceback__)
        raised.__traceback__ = None


# Ladders


def _possible_rungs(ladder: Iterable[RungLike], model: Any) -> tuple[list[Rung], list[str]]:
    """The rungs whose caches `model` can have, what was asked for first; and why others cannot be had.

    A cache that cannot be had is an error where the caller chose it, and not where the default ladder did.
    """
    if isinstance(ladder, str | Rung) or not isinstance(ladder, Iterable):
        raise OptionError(f"expected a sequence of rungs as the ladder, but saw {ladder!r}: put it in a list.")
    rungs = [_rung(entry) for entry in ladder]
    if not rungs:
        raise OptionError("expected at least one rung in the ladder, but saw none: leave ladder out for the default.")
    below = rungs[1:] if rungs[0] == AS_ASKED else rungs
    if AS_ASKED in below:
        raise OptionError(
            "expected None, which is what the call asks for, as the first rung, but saw it further down: put it first."
        )
    for rung in below:
        if rung.name is None or not registry.is_registered(rung.name):
            raise registry.unknown_name(rung.name)
    possible: list[Rung] = [AS_ASKED]
    impossible: list[str] = []
    for rung in below:
        try:
            # No memory is reserved before the first states come.
            registry.cache_for(str(rung.name), registry.CacheRequest(model.config, rung.options, length_hint=1))
            possible.append(rung)
        except KVLayersError as error:
            if ladder is not DEFAULT_LADDER:
                raise
            impossible.append(f"{rung}: {_first_line(error)}")
    return possible, impossible


def _rung(entry: object) -> Rung:
    if isinstance(entry, Rung):
        return entry
    if entry is None or isinstance(entry, str):
        return Rung(entry)
    if isinstance(entry, tuple) and len(entry) == 2:
        return Rung(*entry)
    raise OptionError(
        f"expected a rung to be the name of a cache, a pair (name, options) or a Rung, but saw {entry!r}: for a cache "
        "with options, write ('offloaded_quantized', {'nbits': 4})."
    )


# What is said


@dataclass(frozen=True)
class _Failure:
    """A rung on which memory ran out. Keeps the error's words, and not the error, which would keep memory."""

    rung: Rung
    tokens: int | None
    words: str

    def __str__(self) -> str:
        reached = "" if self.tokens is None else f", after {_tokens(self.tokens)}"
        return f"{self.rung}{reached}: {self.words}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _tokens(count: int) -> str:
    return f"{count} new token{'' if count == 1 else 's'}"


def _stepping_down(failure: _Failure, rung: Rung, call: "_Call") -> str:
    if call.starts_again is not None:
        how = f"It starts again from the prompt, as {call.starts_again}"
    elif call.tokens_so_far:
        how = f"It goes on after the {_tokens(call.tokens_so_far)} that it has"
    else:
        how = "It starts from the prompt"
    return f"resilient_generate ran out of memory with {failure}. {how}, now with {rung}."


def _all_failed(error: BaseException, history: list[_Failure], impossible: list[str], call: "_Call") -> str:
    lines = [str(error), "", "resilient_generate ran out of memory on every rung of its ladder:"]
    lines += [f"  {number}. {failure}" for number, failure in enumerate(history, 1)]
    if call.no_other_cache is not None:
        lines.append(f"No other cache was tried, as {call.no_other_cache}.")
    elif impossible:
        lines += ["Caches that this model cannot have:", *(f"  - {reason}" for reason in impossible)]
    lines.append("Shorten the prompt, generate fewer tokens or sequences at once, or add smaller caches to the ladder.")
    return "\n".join(lines)


# Attempts


class _Call:
    """A call of generate(), to be attempted with one cache after another.

    Attributes:
        starts_again: why tokens of a failed attempt cannot be kept, `None` where they are.
        no_other_cache: why no cache but the caller's can be used, `None` where others can.
    """

    def __init__(self, model: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        self._model = model
        self._cache_name = compat.cache_argument(model)
        self._unnamed, self._arguments = _by_name(model, args, arguments)
        self._config = _whole_config(model, arguments) if _generates_as_transformers(model, arguments) else None
        self._started = time.monotonic()
        self.starts_again = _why_tokens_are_lost(model, self._config, arguments)
        self.no_other_cache = _why_no_other_cache(model, self._config, arguments)
        streamer = arguments.get("streamer")
        self._streamer = None if streamer is None else _Streamer(streamer)
        self._loop = None if self.starts_again is not None else _KeepingLoop(self._streamer, arguments)

    @property
    def tokens_so_far(self) -> int | None:
        """Tokens that the next attempt goes on from, `None` where they are not counted."""
        return None if self._loop is None else self._loop.new_tokens

    def rungs_below_what_is_asked_for(self, rungs: list[Rung]) -> list[Rung]:
        """What is asked for, and the rungs below it: where it is itself one of them, those above it hold more."""
        if self.no_other_cache is not None:
            return [AS_ASKED]
        asked = _value_of("cache_implementation", self._config, self._arguments)
        options = _value_of("cache_config", self._config, self._arguments) or {}
        same = [position for position, rung in enumerate(rungs) if rung.name == asked and rung.options == options]
        return [AS_ASKED, *rungs[max(same, default=0) + 1 :]]

    def attempt(self, rung: Rung) -> Any:
        """Call generate() once."""
        arguments = {name: _apart_from_the_callers(value) for name, value in self._arguments.items()}
        if self._streamer is not None:
            self._streamer.begin_attempt()
            arguments["streamer"] = self._streamer
        if self._loop is not None:
            arguments["custom_generate"] = self._loop
            self._loop.take_over_stop_strings(self._config, arguments)
        if rung == AS_ASKED:
            return self._model.generate(*self._unnamed, **arguments)
        changes: dict[str, Any] = {"cache_implementation": rung.name, "cache_config": dict(rung.options)}
        max_time = _value_of("max_time", self._config, arguments)
        if max_time is not None:
            changes["max_time"] = max(max_time - (time.monotonic() - self._started), 0.0)
        _change_options(arguments, changes)
        with installed():
            return self._model.generate(*self._unnamed, **arguments)

    def let_go_of_the_callers_cache(self) -> None:
        """It is full of a failed attempt, and no other attempt uses it."""
        self._arguments.pop(self._cache_name, None)


def _by_name(model: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments under the names that the model's generate() has for them, and those that have none.

    `arguments` is changed in place, so that nothing else holds what is dropped from it later.
    """
    signature = inspect.signature(model.generate)
    signature.bind(*args, **arguments)
    names = [
        name for name, parameter in signature.parameters.items() if parameter.kind == parameter.POSITIONAL_OR_KEYWORD
    ]
    arguments.update(zip(names, args, strict=False))
    return args[len(names) :], arguments


def _generates_as_transformers(model: Any, arguments: Mapping[str, Any]) -> bool:
    return (
        isinstance(model, GenerationMixin)
        and type(model).generate is GenerationMixin.generate
        and "generate" not in vars(model)
        and arguments.get("custom_generate") is None
    )


def _whole_config(model: Any, arguments: Mapping[str, Any]) -> Any:
    """The options of a call, with those that the model and transformers have for it."""
    of_generate = inspect.signature(GenerationMixin.generate).parameters
    options = {name: value for name, value in arguments.items() if name not in of_generate}
    return model._prepare_generation_config(arguments.get("generation_config"), **options)[0]


def _value_of(option: str, config: Any, arguments: Mapping[str, Any]) -> Any:
    return arguments.get(option) if config is None else vars(config)[option]


def _change_options(arguments: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Set options where the caller sets theirs: transformers warns of options beside a config."""
    config = arguments.get("generation_config")
    if not isinstance(config, GenerationConfig):
        arguments.update(changes)
        return
    arguments["generation_config"] = config = copy.deepcopy(config)
    for option, value in changes.items():
        arguments.pop(option, None)
        setattr(config, option, value)


def _apart_from_the_callers(value: Any) -> Any:
    """The same tensors in a container of one's own: generate() repeats what an encoder returned in place."""
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _apart_from_the_callers(part) for name, part in value.items()})
    if type(value) is dict:
        return {name: _apart_from_the_callers(part) for name, part in value.items()}
    return value


def _why_tokens_are_lost(model: Any, config: Any, arguments: Mapping[str, Any]) -> str | None:
    if config is None:
        return "this generate() is not that of transformers"
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    if mode not in KEEPING_MODES:
        return f"{mode.value} has more of a state than its tokens"
    loop = (GenerationMixin._sample, GenerationMixin._update_model_kwargs_for_generation)
    if (type(model)._sample, type(model)._update_model_kwargs_for_generation) != loop:
        return f"{type(model).__name__} decodes in a way of its own"
    if _processes() > 1:
        return "several processes generate together"
    if config.return_dict_in_generate and any(vars(config)[name] for name in EXTRA_OUTPUTS):
        return "the scores and states of earlier tokens are to be returned as well"
    if arguments.get("inputs_embeds") is not None and not model.config.is_encoder_decoder:
        return "the prompt is given as embeddings"
    if config.guidance_scale not in (None, 1):
        return "guidance has a cache of its own"
    if config.watermarking_config is not None:
        return "a watermark may depend on all steps since the prompt"
    if config.token_healing:
        return "token healing changes the prompt"
    return None


def _processes() -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1


def _why_no_other_cache(model: Any, config: Any, arguments: Mapping[str, Any]) -> str | None:
    if _value_of("use_cache", config, arguments) is False:
        return "use_cache=False leaves no cache that could be smaller"
    past = arguments.get(compat.cache_argument(model))
    if past is None:
        return None
    elsewhere = "the prompt is not given as a whole: its beginning is known to the cache that was passed alone"
    if not isinstance(past, transformers.Cache) or compat.cache_argument(model) != "past_key_values":
        return elsewhere
    held = past.get_seq_length()
    if model.config.is_encoder_decoder:
        ids, mask = arguments.get("decoder_input_ids"), arguments.get("decoder_attention_mask")
    else:
        ids, mask = arguments.get("input_ids", arguments.get("inputs")), arguments.get("attention_mask")
    given = 0 if ids is None else ids.shape[1]
    # As generate() tells them apart: ids as long as their mask are the whole sequence, others what follows the past.
    # Without a mask it makes one for the ids, though not beside an encoder.
    whole = not model.config.is_encoder_decoder if mask is None else mask.shape[1] == given
    return None if held == 0 or (whole and held <= given) else elsewhere


# Keeping tokens


class _Streamer(BaseStreamer):  # type: ignore[misc]
    """Passes on to the caller's streamer what it has not had: the prompt of the first attempt, and every token.

    Attributes:
        tokens: tokens that were passed on since the prompt.
    """

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer = streamer
        self._had_prompt = False
        self._prompt_comes_next = True
        self.tokens = 0

    def begin_attempt(self) -> None:
        self._prompt_comes_next = True

    def put(self, value: Tensor) -> None:
        if not self._prompt_comes_next:
            self._streamer.put(value)
            self.tokens += 1
            return
        self._prompt_comes_next = False
        if not self._had_prompt:
            self._streamer.put(value)
            self._had_prompt = True

    def end(self) -> None:
        self._streamer.end()


class _Recorded(StoppingCriteriaList):  # type: ignore[misc]
    """Criteria of a call, which note in a loop what tokens they have seen, and which sequences they have ended."""

    def __init__(self, criteria: StoppingCriteriaList, loop: "_KeepingLoop", ended: Tensor) -> None:
        super().__init__(criteria)
        self._loop, self._ended = loop, ended

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        # What ended before an earlier attempt failed has ended for good, whatever the criteria say of it now.
        self._ended = super().__call__(input_ids, scores, **kwargs) | self._ended
        self._loop.note(input_ids, self._ended)
        return self._ended


class _PaddingFor(LogitsProcessor):  # type: ignore[misc]
    """Leaves only the padding token to sequences that have ended."""

    def __init__(self, ended: Tensor, padding: Tensor) -> None:
        self._ended, self._padding = ended, padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        only_padding = torch.full_like(scores, -float("inf")).index_fill_(
            1, self._padding.reshape(1).to(scores.device), 0
        )
        return torch.where(self._ended.to(scores.device)[:, None], only_padding, scores)


class _KeepingLoop:
    """The decoding loop of transformers, which each attempt enters where the last one left it.

    generate() is called with the caller's arguments in every attempt, and runs this in the place of its own loop. So
    all that depends on where the prompt ends (lengths, masks, positions, logits processors) is as in the first one.
    """

    def __init__(self, streamer: _Streamer | None, arguments: Mapping[str, Any]) -> None:
        self._streamer = streamer
        # generate() gives these to its own loop alone.
        self._synced_gpus = bool(arguments.get("synced_gpus"))
        self._tokenizer = arguments.get("tokenizer")
        self._prompt_length = 0
        self._sequences: Tensor | None = None
        self._ended: Tensor | None = None

    @property
    def new_tokens(self) -> int:
        """Tokens behind the prompt that all criteria have seen."""
        return 0 if self._sequences is None else self._sequences.shape[1] - self._prompt_length

    def note(self, sequences: Tensor, ended: Tensor) -> None:
        self._sequences, self._ended = sequences, ended

    def take_over_stop_strings(self, config: Any, arguments: dict[str, Any]) -> None:
        """Give generate() the criterion for stop strings, which it makes itself only for its own loop."""
        if config.stop_strings is not None and self._tokenizer is not None:
            criterion = StopStringCriteria(stop_strings=config.stop_strings, tokenizer=self._tokenizer)
            arguments["stopping_criteria"] = StoppingCriteriaList(
                [criterion, *(arguments.get("stopping_criteria") or [])]
            )
            arguments["stop_strings"] = None

    # The names are those of generate()'s own loop: by others, it would take arguments away from the model.
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
        self._prompt_length = input_ids.shape[1]
        if self._sequences is None or self._ended is None:
            ended = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        else:
            input_ids, ended = self._sequences, self._ended
            self._stream_what_is_missing(input_ids)
            if bool(ended.all()):
                return self._result(model, input_ids, generation_config, model_kwargs)
            # One at a time, as the loop does it: what it repeats is the last entry.
            for _ in range(self.new_tokens):
                model_kwargs = GenerationMixin._update_model_kwargs_for_generation(
                    model, ModelOutput(), model_kwargs, is_encoder_decoder=model.config.is_encoder_decoder
                )
            # As the loop asks it. Without such a criterion, sequences that have ended go on until all have.
            if any(getattr(criterion, "eos_token_id", None) is not None for criterion in stopping_criteria):
                padding = _PaddingFor(ended, generation_config._pad_token_tensor)
                logits_processor = LogitsProcessorList([*logits_processor, padding])
        return GenerationMixin._sample(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=_Recorded(stopping_criteria, self, ended),
            generation_config=generation_config,
            synced_gpus=self._synced_gpus,
            streamer=self._streamer,
            **model_kwargs,
        )

    def _stream_what_is_missing(self, sequences: Tensor) -> None:
        """Stream tokens that the failed attempt had noted, and had not come to stream."""
        if self._streamer is not None:
            for position in range(self._prompt_length + self._streamer.tokens, sequences.shape[1]):
                self._streamer.put(sequences[:, position].cpu())

    def _result(self, model: Any, sequences: Tensor, config: Any, model_kwargs: Mapping[str, Any]) -> Any:
        """What the loop returns at its end, where the failed attempt had come that far. The cache is empty."""
        if self._streamer is not None:
            self._streamer.end()
        if not config.return_dict_in_generate:
            return sequences
        output = GenerateEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateDecoderOnlyOutput
        return output(sequences=sequences, past_key_values=model_kwargs.get(compat.cache_argument(model)))
