"""SmolLM2-135M on real text: the same tokens as transformers, through every kind."""

import os
import pathlib
import pydoc_data.topics
from typing import Any

import pytest
import torch
import transformers

import kvlayers
from kvlayers_lab.measuring.scoring import is_tie
from models import continued

DIRECTORY = pathlib.Path(
    os.environ.get("KVLAYERS_DEMO_MODEL", pathlib.Path(__file__).parents[2] / ".models" / "SmolLM2-135M-Instruct")
)
CONTEXT, NEW_TOKENS = 64, 8

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DIRECTORY.is_dir(), reason=f"no model at {DIRECTORY}: `make test` brings it"),
]


def generated(model: Any, ids: torch.Tensor, **how: Any) -> torch.Tensor:
    return continued(model, ids, NEW_TOKENS, min_new_tokens=NEW_TOKENS, **how)


def agree(model: Any, seen: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the tokens are equal, in bfloat16 up to the first two that are equally likely as far as it can tell.

    Sums in another order round differently, and each CPU has an order of its own.
    """
    different = (seen != expected)[0].nonzero()
    if not len(different) or model.dtype != torch.bfloat16:
        return not len(different)
    first = int(different[0])
    with torch.no_grad():
        logits = model(expected[:, :first]).logits[0, -1].float()
    return is_tie(logits, int(expected[0, first]), int(seen[0, first]), model.dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)], ids=["float32", "bfloat16"]
)
def test_greedy_tokens_are_those_of_transformers(dtype: torch.dtype) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(DIRECTORY)
    words = "\n".join(pydoc_data.topics.topics.values())[:20_000]
    text = tokenizer(words, return_tensors="pt").input_ids[:, :CONTEXT]
    model = transformers.AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=dtype).eval()
    expected = generated(model, text)
    with kvlayers.installed():
        for name in ("dynamic", "static"):
            assert agree(model, generated(model, text, cache_implementation=name), expected), name
        assert torch.equal(generated(model, text, prompt_lookup_num_tokens=3), expected) or (dtype == torch.bfloat16), (
            "drafts are verified several at once, which in bfloat16 may tip a tie"
        )
