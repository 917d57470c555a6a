"""How many calls into kvlayers' files a call of `generate()` makes: each is paid by every user, and is easily added."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import kvlayers
from kvlayers.generation.prefix_reuse import active_store
from kvlayers.generation.prefix_reuse.eligibility import StorePart
from models import fresh_model
from versions import TRANSFORMERS

PACKAGE = str(Path(kvlayers.__file__).parent)

# Other versions of transformers ask caches more often, and comprehensions are calls before Python 3.12.
pytestmark = pytest.mark.skipif(
    Version("5.24") > TRANSFORMERS,
    reason=f"the calls that are counted are those of transformers 5.24, not {TRANSFORMERS}",
)


def calls_of(run: Callable[[], Any]) -> int:
    count = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.fixture
def model() -> Any:
    config = transformers.LlamaConfig(
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        vocab_size=99,
        eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def one_token(model: Any) -> Any:
    return model.generate(torch.arange(1, 40)[None], max_new_tokens=1, do_sample=False)


def test_a_call_under_install(model: Any) -> None:
    with kvlayers.installed():
        one_token(model)
        assert calls_of(lambda: one_token(model)) <= 249


def test_a_call_with_a_hit_in_a_store(model: Any) -> None:
    store = kvlayers.PrefixStore(max_bytes=2**24)
    with kvlayers.installed(prefix_store=store):
        one_token(model)
        one_token(model)
        assert calls_of(lambda: one_token(model)) <= 495
        assert store.statistics.hits == 2


def test_modules_of_a_model_cost_a_store_no_calls() -> None:
    """Weights are compared by torch's counts of writes to them, and modules are looked at in loops."""
    found = []
    for layers in (1, 3):
        model, store = fresh_model("llama", num_hidden_layers=layers), kvlayers.PrefixStore(max_bytes=2**24)
        active = active_store.required_store(store, "")
        assert active is not None
        StorePart(model, active, "dynamic", {})
        found.append(calls_of(functools.partial(StorePart, model, active, "dynamic", {})))
    # The config says of each layer what it holds.
    assert found[1] - found[0] <= 2 * 3
