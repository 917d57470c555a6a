"""What it costs to compute documents apart: predictions and answers after documents that were concatenated."""

import functools
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlayers import Cache, DynamicCache
from kvlayers.documents import Joined, joined
from kvlayers.models import bos_ids
from kvlayers_lab.measuring.contenders import Contender
from kvlayers_lab.measuring.decoding import finish
from kvlayers_lab.measuring.scoring import PassageScores, Scores, newest_logits, token_scores
from kvlayers_lab.measuring.text import check_known
from kvlayers_lab.measuring.text import passages as passages_of
from kvlayers_lab.names import KVLAYERS
from kvlayers_lab.tasks.contract import TaskSample, Tick
from kvlayers_lab.tasks.runner import Decoding, Read

BEGINNING = "Read the following texts."
"""What all documents of a text have in common before them."""

SENTENCE_SEARCH = 48
"""Tokens on both sides of a cut among which it looks for the end of a sentence."""


class Apart:
    """A context whose documents are computed apart, each after the same beginning.

    Every layer keeps every token, so that tokens can be recomputed.

    Args:
        model: a causal language model in eval mode.
        beginning: token ids before all documents; empty for none.
        documents: token ids of each document.
    """

    def __init__(self, model: Any, beginning: Sequence[int], documents: Sequence[Sequence[int]]) -> None:
        self._model, self._beginning, self._documents = model, list(beginning), [list(each) for each in documents]

    @functools.cached_property
    def _apart(self) -> list[Cache]:
        before = self._read(DynamicCache(), self._beginning)
        return [self._read(before.fork(), own) for own in self._documents]

    def at_once(self) -> Cache:
        """A cache that has read the whole context in one pass."""
        return self._read(DynamicCache(), [*self._beginning, *itertools.chain(*self._documents)])

    def joined(self, recompute: int | str) -> Joined:
        """The documents as `kvlayers.concatenate` returns them, and what it has recomputed."""
        ids = [torch.tensor([*self._beginning, *own]) for own in self._documents]
        return joined(self._apart, self._model, recompute, ids, len(self._beginning), None)

    def _read(self, cache: Cache, ids: Sequence[int]) -> Cache:
        if ids:
            newest_logits(self._model, torch.tensor([list(ids)], device=self._model.device), cache, 1)
        return cache


def documents_of(tokenizer: Any, ids: Sequence[int], count: int) -> list[list[int]]:
    """Token ids cut into documents of about the same length, at the ends of sentences where there are any."""
    ends = [place + 1 for place, token in enumerate(ids) if tokenizer.decode([token]).strip().endswith(".")]
    cuts = [0]
    for number in range(1, count):
        wanted = len(ids) * number // count
        nearest = min(ends, key=lambda end: abs(end - wanted), default=wanted)
        is_near = abs(nearest - wanted) <= SENTENCE_SEARCH and cuts[-1] < nearest < len(ids)
        cuts.append(nearest if is_near else wanted)
    return [list(ids[begin:stop]) for begin, stop in itertools.pairwise([*cuts, len(ids)])]


def beginning_of(tokenizer: Any) -> list[int]:
    """Token ids of what all documents of a text have in common, with the BOS token if the tokenizer has one there."""
    return [*bos_ids(tokenizer), *tokenizer(BEGINNING, add_special_tokens=False).input_ids]


def recompute_contender(recompute: int | str) -> Contender:
    """Documents that are concatenated, as a contender in tasks."""
    return Contender(KVLAYERS, f"recompute {recompute}", DynamicCache)


def reading_of(model: Any, tokenizer: Any, recomputes: Sequence[int | str], sample: TaskSample, documents: int) -> Read:
    """How contenders read a sample whose context is cut into documents. What others recompute, the exact one reads.

    Args:
        model: a causal language model in eval mode.
        tokenizer: its tokenizer.
        recomputes: what `recompute_contender` was made for.
        sample: the sample. Its introduction is the beginning of all documents.
        documents: how many documents.
    """
    recompute_of = {recompute_contender(recompute).name: recompute for recompute in recomputes}
    begin, others = sample.context_ids[: sample.introduction_tokens], sample.context_ids[sample.introduction_tokens :]
    context = Apart(model, begin, documents_of(tokenizer, others, documents))

    def read(contender: Contender) -> Decoding:
        recompute = recompute_of.get(contender.name)
        decoding = Decoding(model, context.at_once() if recompute is None else context.joined(recompute).cache)
        decoding.append(sample.question_ids)
        return decoding

    return read


