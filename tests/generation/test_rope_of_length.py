"""Models whose RoPE depends on the length: each answer is the one that transformers gives to its prompt alone.

The reference is a model that nobody has called before, and one prompt: with transformers' own cache, or with none where
the model reads a sequence again, as some versions of transformers do not get that right.
"""

import functools
from typing import Any

import pytest
import torch
import transformers as tf

import kvlayers
import versions
from chats import tokenizer_with
from kvlayers.errors import OptionError, UnusedCacheError
from kvlayers.upstream import cache_argument
from kvlayers_lab.evaluation.engine import score_tokens
from kvlayers_lab.evaluation.requests import ScoringRequest
from matrix import once
from models import continued, under_install

pytestmark = pytest.mark.skipif(
    not versions.compat.ROPE_HAS_ONE_DICT, reason="before 5.0, configs say RoPE in other fields"
)

BORDER = 24
"""Longer sequences have other frequencies."""

LENGTHS = (8, 12, 20, 24, 25, 40, 60, 10)
"""Of prompts: some answers end before the border or at it, some cross it, and some begin behind it."""

ANSWER: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": versions.NO_END, "pad_token_id": 0,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": BORDER, "factor": 4.0,
    "short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 9.0, 30.0],
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}

CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    # These two read a sequence again where they cross the border.
    "phi3": (tf.Phi3Config, {"original_max_position_embeddings": BORDER, "rope_parameters": LONGROPE}),
    "phimoe": (
        tf.PhimoeConfig,
        {"num_local_experts": 2, "rope_parameters": {**LONGROPE, "short_mscale": 1.0, "long_mscale": 1.2}},
    ),
    # So does this one, although nothing changes there.
    "phi3 default": (tf.Phi3Config, {"original_max_position_embeddings": BORDER, "rope_parameters": DEFAULT}),
    "llama longrope": (tf.LlamaConfig, {"rope_parameters": LONGROPE}),
    "llama dynamic": (tf.LlamaConfig, {"rope_parameters": DYNAMIC, "max_position_embeddings": BORDER}),
    "gemma3 by layer type": (
        tf.Gemma3TextConfig,
        {
            "head_dim": 8,
            "sliding_window": 16,
            "max_position_embeddings": BORDER,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": DEFAULT},
        },
    ),
}
READING_AGAIN = ["phi3", "phimoe", "phi3 default"]


def model_of(name: str) -> Any:
    versions.need_frequencies_of(name)
    config_class, changes = CONFIGS[name]
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(
        config_class(**{**SIZES, "max_position_embeddings": 128, **changes})
    ).eval()
    # So that a token says something about the logits.
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(12)
    return model


def prompt(tokens: int) -> torch.Tensor:
    return torch.randint(3, 97, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def answer(model: Any, ids: torch.Tensor, tokens: int = 12, **options: Any) -> list[int]:
    return continued(model, ids, tokens, **options)[0, ids.shape[1] :].tolist()


def answer_alone(name: str, ids: torch.Tensor, tokens: int = 12) -> list[int]:
    """The answer of transformers to one prompt, by a model that has seen no other."""
    return answer(model_of(name), ids, tokens, use_cache=name not in READING_AGAIN)


@functools.cache
def alone(name: str, tokens: int) -> list[int]:
    return answer_alone(name, prompt(tokens))


def given(model: Any, ids: torch.Tensor, cache: Any) -> list[int]:
    return answer(model, ids, **{cache_argument.name_in_generate(model): cache})


def many(model: Any, prompts: list[torch.Tensor], **options: Any) -> list[Any]:
    answers = list(kvlayers.generate_many(model, prompts, in_order=True, progress=False, **ANSWER, **options))
    assert [each.error for each in answers] == [None] * len(prompts)
    return answers


MANY: dict[str, dict[str, Any]] = {
    "side by side": {},
    "in chunks": {"chunk_tokens": 8},
    "two rows": {"max_rows": 2},
    "drafts that are looked up": {"prompt_lookup_num_tokens": 3},
}
DRAFTED = "drafts of a model"


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *once(CONFIGS, MANY),
        ("phi3", DRAFTED),
        pytest.param("llama dynamic", DRAFTED, marks=pytest.mark.nightly),
    ],
)
def test_rows_answer_as_alone(name: str, way: str) -> None:
    # Of those with drafts, the first ones end at the border or cross it, and the last one is behind it.
    lengths = LENGTHS if way in MANY else LENGTHS[1:7:2]
    options = MANY[way] if way in MANY else {"assistant_model": model_of(name)}
    answers = many(model_of(name), [prompt(tokens)[0] for tokens in lengths], **options)
    assert [each.ids.tolist() for each in answers] == [alone(name, tokens) for tokens in lengths]


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "phi3 default"])
def test_a_store_of_rows_is_passed_by(name: str) -> None:
    model, store = model_of(name), kvlayers.PrefixStore()
    prompts = [prompt(20)[0], torch.cat([prompt(20)[0], prompt(8)[0]])]
    expected = [answer_alone(name, ids[None]) for ids in prompts]
    for _ in range(2):
        with kvlayers.installed(prefix_store=store):
            answers = many(model, prompts)
        assert [each.cached_tokens for each in answers] == [0, 0]
        assert [each.ids.tolist() for each in answers] == expected
    assert len(store) == 0


