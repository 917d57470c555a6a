"""Documents in a prefix store, and prompts of them: what is exact, what is computed, and what the store keeps."""

import functools
import pathlib
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

import kvlayers
import versions
from kvlayers.errors import CapacityError, ConfigError, KVLayersError, OptionError, UnsupportedLayerError
from kvlayers.generation.prefix_reuse import active_store
from matrix import once
from models import fresh_model, prompt, read, tiny_model, tokens_passed
from vision_models import any_seeing_model

A, B, C = (prompt(1, tokens, tokens) for tokens in (19, 24, 21))
SYSTEM = prompt(1, 6, 5)
QUESTION = prompt(1, 4, 99)
NEW = 5
FOUND = [4, *[1] * (NEW - 1)]
"""Tokens of the passes of a call whose documents are in the store: the question, and what is decoded."""
OPTIONS: dict[str, Any] = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}
FAMILIES = ("llama", "qwen2", "mistral", "gemma3")


def answer(model: Any, documents: Any, store: Any = None, **options: Any) -> Any:
    """What `generate` returns for documents and the question."""
    return kvlayers.generate(model, documents=documents, question=QUESTION, prefix_store=store, **OPTIONS, **options)


def plain(model: Any, *parts: torch.Tensor, **options: Any) -> Any:
    """What `generate` returns for one text, computed at once."""
    ids = torch.cat(parts, dim=1)
    return kvlayers.generate(model, ids, attention_mask=torch.ones_like(ids), **{**OPTIONS, **options})


def by_hand(model: Any, documents: Any, cache: Any = None, beginning: Any = None, recompute: Any = 0) -> Any:
    """What `generate` returns behind documents that are read apart and put together by hand."""
    texts = documents if beginning is None else [torch.cat([beginning, own], dim=1) for own in documents]
    caches = [read(model, ids)[0] for ids in texts]
    common = 0 if beginning is None else beginning.shape[1]
    joined = kvlayers.concatenate(caches, model, recompute=recompute, ids=texts, beginning_tokens=common, into=cache)
    parts = [] if beginning is None else [beginning]
    return plain(model, *parts, *documents, QUESTION, past_key_values=joined)


def assert_same(found: Any, expected: Any, atol: float = 1e-4) -> None:
    """Whether two answers have the same tokens, and logits that are as near as rounding in float32 lets them be."""
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(torch.cat(found.logits), torch.cat(expected.logits), rtol=0, atol=atol)


# The answer


@pytest.mark.parametrize(
    ("family", "recompute", "documents", "beginning"),
    once(
        FAMILIES,
        [0, 3, "30%"],
        [([A, B, C], None), ([C, A], SYSTEM), ([B, A, B], SYSTEM), ([B, A, B], None)],
        times=2,
    ),
)
def test_documents_are_those_that_are_put_together_by_hand(
    family: str, recompute: Any, documents: Any, beginning: Any
) -> None:
    model, store = tiny_model(family), kvlayers.PrefixStore()
    # The windows of the model's layers, as an ordinary call has them.
    windows = kvlayers.DynamicCache(config=model.config)
    expected = by_hand(model, documents, windows, beginning, recompute)
    for each in (None, store, store):
        found = answer(model, documents, each, beginning=beginning, recompute=recompute)
        assert_same(found, expected)
        assert list(map(type, found.to_tuple()[-1].layers)) == list(map(type, windows.layers))


@pytest.mark.parametrize(
    ("family", "options"), once(FAMILIES, [{}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}])
)
def test_documents_are_one_text_unless_less_is_asked_for(family: str, options: dict[str, Any]) -> None:
    # The second document is short, so that windows reach beyond it.
    model, documents = tiny_model(family), [C, A[:, :3]]
    expected = plain(model, SYSTEM, *documents, QUESTION, **options)
    for name, store, how in (
        ("dynamic", None, {}),
        ("static", kvlayers.PrefixStore(), {}),
        ("offloaded", None, {"recompute": 24}),
    ):
        asked: dict[str, Any] = {"beginning": SYSTEM, "cache_implementation": name, **options}
        assert_same(answer(model, documents, store, **asked, **how), expected)
        first = answer(model, documents, recompute=0, **asked).logits[0]
        assert (first - expected.logits[0]).abs().max() > 0.01


