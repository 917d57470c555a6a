"""generate() by a prefix store: the tokens of a plain call, with no token computed that the store has states of."""

import functools
import pathlib
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers as tf

import every_causal_model
import fallback_models
import families
import kvlayers
import versions
from kvlayers import OptionError, PrefixStore
from kvlayers.generation.prefix_reuse.active_store import CURRENT
from kvlayers.upstream import cache_argument
from matrix import once, some
from models import WINDOW, fresh_model, prompt, read, tiny_model, tokens_passed

ROOM = 2**30
PAD = 0
SNAPSHOT = 16
DOCUMENT = 5 * WINDOW
OPTIONS: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": PAD}

FAMILIES = ("llama", "gpt2", "mistral", "gemma3", "llama4", "jamba")
NAMES = ("dynamic", "static", "offloaded", "offloaded_static")
"""Caches with states in full precision: the same tokens for certain."""


def plain(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    with CURRENT.override(None), kvlayers.installed():
        return model.generate(ids, **{**OPTIONS, **options})


def by_store(model: Any, store: PrefixStore, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return kvlayers.generate(model, ids, prefix_store=store, **{**OPTIONS, **options})


def padded(rows: list[torch.Tensor], length: int | None = None) -> dict[str, torch.Tensor]:
    longest = max(row.shape[1] for row in rows) if length is None else length
    ids = torch.full((len(rows), longest), PAD)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, longest - row.shape[1] :] = row[0]
        mask[index, longest - row.shape[1] :] = 1
    return {"ids": ids, "attention_mask": mask}


def one_by_one(model: Any, rows: list[torch.Tensor], **options: Any) -> torch.Tensor:
    """What each prompt gives on its own, padded as a batch of them is."""
    return padded([answer for row in rows for answer in plain(model, row, **options).split(1)])["ids"]


def questions(*lengths: int, document: int = DOCUMENT) -> list[torch.Tensor]:
    text = prompt(tokens=document)
    return [torch.cat([text, prompt(tokens=n, seed=index + 1)], dim=1) for index, n in enumerate(lengths)]


@functools.cache
def chat(family: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Four turns of a chat: what is asked, and what a plain call answers, whatever holds states in full precision."""
    model, ids, turns = tiny_model(family), prompt(tokens=DOCUMENT), []
    for turn in range(4):
        # What a random model writes may be the pad token, and is text none the less.
        answer = plain(model, ids, attention_mask=torch.ones_like(ids))
        turns.append((ids, answer))
        ids = torch.cat([answer, prompt(tokens=7, seed=turn + 1)], dim=1)
    return turns


# One prompt


@pytest.mark.parametrize(("family", "name", "on_disk"), once(FAMILIES, NAMES, [False, True], times=3))
def test_a_chat_pays_for_its_new_tokens_alone(name: str, family: str, on_disk: bool, tmp_path: pathlib.Path) -> None:
    """Also if each turn is that of another process, which goes on from files."""
    model, place = tiny_model(family), tmp_path if on_disk else None
    store = PrefixStore(ROOM, place, snapshot_tokens=SNAPSHOT)
    for turn, (ids, expected) in enumerate(chat(family)):
        hits = store.statistics.hits
        with tokens_passed(model) as counts:
            seen = by_store(model, store, ids, cache_implementation=name, attention_mask=torch.ones_like(ids))
        assert torch.equal(seen, expected)
        # All but the last token of the answer were computed in the turn before.
        new = ids.shape[1] if turn == 0 else 1 + 7
        assert sum(counts) == new + OPTIONS["max_new_tokens"] - 1
        assert (store.statistics.hits - hits, store.statistics.damaged) == (int(turn > 0), 0)
        if on_disk:
            assert store.flush()
            store = PrefixStore(ROOM, place, snapshot_tokens=SNAPSHOT)


EVICTING = {"keep": 0.5, "sink_tokens": 2, "recent_tokens": 8}
RECALL = {"pages": 1, "page_tokens": 8, "recent_tokens": 8}
UNUSUAL = sorted({*families.FAMILIES, "indexer"} - {"marian", "t5gemma", "whisper", "deepseek_v32"})
"""Hybrids, shared KV, learned positions and ALiBi. The indexer of deepseek_v32 has ties there."""

ONE_OF_EACH_KIND = [
    "bloom", "gemma3n", "gpt_oss", "indexer", "mamba2", "minimax", "opt", "qwen3_next", "recurrent_gemma", "zamba2"
]  # fmt: skip


@pytest.mark.parametrize("family", some(UNUSUAL, ONE_OF_EACH_KIND))
def test_no_family_gets_other_tokens(family: str) -> None:
    if family == "recurrent_gemma":
        versions.need_since("5.12", "padded batches of recurrent_gemma")
    indexed, pad = family == "indexer", {"eos_token_id": None}
    model = fallback_models.model_of("deepseek_v32") if indexed else families.model_and_inputs(family)[0]
    store, rows = PrefixStore(ROOM, snapshot_tokens=SNAPSHOT), questions(3, 9, document=40)
    text, batch = rows[0], padded(rows)
    with kvlayers.installed(prefix_store=store):
        for turn in range(2):
            expected = plain(model, text, **pad)
            seen = model.generate(text, attention_mask=torch.ones_like(text), **OPTIONS, **pad)
            assert torch.equal(seen, expected)
            text = torch.cat([seen, prompt(tokens=5, seed=turn + 3)], dim=1)
        for expected in [] if indexed else [one_by_one(model, rows, **pad)] * 2:
            seen = model.generate(batch["ids"], attention_mask=batch["attention_mask"], **OPTIONS, **pad)
            assert torch.equal(seen, expected)
    bypassed = family in ("minimax", "recurrent_gemma") or indexed
    assert (store.statistics.bypassed == (2 if indexed else 4)) == bypassed == (store.statistics.hits == 0)


# Several prompts


BATCHES: dict[str, tuple[list[torch.Tensor], int, dict[str, Any]]] = {
    "of one length": (questions(5, 5, 5), 5, {}),
    "padded": (questions(3, 9, 6), 9, {}),
    "with beams": (questions(3, 8), 8, {"num_beams": 3}),
    "one in chunks": (questions(3), 3, {"prefill_chunk_size": 8}),
    "a long one first": ([prompt(tokens=40), prompt(tokens=1, seed=2), prompt(tokens=2, seed=3)], 0, {}),
    "a long one last": ([prompt(tokens=2, seed=3), prompt(tokens=1, seed=2), prompt(tokens=40)], 0, {}),
    "in chunks": (questions(3, 8), 8, {"prefill_chunk_size": 8}),
    "of their own": ([prompt(tokens=tokens, seed=tokens) for tokens in (21, 33, 27)], 15, {}),
    "samples": (questions(6), 6, {"num_return_sequences": 3, "do_sample": True}),
    "several beams": (questions(6), 6, {"num_beams": 3, "num_return_sequences": 2}),
}
"""Prompts, how many tokens of each the store does not have after a first call, and options."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family", "kind", "padding"), once(NAMES, FAMILIES, BATCHES, (0, WINDOW + 3), times=3)
)
def test_each_prompt_of_a_batch_is_answered_as_alone(name: str, family: str, kind: str, padding: int) -> None:
    rows, new, asked = BATCHES[kind]
    model, store = tiny_model(family), PrefixStore(ROOM, snapshot_tokens=SNAPSHOT)
    torch.manual_seed(3)
    expected = one_by_one(model, rows, **{**asked, "cache_implementation": name, "prefill_chunk_size": None})
    batch = padded(rows, length=max(row.shape[1] for row in rows) + padding)
    for attempt in range(2):
        torch.manual_seed(3)
        with tokens_passed(model) as counts:
            seen = by_store(model, store, **batch, cache_implementation=name, **asked)
        assert torch.equal(seen[:, padding:], expected)
        assert bool((seen[:, :padding] == PAD).all())
        # Padding may have moved behind what is held, and be read with the tokens there.
        each = max(asked.get("num_beams", 1), asked.get("num_return_sequences", 1))
        behind = len(rows) * each * (new + padding + OPTIONS["max_new_tokens"])
        assert sum(counts) <= behind + (DOCUMENT if attempt == 0 else 0)
    assert store.statistics.bypassed == 0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("asked", [{}, {"num_beams": 2}, {"eos_token_id": 5}])
