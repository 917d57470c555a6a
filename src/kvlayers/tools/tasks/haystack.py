"""Filler text around the sentences that matter."""

import bisect
import itertools
import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvlayers.errors import OptionError

LONGEST_SENTENCE = 60
"""Words of a sentence of filler, at most. A longer run of words without a full stop, such as a table, is divided."""


class Needle(NamedTuple):
    """A sentence to be hidden in filler.

    Attributes:
        text: the sentence.
        depth: share of the filler's tokens before it, from 0 to 1.
    """

    text: str
    depth: float


class Haystack:
    """Filler from a text, in whole sentences.

    Args:
        encode: token ids of a text, without special tokens.
        text: the text that the filler is taken from.

    Raises:
        OptionError: the text has no words, or the tokenizer returns no tokens for them.
    """

    def __init__(self, encode: Callable[[str], Sequence[int]], text: str) -> None:
        self.encode = encode
        self.text = text
        self._anchor = tuple(encode("a"))
        self._tokens: dict[str, tuple[int, ...]] = {}
        self._sentences = _sentences(text)
        if not any(self.tokens(f" {sentence}") for sentence in self._sentences):
            raise OptionError(
                "`text` must have words to take filler from, got none that the tokenizer knows: use another text, or "
                "the tokenizer of a model that reads it."
            )

    def tokens(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that stands behind other text.

        Some tokenizers put a space before all that they encode. The ids of a text behind other text are without it.
        """
        if text not in self._tokens:
            anchored = tuple(self.encode(f"a{text}"))
            joined = anchored[: len(self._anchor)] == self._anchor
            self._tokens[text] = anchored[len(self._anchor) :] if joined else tuple(self.encode(text))
        return self._tokens[text]

    def filler(self, tokens: int, chooser: random.Random) -> list[tuple[int, ...]]:
        """Sentences that follow one another in the text, from a random one on, with `tokens` tokens in all.

        Behind its last sentence, the text begins again. The last sentence of the filler is cut at the last token.
        """
        start = chooser.randrange(len(self._sentences))
        found = []
        for sentence in itertools.islice(itertools.cycle(self._sentences), start, None):
            if not tokens:
                break
            ids = self.tokens(f" {sentence}")[:tokens]
            found.append(ids)
            tokens -= len(ids)
        return found

    def hide(self, needles: Sequence[Needle], tokens: int, chooser: random.Random) -> list[int]:
        """Token ids of `tokens` tokens of filler and of the needles in it.

        Each needle stands between two sentences of the filler, as near to its depth as they allow.
        """
        sentences = self.filler(tokens, chooser)
        ends = [0, *itertools.accumulate(map(len, sentences))]
        hidden: dict[int, list[int]] = {}
        for needle in sorted(needles, key=lambda needle: needle.depth):
            hidden.setdefault(_nearest(ends, needle.depth * tokens), []).extend(self.tokens(f" {needle.text}"))
        ids = hidden.get(0, [])
        for place, sentence in enumerate(sentences, 1):
            ids += [*sentence, *hidden.get(place, ())]
        return ids


def _nearest(ascending: Sequence[int], wanted: float) -> int:
    """Index of the number that is nearest to the wanted one."""
    above = min(bisect.bisect_left(ascending, wanted), len(ascending) - 1)
    below = max(above - 1, 0)
    return below if wanted - ascending[below] <= ascending[above] - wanted else above


def _sentences(text: str) -> list[str]:
    """The sentences of a text, each on one line."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])", paragraph):
            words = sentence.split()
            starts = range(0, len(words), LONGEST_SENTENCE)
            found += [" ".join(words[start : start + LONGEST_SENTENCE]) for start in starts]
    return found
