"""How well a generated answer answers a question."""

import re
from collections.abc import Sequence

_WORD = "[0-9A-Za-z_]"
"""What a word or number goes on with. Letters of other scripts may stand beside a number without a space."""


def answer_score(answer: str, expected: Sequence[str]) -> float:
    """Share of the expected strings that an answer contains, from 0 to 1, as RULER scores answers.

    Upper and lower case are the same. An expected string counts only as whole words and whole numbers: 1234 is not
    in 12345.

    Reference: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (2024),
    https://arxiv.org/abs/2404.06654.

    Args:
        answer: the text that a model generated.
        expected: the strings that a right answer contains, at least one.

    Examples:
        >>> answer_score("It is 1234.", ["1234"]), answer_score("12345", ["1234"])
        (1.0, 0.0)
        >>> answer_score("An owl and a Fox", ["fox", "bee"])
        0.5
    """
    found = [re.search(rf"(?<!{_WORD}){re.escape(each)}(?!{_WORD})", answer, re.IGNORECASE) for each in expected]
    return sum(match is not None for match in found) / len(expected)
