"""A call of `generate()` that can be made again with another cache."""

import copy
import time
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin, GenerationMode
from transformers.utils import ModelOutput

from kvlayers.generation.calls import by_name, generates_as_transformers, whole_config
from kvlayers.generation.install import own_call
from kvlayers.generation.oom.ladder import AS_ASKED, Rung
from kvlayers.generation.oom.resume import OncePerToken, ResumableLoop
from kvlayers.upstream import model_types

KEEPING_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
"""Ways of decoding whose whole state is the tokens so far."""

EXTRA_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class GenerateCall:
    """A call of generate(), to be attempted with one cache after another.

    Attributes:
        starts_again: why tokens of a failed attempt cannot be kept, `None` where they are.
        no_other_cache: why no cache but the caller's can be used, `None` where others can.
    """

    def __init__(self, model: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        self._model = model
        self._cache_name = model_types.cache_argument(model)
        self._unnamed, self._arguments = by_name(model, args, arguments)
        self._config = whole_config(model, arguments)[0] if generates_as_transformers(model, arguments) else None
        self._started = time.monotonic()
        self.starts_again = _why_tokens_are_lost(model, self._config, arguments)
        self.no_other_cache = _why_no_other_cache(model, self._config, arguments)
        streamer = arguments.get("streamer")
        self._streamer = None if streamer is None else OncePerToken(streamer)
        self._loop = None if self.starts_again is not None else ResumableLoop(self._streamer, arguments)

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
        with own_call():
            return self._model.generate(*self._unnamed, **arguments)

    def let_go_of_the_callers_cache(self) -> None:
        """It is full of a failed attempt, and no other attempt uses it."""
        self._arguments.pop(self._cache_name, None)


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
    past = arguments.get(model_types.cache_argument(model))
    if past is None:
        return None
    elsewhere = "the prompt is not given as a whole: its beginning is known to the cache that was passed alone"
    if not isinstance(past, transformers.Cache) or model_types.cache_argument(model) != "past_key_values":
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