def test_a_document_is_held_once_for_all_questions(asked: dict[str, Any], family: str) -> None:
    model, store = tiny_model(family), PrefixStore(ROOM)
    rows = questions(*(3 + index % 4 for index in range(12)), document=200)
    caches: list[Any] = []
    with model.register_forward_pre_hook(
        lambda *call: caches.append(cache_argument.passed_in(call[2])), with_kwargs=True
    ):
        seen = by_store(model, store, **padded(rows), **asked)
    assert torch.equal(seen, plain(model, **padded(rows), **asked))
    alone = plain(model, rows[0], return_dict_in_generate=True).past_key_values
    assert caches[-1].batch_size == 12 * asked.get("num_beams", 1)
    assert caches[-1].nbytes < 5 * alone.nbytes


def test_processors_see_ids_in_the_order_of_the_text() -> None:
    model, store, seen = tiny_model("llama"), PrefixStore(ROOM), list[torch.Tensor]()
    batch = padded(questions(*(3 + index % 4 for index in range(12)), document=200))

    def note(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids.clone())
        return scores

    by_store(model, store, **batch, logits_processor=tf.LogitsProcessorList([note]))
    assert torch.equal(seen[0], batch["ids"])
    for asked in (
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.7},
        {"encoder_no_repeat_ngram_size": 2},
        {"bad_words_ids": [[14, 15], [3]]},
    ):
        assert torch.equal(by_store(model, store, **batch, **asked), plain(model, **batch, **asked))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cache_that_is_returned_goes_on_where_its_mask_says(family: str) -> None:
    model, batch = tiny_model(family), padded(questions(3, 8, document=40))
    asked = {"return_dict_in_generate": True, "output_logits": True}
    outputs = plain(model, **batch, **asked), by_store(model, PrefixStore(ROOM), **batch, **asked)
    more = torch.cat([outputs[1].sequences, prompt(2, tokens=4, seed=5)], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.ones(2, more.shape[1] - batch["ids"].shape[1]).long()], dim=1)
    expected, seen = (
        plain(model, more, attention_mask=mask, past_key_values=output.past_key_values, **asked) for output in outputs
    )
    torch.testing.assert_close(seen.logits, expected.logits, rtol=0, atol=1e-5)


