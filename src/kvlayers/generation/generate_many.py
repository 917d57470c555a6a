"""Many prompts through a few rows: rows join as others leave."""

import copy
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from kvlayers.core.cache import Cache
from kvlayers.errors import OptionError
from kvlayers.generation.cache_by_name import (
    AUTO,
    NamedCache,
    cache_for,
    either,
    request_of,
    requested_cache,
)
from kvlayers.generation.call_arguments import check_generation_config, check_model
from kvlayers.generation.prefill import pass_limit, pass_unseen
from kvlayers.generation.prefix_reuse.active_store import ActiveStore, required_store
from kvlayers.generation.prefix_reuse.eligibility import StorePart
from kvlayers.generation.prefix_reuse.prefixed_call import usable_cache
from kvlayers.generation.row_decoding import DecodedRow, Drafter, RowDecoder, check_positions, drafter_of
from kvlayers.prefix import Hit, PrefixStore
from kvlayers.rope.from_config import frequencies_within, remembers_lengths
from kvlayers.upstream import generate_calls, model_types
from kvlayers.utils import late
from kvlayers.utils.options import check_whole_number

MAX_NEW_TOKENS = 128

NOT_HERE = ("output_scores", "output_logits", "output_attentions", "output_hidden_states", "token_healing")
"""Options of a `GenerationConfig` that would change nothing."""

MAX_OVERTAKEN = 8
"""How many prompts may join before one that must wait, for room or for rows with its frequencies. As many are looked at
behind it. Then it is the next one, so that no prompt waits for ever."""

SEEN_BY_IDS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
"""Arguments of `generate()` that are objects, and not options of a `GenerationConfig`."""


@dataclass(frozen=True, eq=False)
class Generated:
    """The answer to one prompt.

    Attributes:
        index: number of the prompt, in the order in which prompts were given.
        ids: the new tokens, int64 `[tokens]`.
        text: the new tokens as text, without special tokens; `None` without a tokenizer.
        prompt_tokens: tokens of the prompt.
        cached_tokens: how many of them came from the prefix store.
        error: what ended the answer, if it did not end by itself.
    """

    index: int
    ids: Tensor
    text: str | None
    prompt_tokens: int
    cached_tokens: int = 0
    error: Exception | None = None


@dataclass(eq=False)
class _Reading:
    """A prompt that is being read."""

    index: int
    row: DecodedRow
    most_tokens: int
    frequencies: str | None
    cache: Cache | None = None
    part: StorePart | None = None
    cached_tokens: int = 0


@dataclass(eq=False)
class _Waiting:
    """A prompt that has not joined.

    Attributes:
        index: its number.
        prompt: as it was given.
        ids: its ids, int64 `[1, tokens]`, once they were needed.
        overtaken: how many prompts behind it have joined.
    """

    index: int
    prompt: Any
    ids: Tensor | None = None
    overtaken: int = 0