@pytest.mark.parametrize("name", ["int4", "int8", "fp8", "static", "offloaded", "recall", "offloaded_static"])
def test_the_cache_of_the_call_takes_in_states_that_were_not_rounded(name: str) -> None:
    model, store, documents = tiny_model("llama"), kvlayers.PrefixStore(), [prompt(1, 60, 1), prompt(1, 100, 2)]
    expected = by_hand(model, documents, kvlayers.make_cache(name, model, length_hint=180))
    for _ in range(2):
        assert_same(answer(model, documents, store, recompute=0, cache_implementation=name), expected)
    # As a name in the place of a cache, too.
    assert_same(answer(model, documents, store, recompute=0, past_key_values=name), expected)
    assert store.statistics.entries == 2


def test_an_int4_cache_is_bit_by_bit_the_one_that_was_given_the_states() -> None:
    model, texts = tiny_model("llama"), [prompt(1, tokens, tokens) for tokens in (90, 101)]
    caches = [read(model, ids)[0] for ids in texts]
    dense = kvlayers.concatenate(caches, model, recompute="20%", ids=texts)
    into, expected = (kvlayers.QuantizedCache(config=model.config, nbits=4, residual_length=16) for _ in range(2))
    for index, layer in enumerate(dense.layers):
        expected.update(layer.keys, layer.values, index)
    assert kvlayers.concatenate(caches, model, recompute="20%", ids=texts, into=into) is into
    assert torch.equal(into.known_ids, torch.cat(texts, dim=1))
    own, other = ([layer.tensors for layer in cache.state().layers] for cache in (into, expected))
    assert len(own[0]) > 2
    torch.testing.assert_close(own, other, rtol=0, atol=0)
    found, wanted = (plain(model, *texts, QUESTION, past_key_values=cache) for cache in (into, expected))
    assert_same(found, wanted, atol=0)


# What is computed


def test_nothing_of_a_stored_document_is_computed_again(tmp_path: pathlib.Path) -> None:
    model, orders = fresh_model("llama"), ([C, A], [B, C, A])
    expected = [answer(model, documents, beginning=SYSTEM, recompute=0) for documents in orders]

    def check(store: Any) -> None:
        for documents, wanted in zip(orders, expected, strict=True):
            with tokens_passed(model) as passed:
                found = answer(model, documents, store, beginning=SYSTEM, recompute=0)
            assert (passed, found.cached_tokens) == (FOUND, (6 + sum(own.shape[1] for own in documents),))
            assert_same(found, wanted)

    with kvlayers.PrefixStore(directory=tmp_path) as store:
        with tokens_passed(model) as passed:
            first = answer(model, [A, B, C], store, beginning=SYSTEM, recompute=0)
        # The beginning once.
        assert (passed, first.cached_tokens) == ([25, 24, 21, *FOUND], (0,))
        check(store)
        store.evict()
        assert store.statistics.bytes == 0
        check(store)
    check(kvlayers.PrefixStore(directory=tmp_path))


