"""How `kvlayers_lab.score` encodes texts: as lm-evaluation-harness does."""

import functools
from typing import Any

import pytest
import transformers
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, processors

import kvlayers_lab
from kvlayers.errors import OptionError
from kvlayers_lab.evaluation.requests import TextPairs, encoded
from models import tiny_model
from score_reference import passes_of

MERGES = [(" ", "a"), ("a", "b"), ("ab", "a"), (" a", "b"), ("b", "\n"), ("b", " ")]
"""Merges over letters, spaces and line breaks, so that tokens reach over the boundary in many ways."""

SPECIAL = ["<s>", "</s>"]


@functools.cache
def merging_tokenizer(begins_with: tuple[str, ...] = (), **special: str) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of pairs of bytes, which puts some special tokens before every text."""
    tokens = [*SPECIAL, "a", "b", "c", " ", "\n", *("".join(merge) for merge in MERGES)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, MERGES))
    if begins_with:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*begins_with, "$A"], special_tokens=[(token, vocabulary[token]) for token in begins_with]
        )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


KINDS: dict[str, dict[str, Any]] = {
    "bos": {"bos_token": "<s>", "eos_token": "</s>", "begins_with": ("<s>",)},
    "bos that is not added": {"bos_token": "<s>", "eos_token": "</s>"},
    "eos alone": {"eos_token": "</s>"},
}


@functools.cache
def harness(kind: str) -> Any:
    """The class of lm-evaluation-harness, which returns the requests that it would score."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="scores are compared with lm-eval")
    found = huggingface.HFLM(pretrained=tiny_model("llama"), tokenizer=merging_tokenizer(**KINDS[kind]))
    found._loglikelihood_tokens = lambda requests, **_: [(tuple(ids), tuple(own)) for _, ids, own in requests]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_encoded_as_lm_evaluation_harness_does(kind: str) -> None:
    instance = pytest.importorskip("lm_eval.api.instance", reason="scores are compared with lm-eval").Instance
    pairs, text = TextPairs(merging_tokenizer(**KINDS[kind])), st.text("abc \n", max_size=8) | st.just("<s>ab")

    @given(text, text.filter(bool))
    @example("", "<s>ab")
    @example("ab ", "ab")
    @example("<s>", "a")
    @example(" \n", "a")
    def check(context: str, continuation: str) -> None:
        request = instance("loglikelihood", {}, (context, continuation), 0)
        ((context_ids, ids),) = harness(kind).loglikelihood([request], disable_tqdm=True)
        if not ids:
            with pytest.raises(OptionError, match="a token of its own"):
                pairs.request(context, continuation, "this")
            return
        # The harness fails for blanks alone, if the tokenizer begins with nothing.
        assume(context_ids)
        assert tuple(pairs.request(context, continuation, "this")) == (context_ids, ids)

    check()


def test_a_continuation_that_merges_away_is_an_error() -> None:
    model, tokenizer = tiny_model("llama"), merging_tokenizer(**KINDS["eos alone"])
    with (
        passes_of(model) as passes,
        pytest.raises(OptionError, match=r"`continuations\[0\]\[1\]` must"),
    ):
        kvlayers_lab.score(model, ["ab"], [["c", "a"]], tokenizer=tokenizer)
    assert passes == []


def test_an_empty_context_needs_a_special_token() -> None:
    with pytest.raises(OptionError, match="has neither a BOS nor an EOS token"):
        TextPairs(merging_tokenizer()).request("", "ab", "this")


def test_a_context_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, texts = merging_tokenizer(), []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **options: texts.append(text) or encode(text, **options))
    encoded(["ab", "ba"], [["c", "cc", "ccc"], ["c", "cc"]], tokenizer)
    assert sorted(texts) == sorted(["ab", "abc", "abcc", "abccc", "ba", "bac", "bacc"])
