"""Tasks of lm-evaluation-harness, made of local JSON files."""

import json
import random
from pathlib import Path
from typing import Any

import yaml

CHOICES, ANSWERS, ROLLING = "word_choices", "word_answers", "word_perplexity"
DOCUMENTS, SHOTS = 6, 3


def words(count: int, generator: random.Random) -> str:
    """Words that the tokenizer of `model_directories` knows."""
    return " ".join(f"w{generator.randrange(80)}" for _ in range(count))


def write_tasks(directory: Path, words_in_question: int = 12) -> Path:
    """Three tasks: multiple choice with few-shot examples, generation, and perplexity of whole texts."""
    generator = random.Random(0)
    documents = [
        {
            "question": words(words_in_question, generator),
            "choices": [words(1 + index % 3, generator) for index in range(4)],
            "label": generator.randrange(4),
        }
        for _ in range(SHOTS + DOCUMENTS)
    ]
    files = {}
    for split, rows in (("train", documents[:SHOTS]), ("test", documents[SHOTS:])):
        files[split] = str(directory / f"{split}.json")
        Path(files[split]).write_text("\n".join(map(json.dumps, rows)))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files, "cache_dir": str(directory / "datasets")},
        "test_split": "test",
    }
    few_shot = {"fewshot_split": "train", "fewshot_config": {"sampler": "first_n"}, "num_fewshot": SHOTS}
    tasks: list[dict[str, Any]] = [
        {
            "task": CHOICES,
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}} is",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{label}}",
            "metric_list": [{"metric": "acc"}],
            **few_shot,
        },
        {
            "task": ANSWERS,
            "output_type": "generate_until",
            "doc_to_text": "{{question}} is",
            "doc_to_target": "{{choices[label]}}",
            "generation_kwargs": {"until": ["."], "max_gen_toks": 8, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
            **few_shot,
        },
        {
            "task": ROLLING,
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{question}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
    ]
    for task in tasks:
        (directory / f"{task['task']}.yaml").write_text(yaml.safe_dump(common | task))
    return directory