@pytest.mark.parametrize(("recompute", "kept"), [(0, 43), (2, 41), (100, 24), ("50%", 33)])
def test_tokens_that_are_recomputed_are_not_counted_as_cached(recompute: Any, kept: int) -> None:
    model, store = tiny_model("llama"), kvlayers.PrefixStore()
    answer(model, [A, B], store, recompute=recompute)
    assert answer(model, [B, A], store, recompute=recompute).cached_tokens == (kept,)
    # Half of a document is stored, and none of another one.
    longer = torch.cat([A, C], dim=1)
    assert answer(model, [prompt(1, 5, 6), longer], store, recompute=0).cached_tokens == (19,)


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("mistral", {}), ("gemma3", {}), ("llama", {"cache_implementation": "int4"}), ("gpt2", {})],
)
def test_a_single_document_is_found(family: str, options: dict[str, Any]) -> None:
    model, store = tiny_model(family), kvlayers.PrefixStore()
    if family != "gpt2":
        kvlayers.store_document(store, A, model, beginning=SYSTEM)
    else:
        # Its keys cannot be moved, and need not be.
        answer(model, [A], store, beginning=SYSTEM, recompute=0)
    with tokens_passed(model) as passed:
        found = answer(model, [A], store, beginning=SYSTEM, recompute=0, **options)
    assert (passed, found.cached_tokens) == (FOUND, (25,))
    assert_same(found, answer(model, [A], beginning=SYSTEM, recompute=0, **options))
    assert options or assert_same(found, plain(model, SYSTEM, A, QUESTION)) is None


def test_whoever_counts_reused_tokens_gets_those_of_documents() -> None:
    model, store = tiny_model("llama"), kvlayers.PrefixStore()
    answer(model, [A, B], store, recompute=0)
    token = active_store.COVERED.set([])
    try:
        found = answer(model, [B, A], store, recompute=2)
        assert active_store.COVERED.get() == [sum(found.cached_tokens)] == [41]
    finally:
        active_store.COVERED.reset(token)
    # Each token of each document was asked for once in each call.
    assert store.statistics.tokens_asked == 2 * 43


def test_ordinary_calls_and_documents_find_each_other_in_the_store_of_install() -> None:
    model, store = tiny_model("llama"), kvlayers.PrefixStore()
    with kvlayers.installed(prefix_store=store):
        answer(model, [A, B], recompute=0)
        assert plain(model, B, QUESTION).cached_tokens == (24,)
        plain(model, C, QUESTION)
        assert answer(model, [B, C], recompute=0).cached_tokens == (45,)
    assert store.statistics.bypassed == 0


def test_prompts_are_read_in_chunks_if_the_call_says_so() -> None:
    model = fresh_model("llama")
    with tokens_passed(model) as passed:
        found = answer(model, [A, B], recompute=0, prefill_chunk_size=8)
    assert passed[:6] == [8, 8, 3, 8, 8, 8]
    assert_same(found, answer(model, [A, B], recompute=0))


