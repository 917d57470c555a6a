"""The long-context tasks as tasks of lm-evaluation-harness. The YAML files beside this one name these functions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from transformers import AutoTokenizer

from kvlayers.errors import OptionError
from kvlayers_lab.measuring.text import default_text
from kvlayers_lab.tasks import samples_of
from kvlayers_lab.tasks.runner import answer_score


def dataset(
    name: str,
    lengths: Sequence[int] = (512, 1024),
    depths: Sequence[float] = (0, 50, 100),
    samples: int = 1,
    seed: int = 0,
    text: str | None = None,
    tokenizer: str | None = None,
    pretrained: str | None = None,
    **of_the_model: Any,
) -> dict[str, Any]:
    """The samples of a task, made from a text on this machine. The harness passes its `--metadata` and model arguments.

    Args:
        name: name of the task.
        lengths: tokens of context and question together. The harness encodes the text again, so that some samples
            have a few tokens more or less.
        depths: where the answer stands, in percent of the context.
        samples: samples for each length and depth.
        seed: seed of all random choices.
        text: file that filler is taken from. Default: Python's help.
        tokenizer: name or directory of the tokenizer. Default: that of the model.
        pretrained: name or directory of the model.
        of_the_model: the other arguments of the model, which decide nothing here.

    Raises:
        OptionError: there is no name of a tokenizer, or a sample cannot be made with these lengths and depths.
    """
    named = tokenizer or pretrained
    if not isinstance(named, str):
        raise OptionError(
            f"`tokenizer` must be the name or the directory of a tokenizer, got {named!r}: pass "
            '--metadata \'{"tokenizer": "..."}\', or name the model with `pretrained`.'
        )
    encoder = AutoTokenizer.from_pretrained(named)
    filler = default_text() if text is None else Path(text).read_text(encoding="utf-8")
    made = samples_of([name], lengths, [depth / 100 for depth in depths], samples, seed, encoder, filler)
    rows = [
        {
            "prompt": encoder.decode(sample.context_ids + sample.question_ids, skip_special_tokens=True),
            "answer": encoder.decode(sample.answer_ids),
            "expected": list(sample.answers),
        }
        for sample in made
    ]
    return {"test": datasets.Dataset.from_list(rows)}


def process_results(sample: Mapping[str, Any], answers: Sequence[str]) -> dict[str, float]:
    """The score of an answer, see `answer_score`."""
    return {"score": answer_score(answers[0], sample["expected"])}
