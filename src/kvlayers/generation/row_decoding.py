"""Decoding of several sequences side by side, each of which joins, goes on and ends by itself, with or without drafts.

A row's draft are tokens that may come next. One pass computes what comes after each of them. The tokens that the row
would have chosen itself are kept, and the cache is rolled back to them, row by row. Chosen tokens are those of plain
decoding, whatever the draft: each is the greatest score, or a sample, given the tokens before it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from kvlayers.core.cache import Cache
from kvlayers.core.dynamic_cache import DynamicCache
from kvlayers.core.preparation import drops_padding, left_padding_of
from kvlayers.errors import CapacityError, OptionError, RollbackError
from kvlayers.generation import retried_pass
from kvlayers.generation.prefill import is_told_positions, pass_tokens
from kvlayers.rope.from_config import frequencies_within
from kvlayers.rows import Rows, merge
from kvlayers.upstream import cache_argument, generate_calls, model_types


@dataclass(frozen=True)
class Drafter:
    """What makes drafts.

    Attributes:
        drafts: for each of all rows, tokens that may come next. Rows that are new to it stand behind the others.
        tokens: tokens of a draft, at most.
    """

    drafts: "Callable[[Sequence[DecodedRow]], list[list[int]]]"
    tokens: int


@dataclass(eq=False)
class DecodedRow:
    """One sequence that is being decoded.

    Attributes:
        ids: all tokens so far, int64 `[1, tokens]`: at first the prompt.
        processors: change the scores of the next token, given the ids; transformers' `LogitsProcessorList`.
        criteria: say whether the row has ended, given the ids; transformers' `StoppingCriteriaList`.
        samples: whether the next token is a sample of the scores, rather than the one with the greatest.
        most: most ids, padding included, beyond which no draft goes; 0 for no drafts.
        padding: how many of the first ids are padding, which the cache has not seen.
        on_token: called with each new token; says whether the row ends there. What it raises is raised by
            `RowDecoder.step`: it is no fault of one row.
        logprobs: log-probabilities of the new tokens, given their scores; `None` if nobody asks for them.
        error: what ended it, apart from its own end.
        last: the newest token that was chosen, so that nobody waits for a device to tell it; -1 before the first.
        is_stopped: whether the caller has ended the row.
        prompt_tokens: how many of the ids are the prompt, padding included.
    """

    ids: Tensor
    processors: Any = None
    criteria: Any = None
    samples: bool = False
    most: int = 0
    padding: int = 0
    on_token: Callable[[int], bool] | None = None
    logprobs: list[float] | None = None
    error: Exception | None = None
    last: int = field(default=-1, init=False)
    is_stopped: bool = field(default=False, init=False)
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = self.ids.shape[1]

    @property
    def tokens(self) -> int:
        """Tokens so far, without padding."""
        return self.ids.shape[1] - self.padding

    def choose(self, logits: Tensor) -> int:
        """Append the next token, given its logits `[1, vocab]`; return it."""
        scores = logits.to(torch.float32, copy=True)
        if self.processors:
            scores = self.processors(self.ids, scores)
        chosen = torch.multinomial(scores.softmax(-1), 1)[:, 0] if self.samples else scores.argmax(-1)
        if self.logprobs is not None:
            self.logprobs.append(float(scores.log_softmax(-1)[0, chosen]))
        self.append(int(chosen))
        return int(chosen)

    def append(self, token: int) -> None:
        """Append a token that was chosen."""
        self.last = token
        self.ids = torch.cat([self.ids, self.ids.new_tensor([[token]])], dim=1)

    @property
    def has_ended(self) -> bool:
        """Whether the answer is complete."""
        return self.is_stopped or bool(self.criteria(self.ids, None).all())

    @property
    def new_ids(self) -> Tensor:
        """The tokens behind the prompt, int64 `[tokens]`."""
        return self.ids[0, self.prompt_tokens :]


def check_takes_rows(model: Any) -> None:
    """Raise `OptionError` if rows of different lengths cannot tell a model their positions, or pass it their cache."""
    if not is_told_positions(model) or not cache_argument.is_taken_by(model):
        raise OptionError(
            "`model` must take `position_ids` and a cache, for rows of different lengths, got a "
            f"{type(model).__name__}, whose forward pass does not name both: pass the base model of a wrapper, or the "
            "prompts one by one."
        )


def pass_rows(model: Any, tokens: Tensor, cache: Cache) -> Tensor:
    """Logits of the next tokens of all rows of a cache, `[batch, new, vocab]`; `tokens` are `[batch, new]`."""
    rows, new, device = Rows(cache), tokens.shape[1], tokens.device
    takes = generate_calls.forward_arguments(model)
    arguments: dict[str, Any] = {cache_argument.name_for(model): cache, "use_cache": True, "return_dict": True}
    if "attention_mask" in takes:
        arguments["attention_mask"] = rows.attention_mask(new, device)
    if "position_ids" in takes:
        arguments["position_ids"] = rows.position_ids(new, device)
    logits: Tensor = model(tokens, **arguments).logits
    return logits


Row = TypeVar("Row", bound=DecodedRow)


class RowDecoder(Generic[Row]):
    """Rows of one cache, decoded together.

    Args:
        model: the model.
        drafter: makes drafts, `None` to decode token by token.

    Attributes:
        cache: the cache of all rows, `None` without rows.
        rows: the rows, in the order of the rows of the cache.
    """

    def __init__(self, model: Any, drafter: Drafter | None = None) -> None:
        self._model, self._drafter = model, drafter
        self._border = model_types.reads_again_behind(model)
        self.cache: Cache | None = None
        self.rows: list[Row] = []

    def join(self, rows: Sequence[Row], caches: Sequence[Cache]) -> None:
        """Add rows, of one or several caches that have seen all of their tokens but the last.

        The caches have the tokens that they had, unless there is one, and no row yet: it is taken over. All give way
        as often as the one that ran out of memory most often.
        """
        if not rows:
            return
        retried_pass.level(caches if self.cache is None else [self.cache, *caches])
        if self.cache is not None:
            self.cache.extend(*caches)
        else:
            self.cache = caches[0] if len(caches) == 1 else merge(list(caches))
        if self._drafter is not None:
            self.cache.activate_past_recording()
        self.rows += rows

    def begin(self, row: DecodedRow, logits: Tensor) -> None:
        """Append the first new token of a row, given the logits after its prompt, `[1, vocab]`."""
        self._take(row, (), logits, logits.argmax(-1).tolist())

    def has_ended(self, row: DecodedRow) -> bool:
        """Whether a row gets no more tokens. What a stopping criterion raises ends it as well."""
        try:
            return row.error is not None or row.has_ended
        except Exception as error:
            row.error = error
            return True

    def drop_ended(self) -> list[Row]:
        """Take out the rows that have ended, and return them."""
        going_on = [index for index, row in enumerate(self.rows) if not self.has_ended(row)]
        if len(going_on) == len(self.rows):
            return []
        ended = [row for index, row in enumerate(self.rows) if index not in going_on]
        # Rows from the end take the places of rows that go, so that few rows are moved.
        last = iter(index for index in going_on if index >= len(going_on))
        kept = [index if index in going_on else next(last) for index in range(len(going_on))]
        self.rows = [self.rows[index] for index in kept]
        if self.cache is not None and kept:
            self.cache.keep_rows(kept)
        elif not kept:
            self.cache = None
        return ended

    @torch.no_grad()
    def step(self, has_drafts: bool = True) -> None:
        """One forward pass: each row gets at least one more token.

        Args:
            has_drafts: whether rows get drafts, if there is what makes them.
        """
        cache = self.cache
        if cache is None:
            return
        drafts = self._drafter.drafts(self.rows) if self._drafter and has_drafts else [[] for _ in self.rows]
        drafts = [
            draft[: max(0, row.most - row.ids.shape[1] - 1)] for row, draft in zip(self.rows, drafts, strict=True)
        ]
        new = 1 + max(map(len, drafts))
        # A shorter draft is filled up by its last token, which nobody looks at.
        passed = [[row.last, *draft] for row, draft in zip(self.rows, drafts, strict=True)]
        tokens = torch.tensor([own + own[-1:] * (new - len(own)) for own in passed], device=self._model.device)
        began = cache.newest_pass()
        try:
            logits = self._pass(tokens, cache)
        except (CapacityError, IndexError) as error:
            if cache.newest_pass() is not began:
                raise
            # It came before any row has taken in a token: there is no room for it, or the model has no position for
            # it. One token may have both, where the draft of another row has not. Without the longest row, the others
            # may go on.
            if new > 1:
                self.step(has_drafts=False)
            else:
                max(self.rows, key=lambda row: row.tokens).error = error
            return
        greatest = logits.argmax(-1).tolist()
        for index, (row, draft) in enumerate(zip(self.rows, drafts, strict=True)):
            self._take(row, draft, logits[index], greatest[index])
        if self._drafter is not None and self.cache is not None:
            self.cache.crop_rows([row.tokens - 1 for row in self.rows])

    def _pass(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits of the next tokens, by a pass that is made again as often as the cache can give way."""
        began = cache.newest_pass()
        try:
            return self._logits_of(tokens, cache)
        except (RuntimeError, MemoryError) as error:
            length, kept = retried_pass.make_room(cache, began, error, lambda length: None)
        if kept < length:
            # It cannot go back by one pass.
            alone = [cache.extract(index) for index in range(len(self.rows))]
            retried_pass.read_again(self._model, [row.ids[:, row.padding : -1] for row in self.rows], alone)
            cache = self.cache = alone[0] if len(alone) == 1 else merge(alone)
        return self._pass(tokens, cache)

    def _logits_of(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits of the next tokens; of a row alone as `generate()` computes them, which may read it all again."""
        row, border = self.rows[0], self._border
        if border is not None and tokens.numel() == 1 and cache.length <= border < row.tokens:
            logits: Tensor = retried_pass.pass_unseen(self._model, row.ids[:, row.padding :], cache).logits
            return logits
        return pass_rows(self._model, tokens, cache)

    def _take(self, row: DecodedRow, draft: Sequence[int], logits: Tensor, greatest: Sequence[int]) -> None:
        """Append the tokens that a row chooses, as far as its draft goes along with them.

        Args:
            row: the row.
            draft: its draft.
            logits: after the last token and after each of the draft, `[1 + draft, vocab]`.
            greatest: the greatest of each.
        """
        for place in range(len(draft) + 1):
            token = greatest[place]
            if not row.processors and not row.samples and row.logprobs is None:
                # The greatest score needs no look at the other ids.
                row.append(token)
            else:
                try:
                    token = row.choose(logits[place : place + 1])
                except Exception as error:
                    row.error = error
                    return
            if row.on_token is not None:
                row.is_stopped = row.is_stopped or row.on_token(token)
            if place == len(draft) or token != draft[place] or self.has_ended(row):
                return


class DraftModel:
    """A smaller model that decodes drafts, greedily, for all rows at once.

    Args:
        model: the smaller model, with the same vocabulary.
        tokens: tokens of a draft.

    Raises:
        OptionError: the smaller model has recurrent states, in its cache or in its modules.
    """

    def __init__(self, model: Any, tokens: int) -> None:
        self._model, self._tokens = model, tokens
        self._rows: list[DecodedRow] = []
        # Of these rows; `None` before the first ones.
        self._cache: Any = None
        if (kept := model_types.kept_states(model)) is not None:
            raise OptionError(
                f"`assistant_model` must keep its states in its cache, to roll drafts back, got a "
                f"{type(model).__name__}, which keeps some in {kept}: pass another model."
            )
        if DynamicCache(config=model.config).recurrent_parts():
            raise OptionError(
                "`assistant_model` must be a model without recurrent states for several prompts, got a "
                f"{type(model).__name__}: pass the prompts one by one."
            )

    def _follow(self, rows: Sequence[DecodedRow]) -> None:
        """Forget rows that have gone, and read the tokens of new ones, apart from their last.

        Rows that were there before stand first.
        """
        places = {row: place for place, row in enumerate(self._rows)}
        kept = [places[row] for row in rows if row in places]
        if 0 < len(kept) < len(places):
            self._cache.keep_rows(kept)
        self._rows = [*rows[: len(kept)]]
        if not kept:
            # Or the states of rows that have ended would stay in memory while the new ones are read.
            self._cache = None
        caches = [self._cache] if kept else []
        for row in rows[len(kept) :]:
            cache = DynamicCache(config=self._model.config)
            cache_argument.read_tokens(self._model, row.ids[:, row.padding : -1].to(self._model.device), cache)
            cache.activate_past_recording()
            caches.append(cache)
        if len(rows) > len(kept):
            self._cache, self._rows = merge(caches), [*rows]

    @torch.no_grad()
    def drafts(self, rows: Sequence[DecodedRow]) -> list[list[int]]:
        """For each row the tokens that the smaller model would choose."""
        self._follow(rows)
        cache = self._cache
        # What it has seen of a draft that was not accepted goes. What was accepted beyond its draft it has not seen.
        cache.crop_rows([min(seen, row.tokens - 1) for seen, row in zip(cache.row_lengths, rows, strict=True)])
        missing = [row.ids[0, row.padding + seen :] for seen, row in zip(cache.row_lengths, rows, strict=True)]
        most = max(map(len, missing))
        tokens = torch.stack([torch.cat([own, own[-1:].expand(most - len(own))]) for own in missing])
        logits = pass_rows(self._model, tokens.to(self._model.device), cache)
        cache.crop_rows([row.tokens for row in rows])
        last = torch.tensor([len(own) - 1 for own in missing], device=logits.device)
        chosen = logits[torch.arange(len(rows), device=logits.device), last].argmax(-1)
        drafts = [chosen]
        for _ in range(self._tokens - 1):
            drafts.append(pass_rows(self._model, drafts[-1][:, None], cache)[:, -1].argmax(-1))
        return torch.stack(drafts, 1).tolist()


# Several prompts with drafts, which transformers decodes for one


def decode_batch(model: Any, cache: Cache, input_ids: Tensor, kwargs: dict[str, Any], given: Mapping[str, Any]) -> Any:
    """Decode a batch with drafts, in the place of transformers' loop.

    Args:
        model: the model.
        cache: the cache of the call, which may have seen the first tokens.
        input_ids: the prompts, int64 `[batch, tokens]`, padded on the left.
        kwargs: the other arguments of the loop.
        given: arguments of the call of `generate()`, by name.

    Returns:
        What `generate()` returns: the sequences, padded on the right, or an output with them and the cache.

    Raises:
        OptionError: an option that is not supported for several prompts.
        RollbackError: the model has recurrent states.
    """
    config = kwargs["generation_config"]
    drafter = _drafter(config, kwargs)
    mask = kwargs.get("attention_mask")
    padded = None if mask is None else left_padding_of(mask)
    # Tokens of padding before each prompt.
    padding = [0] * input_ids.shape[0] if padded is None else padded.tolist()
    _check_batch(model, cache, input_ids, padding, kwargs, given)
    first = _prefill(model, cache, input_ids, padding, kwargs)
    # Where the frequencies change, every token has those of its own pass.
    decoder = RowDecoder[DecodedRow](model, drafter if frequencies_of(model, input_ids, kwargs, padding) else None)
    rows = [
        DecodedRow(
            ids,
            # Some of them remember the prompts that they were made for.
            generate_calls.logits_processors(model, config, ids, given),
            kwargs["stopping_criteria"],
            bool(config.do_sample),
            config.max_length,
            own,
        )
        for ids, own in zip(torch.split(input_ids, 1), padding, strict=True)
    ]
    for row, logits in zip(rows, torch.split(first, 1), strict=True):
        decoder.begin(row, logits)
    decoder.join(rows, [cache.fork()])
    alone: dict[DecodedRow, Cache] = {}
    while decoder.cache is not None:
        for index, row in enumerate(decoder.rows):
            if decoder.has_ended(row):
                if row.error is not None:
                    raise row.error
                alone[row] = decoder.cache.extract(index)
        decoder.drop_ended()
        decoder.step()
    cache.replace_layers(merge([alone[row] for row in rows]).adapted_layers())
    return _output(rows, cache, config)


def frequencies_of(
    model: Any, input_ids: Tensor, kwargs: Mapping[str, Any], padding: Sequence[int] = (0,)
) -> str | None:
    """By which frequencies all keys of a call are rotated, drafts included; `None` if there are several."""
    config = kwargs["generation_config"]
    # transformers does not end a draft that was looked up where the answer ends.
    longest = config.max_length + (config.prompt_lookup_num_tokens or 0)
    return frequencies_within(model.config, input_ids.shape[1] - max(padding), longest - min(padding))


def _check_batch(
    model: Any,
    cache: Cache,
    input_ids: Tensor,
    padding: Sequence[int],
    kwargs: Mapping[str, Any],
    given: Mapping[str, Any],
) -> None:
    """Raise what `decode_batch` raises, before anything is computed."""
    name = type(model).__name__
    if cache.recurrent_parts():
        raise RollbackError(
            f"`input_ids` must be of one prompt for drafts with the recurrent states of {name}, got "
            f"{input_ids.shape[0]}: leave out the drafts, or pass the prompts one by one."
        )
    check_takes_rows(model)
    if len(padding) > 1 and frequencies_of(model, input_ids, kwargs, padding) is None:
        raise OptionError(
            f"`input_ids` must be of one prompt for drafts with {name}, as the frequencies of its RoPE change within "
            f"these lengths, got {len(padding)}: leave out the drafts, or pass the prompts one by one."
        )
    known = {*OF_LOOPS, *OF_DRAFTS, *OF_PASSES, cache_argument.name_in_generate(model)}
    # What the caller has not given, such as positions, follows from the mask.
    others = [key for key, value in kwargs.items() if value is not None and key not in known and key in given]
    others += [key for key in OF_BATCH_INDICES if given.get(key) is not None]
    if model_types.decoder_config(model.config) is not model.config:
        others.append("model")
    if others or (cache.length and any(padding)):
        raise OptionError(
            f"`input_ids` of several prompts must come with a mask alone for drafts with {name}, got "
            f"{', '.join(others) or 'a cache that has seen tokens, beside padding'}: pass the prompts one by one, or "
            "leave out the drafts."
        )


NOT_FOR_BATCHES = ("assistant_early_exit", "use_mtp", "output_scores", "output_logits", "output_attentions")
"""Options of drafts that are not offered for several prompts, and what is not returned for them."""


def _drafter(config: Any, kwargs: dict[str, Any]) -> Drafter | None:
    """What makes the drafts that a call asks for."""
    options = vars(config)
    refused = [name for name in (*NOT_FOR_BATCHES, "output_hidden_states") if options.get(name)]
    refused += [name for name in ("streamer", "assistant_tokenizer") if kwargs.get(name) is not None]
    if refused:
        raise OptionError(
            f"`{refused[0]}` must be left out of a call with drafts for several prompts, got "
            f"{kwargs.get(refused[0], options.get(refused[0]))!r}: pass the prompts one by one."
        )
    return drafter_of(config, config.prompt_lookup_num_tokens, kwargs.get("assistant_model"))


def drafter_of(config: Any, looked_up: int | None, assistant: Any) -> Drafter | None:
    """What makes the drafts of a call, `None` for no drafts.

    Args:
        config: the config of the call.
        looked_up: tokens of drafts that are looked up in the rows themselves, as what has followed the newest tokens
            before (Saxena 2023); `None` for none of these.
        assistant: a model that makes them, as long as its own config says, or else that of the call.
    """
    if assistant is not None:
        tokens = int(
            assistant.generation_config.num_assistant_tokens or config.num_assistant_tokens or NUM_ASSISTANT_TOKENS
        )
        return Drafter(DraftModel(assistant, tokens).drafts, tokens)
    if looked_up is None:
        return None
    find = generate_calls.prompt_lookup(config, looked_up)
    return Drafter(lambda rows: [find(row.ids) for row in rows], looked_up)


NUM_ASSISTANT_TOKENS = 20
"""Tokens of a draft if no config says it, as in transformers."""

OF_LOOPS = ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer", "inputs_tensor")
OF_DRAFTS = ("assistant_model", "assistant_tokenizer", "tokenizer")
"""Arguments of transformers' loop over drafts that are not for the model."""

OF_PASSES = ("attention_mask", "use_cache", "cache_position", "logits_to_keep", "return_dict", *NOT_FOR_BATCHES[2:])
"""Arguments of the model that do not change what it computes for a row, or that are made for each pass."""

OF_BATCH_INDICES = ("prefix_allowed_tokens_fn", "negative_prompt_ids")
"""Arguments of `generate()` that would need to know which row of the batch a row is."""


def _prefill(model: Any, cache: Cache, input_ids: Tensor, padding: Sequence[int], kwargs: Mapping[str, Any]) -> Tensor:
    """Pass the tokens that the cache has not seen. Returns the logits after the last one, `[batch, vocab]`."""
    model_kwargs = {name: value for name, value in kwargs.items() if name not in (*OF_LOOPS, *OF_DRAFTS)}
    mask, seen = model_kwargs.get("attention_mask"), cache.length
    if seen or not any(padding) or all(map(drops_padding, cache.adapted_layers())):
        logits: Tensor = pass_tokens(model, input_ids, model_kwargs, cache, seen).logits[:, -1]
        if any(padding) and not seen:
            Rows(cache, mask)
        return logits
    alone = cache.fork(len(padding))
    # It was told of the padding of the whole batch.
    prompts = [ids[:, padded:] for ids, padded in zip(torch.split(input_ids, 1), padding, strict=True)]
    last = retried_pass.read_again(model, prompts, alone)
    cache.replace_layers(merge(alone).adapted_layers())
    return torch.cat(last)


def _output(rows: Sequence[DecodedRow], cache: Cache, config: Any) -> Any:
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    pad = config.pad_token_id if config.pad_token_id is not None else ends[0] or 0
    sequences = torch.nn.utils.rnn.pad_sequence([row.ids[0] for row in rows], batch_first=True, padding_value=pad)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences, **{cache_argument.usual_name(): cache})
