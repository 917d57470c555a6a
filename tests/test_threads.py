"""Threads that generate with one model: tokens are those of a thread on its own, and nothing is left on the model."""

import copy
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessorList

import kvlayers
from kvlayers import PrefixStore
from models import CONFIGS, fresh_model, prompt
from test_assisted import draft_of, spread

THREADS = 4
ROUNDS = int(os.environ.get("KVLAYERS_TEST_ROUNDS", "1"))
"""Calls that each thread makes in each mode. `KVLAYERS_TEST_ROUNDS=20 pytest tests/test_threads.py` is the whole test."""

FAMILIES = ("llama", "gemma3", "qwen3_next", "bamba", "falcon_h1", "t5")
RECURRENT = ("qwen3_next", "bamba", "falcon_h1")
NEW_TOKENS = 10
SECONDS = 300
"""For threads to meet, and to end."""

ROOM = 2**24


class Choosing(transformers.LogitsProcessor):  # type: ignore[misc]
    """Samples with a generator of its own, as torch's is that of all threads, and leaves but one token to choose."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = torch.multinomial(scores.softmax(-1), 1, generator=self._generator)
        return torch.full_like(scores, -float("inf")).scatter_(1, chosen, 0.0)


class Watching(transformers.LogitsProcessor):  # type: ignore[misc]
    """Notes at each token what is set on a model that was not set on it before."""

    def __init__(self, model: Any) -> None:
        self._model, self._before = model, dict(vars(model))
        self.seen: set[str] = set()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen |= {name for name, value in vars(self._model).items() if self._before.get(name) is not value}
        return scores


def set_on(model: Any) -> dict[Any, Any]:
    """All that is set on a model, on its modules and on their classes."""
    found: dict[Any, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            found.update({(path, name, part): entry for part, entry in parts})
    classes = {base for module in model.modules() for base in type(module).__mro__}
    for base in classes:
        found.update({(base, name): value for name, value in vars(base).items() if name != "__abstractmethods__"})
    return found


class Untouched:
    """A model that is not changed.

    Args:
        model: the model.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._set_on = model, set_on(model)
        self._configs = copy.deepcopy(self._options())

    def _options(self) -> list[dict[str, Any]]:
        return [dict(vars(self._model.config)), dict(vars(self._model.generation_config))]

    def check(self) -> None:
        now = set_on(self._model)
        assert sorted(map(str, now.keys() ^ self._set_on.keys())) == []
        assert [key for key, value in self._set_on.items() if now[key] is not value] == []
        assert self._options() == self._configs


def in_threads(work: Callable[[int], None], threads: int = THREADS) -> None:
    """Call `work` with the number of each thread in all of them at once, and raise what the first of them raises."""
    barrier = threading.Barrier(threads)
    raised: list[BaseException] = []

    def run(index: int) -> None:
        try:
            barrier.wait(SECONDS)
            work(index)
        except BaseException as error:
            raised.append(error)

    crowd = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(threads)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in crowd), "a thread waits for ever"
    if raised:
        raise raised[0]


@pytest.fixture(autouse=True)
def _taking_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def repetitive(seed: int = 0) -> Tensor:
    """A prompt in which look-up finds something, long enough to be computed once for several samples."""
    return torch.cat([prompt(1, 9, seed=seed)] * 4, dim=1)


def tokens_of(model: Any, ids: Tensor, **how: Any) -> Tensor:
    defaults: dict[str, Any] = {
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
    }
    tokens: Tensor = model.generate(ids, **{**defaults, **how})
    return tokens


ASSISTED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "prompt look-up": lambda draft: {"prompt_lookup_num_tokens": 4},
    "assisted": lambda draft: {"assistant_model": draft},
}


@pytest.mark.parametrize("mode", ASSISTED)
@pytest.mark.parametrize("family", RECURRENT)
def test_threads_have_drafts_of_their_own(installed: None, family: str, mode: str) -> None:
    model = spread(family)
    how = ASSISTED[mode](draft_of(model))
    prompts = [repetitive(seed) for seed in range(THREADS)]
    expected = [tokens_of(model, ids, **how) for ids in prompts]
    untouched = Untouched(model)
    wrong: list[int] = []
    watching = [Watching(model) for _ in prompts]

    def work(index: int) -> None:
        for _ in range(2):
            seen = tokens_of(model, prompts[index], logits_processor=LogitsProcessorList([watching[index]]), **how)
            if not torch.equal(seen, expected[index]):
                wrong.append(index)

    in_threads(work)
    assert wrong == []
    assert [each.seen for each in watching] == [set()] * THREADS
    untouched.check()
