"""Decoding of several sequences side by side, each of which joins, goes on and ends by itself, with or without drafts.

A row's draft are tokens that may come next. One pass computes what comes after each of them. The tokens that the row
would have chosen itself are kept, and the cache is rolled back to them, row by row. Chosen tokens are those of plain
decoding, whatever the draft: each is the greatest score, or a sample, given the tokens before it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.core.cache import Cache
from kvlayers.errors import OptionError
from kvlayers.generation.prefix_reuse.prefixed_call import pass_unseen
from kvlayers.rows import Rows, merge
from kvlayers.upstream import cache_argument, generate_calls, model_types


class Drafter(ABC):
    """What makes drafts. One that remembers nothing of rows has `drafts` alone."""

    def join(self, rows: "Sequence[DecodedRow]") -> None:
        """Begin to draft for further rows."""

    def keep(self, indices: Sequence[int]) -> None:
        """Draft for the rows at `indices` alone from now on."""

    @abstractmethod
    def drafts(self, rows: "Sequence[DecodedRow]") -> list[list[int]]:
        """For each of all rows tokens that may come next."""


class LookedUp(Drafter):
    """Drafts that are found in the rows themselves: what has followed the newest tokens before (Saxena 2023).

    Args:
        find: given the ids of a row, `[1, tokens]`, tokens that may come next.
    """

    def __init__(self, find: Callable[[Tensor], list[int]]) -> None:
        self._find = find

    def drafts(self, rows: "Sequence[DecodedRow]") -> list[list[int]]:
        """For each row what has followed its newest tokens before."""
        return [self._find(row.ids) for row in rows]


class DecodedRow:
    """One sequence that is being decoded.

    Args:
        ids: the prompt, int64 `[1, tokens]`.
        processors: change the scores of the next token, given the ids; transformers' `LogitsProcessorList`.
        criteria: say whether the row has ended, given the ids; transformers' `StoppingCriteriaList`.
        samples: whether the next token is a sample of the scores, rather than the one with the greatest.
        most: most ids, padding included, beyond which no draft goes; 0 for no drafts.
        padding: how many of the first ids are padding, which the cache has not seen.

    Attributes:
        ids: all tokens so far, `[1, tokens]`.
        last: the newest token that was chosen, so that nobody waits for a device to tell it.
        is_stopped: whether the caller has ended the row.
        logprobs: log-probabilities of the new tokens, given their scores; `None` if nobody asks for them.
        prompt_tokens: how many of them are the prompt, padding included.
        padding: as passed.
    """

    def __init__(self, ids: Tensor, processors: Any, criteria: Any, samples: bool, most: int, padding: int = 0) -> None:
        self.ids = ids
        self.most = most
        self.last = -1
        self.is_stopped = False
        self.logprobs: list[float] | None = None
        self.prompt_tokens = ids.shape[1]
        self.padding = padding
        self._processors, self._criteria, self._samples = processors, criteria, samples

    @property
    def tokens(self) -> int:
        """Tokens so far, without padding."""
        return self.ids.shape[1] - self.padding

    @property
    def chooses_the_greatest(self) -> bool:
        """Whether the next token is the one with the greatest score, which needs no look at the other ids."""
        return not self._processors and not self._samples and self.logprobs is None

    def choose(self, logits: Tensor) -> int:
        """Append the next token, given its logits `[1, vocab]`; return it."""
        scores = logits.to(torch.float32, copy=True)
        if self._processors:
            scores = self._processors(self.ids, scores)
        chosen = torch.multinomial(scores.softmax(-1), 1)[:, 0] if self._samples else scores.argmax(-1)
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
        return self.is_stopped or bool(self._criteria(self.ids, None).all())

    @property
    def new_ids(self) -> Tensor:
        """The tokens behind the prompt, int64 `[tokens]`."""
        return self.ids[0, self.prompt_tokens :]


def check_positions(model: Any) -> None:
    """Raise `OptionError` if rows of different lengths cannot tell a model their positions."""
    takes = "position_ids" in generate_calls.forward_arguments(model)
    if not takes and model.config.model_type not in (
        *model_types.HAS_RELATIVE_POSITIONS,
        *model_types.HAS_NO_POSITIONS,
    ):
        raise OptionError(
            f"`model` must take `position_ids`, for rows of different lengths, got a {type(model).__name__}, whose "
            "forward pass names no such argument: pass the base model of a wrapper, or the prompts one by one."
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


class RowDecoder:
    """Rows of one cache, decoded together.

    Args:
        model: the model.
        on_token: called with a row and each of its new tokens; says whether the row ends there. What it raises is
            raised by `step`: it is no fault of one row.
        drafter: makes drafts, `None` to decode token by token.

    Attributes:
        cache: the cache of all rows, `None` without rows.
        rows: the rows, in the order of the rows of the cache.
        errors: by row, what ended it, apart from its own end.
    """

    def __init__(
        self, model: Any, on_token: Callable[[DecodedRow, int], bool] | None = None, drafter: Drafter | None = None
    ) -> None:
        self._model, self._drafter, self._on_token = model, drafter, on_token
        self._border = model_types.reads_again_behind(model)
        self.cache: Cache | None = None
        self.rows: list[DecodedRow] = []
        self.errors: dict[DecodedRow, Exception] = {}

    def join(self, rows: Sequence[DecodedRow], caches: Sequence[Cache]) -> None:
        """Add rows, of one or several caches that have seen all of their tokens but the last.

        The caches do not change, unless there is one, and no row yet: it is taken over.
        """
        if not rows:
            return
        if self.cache is not None:
            self.cache.extend(*caches)
        else:
            self.cache = caches[0] if len(caches) == 1 else merge(list(caches))
        if self._drafter is not None:
            self.cache.activate_past_recording()
            self._drafter.join(rows)
        self.rows += rows

    def begin(self, row: DecodedRow, logits: Tensor) -> None:
        """Append the first new token of a row, given the logits after its prompt, `[1, vocab]`."""
        self._take(row, (), logits, logits.argmax(-1).tolist())

    def has_ended(self, row: DecodedRow) -> bool:
        """Whether a row gets no more tokens. What a stopping criterion raises ends it as well."""
        try:
            return row in self.errors or row.has_ended
        except Exception as error:
            self.errors[row] = error
            return True

    def drop_ended(self) -> list[tuple[DecodedRow, Exception | None]]:
        """Take out the rows that have ended, and return them with what ended them, apart from their own end."""
        going_on = [index for index, row in enumerate(self.rows) if not self.has_ended(row)]
        if len(going_on) == len(self.rows):
            return []
        ended = [row for index, row in enumerate(self.rows) if index not in going_on]
        # Rows from the end take the places of rows that go, so that few rows are moved.
        last = iter(index for index in going_on if index >= len(going_on))
        kept = [index if index in going_on else next(last) for index in range(len(going_on))]
        self.rows = [self.rows[index] for index in kept]
        if self._drafter is not None:
            self._drafter.keep(kept)
        if self.cache is not None and kept:
            self.cache.keep_rows(kept)
        elif not kept:
            self.cache = None
        return [(row, self.errors.pop(row, None)) for row in ended]

    @torch.no_grad()
    def step(self) -> None:
        """One forward pass: each row gets at least one more token."""
        cache = self.cache
        if cache is None:
            return
        drafts = [[] for _ in self.rows] if self._drafter is None else self._drafter.drafts(self.rows)
        drafts = [
            draft[: max(0, row.most - row.ids.shape[1] - 1)] for row, draft in zip(self.rows, drafts, strict=True)
        ]
        new = 1 + max(map(len, drafts))
        # A shorter draft is filled up by its last token, which nobody looks at.
        passed = [[row.last, *draft] for row, draft in zip(self.rows, drafts, strict=True)]
        tokens = torch.tensor([own + own[-1:] * (new - len(own)) for own in passed], device=self._model.device)
        logits = self._pass(tokens, cache)
        greatest = logits.argmax(-1).tolist()
        for index, (row, draft) in enumerate(zip(self.rows, drafts, strict=True)):
            self._take(row, draft, logits[index], greatest[index])
        if self._drafter is not None:
            cache.crop_rows([row.tokens - 1 for row in self.rows])

    def _pass(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits of the next tokens; of a row alone as `generate()` computes them, which may read it all again."""
        row, border = self.rows[0], self._border
        if border is not None and tokens.numel() == 1 and cache.get_seq_length() <= border < row.tokens:
            ids = row.ids[:, row.padding :]
            positions = torch.arange(row.tokens, device=ids.device)[None]
            logits: Tensor = pass_unseen(self._model, ids, cache, None, positions).logits
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
            if row.chooses_the_greatest:
                row.append(token)
            else:
                try:
                    token = row.choose(logits[place : place + 1])
                except Exception as error:
                    self.errors[row] = error
                    return
            if self._on_token is not None:
                row.is_stopped = self._on_token(row, token)
            if place == len(draft) or token != draft[place] or self.has_ended(row):
                return