def generate_many(
    model: Any,
    prompts: Iterable[Any],
    *,
    tokenizer: Any = None,
    max_new_tokens: int | None = None,
    max_rows: int = 32,
    memory: int | str | None = None,
    cache: str | None = None,
    cache_config: Mapping[str, Any] | None = None,
    cache_implementation: str | None = None,
    prefix_store: PrefixStore | None = None,
    namespace: str = "",
    in_order: bool = False,
    chunk_tokens: int = 512,
    prompt_lookup_num_tokens: int | None = None,
    assistant_model: Any = None,
    on_token: Callable[[int, int], Any] | None = None,
    progress: bool = True,
    **options: Any,
) -> Iterator[Generated]:
    """Answer many prompts, `max_rows` at a time: a prompt joins as soon as an answer has ended.

    Every answer has the tokens that `model.generate` would give its prompt alone.

    Args:
        model: a decoder-only model of transformers, also within a `PeftModel` or as `torch.compile` returns it. Rows
            are decoded by the model itself, without the compiled code. A model that keeps states in its modules, such
            as RecurrentGemma, answers one prompt after another, whatever `max_rows` says.
        prompts: texts, messages of a chat (lists of dicts, by the tokenizer's chat template), or ids: lists of numbers,
            or int64 `[tokens]` or `[1, tokens]`. They are asked for one by one, as rows
            become free; while one waits for room, at most 8 of those behind it.
        tokenizer: for texts, chats and stop strings.
        max_new_tokens: most tokens of an answer. Default: that of `generation_config`, or 128.
        max_rows: most answers at a time.
        memory: bytes of the device that the rows may take, such as "4GiB": a prompt waits until it fits beside the
            others, and at most 8 of those behind it join before it. To let a row join takes as much once more for a
            moment, and forward passes and an `assistant_model` need memory of their own. Default: half of what is free,
            or one row.
        cache: name of the cache, such as "int4"; one of `cache_names()`. Default: "dynamic".
        cache_config: options of the cache.
        cache_implementation: the same as `cache`, by the name that `generate()` has for it.
        prefix_store: a store in which prompts are looked up, and into which they are inserted.
        namespace: the namespace in the store.
        in_order: answers come in the order of the prompts, rather than as they end.
        chunk_tokens: most tokens of a prompt that are read between two steps of the other rows. A prompt is read
            whole if what its cache holds would depend on it (caches that evict or round), or in chunks of
            `prefill_chunk_size`, as `model.generate` does.
        prompt_lookup_num_tokens: tokens of drafts that are looked up in the row itself, as in transformers; `None` for
            no drafts.
        assistant_model: a smaller model with the same vocabulary that makes drafts, as in transformers.
        on_token: called with the number of a prompt and each new token of its answer, which ends there if it returns
            `True`. What it raises ends all answers.
        progress: show a progress bar on stderr, if that is a terminal or a notebook and there is no `on_token`. What is
            printed between the answers stands above it.
        options: options of a `GenerationConfig`, a `generation_config`, a `logits_processor`, `stopping_criteria`, or a
            `prefix_allowed_tokens_fn`, as for `model.generate` with one prompt at a time, which is number 0 to them.
            Beams and several answers to a prompt are not among them.

    Yields:
        Answers. What goes wrong with one prompt is in its `error`, and the others go on: a `CapacityError`, say, if the
        prompt does not fit into the `memory` that was given. What a forward pass of all rows raises, or the iterator of
        prompts, or `on_token`, ends them all, as does a text without a `tokenizer`.

    Raises:
        OptionError: a wrong option.
        RegistryError: there is no cache of this name.

    Example:
        >>> import torch, transformers, kvlayers
        >>> config = transformers.LlamaConfig(
        ...     num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=99,
        ...     eos_token_id=None,
        ... )
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> prompts = [[5, 8, 13], [21, 34], [55]]
        >>> answers = kvlayers.generate_many(
        ...     model, prompts, max_new_tokens=4, max_rows=2, in_order=True, progress=False
        ... )
        >>> [(answer.index, len(answer.ids)) for answer in answers]
        [(0, 4), (1, 4), (2, 4)]
    """
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise OptionError(f"`prompts` must be a list or an iterator of prompts, got a {type(prompts).__name__}.")
    check_model(model)
    check_generation_config(options.get("generation_config"))
    _check_callables(tokenizer, on_token, options)
    of_config = vars(options.get("generation_config") or model.generation_config)
    ends_by_length = of_config.get("max_length") not in (
        None,
        GenerationConfig().max_length,
        model.generation_config.max_length,
    )
    if max_new_tokens is None and of_config.get("max_new_tokens") is None and ends_by_length:
        raise OptionError("`generation_config` must have `max_new_tokens`, got `max_length` alone.")
    max_new_tokens = (of_config.get("max_new_tokens") or MAX_NEW_TOKENS) if max_new_tokens is None else max_new_tokens
    for name, number in {"max_new_tokens": max_new_tokens, "max_rows": max_rows, "chunk_tokens": chunk_tokens}.items():
        check_whole_number(number, f"`{name}`", 1)
    model = model_types.unwrapped(model)
    if model.config.is_encoder_decoder:
        raise OptionError(f"`model` must be a decoder-only model, got a {type(model).__name__}: use model.generate().")
    check_positions(model)
    given = {name: options.pop(name) for name in SEEN_BY_IDS if name in options}
    config, left = generate_calls.full_generation_config(model, {"max_new_tokens": max_new_tokens, **options})
    of_generate = options.keys() & {*generate_calls.arguments_of_generate(), "max_length"} - {"generation_config"}
    without_cache = {"use_cache"} if options.get("use_cache") is False else set()
    if refused := sorted(of_generate | without_cache | {name for name in NOT_HERE if vars(config).get(name)}):
        raise OptionError(f"`options` must not have what generate_many does not do, got {', '.join(refused)}.")
    if left:
        raise OptionError(f"`options` must be options of a GenerationConfig, got {', '.join(sorted(left))}.")
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample") or (config.num_return_sequences or 1) > 1:
        raise OptionError(f"`options` must ask for one answer, by greedy search or by samples, got {mode}.")
    if config.stop_strings is not None and tokenizer is None:
        raise OptionError("`tokenizer` must be given for stop strings, got none.")
    generate_calls.prepare_special_tokens(model, config)
    named = requested_cache(either(cache, cache_implementation) or "dynamic", cache_config)
    if named.name == AUTO:
        raise OptionError(f"`cache` must be one cache for all rows, got {AUTO!r}: name it, and pass `memory`.")
    # Now, so that wrong options are refused before the first prompt.
    example = _empty(model, named, 1 + max_new_tokens)
    is_kept_elsewhere = model_types.kept_states(model) is not None
    if is_kept_elsewhere:
        # Its modules have states of one sequence, and a pass of several tokens begins another one.
        max_rows, chunk_tokens = 1, sys.maxsize
    elif any(layer.is_upstream or layer.fidelity != "exact" for layer in example.adapted_layers()):
        chunk_tokens = config.prefill_chunk_size or sys.maxsize
    drafter, tokens_of_drafts = _drafter(model, config, prompt_lookup_num_tokens, assistant_model)
    if drafter is not None and (is_kept_elsewhere or example.recurrent_parts()):
        raise OptionError(
            "`prompt_lookup_num_tokens` and `assistant_model` must be left out for a model whose states cannot be "
            f"taken back, got a {type(model).__name__}."
        )
    many = _Many(
        model=model,
        config=config,
        given={**given, "tokenizer": tokenizer},
        named=named,
        active=required_store(prefix_store, namespace),
        max_rows=max_rows,
        room=late.function("room for rows")(named.name, request_of(model, named.options, batch_size=1), memory),
        chunk_tokens=chunk_tokens,
        drafter=drafter,
        room_for_drafts=tokens_of_drafts,
        on_token=on_token,
    )
    answers = _in_order(many.answers(prompts)) if in_order else many.answers(prompts)
    # Beside `on_token`, which shows its own progress, a bar would stand in the middle of its lines.
    return _with_progress(answers, prompts) if progress and on_token is None else answers