@dataclass(frozen=True)
class DocumentFidelity:
    """What concatenated documents change in the predictions after them.

    Attributes:
        documents: how many documents.
        recompute: as for `kvlayers.concatenate`; `None` for a context that was computed at once.
        recomputed: share of all tokens that was recomputed.
        tokens: tokens that were scored.
        kl: mean KL divergence of the next-token distributions from those after the whole context, in nats.
        agreement: share of the tokens whose likeliest next token is the same.
        perplexity: perplexity of the scored tokens.
        seconds: median seconds to concatenate the documents, or to compute the context at once.
        of_full: `seconds` as a share of those of the whole context.
    """

    documents: int
    recompute: int | str | None
    recomputed: float
    tokens: int
    kl: float
    agreement: float
    perplexity: float
    seconds: float
    of_full: float


def measure_documents(
    model: Any,
    tokenizer: Any,
    text: str,
    counts: Sequence[int],
    document_tokens: int,
    scored: int,
    passages: int,
    recomputes: Sequence[int | str],
    tick: Tick,
) -> list[DocumentFidelity]:
    """Concatenate documents of a text, and score tokens after them that go on with one of the documents.

    Args:
        model: in eval mode.
        tokenizer: its tokenizer.
        text: the text that documents are taken from, spread evenly over it.
        counts: how many documents are concatenated; each of these numbers is measured.
        document_tokens: tokens of each document.
        scored: tokens that are read after the documents. The first of them is not scored.
        passages: how often, each time with other documents.
        recomputes: as `recompute` of `kvlayers.concatenate`.
        tick: called before each piece of work.

    Returns:
        For each number of documents, the whole context, then each of `recomputes`.

    Raises:
        OptionError: the text is too short.
    """
    found, begin, without_bos = list[DocumentFidelity](), beginning_of(tokenizer), len(bos_ids(tokenizer))
    for count in counts:
        texts = passages_of(tokenizer, text, passages * count, without_bos + document_tokens + scored)
        for ids in texts:
            check_known(model.config, ids)
        rows = {amount: (Scores(), list[float]()) for amount in (None, *recomputes)}
        for passage in range(passages):
            # Neighbours in the text would tell one another too much.
            chosen = [texts[passage + passages * number][0, without_bos:].tolist() for number in range(count)]
            context = Apart(model, begin, [own[:document_tokens] for own in chosen])
            target = torch.tensor([chosen[passage % count][document_tokens:]], device=model.device)
            # The documents are computed now, and not while a clock runs.
            context.joined(0)
            expected: Tensor | None = None
            for amount, (scores, shares) in rows.items():
                how = "all at once" if amount is None else f"recompute {amount}"
                tick(f"{count} documents, set {passage + 1}: {how}")
                finish(model.device)
                started = time.perf_counter()
                cache, recomputed = Joined(context.at_once(), ()) if amount is None else context.joined(amount)
                finish(model.device)
                seconds = time.perf_counter() - started
                shares.append(len(recomputed) / cache.get_seq_length())
                seen = newest_logits(model, target, cache, scored)[:-1].double().log_softmax(-1)
                expected = seen if expected is None else expected
                kl, surprise, agrees = (tuple(each.tolist()) for each in token_scores(expected, seen, target[0, 1:]))
                scores.passages.append(PassageScores(kl, surprise, agrees, seconds))
        full = _median_seconds(rows[None][0])
        for amount, (scores, shares) in rows.items():
            summary, seconds = scores.summary(), _median_seconds(scores)
            figures = {name: summary[name] for name in ("tokens", "kl", "agreement", "perplexity")}
            share = statistics.fmean(shares)
            found.append(DocumentFidelity(count, amount, share, **figures, seconds=seconds, of_full=seconds / full))
    return found


def _median_seconds(scores: Scores) -> float:
    return statistics.median(each.seconds for each in scores.passages)
