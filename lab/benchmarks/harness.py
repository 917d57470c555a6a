"""Compares lm-evaluation-harness's own model `hf` with the model `kvlayers`, which computes each context once.

    python lab/benchmarks/harness.py                         # three tasks of 20 documents: eight minutes
    python lab/benchmarks/harness.py --documents 50 --shots 3

The tasks are made of Python's help: four choices behind few-shot examples, about 1,000 tokens; answers that are
generated behind the same examples in each prompt; and the perplexity of texts. The models take turns, and share the
weights. A ratio compares two runs of the same turn, and the figure is the median over all turns. The exit code is 1 if
a log-probability differs by more than 1e-4, or a text differs. Run it on an idle machine.
"""

import itertools
import json
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import lm_eval
import torch
import torch.utils.collect_env
import transformers
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from kvlayers_lab.evaluation.harness import KVLayersLM
from lib import report
from lib.internals import default_text
from lib.timing import Turns

CHOICES, ANSWERS, PERPLEXITY = "choices", "answers", "perplexity"
TASKS = (CHOICES, ANSWERS, PERPLEXITY)
HF, KVLAYERS = "hf", "kvlayers"
MOST_DIFFERENCE = 1e-4
ANSWER_WORDS = 8


def options() -> report.Options:
    made = report.Options("harness", __doc__)
    made.real_model(is_needed=True)
    made.dtype("float32")
    made.some_of("--tasks", TASKS, "tasks")
    made.sized("--documents", 20, None, "documents of each task")
    made.sized("--shots", 5, None, "few-shot examples before each question")
    made.sized("--words", 75, None, "words of a question; 75 are 1,000 tokens with 5 shots")
    made.sized("--batch-size", 4, None, "of both models")
    made.sized("--trials", 3, None, "trials")
    return made


def documents(text: str, count: int, words: int) -> list[dict[str, Any]]:
    """Passages of a text, and four continuations of each: its own, and those of other passages."""
    step = words + ANSWER_WORDS
    all_words = text.split()
    if len(all_words) < 4 * step:
        raise SystemExit(f"the text has {len(all_words)} words, and {4 * step} are needed: use a longer one")
    passages = [all_words[start : start + step] for start in range(0, len(all_words) - step + 1, step)]
    cycle = list(itertools.islice(itertools.cycle(passages), count + 3))
    generator, found = random.Random(0), []
    for index in range(count):
        endings = [" ".join(passage[words:]) for passage in cycle[index : index + 4]]
        order = generator.sample(range(4), 4)
        choices = [endings[place] for place in order]
        found.append({"question": " ".join(cycle[index][:words]), "choices": choices, "label": order.index(0)})
    return found


def write_tasks(directory: pathlib.Path, given: Any) -> None:
    text = given.text.read_text() if given.text else default_text()
    rows = documents(text, given.shots + given.documents, given.words)
    files = {"train": str(directory / "train.json"), "test": str(directory / "test.json")}
    for split, part in (("train", rows[: given.shots]), ("test", rows[given.shots :])):
        pathlib.Path(files[split]).write_text("\n".join(map(json.dumps, part)))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files, "cache_dir": str(directory / "datasets")},
        "test_split": "test",
    }
    examples = {"fewshot_split": "train", "fewshot_config": {"sampler": "first_n"}, "num_fewshot": given.shots}
    kinds: dict[str, dict[str, Any]] = {
        CHOICES: {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{label}}",
            "metric_list": [{"metric": "acc"}],
            **examples,
        },
        ANSWERS: {
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{choices[label]}}",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
            **examples,
        },
        PERPLEXITY: {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{question}} {{choices | join(' ')}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
    }
    for name, kind in kinds.items():
        (directory / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **kind}))


def answers_of(model: Any, task: str, manager: TaskManager) -> tuple[float, list[Any]]:
    """Seconds of a task, and what the model answered to each request."""
    begin = time.perf_counter()
    found = lm_eval.simple_evaluate(model, tasks=[task], task_manager=manager, bootstrap_iters=0, random_seed=0)
    seconds = time.perf_counter() - begin
    answers = [answer for sample in found["samples"][task] for of_request in sample["resps"] for answer in of_request]
    return seconds, [answer[0] if isinstance(answer, tuple | list) else answer for answer in answers]


def difference(one: list[Any], other: list[Any]) -> float:
    """The largest difference of log-probabilities, or the share of texts that differ."""
    if isinstance(one[0], str):
        return statistics.fmean(text != same for text, same in zip(one, other, strict=True))
    return max(abs(float(score) - float(same)) for score, same in zip(one, other, strict=True))


def measure(run: report.Session) -> dict[str, Any]:
    given, kinds = run.given, {HF: HFLM, KVLAYERS: KVLayersLM}
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=getattr(torch, given.dtype)).eval()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        write_tasks(pathlib.Path(directory), given)
        manager = TaskManager(include_path=directory, include_defaults=False)
        for task in given.tasks:

            def answered(name: str, task: str = task) -> tuple[float, list[Any]]:
                # Made for each turn: no store has prompts of an earlier one.
                return answers_of(kinds[name](model, tokenizer=tokenizer, batch_size=given.batch_size), task, manager)

            turns, apart = Turns(kinds), 0.0
            for trial in range(given.trials + 1):
                # The first turn loads data, and is not counted.
                answers = turns.take_timed(answered, is_counted=trial > 0)
                apart = max(apart, difference(answers[HF], answers[KVLAYERS]))
            medians = {name: turns.median(name) for name in kinds}
            found[task] = {"seconds": turns.seconds, **medians, "times": turns.ratio(HF, KVLAYERS), "difference": apart}
            run.expect(apart <= MOST_DIFFERENCE, f"{task}: the largest difference is {apart:.1e}")
    columns = {**{name: report.shown(name) for name in kinds}, "times as fast": report.shown("times")}
    columns["largest difference"] = report.shown("difference", ".1e")
    run.table(f"Seconds of a task, {given.documents} documents, {given.dtype}", "task", {"": found}, columns)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    given = options().parse(arguments)
    # The harness asks for these facts after each task, which takes seconds.
    torch.utils.collect_env.get_pretty_env_info = str
    with report.session(given) as run:
        found = measure(run)
    return run.finish(found)


if __name__ == "__main__":
    sys.exit(main())