def _check_callables(tokenizer: object, on_token: object, options: Mapping[str, Any]) -> None:
    """Raise `OptionError` if one of the objects that rows call cannot be called."""
    if tokenizer is not None and not callable(tokenizer):
        raise OptionError(f"`tokenizer` must be a tokenizer, got a {type(tokenizer).__name__}: load it first.")
    if on_token is not None and not callable(on_token):
        raise OptionError(f"`on_token` must be a function of a prompt's number and a token, got {on_token!r}.")
    for name in ("logits_processor", "stopping_criteria"):
        if not isinstance(options.get(name), list | None):
            raise OptionError(f"`{name}` must be a list, got a {type(options[name]).__name__}: pass [{name}].")


def _drafter(model: Any, config: Any, looked_up: int | None, assistant: Any) -> tuple[Drafter | None, int]:
    """What makes drafts, and of how many tokens."""
    if looked_up is not None and assistant is not None:
        raise OptionError("`prompt_lookup_num_tokens` must be left out beside an `assistant_model`, got both.")
    if looked_up is None and assistant is None:
        return None, 0
    if looked_up is not None:
        check_whole_number(looked_up, "`prompt_lookup_num_tokens`", 1, of="tokens")
        return drafter_of(config, looked_up, None)
    assistant = model_types.unwrapped(assistant)
    if not isinstance(assistant, PreTrainedModel):
        raise OptionError(f"`assistant_model` must be a model of transformers, got a {type(assistant).__name__}.")
    own, smaller = (model_types.decoder_config(each.config).vocab_size for each in (model, assistant))
    if own != smaller:
        raise OptionError(f"`assistant_model` must have the vocabulary of the model, {own} tokens, got {smaller}.")
    return drafter_of(config, None, assistant)


def _empty(model: Any, named: NamedCache, length_hint: int) -> Cache:
    """A cache of one sequence, of so many tokens."""
    cache = cache_for(named.name, request_of(model, named.options, batch_size=1, length_hint=length_hint))
    if not isinstance(cache, Cache):
        raise OptionError(f"`cache` must be a cache of kvlayers, got {named.name!r}, a {type(cache).__name__}.")
    return cache