# What the store keeps


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_store_gets_nothing_that_was_put_together(family: str) -> None:
    model, store = tiny_model(family), kvlayers.PrefixStore()
    for recompute in (0, "30%"):
        answer(model, [A, B, C], store, beginning=SYSTEM, recompute=recompute)
    assert (store.statistics.entries, store.statistics.tokens) == (3, 6 + 19 + 24 + 21)

    def end(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    processors = transformers.LogitsProcessorList([end])
    with pytest.raises(KeyboardInterrupt):
        answer(model, [B, A], store, beginning=SYSTEM, recompute=0, logits_processor=processors)
    assert store.statistics.tokens == 6 + 19 + 24 + 21
    # Ordinary calls, the same and longer ones, get what a plain call computes.
    for parts in ([SYSTEM, A, B, C, QUESTION], [SYSTEM, B, A, QUESTION, C], [SYSTEM, C]):
        assert_same(plain(model, *parts, prefix_store=store), plain(model, *parts))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_document_is_the_states_of_its_tokens(family: str) -> None:
    model, store = tiny_model(family), kvlayers.PrefixStore()
    for beginning in (None, SYSTEM[0]):
        whole = A if beginning is None else torch.cat([SYSTEM, A], dim=1)
        expected, _ = read(model, whole)
        for _ in range(2):
            cache = kvlayers.store_document(store, A[0], model, beginning=beginning)
            assert torch.equal(cache.known_ids, whole)
            # As passes over the document alone and after its beginning sum in another order.
            own, other = ([(layer.keys, layer.values) for layer in each.layers] for each in (cache, expected))
            torch.testing.assert_close(own, other, rtol=0, atol=1e-4)
            assert_same(plain(model, whole, QUESTION, past_key_values=cache), plain(model, whole, QUESTION))
    assert store.statistics.tokens_covered == 19 + 25
    # What was decoded behind it is not in the store.
    assert (kvlayers.store_document(store, A[0], model).get_seq_length(), store.statistics.entries) == (19, 2)
    # A prefix of another document needs no entry.
    assert (kvlayers.store_document(store, A[0, :7], model).get_seq_length(), store.statistics.entries) == (7, 2)
    parts = [kvlayers.store_document(store, own, model) for own in (B, A)]
    joined = kvlayers.concatenate(parts, model, recompute="30%")
    found = plain(model, B, A, QUESTION, past_key_values=joined)
    assert_same(found, by_hand(model, [B, A], recompute="30%"))


@pytest.mark.parametrize("beginning", [None, prompt(1, 320, 0)], ids=["apart", "behind a beginning"])
def test_documents_take_the_bytes_of_their_states(beginning: Any, tmp_path: pathlib.Path) -> None:
    model, texts = fresh_model("llama", max_position_embeddings=4096), [prompt(1, 320, seed) for seed in range(1, 7)]
    store, a_text = kvlayers.PrefixStore(directory=tmp_path), 2 * 2 * 2 * 8 * 4 * 320
    for documents in (texts, texts[::-1]):
        answer(model, documents, store, beginning=beginning, recompute=0)
    states, now = a_text * (6 + (beginning is not None)), store.statistics
    assert states <= now.bytes <= 1.05 * states
    assert (now.shared_bytes >= a_text) == (beginning is not None)
    assert store.flush()
    on_disk = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert store.statistics.file_bytes == on_disk <= 1.1 * states


def test_without_room_the_call_goes_on() -> None:
    model, store = tiny_model("llama"), kvlayers.PrefixStore(max_bytes=256 * 20)
    for _ in range(2):
        assert_same(answer(model, [A, B], store, recompute=0), answer(model, [A, B], recompute=0))
    assert (store.statistics.entries, store.statistics.refused) == (1, 2)


# Texts


def words(begins_texts: bool) -> Any:
    """A tokenizer of words, which may put a token before every text."""
    names = ["<pad>", "<s>", "<unk>", *(f"w{number}" for number in range(3, 97))]
    tokenizer = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    if begins_texts:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


@pytest.mark.parametrize("begins_texts", [False, True])
def test_texts_are_encoded_one_by_one(begins_texts: bool) -> None:
    model, store, tokenizer = fresh_model("llama"), kvlayers.PrefixStore(), words(begins_texts)
    texts = [" ".join(f"w{number}" for number in own[0].tolist()) for own in (A, B, SYSTEM, QUESTION)]
    start = torch.tensor([[1] if begins_texts else []], dtype=torch.int64)
    options: dict[str, Any] = {"question": texts[3], "tokenizer": tokenizer, "prefix_store": store, **OPTIONS}

    def ask(documents: Any, **others: Any) -> Any:
        return kvlayers.generate(model, documents=documents, **options, **others)

    assert_same(ask(texts[:2]), plain(model, start, A, B, QUESTION))
    assert_same(ask(texts[:2], beginning=texts[2]), plain(model, start, SYSTEM, A, B, QUESTION))
    store.clear()
    # Documents are behind the first token, wherever they stand.
    begun = by_hand(model, [A, B], beginning=start if begins_texts else None)
    assert_same(ask(texts[:2], recompute=0), begun)
    with tokens_passed(model) as passed:
        ask([texts[1], texts[0]], recompute=0)
    assert passed == FOUND
    # Who passes ids says what stands in front.
    assert_same(ask([A, texts[1]]), plain(model, A, B, QUESTION))
    assert_same(ask(texts[:2], beginning=SYSTEM), plain(model, SYSTEM, A, B, QUESTION))


def test_a_text_that_begins_with_the_first_token_gets_it_once() -> None:
    model, tokenizer, start = fresh_model("llama"), words(begins_texts=True), torch.tensor([[1]])
    texts = [" ".join(f"w{number}" for number in own[0].tolist()) for own in (A, B, QUESTION)]
    for begun in (texts[0], f"<s> {texts[0]}"):
        for parts in ({"documents": [begun, texts[1]]}, {"beginning": begun, "documents": [texts[1]]}):
            asked = kvlayers.generate(model, question=texts[2], tokenizer=tokenizer, **parts, **OPTIONS)
            assert_same(asked, plain(model, start, A, B, QUESTION))
    # A text that is nothing else is the beginning.
    asked = kvlayers.generate(
        model, beginning="<s>", documents=texts[:2], question=texts[2], tokenizer=tokenizer, **OPTIONS
    )
    assert_same(asked, plain(model, start, A, B, QUESTION))


# Bad input


@functools.cache
def usual() -> Any:
    return plain(tiny_model("llama"), A, B, QUESTION)


def calling(**options: Any) -> Any:
    """A call with documents and a question, or with something else in their place."""
    return lambda model, store: kvlayers.generate(
        model, **{"documents": [A, B], "question": QUESTION, "recompute": 0, "prefix_store": store, **options}
    )


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (calling(question=None), OptionError, "`question` must be"),
        (calling(question=torch.empty(1, 0, dtype=torch.int64)), OptionError, "`question` must be"),
        (calling(documents=[]), OptionError, "`documents` must be a list"),
        (calling(documents=A), OptionError, "`documents` must be a list"),
        (calling(documents="text"), OptionError, "`documents` must be a list"),
        (calling(documents=[A, torch.empty(0, dtype=torch.int64)]), OptionError, "`documents` must be text, or ids"),
        (calling(documents=[A, A.expand(2, -1)]), OptionError, "`documents` must be text, or ids"),
        (calling(documents=[A, A.float()]), OptionError, "`documents` must be text, or ids"),
        (calling(documents=[A, A.int()]), OptionError, "`documents` must be text, or ids"),
        (calling(documents=[A, 5]), OptionError, "`documents` must be text, or ids"),
        (calling(documents=[A, "text"]), OptionError, "`tokenizer` must be given for texts in `documents`"),
        (calling(documents=[A, ""], tokenizer=words(begins_texts=False)), OptionError, "`documents` must be text"),
        (calling(documents=None), OptionError, "need `documents`"),
        (calling(documents=None, question=None), OptionError, "need `documents`"),
        (calling(documents=None, question=None, recompute="100%", beginning=A), OptionError, "need `documents`"),
        (calling(beginning=torch.empty(1, 0, dtype=torch.int64)), OptionError, "`beginning` must be text, or ids"),
        (calling(beginning="hi"), OptionError, "`tokenizer` must be given for texts in `beginning`"),
        (calling(beginning="hi", tokenizer=None), OptionError, "`tokenizer` must be given for texts in `beginning`"),
        (calling(recompute="some"), OptionError, "`recompute` must be"),
        (calling(recompute=-1), OptionError, "`recompute` must be"),
        (calling(recompute="100%", documents=[A, "text"]), OptionError, "`tokenizer` must be given"),
        (calling(input_ids=A), OptionError, "`documents` cannot be combined with input_ids:"),
        (calling(inputs=A), OptionError, "`documents` cannot be combined with inputs:"),
        (calling(attention_mask=torch.ones_like(A)), OptionError, "cannot be combined with attention_mask:"),
        (calling(inputs_embeds=torch.zeros(1, 3, 32)), OptionError, "cannot be combined with inputs_embeds:"),
        (calling(past_key_values=kvlayers.DynamicCache()), OptionError, "cannot be combined with a cache:"),
        (calling(cache=kvlayers.DynamicCache(), recompute="100%"), OptionError, "cannot be combined with a cache:"),
        (
            lambda model, store: kvlayers.generate(model, A, documents=[A], question=QUESTION),
            OptionError,
            "cannot be combined with positional arguments:",
        ),
        (calling(prefix_store={}), OptionError, "`prefix_store` must be"),
        (calling(namespace=5), OptionError, "`namespace` must be"),
        (calling(position_ids=torch.arange(47)[None]), OptionError, "as .*position_ids.*: pass recompute='100%'"),
        (calling(prompt_lookup_num_tokens=3), OptionError, "as .*assisted_generation: pass recompute='100%'"),
        (calling(assistant_model=tiny_model("llama", 1)), OptionError, "as .*an assistant model.*: pass recompute="),
        (calling(use_cache=False), OptionError, "as .*use_cache.*: pass recompute='100%'"),
        (
            calling(output_attentions=True, return_dict_in_generate=True),
            OptionError,
            "as .*output_attentions.*: pass recompute='100%'",
        ),
        (calling(cache_implementation="sink"), UnsupportedLayerError, "`cache_implementation` must hold"),
        (calling(cache_implementation="snapkv"), UnsupportedLayerError, "`cache_implementation` must hold"),
        (calling(cache_implementation="knorm"), UnsupportedLayerError, "`cache_implementation` must hold"),
        (
            calling(cache_implementation="static", cache_config={"max_cache_len": 40}),
            CapacityError,
            "reservation has room for at most 40 tokens",
        ),
        (calling(documents=[A, B] * 6), CapacityError, "`max_position_embeddings`"),
        (lambda model, store: kvlayers.store_document(store, A.float(), model), OptionError, "`ids` must be"),
        (lambda model, store: kvlayers.store_document(store, A[:, :0], model), OptionError, "`ids` must be"),
        (lambda model, store: kvlayers.store_document(store, "text", model), OptionError, "`ids`"),
        (
            lambda model, store: kvlayers.store_document(store, A, model, beginning=A.expand(2, -1)),
            OptionError,
            "`beginning` must be",
        ),
        (
            lambda model, store: kvlayers.store_document(store, A, model, namespace=5),
            OptionError,
            "`namespace` must be",
        ),
        (
            lambda model, store: kvlayers.store_document(store, A.repeat(1, 20), model),
            CapacityError,
            "`max_position_embeddings`",
        ),
        (lambda model, store: store.lookup(A, model="m", leave=-1), OptionError, "`leave` must be"),
    ],
)
def test_wrong_calls_are_named_and_nothing_is_computed(call: Any, error: type[KVLayersError], named: str) -> None:
    model, store, before = tiny_model("llama"), kvlayers.PrefixStore(), [A.clone(), B.clone()]
    with tokens_passed(model) as passed, pytest.raises(error, match=named):
        call(model, store)
    assert (passed, len(store)) == ([], 0)
    assert all(torch.equal(own, old) for own, old in zip((A, B), before, strict=True))
    # The next call is a usual one.
    assert_same(answer(model, [A, B], store), usual())


