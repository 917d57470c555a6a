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

DIRECTORY = pathlib.Path(
    os.environ.get("KVLAYERS_DEMO_MODEL", pathlib.Path(__file__).parents[2] / ".models" / "SmolLM2-135M-Instruct")
)
CONTEXT, NEW_TOKENS = 64, 8
SINK_WINDOW = 64

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DIRECTORY.is_dir(), reason=f"no model at {DIRECTORY}: `make test` brings it"),
]


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    """Real text, int64 `[1, CONTEXT]`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DIRECTORY)
    words = "\n".join(pydoc_data.topics.topics.values())[:20_000]
    return tokenizer(words, return_tensors="pt").input_ids[:, :CONTEXT]


@pytest.fixture(
    scope="module",
    params=[torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)],
    ids=["float32", "bfloat16"],
)
def model(request: pytest.FixtureRequest) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=request.param).eval()


@pytest.fixture(scope="module")
def expected(model: Any, text: torch.Tensor) -> torch.Tensor:
    """The tokens of transformers."""
    return generated(model, text)


def generated(model: Any, ids: torch.Tensor, **how: Any) -> torch.Tensor:
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS, **how
    )  # fmt: skip


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


def test_greedy_tokens_are_those_of_transformers(model: Any, text: torch.Tensor, expected: torch.Tensor) -> None:
    with kvlayers.installed():
        for name in ("dynamic", "static"):
            assert agree(model, generated(model, text, cache_implementation=name), expected), name
        assert torch.equal(generated(model, text, prompt_lookup_num_tokens=3), expected) or (
            model.dtype == torch.bfloat16
        ), "drafts are verified several at once, which in bfloat16 may tip a tie"


@pytest.mark.nightly
def test_text_of_ten_windows_is_predicted_as_by_recomputing_sinks_and_window(text_of_windows: torch.Tensor) -> None:
    """The last ones token by token; the paper's reference recomputes, for each token, all that is held as one text."""
    window, sinks, ids = SINK_WINDOW, 4, text_of_windows
    # Many CPUs compute slowly in bfloat16, and a perplexity shows nothing of how it rounds.
    model = transformers.AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32).eval()
    cache = kvlayers.SinkCache(window, sinks, config=model.config)
    scored = torch.arange(7 * window, 10 * window, 3)
    streamed = []
    with torch.inference_mode():
        # What was read so long ago is in no state that is held: it may be read faster.
        for chunk in ids[:, : 7 * window].split(window // 2, dim=1):
            model.model(chunk, past_key_values=cache)
        for position in range(7 * window, 10 * window):
            hidden = model.model(ids[:, position : position + 1], past_key_values=cache).last_hidden_state
            if position in scored:
                streamed.append(model.lm_head(hidden)[:, -1])
        held = [torch.cat([ids[0, :sinks], ids[0, end - (window - sinks) : end]]) for end in scored + 1]
        recomputed = [model(texts, logits_to_keep=1).logits[:, -1] for texts in torch.stack(held).split(8)]
    perplexity, expected = (
        float(torch.nn.functional.cross_entropy(torch.cat(logits).float(), ids[0, scored + 1]).exp())
        for logits in (streamed, recomputed)
    )
    assert perplexity == pytest.approx(expected, rel=0.1)


@pytest.fixture
def text_of_windows() -> torch.Tensor:
    """Real text of ten windows and a token, int64 `[1, 641]`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DIRECTORY)
    words = "\n".join(pydoc_data.topics.topics.values())[:20_000]
    return tokenizer(words, return_tensors="pt").input_ids[:, : 10 * SINK_WINDOW + 1]
