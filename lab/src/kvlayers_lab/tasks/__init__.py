"""Synthetic tasks over long contexts, which a model solves through a cache, in the spirit of RULER.

Reference: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (2024),
https://arxiv.org/abs/2404.06654.
"""

from pathlib import Path

# It registers the tasks of kvlayers.
from kvlayers_lab.tasks import builtin
from kvlayers_lab.tasks.contract import (
    Haystack,
    Needle,
    Task,
    TaskSample,
    TaskText,
    register_task,
    samples_of,
    task_named,
    task_names,
    unregister_task,
)

HARNESS_TASKS = Path(__file__).with_name("harness")
"""Folder of the tasks as tasks of lm-evaluation-harness, for its `--include_path`."""

__all__ = [
    "HARNESS_TASKS",
    "Haystack",
    "Needle",
    "Task",
    "TaskSample",
    "TaskText",
    "builtin",
    "register_task",
    "samples_of",
    "task_named",
    "task_names",
    "unregister_task",
]