@pytest.mark.parametrize(
    ("family", "error"),
    [("gpt2", ConfigError), ("t5", OptionError), ("jamba", KVLayersError), ("deepseek_v3", ConfigError)],
)
def test_models_whose_states_cannot_be_put_together_are_named(family: str, error: type[KVLayersError]) -> None:
    model, store = fresh_model(family), kvlayers.PrefixStore()
    with tokens_passed(model) as passed:
        for call in (
            lambda: answer(model, [A, B], store, recompute=0),
            lambda: kvlayers.store_document(store, A, model),
        ):
            with pytest.raises(error):
                call()
    assert (passed, len(store)) == ([], 0)


def test_states_that_depend_on_more_than_tokens_are_refused() -> None:
    model, store = fresh_model("llama", attention_dropout=0.5), kvlayers.PrefixStore()
    model.train()
    for call, message in (
        (
            lambda: answer(model, [A, B], store, recompute=0),
            r"`documents` cannot be concatenated, as .* training mode.*: pass recompute='100%', which computes them as",
        ),
        (
            lambda: kvlayers.store_document(store, A, model),
            r"`ids` cannot be stored as a document, as .* training mode.*: pass them to",
        ),
    ):
        with pytest.raises(OptionError, match=message):
            call()
    assert len(store) == 0
    model.eval().set_attn_implementation("eager")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match="`recompute` needs attn_implementation"):
        answer(model, [A, B], store, recompute="15%")
    assert len(store) == 0