class _Many:
    """The prompts that are being read, and the rows that are being decoded."""

    def __init__(
        self,
        model: Any,
        config: Any,
        given: dict[str, Any],
        named: NamedCache,
        active: ActiveStore | None,
        max_rows: int,
        room: Any,
        chunk_tokens: int,
        drafter: Drafter | None,
        room_for_drafts: int,
        on_token: Callable[[int, int], Any] | None,
    ) -> None:
        self._room_for_drafts = room_for_drafts
        self._model, self._config, self._given = model, config, given
        self._named, self._active = named, active
        # Raises before the first prompt.
        self._part_of_store()
        self._max_rows, self._room, self._chunk_tokens = max_rows, room, chunk_tokens
        # What it returns may be anything, as that of `print`.
        show = None if on_token is None else lambda row, token: on_token(self._of[row].index, token) is True
        self._decoder = RowDecoder(model, show, drafter)
        self._of: dict[DecodedRow, _Reading] = {}
        self._reading: deque[_Reading] = deque()

    def _part_of_store(self) -> StorePart | None:
        return StorePart.if_usable(self._model, self._active, self._named.name, self._named.options)

    def answers(self, prompts: Iterable[Any]) -> Iterator[Generated]:
        """The answers as they end."""
        given = enumerate(prompts)
        waiting: list[_Waiting] = []
        is_over, held = False, 1
        while True:
            # As long as no row leaves, those that wait wait on.
            place = 0 if len(self._held) < held else MAX_OVERTAKEN + 1
            while len(self._held) < self._max_rows and place <= MAX_OVERTAKEN:
                if place == len(waiting):
                    number, prompt = (-1, None) if is_over else next(given, (-1, None))
                    if is_over := number < 0:
                        break
                    if self._given["tokenizer"] is None and _is_text_or_chat(prompt):
                        raise OptionError("`tokenizer` must be given for prompts that are texts or chats, got none.")
                    waiting.append(_Waiting(number, prompt))
                next_one = waiting[place]
                try:
                    joins = self._joins(next_one)
                except Exception as error:
                    del waiting[place]
                    yield Generated(next_one.index, torch.empty(0, dtype=torch.int64), None, 0, error=error)
                    continue
                if joins:
                    del waiting[place]
                    for each in waiting[:place]:
                        each.overtaken += 1
                elif next_one.overtaken < MAX_OVERTAKEN:
                    place += 1
                else:
                    break
            held = len(self._held)
            if not held:
                return
            yield from self._read()
            self._decoder.step()
            for row, reason in self._decoder.drop_ended():
                yield self._answer(self._of.pop(row), reason)

    def _joins(self, waiting: "_Waiting") -> bool:
        """Whether a prompt may join those that are held, which it then does."""
        if waiting.ids is None:
            waiting.ids = self._ids_of(waiting.prompt)
        most, held = self._most_tokens(waiting.ids), self._held
        # One pass has one set of frequencies.
        if held and self._frequencies(waiting.ids) not in {each.frequencies for each in held} - {None}:
            return False
        if not self._room.fits(most, [each.most_tokens for each in held]):
            return False
        self._reading.append(self._begin(waiting.index, waiting.ids))
        return True

    @property
    def _held(self) -> list[_Reading]:
        """The prompts whose states are held."""
        return [*self._of.values(), *self._reading]

    def _frequencies(self, ids: Tensor) -> str | None:
        """By which frequencies all keys of a row are rotated, `None` if these change with its length."""
        return frequencies_within(self._model.config, ids.shape[1], self._most_tokens(ids))

    def _most_tokens(self, ids: Tensor) -> int:
        return ids.shape[1] + int(self._config.max_new_tokens) + self._room_for_drafts

    def _begin(self, number: int, ids: Tensor) -> _Reading:
        own = copy.copy(self._config)
        own.max_length = ids.shape[1] + own.max_new_tokens
        processors = generate_calls.logits_processors(self._model, own, ids, self._given)
        criteria = generate_calls.stopping_criteria(self._model, own, self._given)
        frequencies = self._frequencies(ids)
        # A draft would be rotated by the frequencies of a longer sequence.
        most = 0 if frequencies is None else own.max_length
        row = DecodedRow(ids, processors, criteria, bool(own.do_sample), most)
        return _Reading(number, row, self._most_tokens(ids), frequencies)

    def _cache_of(self, reading: _Reading) -> Cache:
        """The cache of a prompt, which has seen what the store has: also what the prompts before have inserted."""
        if reading.cache is None:
            # The model may have changed since the prompts before.
            reading.part = self._part_of_store()
            found = Hit() if reading.part is None else reading.part.lookup(reading.row.ids)
            empty = functools.partial(_empty, self._model, self._named, reading.most_tokens)
            reading.cache = usable_cache(found.cache, self._model.device, empty)
            reading.cached_tokens = found.covered
        return reading.cache

    def _ids_of(self, prompt: Any) -> Tensor:
        tokenizer = self._given["tokenizer"]
        given = prompt
        if _is_text_or_chat(prompt):
            prompt = (
                tokenizer(prompt).input_ids
                if isinstance(prompt, str)
                else tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
            )
        if isinstance(prompt, Mapping):
            prompt = prompt.get("input_ids")
        try:
            ids = torch.as_tensor(prompt)
        except (TypeError, ValueError, RuntimeError) as error:
            raise _no_prompt(given) from error
        ids = ids[None] if ids.dim() == 1 else ids
        is_whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        if ids.dim() != 2 or ids.shape[0] != 1 or not ids.numel() or not is_whole or ids.is_meta:
            raise _no_prompt(given)
        return ids.to(self._model.device, torch.int64)

    def _read(self) -> Iterator[Generated]:
        """Read a chunk of the first prompt that is being read, and let it join if that was the last one.

        Without rows that would wait, prompts are read until all have joined.
        """
        ready: list[_Reading] = []
        while self._reading:
            reading = self._reading[0]
            try:
                logits = self._read_chunk(reading)
            except Exception as error:
                self._reading.popleft()
                yield self._answer(reading, error)
                continue
            if logits is not None:
                self._reading.popleft()
                self._of[reading.row] = reading
                self._decoder.begin(reading.row, logits)
                ready.append(reading)
            if self._decoder.rows:
                break
        # Some may have ended with their first token.
        going_on = [reading for reading in ready if not self._decoder.has_ended(reading.row)]
        self._decoder.join([reading.row for reading in going_on], [self._cache_of(reading) for reading in going_on])
        for reading in going_on:
            # Its states are those of its row now.
            reading.cache = None
        for reading in ready:
            if reading not in going_on:
                yield self._answer(self._of.pop(reading.row), self._decoder.errors.pop(reading.row, None))

    @torch.no_grad()
    def _read_chunk(self, reading: _Reading) -> Tensor | None:
        """The logits after the last token of a prompt, `[1, vocab]`, or `None` if there is more to read."""
        ids, cache, model = reading.row.ids, self._cache_of(reading), self._model
        seen, end = cache.get_seq_length(), ids.shape[1]
        if seen == 0 and remembers_lengths(model.config):
            # By a pass over a short sequence, so that the answer does not depend on those before it.
            model(ids[:, :1], use_cache=False)
        is_whole = frequencies_within(model.config, 1, end) is None
        stop = end if is_whole else min(seen + self._chunk_tokens, end)
        positions = torch.arange(stop, device=model.device)[None]
        output = pass_unseen(model, ids[:, :stop], cache, pass_limit(model, cache) if seen else None, positions)
        if stop < end:
            return None
        if reading.part is not None:
            now = self._part_of_store()
            if now is not None and now.is_of_same_states(reading.part):
                now.insert(ids, cache)
        logits: Tensor = output.logits[:, -1]
        return logits

    def _answer(self, reading: _Reading, error: Exception | None) -> Generated:
        ids = reading.row.new_ids
        tokenizer = self._given["tokenizer"]
        text = None if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=True)
        return Generated(reading.index, ids, text, reading.row.prompt_tokens, reading.cached_tokens, error)


