"""A conversation without images goes on with its own positions, whatever images a model has seen since."""

from typing import Any

import pytest
import torch

import kvlayers
import kvlayers_lab
import versions
from models import continued
from vision_models import inputs, seeing_model

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
"""Those that keep `rope_deltas` of the newest images."""

FIRST, SECOND = [5, 6, 7, 8, 9, 10], [11, 12, 13, 14]
HOW = {"return_dict_in_generate": True, "output_logits": True}


def look_at_an_image(model: Any) -> None:
    """A call of somebody else, after which a model remembers how far images have moved positions."""
    kvlayers.generate(model, **inputs("qwen2_5_vl", [[20, 21], (3, (8, 8)), [22, 23]]), max_new_tokens=2)


def behind(output: Any) -> torch.Tensor:
    return torch.cat([output.sequences, torch.tensor([SECOND])], dim=1)


@pytest.mark.parametrize("only_new", [False, True], ids=["the whole sequence", "new tokens alone"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_with_a_cache_goes_on_as_without_the_other_image(family: str, only_new: bool) -> None:
    if only_new:
        versions.need_since("5.4", "new tokens alone behind a cache")
    model, seen = seeing_model(family), []
    for meanwhile in (lambda model: None, look_at_an_image):
        cache = kvlayers.DynamicCache(config=model.config)
        with kvlayers.installed():
            whole = behind(continued(model, torch.tensor([FIRST]), 5, past_key_values=cache, **HOW))
            meanwhile(model)
            ids = whole[:, cache.get_seq_length() :] if only_new else whole
            output = continued(model, ids, 5, attention_mask=torch.ones_like(whole), past_key_values=cache, **HOW)
        seen.append(output.logits)
    torch.testing.assert_close(seen[1], seen[0])
    torch.testing.assert_close(seen[1], continued(model, whole, 5, **HOW).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_with_an_image_keeps_its_positions(family: str) -> None:
    model, prompt = seeing_model(family), inputs(family, [[20, 21], (3, (8, 8)), [22, 23]])
    cache = kvlayers.DynamicCache(config=model.config)
    with kvlayers.installed():
        first = model.generate(**prompt, past_key_values=cache, max_new_tokens=5, do_sample=False, **HOW)
        whole = behind(first)
        second = continued(model, whole, 5, past_key_values=cache, **HOW)
    again = {name: entries for name, entries in prompt.items() if name not in ("input_ids", "attention_mask")}
    if "mm_token_type_ids" in prompt:
        padding = 0, whole.shape[1] - prompt["input_ids"].shape[1]
        again["mm_token_type_ids"] = torch.nn.functional.pad(prompt["mm_token_type_ids"], padding)
    torch.testing.assert_close(second.logits, continued(model, whole, 5, **again, **HOW).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_and_scores_have_their_own_positions(family: str) -> None:
    model, prompt = seeing_model(family), [*FIRST, *SECOND]

    def found() -> tuple[list[int], Any]:
        answers = kvlayers.generate_many(
            model, [prompt, FIRST], max_new_tokens=5, do_sample=False, chunk_tokens=4, in_order=True, progress=False
        )
        scores = kvlayers_lab.score(model, [FIRST], [[SECOND]], progress=False)
        return [answer.ids.tolist() for answer in answers], scores[0][0].token_logprobs

    right = continued(model, torch.tensor([prompt]), 5)[0, len(prompt) :].tolist()
    before = found()
    look_at_an_image(model)
    after = found()
    assert after[0] == before[0]
    assert after[0][0] == right
    assert after[1] == pytest.approx(before[1], abs=1e-5)
