"""A plugin of pytest: leaves out the tests of a room that was removed, which the environment names."""

import inspect
import os
import pathlib
import re

import pytest

WORDS = {
    "recall": r"[Rr]ecall|RECALL|test_capabilities",
    "sinks": r"test_capabilities|SinkLayer|SinkCache|SINK|[\"' (\[-]sink(?!_tokens)\b|sinks? |kvlayers\.sinks",
}
"""For each room that a test removes, what only its tests mention."""

ROOM = os.environ.get("KVLAYERS_WITHOUT_ROOM", "")


def pytest_ignore_collect(collection_path: pathlib.Path) -> bool | None:
    return True if ROOM in collection_path.parts and "tests" in collection_path.parts else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if _mentions_the_room(item)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def _mentions_the_room(item: pytest.Item) -> bool:
    source = inspect.getsource(item.function) if isinstance(item, pytest.Function) else ""
    return re.search(WORDS[ROOM], f"{item.nodeid} {source}") is not None
