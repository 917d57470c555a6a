"""The same greedy continuation through one cache after the other, timed."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from .. import model_types
from ..measuring.contenders import Contender, exact_names, of_ours, of_theirs
from ..measuring.held import held_bytes
from ..measuring.ties import is_tie
from ..measuring.turns import there_and_back


@dataclass(frozen=True)
class Run:
    """One continuation.

    Attributes:
        tokens: the tokens that were generated.
        prefill_seconds: from the call to the first token.
        decode_seconds: from the first token to the last.
        nbytes: bytes that the cache held at the end.
    """

    tokens: list[int]
    prefill_seconds: float
    decode_seconds: float
    nbytes: int

    @property
    def tokens_per_second(self) -> float:
        """Speed of decode: the first token is the prefill's."""
        return (len(self.tokens) - 1) / self.decode_seconds


@dataclass
class Row:
    """What the runs of one cache came to.

    Attributes:
        library: who makes the cache.
        cache: its name.
        is_reference: whether the others' tokens are compared with this one's.
        runs: its runs, one for each trial.
        first_difference: index of the first token that differs from the reference in any run, `None` where none does.
        is_tie: whether that token and the reference's are equally likely, as far as the dtype can say.
    """

    library: str
    cache: str
    is_reference: bool
    runs: list[Run] = field(default_factory=list)
    first_difference: int | None = None
    is_tie: bool = False

    @property
    def same_tokens(self) -> bool:
        """Whether every run gave the tokens of the reference."""
        return self.first_difference is None

    @property
    def tokens_per_second(self) -> float:
        """Median speed of decode."""
        return statistics.median(run.tokens_per_second for run in self.runs)

    @property
    def nbytes(self) -> int:
        """The most bytes that any run held at its end."""
        return max(run.nbytes for run in self.runs)


class TokenClock(BaseStreamer):  # type: ignore[misc]
    """Takes the time at each token. generate() brings each to the host first, so that a GPU has finished it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Called with the prompt, and then with every new token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Called after the last token."""


def contenders(model: Any, length: int) -> list[Contender]:
    """Every exact cache that suits a model, transformers' DynamicCache first.

    Args:
        model: the model.
        length: the most tokens that a cache will hold.
    """
    names = exact_names(model.config)
    ours = [of_ours(name, model, length) for name in names]
    return [of_theirs("dynamic", model, length), *ours, of_theirs("static", model, length)]


def continue_text(
    model: Any, ids: Tensor, tokens: int, cache: Any, streamer: Any, to_the_end: bool = True
) -> list[int]:
    """Greedy continuation through `cache`.

    Args:
        model: the model.
        ids: the prompt, int64 `[1, tokens]`.
        tokens: tokens to generate.
        cache: an empty cache, of either library.
        streamer: told of each token as it comes.
        to_the_end: go on when the model would stop, so that runs can be compared.

    Returns:
        The new tokens.
    """
    ids = ids.to(model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=1,
        max_new_tokens=tokens,
        min_new_tokens=tokens if to_the_end else 0,
        # Else generate() compiles around some caches and not around others.
        disable_compile=True,
        streamer=streamer,
        **{model_types.cache_argument(model): cache},
    )
    generated: list[int] = output[0, ids.shape[1] :].tolist()
    return generated


def run_once(model: Any, ids: Tensor, tokens: int, contender: Contender) -> Run:
    """One timed continuation through a new cache. Arguments as of `continue_text`."""
    cache = contender.make()
    clock = TokenClock()
    generated = continue_text(model, ids, tokens, cache, clock)
    prompt_given, first_token, *_, last_token = clock.times
    return Run(generated, first_token - prompt_given, last_token - first_token, held_bytes(cache))


def compare(
    model: Any,
    ids: Tensor,
    tokens: int,
    trials: int,
    rivals: Sequence[Contender],
    on_run: Callable[[Contender, int], None],
) -> list[Row]:
    """Run every cache `trials` times, in turns, and in the other direction every other time.

    Args:
        model: the model.
        ids: the prompt, int64 `[1, tokens]`.
        tokens: tokens to generate, 2 or more.
        trials: runs of each cache.
        rivals: the caches; the first is the one that the others are compared with.
        on_run: called before each run, with the cache and the index of the trial.

    Returns:
        A row for each cache, in the order of `rivals`.
    """
    rows = [Row(rival.library, rival.cache, is_reference=rival is rivals[0]) for rival in rivals]
    for trial in range(trials):
        for row, rival in there_and_back(list(zip(rows, rivals, strict=True)), trial):
            on_run(rival, trial)
            row.runs.append(run_once(model, ids, tokens, rival))
    expected = rows[0].runs[0].tokens
    for row in rows:
        differences = [_first_difference(run.tokens, expected) for run in row.runs]
        row.first_difference = min((index for index in differences if index is not None), default=None)
        if row.first_difference is not None:
            seen = row.runs[differences.index(row.first_difference)].tokens
            row.is_tie = _is_tie(model, ids, expected, seen, row.first_difference)
    return rows


def _is_tie(model: Any, ids: Tensor, expected: list[int], seen: list[int], index: int) -> bool:
    before = torch.cat([ids, torch.tensor([expected[:index]], dtype=ids.dtype)], dim=1).to(model.device)
    with torch.no_grad():
        logits = model(before).logits[0, -1].float()
    return is_tie(logits, expected[index], seen[index], model.dtype)


def _first_difference(tokens: list[int], expected: list[int]) -> int | None:
    pairs = zip(tokens, expected, strict=True)
    return next((index for index, (token, wanted) in enumerate(pairs) if token != wanted), None)
