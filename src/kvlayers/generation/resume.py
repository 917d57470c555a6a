"""Tokens that `resilient_generate` keeps from one attempt to the next."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import (
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    GenerationMixin,
)

from kvlayers.upstream import cache_argument, generate_calls


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
