"""Many prompts through a few rows: rows join as others leave."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from kvlayers.batching.row_engine import Request, RowEngine
from kvlayers.errors import OptionError
from kvlayers.generation.cache_by_name import either, requested_cache
from kvlayers.generation.call_arguments import check_generation_config, check_is, check_model
from kvlayers.generation.chat import checked_message
from kvlayers.generation.prefix_reuse.active_store import required_store
from kvlayers.generation.row_decoding import Drafter, drafter_of
from kvlayers.prefix import PrefixStore
from kvlayers.upstream import generate_calls, model_types
from kvlayers.utils.options import check_whole_number, checks_options, suggestion

MAX_NEW_TOKENS = 128

NOT_HERE = ("output_scores", "output_logits", "output_attentions", "output_hidden_states", "token_healing")
"""Options of a `GenerationConfig` that would change nothing."""

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


@checks_options
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
        chunk_tokens: most tokens of prompts that are read between two steps of the other rows. A prompt is read
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
        raise OptionError(
            f"`prompts` must be a list or an iterator of prompts, got a {type(prompts).__name__}: pass [text] for one, "
            "or the `input_ids` that a tokenizer returns."
        )
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
        raise OptionError(
            "`generation_config` must have `max_new_tokens`, got `max_length` alone: set it, since prompts differ in "
            "length."
        )
    max_new_tokens = (of_config.get("max_new_tokens") or MAX_NEW_TOKENS) if max_new_tokens is None else max_new_tokens
    for name, number in {"max_new_tokens": max_new_tokens, "max_rows": max_rows, "chunk_tokens": chunk_tokens}.items():
        check_whole_number(number, f"`{name}`", 1)
    model = model_types.unwrapped(model)
    given = {"tokenizer": tokenizer, **{name: options.pop(name) for name in SEEN_BY_IDS if name in options}}
    config, left = generate_calls.full_generation_config(model, {"max_new_tokens": max_new_tokens, **options})
    of_generate = options.keys() & {*generate_calls.SIGNATURE.parameters, "max_length"} - {"generation_config"}
    of_generate |= {name for name in NOT_HERE if vars(config).get(name)}
    of_generate |= {"use_cache"} if options.get("use_cache") is False else set()
    if refused := sorted(of_generate):
        raise OptionError(
            f"`options` must not have what generate_many does not do, got {', '.join(refused)}: leave it out, or "
            "call generate()."
        )
    if left:
        raise OptionError(
            f"`options` must be options of a GenerationConfig, got {', '.join(sorted(left))}: "
            f"{suggestion(min(left), [*generate_many.__annotations__, *vars(config)]) or 'leave them out.'}"
        )
    if (mode := config.get_generation_mode().value) not in ("greedy_search", "sample") or (
        config.num_return_sequences or 1
    ) > 1:
        raise OptionError(
            f"`options` must ask for one answer, by greedy search or by samples, got {mode}: leave it out, or call "
            "generate()."
        )
    if config.stop_strings is not None and tokenizer is None:
        raise OptionError("`tokenizer` must be given for stop strings, got none: pass the model's.")
    generate_calls.prepare_special_tokens(model, config)
    named = requested_cache(
        either("dynamic" if cache is None and cache_implementation is None else cache, cache_implementation),
        cache_config,
    )
    engine = RowEngine[_Numbered](
        model,
        config,
        named,
        required_store(prefix_store, namespace),
        max_rows,
        memory,
        chunk_tokens,
        _drafter(model, config, prompt_lookup_num_tokens, assistant_model),
    )
    if isinstance(prompts, Tensor) and prompts.dim() == 2:
        # Without a mask, generate() takes pad tokens for padding.
        mask = generate_calls.mask_of_prompts(model, config, prompts)
        prompts = prompts if mask is None else [row[kept] for row, kept in zip(prompts, mask.bool(), strict=True)]
    answers = _answers(engine, _requests(prompts, model, config, given, on_token), tokenizer)
    answers = _in_order(answers) if in_order else answers
    # Beside `on_token`, which shows its own progress, a bar would stand in the middle of its lines.
    return _with_progress(answers, prompts) if progress and on_token is None else answers


def _check_callables(tokenizer: object, on_token: object, options: Mapping[str, Any]) -> None:
    """Raise `OptionError` if one of the objects that rows call cannot be called."""
    if tokenizer is not None and not (callable(tokenizer) and callable(getattr(tokenizer, "decode", None))):
        raise OptionError(f"`tokenizer` must be a tokenizer, got a {type(tokenizer).__name__}: load it first.")
    if on_token is not None and not callable(on_token):
        raise OptionError(
            f"`on_token` must be a function of a prompt's number and a token, got {on_token!r}: pass one, or leave "
            "it out."
        )
    for name in ("logits_processor", "stopping_criteria"):
        check_is(list | None, options.get(name), name, "a list", f"pass [{name}]")


def _drafter(model: Any, config: Any, looked_up: int | None, assistant: Any) -> Drafter | None:
    """What makes drafts, `None` for no drafts."""
    if looked_up is not None and assistant is not None:
        raise OptionError(
            "`prompt_lookup_num_tokens` must be left out beside an `assistant_model`, got both: pass one of them."
        )
    if looked_up is not None:
        check_whole_number(looked_up, "`prompt_lookup_num_tokens`", 1, of="tokens")
    if assistant is not None:
        assistant = model_types.unwrapped(assistant)
        check_is(PreTrainedModel, assistant, "assistant_model", "a model of transformers", "pass a loaded model")
        own, smaller = (model_types.decoder_config(each.config).vocab_size for each in (model, assistant))
        if own != smaller:
            raise OptionError(
                f"`assistant_model` must have the vocabulary of the model, {own} tokens, got {smaller}: pass a model "
                "of the same tokenizer."
            )
    return drafter_of(config, looked_up, assistant)


@dataclass(eq=False, kw_only=True)
class _Numbered(Request):
    """A request with the number of its prompt."""

    index: int = 0


def _requests(
    prompts: Iterable[Any],
    model: Any,
    config: Any,
    given: Mapping[str, Any],
    on_token: Callable[[int, int], Any] | None,
) -> Iterator[_Numbered]:
    """A request for each prompt. What is wrong with a prompt is its error."""
    for index, prompt in enumerate(prompts):
        if given["tokenizer"] is None and _is_text_or_chat(prompt):
            raise OptionError(
                "`tokenizer` must be given for prompts that are texts or chats, got none: pass tokenizer=..."
            )
        # What it returns may be anything, as that of `print`.
        show = None if on_token is None else lambda token, index=index: on_token(index, token) is True
        try:
            ids, error = _ids_of(prompt, given["tokenizer"]).to(model.device), None
        except Exception as reason:
            ids, error = torch.empty(1, 0, dtype=torch.int64), reason
        yield _Numbered(ids, config=config, on_token=show, given=given, error=error, index=index)


def _ids_of(prompt: Any, tokenizer: Any) -> Tensor:
    """The ids of a prompt, int64 `[1, tokens]`."""
    given = prompt
    if _is_text_or_chat(prompt):
        prompt = (
            tokenizer(prompt).input_ids
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template(
                [checked_message(each) for each in prompt], add_generation_prompt=True, return_dict=True
            )["input_ids"]
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
    return ids.to(torch.int64)


def _answers(engine: RowEngine[_Numbered], requests: Iterator[_Numbered], tokenizer: Any) -> Iterator[Generated]:
    """The answers as they end."""
    while True:
        for failed in engine.admit(lambda: next(requests, None)):
            yield Generated(failed.index, failed.new_ids, None, failed.prompt_tokens, error=failed.error)
        if not engine.held:
            return
        for ended in engine.advance():
            text = None if tokenizer is None else tokenizer.decode(ended.new_ids, skip_special_tokens=True)
            yield Generated(ended.index, ended.new_ids, text, ended.prompt_tokens, ended.cached_tokens, ended.error)


def _is_text_or_chat(prompt: object) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict))


def _no_prompt(given: object) -> OptionError:
    """The error for something that is no prompt, or has no tokens."""
    shown = f"{given.dtype} of shape {list(given.shape)}" if isinstance(given, Tensor) else f"{given!r:.80}"
    return OptionError(
        "`prompts` must each be a text, a chat (a list of messages), or ids [tokens] of at least one token, got "
        f"{shown}: leave it out, or begin it with the BOS token (one prompt of ids is [ids])."
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