def _is_text_or_chat(prompt: object) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict))


def _no_prompt(given: object) -> OptionError:
    """The error for something that is no prompt, or has no tokens."""
    shown = f"{given.dtype} of shape {list(given.shape)}" if isinstance(given, Tensor) else f"{given!r:.80}"
    return OptionError(
        "`prompts` must each be a text, a chat (a list of messages), or ids [tokens] of at least one token, got "
        f"{shown}: leave it out, or begin it with the BOS token."
    )


def _in_order(answers: Iterator[Generated]) -> Iterator[Generated]:
    waiting: dict[int, Generated] = {}
    number = 0
    for answer in answers:
        waiting[answer.index] = answer
        while number in waiting:
            yield waiting.pop(number)
            number += 1


def _with_progress(answers: Iterator[Generated], prompts: Iterable[Any]) -> Iterator[Generated]:
    from tqdm.auto import tqdm

    bar = tqdm(
        answers,
        total=len(prompts) if isinstance(prompts, Sequence) else None,
        desc="answers",
        unit="prompt",
        # A file would get a line for each drawing. In a notebook the bar is no text.
        disable=not sys.stderr.isatty() and "ipykernel" not in sys.modules,
    )
    for answer in bar:
        # While the caller has the answer, what it prints takes the place of the bar, which comes again below.
        bar.clear()
        yield answer
        bar.refresh()