@pytest.mark.parametrize(("tokens", "name"), once(LENGTHS, READING_AGAIN))
def test_a_cache_that_the_model_gives_up_is_filled_again(name: str, tokens: int) -> None:
    model = model_of(name)
    cache = kvlayers.DynamicCache(config=model.config)
    with kvlayers.installed():
        assert given(model, prompt(tokens), cache) == alone(name, tokens)
        # The last token that was chosen has not been read.
        assert cache.get_seq_length() == tokens + 11
        whole = torch.cat([prompt(tokens), torch.tensor([alone(name, tokens)])], dim=1)
        assert given(model, whole, cache) == answer_alone(name, whole)


@pytest.mark.parametrize("cache", ["int4", "dynamic"])
@pytest.mark.parametrize("name", READING_AGAIN)
def test_the_cache_stays_the_one_that_was_named(name: str, cache: str) -> None:
    model = model_of(name)
    output = kvlayers.generate(model, prompt(20), cache_implementation=cache, return_dict_in_generate=True, **ANSWER)
    held = cache_argument.in_output(output)
    assert isinstance(held, type(kvlayers.make_cache(cache, model)))
    assert held.get_seq_length() == 31


@pytest.mark.skipif(not versions.compat.MARKS_GIVEN_CACHES, reason="before 5.17 nothing says that a cache was given")
@pytest.mark.parametrize("name", ["phi3", "phimoe"])
def test_without_install_the_error_says_what_to_do(name: str) -> None:
    model = model_of(name)
    with pytest.raises(UnusedCacheError, match=r"kvlayers\.install\(\).*read a prompt again"):
        given(model, prompt(60), kvlayers.DynamicCache(config=model.config))
    assert given(model, prompt(8), kvlayers.DynamicCache(config=model.config)) == alone(name, 8)


@pytest.mark.parametrize(
    ("name", "options"),
    once(CONFIGS, [{"prefill_chunk_size": 8}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": True}]),
)
def test_options_change_no_answer(name: str, options: dict[str, Any]) -> None:
    if "assistant_model" in options:
        options = {"assistant_model": model_of(name)}
    if "prefill_chunk_size" in options and name in READING_AGAIN and versions.LEAVES_THE_CACHE_TO_MODELS:
        pytest.skip("transformers 5.0 does not read again behind chunks")
    for tokens in LENGTHS:
        assert under_install(answer, model_of(name), prompt(tokens), **options) == alone(name, tokens), tokens


@pytest.mark.parametrize("name", ["phi3", "llama dynamic"])
def test_drafts_for_several_prompts_over_the_border_are_refused(name: str, installed: None) -> None:
    model, ids = model_of(name), torch.cat([prompt(8), prompt(8) + 1])
    assert answer(model, ids, prompt_lookup_num_tokens=3) == alone(name, 8)
    with pytest.raises(OptionError, match="frequencies of its RoPE"):
        answer(model, ids, 20, prompt_lookup_num_tokens=3)


TEMPLATE = "{% for message in messages %}{{ message['content'] }}.{% endfor %}"


@pytest.mark.parametrize("name", CONFIGS)
def test_turns_of_a_chat_answer_as_whole_prompts(name: str) -> None:
    tokenizer = tokenizer_with(TEMPLATE)
    chat, reused = kvlayers.Chat(model_of(name), tokenizer), []
    # The third turn is behind the border, as are those after it, and then the conversation is short again.
    for text in ("hello", "yes", "and what is that", "no", "so", None, "bird"):
        if text is None:
            del chat.messages[2:]
            continue
        asked = tokenizer.apply_chat_template(
            [*chat.messages, {"role": "user", "content": text}], return_tensors="pt", return_dict=True
        )["input_ids"]
        expected = tokenizer.decode(answer_alone(name, asked, 4), skip_special_tokens=True)
        assert chat.ask(text, max_new_tokens=4, do_sample=False) == expected
        reused.append(chat.cached_tokens > 0)
    # Between keys of the same frequencies, nothing is computed again.
    assert reused[1]
    assert reused[4] == ("dynamic" not in name and "gemma3" not in name)


# A model with dynamic NTK has no positions behind the border, as far as scores are concerned.
@pytest.mark.parametrize(("name", "cache"), once(["phi3", "phimoe", "llama longrope"], ["int4", "snapkv"]))
def test_scores_of_lossy_caches_do_not_depend_on_other_requests(name: str, cache: str) -> None:
    model = model_of(name)
    requests = [
        ScoringRequest(tuple(prompt(tokens)[0].tolist()), tuple(prompt(more)[0].tolist()))
        for tokens, more in ((8, 4), (30, 6), (12, 5), (12, 16), (40, 3))
    ]

    def scores(own: Any, some: Any, **options: Any) -> list[float]:
        found = score_tokens(own, some, lambda: kvlayers.make_cache(cache, own), **options)
        return [value for score in found for value in score.token_logprobs]

    expected = [value for request in requests for value in scores(model_of(name), [request])]
    # float32, and another order of sums: nothing is padded, so the passes are the same.
    assert scores(model, requests, batch_size=4) == pytest.approx(expected, abs=1e-4)
    # Chunks of a context would be rotated by the frequencies of a shorter one.
    assert scores(model, requests, batch_size=4, chunk=8) == pytest.approx(expected, abs=1e-4)