@versions.images_in_prefixes
def test_models_of_images_take_documents_of_text_and_compute_nothing_again() -> None:
    model, store = any_seeing_model("llava"), kvlayers.PrefixStore()
    for wrong, error in (({"recompute": "15%"}, ConfigError), ({"pixel_values": torch.zeros(1, 3, 8, 8)}, OptionError)):
        with pytest.raises(error, match="text alone|given pixel_values"):
            answer(model, [A, B], store, **{"recompute": 0, **wrong})
    assert len(store) == 0
    assert_same(answer(model, [A, B], store, recompute=0), by_hand(model, [A, B]))


@pytest.mark.parametrize(
    ("into", "error"),
    [
        (lambda model: "int4", OptionError),
        (lambda model: transformers.DynamicCache(), OptionError),
        (lambda model: kvlayers.DynamicCache(config=tiny_model("gemma3").config), OptionError),
        (lambda model: kvlayers.DynamicCache(config=tiny_model("mistral").config), OptionError),
        (lambda model: emptied(filled(1, heads=4)), OptionError),
        (lambda model: emptied(filled(1, head_dim=16)), OptionError),
        (lambda model: kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), kvlayers.DynamicCache()), OptionError),
        (lambda model: filled(2), OptionError),
        (lambda model: filled(1), OptionError),
        (lambda model: kvlayers.SinkCache(config=model.config, window_length=16), UnsupportedLayerError),
        (lambda model: kvlayers.make_cache("snapkv", model), UnsupportedLayerError),
        (lambda model: kvlayers.StaticCache(config=model.config, max_cache_len=42), CapacityError),
    ],
)
def test_only_empty_caches_with_room_take_documents_in(into: Any, error: type[KVLayersError]) -> None:
    model, store = tiny_model("llama"), kvlayers.PrefixStore()
    caches, cache = [kvlayers.store_document(store, own, model) for own in (A, B)], into(model)
    before = cache.get_seq_length() if isinstance(cache, transformers.Cache) else None
    with pytest.raises(error, match="`into`|reservation"):
        kvlayers.concatenate(caches, model, recompute=0, into=cache)
    assert before is None or cache.get_seq_length() == before
    assert [own.get_seq_length() for own in caches] == [19, 24]


def filled(rows: int, heads: int = 2, head_dim: int = 8) -> Any:
    cache = kvlayers.DynamicCache()
    for index in range(2):
        cache.update(*torch.zeros(2, rows, heads, 3, head_dim), index)
    return cache


def emptied(cache: Any) -> Any:
    cache.reset()
    return cache


def test_a_cache_that_takes_in_documents_half_way_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    model, store, into = tiny_model("llama"), kvlayers.PrefixStore(), kvlayers.DynamicCache(config=tiny_model("llama"))
    caches = [kvlayers.store_document(store, own, model) for own in (A, B)]
    with monkeypatch.context() as patched:
        patched.setattr(into.layers[1], "update", None)
        with pytest.raises(TypeError):
            kvlayers.concatenate(caches, model, recompute=0, into=into)
    assert [layer.length for layer in into.layers] == [0, 0]
    kvlayers.concatenate(caches, model, recompute=0, into=into)
    assert_same(plain(model, A, B, QUESTION, past_key_values=into), by_hand(model, [A, B]))