def test_a_streamer_sees_a_prompt_as_it_was_given() -> None:
    model, batch = tiny_model("llama"), padded([questions(6, document=40)[0]], length=60)
    expected, seen = list[torch.Tensor](), list[torch.Tensor]()
    plain(model, **batch, streamer=types.SimpleNamespace(put=expected.append, end=list))
    by_store(model, PrefixStore(ROOM), **batch, streamer=types.SimpleNamespace(put=seen.append, end=list))
    assert [each.flatten().tolist() for each in seen] == [each.flatten().tolist() for each in expected]


OWN_POSITIONS: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "is_decoder": True,
    "pad_token_id": 1,
    "eos_token_id": None,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    "config",
    [
        tf.RobertaConfig(**OWN_POSITIONS),
        tf.RoFormerConfig(**OWN_POSITIONS),
        # A window that counts slots, before which padding must stay.
        tf.GPTNeoConfig(
            vocab_size=97, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
            window_size=WINDOW, pad_token_id=1, eos_token_id=None,
        ),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_models_that_number_tokens_in_ways_of_their_own(config: Any) -> None:
    torch.manual_seed(0)
    model, store = tf.AutoModelForCausalLM.from_config(config).eval(), PrefixStore(ROOM)
    # Tokens of an untrained model say little.
    asked = {"pad_token_id": 1, "return_dict_in_generate": True, "output_logits": True}
    with kvlayers.installed(prefix_store=store):
        for rows in (questions(6), questions(5, 5, 5), questions(3, 8)):
            batch = padded(rows)
            batch["ids"][batch["attention_mask"] == 0] = 1
            expected, ids = plain(model, **batch, **asked), batch["ids"]
            for _ in range(2):
                seen = model.generate(ids, attention_mask=batch["attention_mask"], **{**OPTIONS, **asked})
                torch.testing.assert_close(seen.logits, expected.logits, rtol=0, atol=1e-5)
    assert store.statistics.hits > 0


# Whose it is


OTHERS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "exact": (
        {"cache_implementation": "dynamic"},
        [
            {"namespace": "other"},
            {"cache_implementation": "static"},
            {"cache_implementation": "quantized"},
            {"cache_implementation": "quantized", "cache_config": {"nbits": 2}},
        ],
    ),
    "packed": ({"cache_implementation": "int8"}, [{"cache_implementation": "int4"}]),
    "sinks": (
        {"cache_implementation": "sink", "cache_config": {"window_length": 30, "num_sink_tokens": 2}},
        [{"cache_implementation": "sink", "cache_config": {"window_length": 30, "num_sink_tokens": 3}}],
    ),
    "evicted by a rule": (
        {"cache_implementation": "keydiff", "cache_config": EVICTING},
        [
            {"cache_implementation": "dynamic"},
            {"cache_implementation": "keydiff", "cache_config": {**EVICTING, "keep": 0.25}},
            {"cache_implementation": "keydiff", "cache_config": {**EVICTING, "per_head": False}},
            {"cache_implementation": "keydiff", "cache_config": {**EVICTING, "quantization": {"nbits": 4}}},
            {"cache_implementation": "knorm", "cache_config": EVICTING},
        ],
    ),
    "evicted by queries": (
        {"cache_implementation": "snapkv", "cache_config": EVICTING},
        [{"cache_implementation": "knorm", "cache_config": EVICTING}],
    ),
    "read in pages": (
        {"cache_implementation": "recall", "cache_config": {"recall": RECALL}},
        [
            {"cache_implementation": "dynamic"},
            {"cache_implementation": "recall", "cache_config": {"recall": {**RECALL, "pages": 2}}},
        ],
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_only_a_call_with_the_same_cache_mode_and_namespace_finds_an_entry(kind: str, tmp_path: pathlib.Path) -> None:
    """And goes on from it as in a chat, in memory and from files."""
    model, store, ids = tiny_model("llama"), PrefixStore(ROOM, tmp_path), prompt(tokens=DOCUMENT)
    asked, others = OTHERS[kind]
    first = by_store(model, store, ids, **asked)
    longer = torch.cat([first, prompt(tokens=7, seed=1)], dim=1)
    for other in others:
        by_store(model, store, longer, **other)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        by_store(model, store, longer)
    assert (store.statistics.hits, store.statistics.misses) == (0, 2 + len(others))
    cache = kvlayers.make_cache(asked["cache_implementation"], model, **asked.get("cache_config", {}))
    with kvlayers.installed():
        model.generate(ids, past_key_values=cache, **OPTIONS)
        expected = model.generate(longer, past_key_values=cache, **OPTIONS)
    assert store.flush()
    for each in (store, PrefixStore(ROOM, tmp_path)):
        assert torch.equal(by_store(model, each, longer, **asked), expected)
        assert each.statistics.hits == 1


# install()


def test_installed_calls_go_by_the_store_where_they_can() -> None:
    model, store, ids = tiny_model("llama"), PrefixStore(ROOM), prompt(tokens=DOCUMENT)
    expected = plain(model, ids)
    with kvlayers.installed(prefix_store=store, namespace="mine"):
        for _ in range(2):
            assert torch.equal(model.generate(ids, **OPTIONS), expected)
        assert (store.statistics.hits, store.statistics.bypassed) == (1, 0)
        cache = kvlayers.DynamicCache(config=model.config)
        assert torch.equal(model.generate(ids, past_key_values=cache, **OPTIONS), expected)
        assert (store.statistics.hits, store.statistics.bypassed) == (1, 1)
        other = PrefixStore(ROOM)
        with kvlayers.installed(prefix_store=other):
            model.generate(ids, **OPTIONS)
        assert (other.statistics.misses, store.statistics.hits) == (1, 1)
        kvlayers.generate(model, ids, prefix_store=other, **OPTIONS)
        kvlayers.generate(model, ids, **OPTIONS)
        assert (other.statistics.hits, other.statistics.misses, store.statistics.hits) == (1, 1, 2)


def test_install_has_one_store_for_all_threads() -> None:
    model, ids = tiny_model("llama"), prompt(tokens=DOCUMENT)
    first, store = PrefixStore(ROOM), PrefixStore(ROOM)
    kvlayers.install(prefix_store=first)
    kvlayers.install(prefix_store=store, namespace="mine")
    kvlayers.install()
    try:
        with ThreadPoolExecutor() as threads:
            threads.submit(model.generate, ids, **OPTIONS).result()
        model.generate(ids, **OPTIONS)
    finally:
        kvlayers.uninstall()
    with kvlayers.installed():
        model.generate(ids, **OPTIONS)
    assert (store.statistics.hits, store.statistics.misses, first.statistics.misses) == (1, 1, 0)


def test_an_answer_outlives_what_becomes_of_the_store() -> None:
    def fail(entry: Any) -> float:
        raise LookupError("a policy of somebody else's")

    model, ids = tiny_model("llama"), prompt(tokens=DOCUMENT)
    most = plain(model, ids, return_dict_in_generate=True).past_key_values.nbytes * 2
    store = PrefixStore(most, policy=types.SimpleNamespace(rank=fail))
    for seed in range(3):
        text = prompt(tokens=DOCUMENT, seed=seed)
        assert torch.equal(by_store(model, store, text), plain(model, text))
    # Two fit in, without their spare room.
    assert store.statistics.refused == 1


def test_threads_share_a_store() -> None:
    model, store = tiny_model("mistral"), PrefixStore(ROOM, snapshot_tokens=SNAPSHOT)
    rows = questions(3, 4, 5, 6)
    expected = [plain(model, row) for row in rows]
    with ThreadPoolExecutor(len(rows)) as threads:
        seen = threads.map(lambda row: [by_store(model, store, row) for _ in range(4)], rows)
        assert all(torch.equal(own, each) for own, answers in zip(expected, seen, strict=True) for each in answers)
    assert store.statistics.hits >= 3 * len(rows)


# Calls that cannot


TEXT = prompt(tokens=DOCUMENT)
PLACE = torch.tensor([4])
llama = functools.partial(tiny_model, "llama")


def longrope() -> Any:
    options = llama().config.to_diff_dict() | {"original_max_position_embeddings": 32}
    options |= versions.rope(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[2.0] * 4)
    return tf.AutoModelForCausalLM.from_config(tf.Phi3Config(**options)).eval()


def with_inputs_of_its_own() -> Any:
    model = fresh_model("llama")
    model.prepare_inputs_for_generation = model.prepare_inputs_for_generation
    return model


REFUSED: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {
    "a hole": ("padding on the left", llama, {"attention_mask": torch.ones_like(TEXT).index_fill(1, PLACE, 0)}),
    "a pad token": ("pad token", llama, {"input_ids": TEXT.index_fill(1, PLACE, PAD), "eos_token_id": 7}),
    "no cache": ("use_cache", llama, {"use_cache": False}),
    "positions": ("states may depend on position_ids", llama, {"position_ids": torch.arange(DOCUMENT)[None]}),
    "ids of another dtype": ("not token ids", llama, {"input_ids": TEXT.int()}),
    "an encoder": ("encoder", lambda: tiny_model("t5"), {}),
    "packed rows": (
        "cannot be put side by side",
        llama,
        {"input_ids": torch.cat([TEXT[:, :20], TEXT[:, 20:]]), "cache_implementation": "quantized"},
    ),
    "inputs of its own": ("prepare_inputs_for_generation", with_inputs_of_its_own, {}),
    "a rotation by the length": ("rope_type", longrope, {}),
}
if "dory" in tf.CONFIG_MAPPING:
    REFUSED["states that depend on passes"] = "one by one", every_causal_model.of_loops, {}
if versions.DRAFTS_MAY_HAVE_A_LEAST_LENGTH:
    REFUSED["drafts"] = "assistant", llama, {"assistant_model": llama()}


@pytest.mark.parametrize("case", REFUSED)
def test_calls_that_cannot_go_by_a_store_say_so(case: str) -> None:
    message, make, own = REFUSED[case]
    model, store, arguments = make(), PrefixStore(ROOM), {"input_ids": TEXT, **OPTIONS, **own}
    with pytest.raises(OptionError, match=message):
        kvlayers.generate(model, prefix_store=store, **arguments)
    with kvlayers.installed():
        expected = model.generate(**arguments)
    with kvlayers.installed(prefix_store=store):
        assert torch.equal(model.generate(**arguments), expected)
    assert (store.statistics.bypassed, len(store)) == (1, 0)


def test_weights_on_several_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    places = [types.SimpleNamespace(device=torch.device(place), is_meta=False) for place in ("cpu", "cuda")]
    monkeypatch.setattr(model, "parameters", lambda *args, **how: iter(places))
    with pytest.raises(OptionError, match="several devices"):
        by_store(model, PrefixStore(ROOM), TEXT)


class OfItsOwn(tf.LlamaForCausalLM):  # type: ignore[misc]
    def generate(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


def call_with(**options: Any) -> Any:
    return kvlayers.generate(llama(), TEXT, **{"prefix_store": PrefixStore(ROOM), **OPTIONS, **options})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((functools.partial(call_with, prefix_store=given), r"kvlayers\.PrefixStore") for given in ("store", 3, {})),
        *((functools.partial(kvlayers.install, prefix_store=given), "PrefixStore") for given in ("store", 3, {})),
        (lambda: call_with(namespace=3), "namespace"),
        (lambda: call_with(namespace="mine", prefix_store=None), "got namespace='mine' without one"),
        (lambda: kvlayers.install(namespace="mine"), "got namespace='mine' without one"),
        (lambda: kvlayers.installed(namespace="mine").__enter__(), "got namespace='mine' without one"),
        (lambda: call_with(cache_config={1: 2}), "cache_config"),
        (
            lambda: kvlayers.generate(OfItsOwn(llama().config), TEXT, prefix_store=PrefixStore(ROOM)),
            "got a .*OfItsOwn, whose own",
        ),
        (lambda: PrefixStore(ROOM, snapshot_tokens=0), "snapshot_tokens"),
    ],
)
def test_what_is_no_store_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()
    assert not kvlayers.is_installed()


@pytest.mark.parametrize("way", ["lora", "rows of several adapters", "prompt tuning", "prefix tuning"])
def test_what_peft_does_to_a_model_is_seen(way: str) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    if way == "prefix tuning" and not versions.peft_passes_prefixes():
        pytest.skip("this PEFT passes its prefix by a name that this transformers ignores beside the new one")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    config = {
        "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "prefix tuning": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    }.get(way, lora)
    model = peft.get_peft_model(fresh_model("llama"), config).eval()
    store, ids, asked = PrefixStore(ROOM), prompt(tokens=DOCUMENT), dict(OPTIONS)
    if way == "rows of several adapters":
        asked["adapter_names"] = ["default"]
    for _ in range(2):
        with kvlayers.installed():
            expected = model.generate(input_ids=ids, **asked)
        with kvlayers.installed(prefix_store=store):
            assert torch.equal(model.generate(input_ids=ids, **asked), expected)
            with model.disable_adapter():
                base = model.generate(input_ids=ids, **OPTIONS)
    with model.disable_adapter(), kvlayers.installed():
        assert torch.equal(model.generate(input_ids=ids, **OPTIONS), base)
    assert (store.statistics.bypassed >= 2) == (way != "lora")


def test_a_model_that_was_asked_for_hidden_states_goes_by_the_store_all_the_same() -> None:
    """transformers leaves hooks on its layers, which take what they return in calls that ask for it."""
    versions.need_since("5.2", "a prefix store behind its hooks")
    model, store, ids = fresh_model("llama"), PrefixStore(ROOM), prompt(tokens=DOCUMENT)
    read(model, ids, output_hidden_states=True)
    expected = plain(model, ids)
    for hits in range(2):
        assert torch.equal(by_store(model, store, ids), expected)
        assert store.statistics.hits == hits


def test_a_store_that_is_told_of_new_weights_does_not_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlayers.persistence.fingerprint._digest", lambda _: pytest.fail("weights were read"))
    model, other, store, ids = fresh_model("llama"), fresh_model("llama", seed=1), PrefixStore(ROOM), prompt(tokens=40)

    def forget(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        store.forget_weights()
        return scores

    for _ in range(3):
        store.forget_weights()
        assert len(store) == 0
        for each in (model, other):
            expected = plain(each, ids)
            for computed in (40, 1):
                with tokens_passed(each) as counts:
                    assert torch.equal(by_store(each, store, ids), expected)
                assert counts[0] == computed
        # What this call inserts when it ends is not found behind new weights.
        by_store(model, store, prompt(tokens=40, seed=1), logits_processor=tf.LogitsProcessorList([forget]))
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(-1)
        expected = plain(model, prompt(tokens=40, seed=1))
        assert torch.equal(by_store(model, store, prompt(tokens=40, seed=1)), expected)
