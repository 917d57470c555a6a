"""Rows whose passes run out of memory: the pass is made again, and all answers are those of a run without a failure."""

from typing import Any

import pytest
import torch

import kvlayers
from kvlayers.core.buffer import TokenBuffer
from kvlayers.generation.retried_pass import SteppedDownWarning
from models import fresh_model

PROMPTS = [[5, 8, 13, 21, 34, 55, 60, 61, 62, 63, 64, 65, 66, 67], [21, 34], list(range(40, 57))]
MESSAGE = "CUDA out of memory."


pytestmark = pytest.mark.usefixtures("quick_collections")


class Operations:
    """Counts the operations of a model, of which one fails for lack of memory, or all from one on."""

    def __init__(self, model: Any) -> None:
        self.done, self.failing, self.for_good = 0, 0, False
        for module in model.modules():
            if not list(module.children()):
                module.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.done += 1
        if self.done == self.failing or (self.for_good and self.done >= self.failing):
            raise torch.OutOfMemoryError(MESSAGE)


def answers(model: Any, **how: Any) -> list[Any]:
    options = {"max_new_tokens": 4, "max_rows": 2, "in_order": True, "progress": False, **how}
    return list(kvlayers.generate_many(model, PROMPTS, **options))


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", {}),
        ("llama", {"prompt_lookup_num_tokens": 2}),
        ("mistral", {"chunk_tokens": 4}),
        ("gemma3", {"prompt_lookup_num_tokens": 2}),
        ("jamba", {}),
    ],
)
def test_any_operation_may_fail(family: str, how: dict[str, Any]) -> None:
    model = fresh_model(family)
    expected = [answer.ids.tolist() for answer in answers(model, **how)]
    operations = Operations(model)
    answers(model, **how)
    for failing in range(1, operations.done + 1, operations.done // 20):
        operations.done, operations.failing, heard = 0, failing, []
        with pytest.warns(SteppedDownWarning):
            seen = answers(model, on_token=lambda index, token: heard.append((index, token)), **how)  # noqa: B023
        assert [answer.error for answer in seen] == [None] * 3
        assert [answer.ids.tolist() for answer in seen] == expected, failing
        for index, tokens in enumerate(expected):
            assert [token for row, token in heard if row == index] == tokens


def test_what_gave_way_is_not_stored_as_if_it_were_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    model, store, allocate = fresh_model("llama"), kvlayers.PrefixStore(max_bytes=2**24), TokenBuffer.allocate
    failing: list[bool] = [True]

    def allocated(*args: Any, **kwargs: Any) -> TokenBuffer:
        if failing:
            failing.clear()
            raise torch.OutOfMemoryError(MESSAGE)
        return allocate(*args, **kwargs)

    monkeypatch.setattr(TokenBuffer, "allocate", allocated)
    with pytest.warns(SteppedDownWarning):
        answers(model, prefix_store=store, max_rows=1)
    assert (len(store), store.statistics.refused) == (2, 1)
    failing.append(True)
    with kvlayers.installed(prefix_store=store), pytest.warns(SteppedDownWarning):
        model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=4)
    assert (len(store), store.statistics.refused) == (2, 2)


def test_an_error_in_the_end_is_that_of_the_prompt_or_of_all_rows() -> None:
    model = fresh_model("llama")
    operations = Operations(model)
    operations.failing, operations.for_good = 3, True
    with pytest.warns(SteppedDownWarning):
        seen = answers(model)
    for answer in seen:
        assert isinstance(answer.error, torch.OutOfMemoryError)
        assert "no step left to give way by (steps taken: int8, int4)" in str(answer.error)
    operations.done, operations.failing = 0, 100
    with pytest.warns(SteppedDownWarning), pytest.raises(torch.OutOfMemoryError, match="no step left"):
        answers(model)
