"""A call that is cancelled, or fails, after its prefill has its prompt in the store, and nothing that is not true."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import kvlayers
from kvlayers import PrefixStore
from kvlayers.generation.prefix_reuse.active_store import CURRENT
from kvlayers.generation.prefix_reuse.borders import MOST_DROPPED
from matrix import once
from models import WINDOW, prompt, tiny_model

TOKENS = 5 * WINDOW
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


class Ended(BaseException):
    """Raised by the caller's code, as by a signal."""


class After:
    """Counts down each time that `generate()` calls it, as a streamer, a criterion or a processor; then raises."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls -= 1
        if self.calls < 0:
            raise Ended
        return args[-1]

    put = __call__

    def end(self) -> None:
        """What a streamer has."""


class Criterion(After):
    def __call__(self, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        super().__call__(ids)
        return torch.zeros(len(ids), dtype=torch.bool)


ENDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "streamer": lambda step: {"streamer": After(1 + step)},
    "criterion": lambda step: {"stopping_criteria": tf.StoppingCriteriaList([Criterion(step)])},
    "processor": lambda step: {"logits_processor": tf.LogitsProcessorList([After(step)])},
}


CACHES = [
    *(("llama", name) for name in ("dynamic", "static", "offloaded", "int4")),
    *((family, "dynamic") for family in ("mistral", "gemma3", "jamba")),
]
"""What is held of the last ones cannot be rolled back, and has its snapshots."""


@pytest.mark.parametrize(("family", "name", "end", "step"), once(CACHES, ENDS, [0, 3], times=2))
def test_the_prompt_of_a_call_that_ends_early_is_stored(family: str, name: str, end: str, step: int) -> None:
    model, store, ids = tiny_model(family), PrefixStore("1GiB", snapshot_tokens=16), prompt(tokens=TOKENS)
    options = {**OPTIONS, "cache_implementation": name}
    with CURRENT.override(None), kvlayers.installed():
        expected = model.generate(ids, **options)
    with kvlayers.installed(prefix_store=store):
        with pytest.raises(Ended):
            model.generate(ids, **options, **ENDS[end](step))
        # What cannot be rolled back is without its last tokens, unless tokens were decoded behind it.
        left = {"llama": 1, "jamba": 1}.get(family, MOST_DROPPED)
        assert store.statistics.tokens in (TOKENS if family == "llama" else TOKENS - left, TOKENS)
        output = model.generate(ids, **options, return_dict_in_generate=True)
    assert output.cached_tokens == (TOKENS - left,)
    assert torch.equal(output.sequences, expected)


@pytest.mark.parametrize(("passes", "covered"), [(0, 0), (1, TOKENS - 1), (3, TOKENS - 1)])
def test_a_pass_that_is_interrupted_between_two_layers(
    passes: int, covered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the prefill, nothing is stored; later, what all layers have read."""
    model, store, ids = tiny_model("llama"), PrefixStore("1GiB"), prompt(tokens=TOKENS)
    with CURRENT.override(None), kvlayers.installed():
        expected = model.generate(ids, **OPTIONS)
    seen: list[Any] = []
    forward = LlamaDecoderLayer.forward

    # A store takes no states of a model whose class has another function than its own.
    @functools.wraps(forward)
    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        if len(seen) == len(model.model.layers) * (passes + 1):
            raise KeyboardInterrupt
        return forward(self, *args, **kwargs)

    with kvlayers.installed(prefix_store=store):
        monkeypatch.setattr(LlamaDecoderLayer, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids, **OPTIONS)
        monkeypatch.undo()
        output = model.generate(ids, **OPTIONS, return_dict_in_generate=True)
    assert output.cached_tokens == (covered,)
    assert torch.equal(output.sequences, expected)


def test_memory_that_ran_out_is_not_held() -> None:
    model, store, ids = tiny_model("llama"), PrefixStore("1GiB"), prompt(tokens=TOKENS)

    class Full(After):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise MemoryError

    with kvlayers.installed(prefix_store=store), pytest.raises(MemoryError):
        model.generate(ids, **OPTIONS, logits_processor=tf.LogitsProcessorList([Full(0)]))
    assert len(store) == 0
