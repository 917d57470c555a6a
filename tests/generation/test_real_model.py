"""SmolLM2-135M on real text: the same tokens as transformers."""

import os
import pathlib
import pydoc_data.topics

import pytest
import torch
import transformers

import kvlayers
from models import continued

DIRECTORY = pathlib.Path(
    os.environ.get("KVLAYERS_DEMO_MODEL", pathlib.Path(__file__).parents[2] / ".models" / "SmolLM2-135M-Instruct")
)


@pytest.mark.slow
@pytest.mark.skipif(not DIRECTORY.is_dir(), reason=f"no model at {DIRECTORY}: `make test` brings it")
def test_greedy_tokens_are_those_of_transformers() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(DIRECTORY)
    words = "\n".join(pydoc_data.topics.topics.values())[:20_000]
    text = tokenizer(words, return_tensors="pt").input_ids[:, :64]
    model = transformers.AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32).eval()
    expected = continued(model, text, 8, min_new_tokens=8)
    with kvlayers.installed():
        for name, drafts in (("dynamic", None), ("static", None), (None, 3)):
            how = {"cache_implementation": name, "prompt_lookup_num_tokens": drafts}
            assert torch.equal(continued(model, text, 8, min_new_tokens=8, **how), expected), how
