"""Which calls of generate() go by a store: prompts with pad tokens, training mode, other threads; and what is said.

A call that is cancelled, or fails, after its prefill has its prompt in the store, and nothing that is not true.
"""

import contextvars
import functools
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

import kvlayers
import kvlayers_lab
from kvlayers import OptionError, PrefixStore
from kvlayers.generation.prefix_reuse.active_store import CURRENT
from kvlayers.generation.prefix_reuse.borders import MOST_DROPPED
from matrix import once
from models import fresh_model, prompt, tiny_model

PAD, END, TOKENS = 0, 7, 40
OPTIONS: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": PAD}


def plain(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    with CURRENT.override(None), kvlayers.installed():
        return model.generate(ids, **{**OPTIONS, **options})


def with_tokens(token: int, *places: int, batch: int = 1) -> torch.Tensor:
    """Prompts, the last of which has a token at some places."""
    ids = prompt(batch=batch, tokens=TOKENS)
    ids[-1, list(places)] = token
    return ids


PADS: dict[str, tuple[torch.Tensor, dict[str, Any], tuple[int, ...]]] = {
    "one that ends a sequence is text": (with_tokens(PAD, 3, TOKENS - 2), {"eos_token_id": PAD}, (TOKENS - 1,)),
    "one of those that end": (with_tokens(PAD, 3, TOKENS - 2), {"eos_token_id": [END, PAD]}, (TOKENS - 1,)),
    # transformers makes a mask then, and the store takes the same tokens for padding.
    "one on the left that ends nothing is padding": (
        with_tokens(PAD, *range(5), batch=2), {"eos_token_id": END}, (TOKENS - 1, TOKENS - 6),
    ),
    # generate() then pads with a token that ends a sequence, and makes no mask.
    "without one, all tokens are text": (
        with_tokens(2, 3, TOKENS - 2), {"pad_token_id": None, "eos_token_id": 2}, (TOKENS - 1,),
    ),
    "without one, and several ends": (
        with_tokens(2, 3, TOKENS - 2), {"pad_token_id": None, "eos_token_id": [2, 5]}, (TOKENS - 1,),
    ),
}  # fmt: skip
"""Prompts, options, and how many tokens of each prompt a second call finds."""


@pytest.mark.parametrize("case", PADS)
def test_a_pad_token_in_a_prompt_is_padding_or_text(case: str) -> None:
    model, store, (ids, options, found) = tiny_model("llama"), PrefixStore("1GiB"), PADS[case]
    options = {**OPTIONS, **options}
    expected = plain(model, ids, **options)
    for covered in ((0,) * len(ids), found):
        output = kvlayers.generate(model, inputs=ids, prefix_store=store, return_dict_in_generate=True, **options)
        assert torch.equal(output.sequences, expected)
        assert output.cached_tokens == covered
    if options.pop("pad_token_id") is None:
        (answer,) = kvlayers.generate_many(model, [ids], prefix_store=store, progress=False, **options)
        assert torch.equal(answer.ids, expected[0, TOKENS:])


TRAINED: dict[str, Callable[[Any], object]] = {
    "": lambda model: None,
    "module": lambda model: model.model.layers[1].add_module("extra", torch.nn.Dropout(0.1)),
    "attribute": lambda model: setattr(model.model.layers[0].self_attn, "attention_dropout", 0.1),
    "config": lambda model: setattr(model.config, "resid_pdrop", 0.1),
    "checkpointing": lambda model: model.gradient_checkpointing_enable(),
    "batch norm": lambda model: model.add_module("norm", torch.nn.BatchNorm1d(4)),
}


@pytest.mark.parametrize("change", TRAINED)
def test_training_mode_is_refused_if_it_changes_states(change: str) -> None:
    model, store, ids = fresh_model("llama").train(), PrefixStore("1GiB"), prompt(tokens=TOKENS)
    TRAINED[change](model)
    model.config.classifier_dropout = 0.5
    with torch.no_grad(), kvlayers.installed(prefix_store=store):
        for _ in range(2):
            model.generate(ids, **OPTIONS)
    assert (store.statistics.hits, store.statistics.bypassed) == ((0, 2) if change else (1, 0))
    assert ("is in training mode" in store.explain()) == bool(change)


def test_a_config_that_changes_between_calls_is_looked_at_again() -> None:
    """What a config says of a model is found once, and again if a field changes, also one within another."""
    model, store, ids = fresh_model("llama"), PrefixStore("1GiB"), prompt(tokens=TOKENS)
    with kvlayers.installed(prefix_store=store):
        for _ in range(2):
            model.generate(ids, **OPTIONS)
        assert (store.statistics.hits, store.statistics.bypassed) == (1, 0)
        # Before transformers 5, a config has no such field without a type.
        parameters = vars(model.config).get("rope_parameters")
        if parameters is None:
            model.config.rope_scaling = {"rope_type": "dynamic", "factor": 2.0}
        else:
            parameters["rope_type"] = "dynamic"
        model.generate(ids, **OPTIONS)
        assert (store.statistics.hits, store.statistics.bypassed) == (1, 1)
    assert "depends on the length of the prompt" in store.explain()


def test_each_reason_is_logged_once_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    model, store, ids = tiny_model("llama"), PrefixStore("1GiB"), prompt(tokens=TOKENS)
    with kvlayers.installed(prefix_store=store):
        for _ in range(3):
            model.generate(ids, use_cache=False, **OPTIONS)
        cache = model.generate(ids.int(), return_dict_in_generate=True, **OPTIONS).past_key_values
    said = [record.getMessage() for record in caplog.records if record.name.startswith("kvlayers")]
    assert [text.partition(": ")[2] for text in said] == [
        "use_cache is False.",
        "its prompts are not token ids, int64 [rows, tokens].",
    ]
    assert store.statistics.bypasses == {
        "use_cache is False": 3,
        "its prompts are not token ids, int64 [rows, tokens]": 1,
    }
    assert "3 calls went on without it: use_cache is False" in store.explain()
    assert "could not use the store" in repr(cache.explain())


def test_a_thread_within_a_block_is_counted_unless_it_takes_the_context_along() -> None:
    model, store, ids = tiny_model("llama"), PrefixStore("1GiB"), prompt(tokens=TOKENS)

    def ask() -> None:
        model.generate(ids, **OPTIONS)

    with ThreadPoolExecutor() as threads:
        with kvlayers.installed(prefix_store=store):
            threads.submit(ask).result()
            assert (len(store), store.statistics.bypassed) == (0, 1)
            assert "another thread" in store.explain()
            threads.submit(contextvars.copy_context().run, ask).result()
            ask()
            assert (store.statistics.hits, store.statistics.bypassed) == (1, 1)
        with kvlayers.installed():
            threads.submit(ask).result()
    assert store.statistics.bypassed == 1


# Calls that end early


class Ended(BaseException):
    """Raised by the caller's code, as by a signal."""


def ending(calls: int) -> Callable[..., Any]:
    """What `generate()` can call so often, as a streamer, a criterion or a processor; then it raises."""
    left = iter(range(calls))

    def called(*given: Any) -> Any:
        if next(left, None) is None:
            raise Ended
        return given[-1]

    return called


def criterion(step: int) -> Callable[..., torch.Tensor]:
    end = ending(step)
    return lambda ids, *others: end(torch.zeros(len(ids), dtype=torch.bool))


ENDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "streamer": lambda step: {"streamer": types.SimpleNamespace(put=ending(1 + step), end=list)},
    "criterion": lambda step: {"stopping_criteria": tf.StoppingCriteriaList([criterion(step)])},
    "processor": lambda step: {"logits_processor": tf.LogitsProcessorList([ending(step)])},
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
    expected = plain(model, ids, **options)
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
    expected, forward, seen = plain(model, ids), LlamaDecoderLayer.forward, list[Any]()

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

    def run_out(*given: Any) -> Any:
        raise MemoryError

    with kvlayers.installed(prefix_store=store), pytest.raises(MemoryError):
        model.generate(ids, **OPTIONS, logits_processor=tf.LogitsProcessorList([run_out]))
    assert len(store) == 0


# Whatever uses a store asks the same: whether states depend on tokens, weights and settings that are compared

IDS = prompt(tokens=TOKENS)
HOW: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def generate(model: Any, ids: torch.Tensor, store: Any) -> Any:
    return kvlayers.generate(model, ids, prefix_store=store, **HOW)[0, ids.shape[1] :].tolist()


def generate_many(model: Any, ids: torch.Tensor, store: Any) -> Any:
    (answer,) = kvlayers.generate_many(model, [ids[0].tolist()], prefix_store=store, progress=False, **HOW)
    return answer.ids.tolist()


def documents(model: Any, ids: torch.Tensor, store: Any) -> Any:
    return kvlayers.generate(
        model, documents=[ids[0, :-1]], question=ids[0, -1:], recompute=0, prefix_store=store, **HOW
    )[0, ids.shape[1] :].tolist()


def document(model: Any, ids: torch.Tensor, store: Any) -> None:
    kvlayers.store_document(store, ids, model)


def score(model: Any, ids: torch.Tensor, store: Any) -> None:
    kvlayers_lab.score(model, [ids[0].tolist()], [[[5]]], prefix_store=store, progress=False)


USES: tuple[Callable[..., Any], ...] = (generate, generate_many, documents, document, score)


def hooked(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output + 3.0)


def replaced(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda states, forward=mlp.forward: forward(states) + 3.0


def attends_otherwise(model: Any) -> None:
    model.set_attn_implementation("mine")


def has_a_function(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.Identity().eval()
    model.model.layers[0].mlp.act_fn.scale = lambda: 3.0


def of_its_class(model: Any) -> None:
    LlamaMLP.forward = lambda self, states: states * 0.5


CHANGES = {
    hooked: "model.layers.0.mlp has hooks",
    replaced: r"forward\(\) of model.layers.0.mlp is not the one of its class",
    attends_otherwise: "attn_implementation='mine' is no function of transformers",
    has_a_function: "model.layers.0.mlp.act_fn",
    of_its_class: r"forward\(\) of model.layers.0.mlp is not the one of its class",
}


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        return sdpa_attention_forward(module, query, key, value * 0.2, mask, **options)

    monkeypatch.setitem(tf.AttentionInterface._global_mapping, "mine", mine)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "mine", sdpa_mask)
    # To be put back after each test.
    monkeypatch.setattr(LlamaMLP, "forward", LlamaMLP.forward)


@pytest.mark.parametrize(("use", "change"), once(USES, CHANGES, times=2))
def test_states_that_cannot_be_compared_reach_no_store(use: Callable[..., Any], change: Callable[[Any], None]) -> None:
    model, store = fresh_model("llama"), kvlayers.PrefixStore("64MiB")
    change(model)
    with pytest.raises(OptionError, match=CHANGES[change]):
        use(model, IDS, store)
    assert len(store) == 0


def test_a_forward_that_was_put_back_is_the_one_of_its_class() -> None:
    """Once a call has asked for hidden states, transformers 5.0 leaves the method of the class as an attribute."""
    model, store = fresh_model("llama"), kvlayers.PrefixStore("64MiB")
    for layer in model.model.layers:
        layer.forward = layer.forward
    for _ in range(2):
        generate(model, IDS, store)
    assert store.statistics.hits == 1


@pytest.mark.parametrize("first", [generate, generate_many])
@pytest.mark.parametrize("then", [generate, generate_many])
def test_other_implementations_of_attention_do_not_share(first: Callable[..., Any], then: Callable[..., Any]) -> None:
    model, store = fresh_model("llama"), kvlayers.PrefixStore("64MiB")
    first(model, IDS[:, :35], store)
    model.set_attn_implementation("eager")
    then(model, IDS, store)
    assert (store.statistics.hits, len(store)) == (0, 2)
    model.set_attn_implementation("sdpa")
    then(model, IDS, store)
    assert store.statistics.hits == 1


def test_a_function_in_the_place_of_one_of_transformers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = fresh_model("llama"), kvlayers.PrefixStore("64MiB")
    table = tf.AttentionInterface._global_mapping
    monkeypatch.setitem(table, "sdpa", table["mine"])
    with pytest.raises(OptionError, match="attn_implementation='sdpa'"):
        generate(model, IDS, store)


def test_a_model_that_changes_between_two_prompts_is_noticed() -> None:
    model, store, prompts = fresh_model("llama"), kvlayers.PrefixStore("64MiB"), [IDS[0].tolist()] * 3
    answers = kvlayers.generate_many(model, prompts, prefix_store=store, max_rows=1, progress=False, **HOW)
    assert next(answers).error is None
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    right = model.generate(IDS, attention_mask=torch.ones_like(IDS), **HOW)[0, 40:].tolist()
    second = next(answers)
    assert (second.ids.tolist(), second.cached_tokens) == (right, 0)
    hooked(model)
    assert isinstance(next(answers).error, OptionError)
    assert len(store) == 2


def test_a_hook_of_all_modules_is_noticed() -> None:
    model, store = fresh_model("llama"), kvlayers.PrefixStore("64MiB")
    with (
        torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None),
        pytest.raises(OptionError, match="all modules have hooks"),
    ):
        generate_many(model, IDS, store)
    assert generate_many(model, IDS, store) == generate(model, IDS, store)


def test_a_model_that_changes_while_a_prompt_is_read_has_it_in_no_store() -> None:
    model, store, seen = fresh_model("llama"), kvlayers.PrefixStore("64MiB"), list[int]()

    def change_once(number: int, token: int) -> bool:
        seen.append(number)
        if seen == [0, 1, 0, 0]:
            # The third prompt is read in chunks meanwhile, and two of them were read with the weights of before.
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight.mul_(2)
        return number == 1

    prompts = [[5, 6, 7, 8], [9, 10, 11], IDS[0].tolist()]
    answers = kvlayers.generate_many(
        model, prompts, prefix_store=store, max_rows=2, chunk_tokens=8, on_token=change_once, progress=False, **HOW
    )
    assert [answer.error for answer in answers] == [None] * 3
    assert seen.index(2) > 3
    right = model.generate(IDS, attention_mask=torch.ones_like(IDS), **HOW)[0, 40:].tolist()
    assert (generate(model, IDS, store), store.statistics.hits) == (right, 0)
