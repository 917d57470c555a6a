"""The long-context tasks as tasks of lm-evaluation-harness."""

from pathlib import Path
from typing import Any

import pytest

from kvlayers.errors import OptionError
from kvlayers_lab.tasks import HARNESS_TASKS, samples_of, task_names
from model_directories import random_text, save_sharp_model, word_tokenizer

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: it comes with the extra 'eval'")

from lm_eval.tasks import TaskManager  # noqa: E402

import kvlayers_lab.evaluation.harness  # noqa: E402, F401

INT2 = {"cache": "int2", "cache_config": {"residual_length": 0, "sink_tokens": 0}, "chunk": 32}


def test_the_tasks_are_those_of_kvlayers_and_a_cache_changes_their_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", str)
    directory, text = save_sharp_model(tmp_path / "model", queries=8, max_position_embeddings=512), random_text(600)
    (tmp_path / "text.txt").write_text(text)
    asked = {"lengths": [400], "depths": [0, 50], "samples": 2, "seed": 3, "text": str(tmp_path / "text.txt")}
    names = [f"kvlayers_{name}" for name in task_names()]
    said: list[list[Any]] = []
    for arguments in ({}, INT2):
        found = lm_eval.simple_evaluate(
            "kvlayers",
            model_args={"pretrained": str(directory), **arguments},
            tasks=["kvlayers_long_context"],
            task_manager=TaskManager(
                include_path=str(HARNESS_TASKS),
                include_defaults=False,
                metadata={"pretrained": str(directory), **asked},
            ),
            device="cpu",
            bootstrap_iters=0,
        )
        assert {*names, "kvlayers_long_context"} == found["results"].keys()
        assert all(0 <= each["score,none"] <= 1 for each in found["results"].values())
        assert all("score_stderr,none" in found["results"][name] for name in names)
        said.append([each["resps"] for name in names for each in found["samples"][name]])
    assert said[0] != said[1]
    tokenizer = word_tokenizer()
    samples = samples_of(["keys"], [400], [0, 0.5], 2, 3, tokenizer, text)
    documents = [each["doc"] for each in found["samples"]["kvlayers_keys"]]
    assert [each["prompt"] for each in documents] == [
        tokenizer.decode(each.context_ids + each.question_ids, skip_special_tokens=True) for each in samples
    ]
    assert [tuple(each["expected"]) for each in documents] == [each.answers for each in samples]


def test_a_model_without_a_name_needs_the_name_of_a_tokenizer() -> None:
    manager = TaskManager(include_path=str(HARNESS_TASKS), include_defaults=False)
    with pytest.raises(OptionError, match="`tokenizer` must be the name or the directory of a tokenizer, got None"):
        manager.load(["kvlayers_needle"])
