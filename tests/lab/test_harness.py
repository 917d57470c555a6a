"""The model `kvlayers` of lm-evaluation-harness: the harness's own results with exact caches, and with other caches
those of decoding through them. The long-context tasks are tasks of the harness as well."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fresh_process
import kvlayers
import kvlayers_lab
from kvlayers_lab.tasks import HARNESS_TASKS, samples_of, task_names
from model_directories import random_text, save_model, save_sharp_model, save_with_tokenizer, word_tokenizer
from models import fresh_model, passes_of, tiny_model, tokens_passed

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: it comes with the extra 'eval'")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.model import CachingLM  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from kvlayers_lab.evaluation import harness as harness_model  # noqa: E402
from kvlayers_lab.evaluation.harness import KVLayersLM  # noqa: E402

INT2 = {"cache": "int2", "cache_config": {"residual_length": 0, "sink_tokens": 0}}
"""A cache that packs a context as soon as it has a block of 64 tokens."""

FEW_SHOT = random_text(100)
CONTEXTS = [f"{FEW_SHOT} {random_text(20 + 3 * index, seed=1 + index)}" for index in range(4)]
CHOICES_OF_EACH = [" w1", " w2 w3", " w4 w5 w6"]
PAIRS = [(context, choice) for context in CONTEXTS for choice in CHOICES_OF_EACH]


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def hf(**arguments: Any) -> Any:
    return HFLM(tiny_model("llama"), tokenizer=word_tokenizer(), **arguments)


def adapted(**arguments: Any) -> Any:
    return KVLayersLM(tiny_model("llama"), tokenizer=word_tokenizer(), **arguments)


def score(model: Any, pairs: list[tuple[str, str]] = PAIRS) -> list[tuple[float, bool]]:
    answers: list[tuple[float, bool]] = model.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    return answers


def agrees(answers: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> bool:
    assert len(answers) == len(expected) > 0
    return all(
        abs(own[0] - other[0]) < 1e-4 and own[1] == other[1] for own, other in zip(answers, expected, strict=True)
    )


@pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded"])
def test_scores_with_an_exact_cache_are_those_of_hf_and_shared_contexts_are_computed_once(cache: str) -> None:
    with tokens_passed(tiny_model("llama")) as of_hf:
        expected = score(hf(batch_size=4))
    with tokens_passed(tiny_model("llama")) as passes:
        assert agrees(score(adapted(cache=cache, batch_size=4)), expected)
    assert sum(passes) < sum(of_hf) / 3


def test_a_continuation_that_the_model_would_choose_is_greedy() -> None:
    model, context = tiny_model("llama"), CONTEXTS[0]
    ids = torch.tensor([adapted().tok_encode(context)])
    chosen = model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
    text = " ".join(word_tokenizer().convert_ids_to_tokens(chosen.tolist()))
    pairs = [(context, f" {text}"), (context, f" {text} w1"), (context, " w1")]
    scores = score(adapted(), pairs)
    assert [is_greedy for _, is_greedy in scores] == [True, False, False]
    assert agrees(scores, score(hf(), pairs))


def test_too_long_contexts_lose_their_first_tokens_as_in_hf(caplog: pytest.LogCaptureFixture) -> None:
    scores = score(adapted(max_length=60))
    assert "12 of 12 contexts lost their first tokens: at most 60 fit." in caplog.messages
    assert agrees(scores, score(hf(max_length=60)))
    assert not agrees(score(adapted(max_length=60)), score(hf()))


def test_an_empty_context_is_the_prefix_token_as_in_hf() -> None:
    pairs = [("", "w1 w2"), ("w3", " w4"), ("w1", "<s>")]
    assert agrees(score(adapted(), pairs), score(hf(), pairs))


@pytest.mark.parametrize("chunk", [None, 1])
def test_scores_with_a_small_cache_are_those_of_score(chunk: int | None) -> None:
    arguments: dict[str, Any] = {"tokenizer": word_tokenizer(), "chunk": chunk, **INT2}
    groups = kvlayers_lab.score(tiny_model("llama"), CONTEXTS[:2], [CHOICES_OF_EACH] * 2, **arguments)
    expected = [(each.logprob, each.is_greedy) for group in groups for each in group]
    assert agrees(score(adapted(**INT2, chunk=chunk, batch_size=4), PAIRS[:6]), expected)
    assert not agrees(expected, score(hf(), PAIRS[:6]))
    # Whatever else is scored.
    assert agrees([score(adapted(**INT2, chunk=chunk), [pair])[0] for pair in PAIRS[3:6]], expected[3:6])


@pytest.mark.parametrize("batch_size", [1, 3, "auto"])
def test_rolling_scores_are_those_of_hf(batch_size: int | str) -> None:
    texts = instances("loglikelihood_rolling", [(random_text(words, seed=words),) for words in (5, 90, 33)])
    expected = hf(max_length=32).loglikelihood_rolling(texts, disable_tqdm=True)
    model = adapted(max_length=32, batch_size=batch_size)
    assert model.loglikelihood_rolling(texts, disable_tqdm=True) == pytest.approx(expected, abs=1e-4)


def generate(model: Any, contexts: list[str], **options: Any) -> list[str]:
    options = {"until": ["."], "max_gen_toks": 12, "do_sample": False, **options}
    requests = instances("generate_until", [(context, options) for context in contexts])
    texts: list[str] = model.generate_until(requests, disable_tqdm=True)
    return texts


@pytest.mark.parametrize("batch_size", [1, 3])
def test_texts_with_an_exact_cache_are_those_of_hf_and_shared_prompts_are_computed_once(batch_size: int) -> None:
    expected = generate(hf(batch_size=batch_size), CONTEXTS)
    assert len(set(expected)) > 1
    tokens = {}
    for store in ("auto", 0, None, "1MiB"):
        model = adapted(batch_size=batch_size, prefix_store=store)
        with tokens_passed(tiny_model("llama")) as passes:
            assert generate(model, CONTEXTS) == expected
        tokens[store] = sum(passes)
    assert tokens["auto"] == tokens["1MiB"] < tokens[0] / 2
    assert tokens[0] == tokens[None]


def test_drafts_are_for_batches_too() -> None:
    plain = generate(hf(), CONTEXTS)
    with passes_of(tiny_model("llama")) as passes:
        assert generate(adapted(batch_size=4), CONTEXTS, prompt_lookup_num_tokens=2) == plain
    assert max(rows * tokens for rows, tokens in passes) > len(CONTEXTS)


def test_what_rows_cannot_do_generate_does() -> None:
    assert generate(adapted(batch_size=4), CONTEXTS, num_beams=2) == generate(hf(batch_size=4), CONTEXTS, num_beams=2)
    # A cache that rounds gets each prompt alone.
    alone = [generate(adapted(**INT2), [context], num_beams=2)[0] for context in CONTEXTS]
    assert generate(adapted(**INT2, batch_size=4), CONTEXTS, num_beams=2) == alone


def test_thoughts_are_left_out_as_in_hf() -> None:
    models = [hf(), adapted(batch_size=4)]
    ids = models[0].tok_encode(generate(models[0], CONTEXTS)[0])
    for end in (ids[2], word_tokenizer().decode(ids[2])):
        for model in models:
            model.think_end_token = end
        expected, texts = (generate(model, CONTEXTS) for model in models)
        assert texts == expected


@pytest.mark.parametrize("chunk", [None, 16])
def test_texts_with_a_small_cache_are_those_of_its_own_calls_of_generate(chunk: int | None) -> None:
    options = INT2["cache_config"]
    expected = []
    for context in CONTEXTS:
        ids = torch.tensor([adapted().tok_encode(context)])
        output = kvlayers.generate(
            *(tiny_model("llama"), ids),
            cache_implementation="int2",
            cache_config=options,
            prefill_chunk_size=chunk,
            max_new_tokens=12,
            do_sample=False,
        )
        expected.append(word_tokenizer().decode(output[0, ids.shape[1] :]).split(".")[0].rstrip())
    # One batch, and prompts of different lengths, which are not padded: padding would be rounded with them.
    texts = generate(adapted(**INT2, chunk=chunk, batch_size=4), CONTEXTS)
    assert [text.rstrip() for text in texts] == expected
    assert texts != generate(hf(), CONTEXTS)


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = score(adapted())
    monkeypatch.setattr(harness_model, "RECORDED_TOGETHER", 3)
    original, calls = harness_model.score_tokens, []

    def score_two_parts(model: Any, requests: Any, *args: Any, **arguments: Any) -> Any:
        calls.append(len(requests))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(model, requests, *args, **arguments)

    monkeypatch.setattr(harness_model, "score_tokens", score_two_parts)
    recorded = CachingLM(adapted(), str(tmp_path / "answers.db"))
    with pytest.raises(KeyboardInterrupt):
        recorded.loglikelihood(instances("loglikelihood", PAIRS))
    answers = recorded.loglikelihood(instances("loglikelihood", PAIRS))
    assert agrees([tuple(answer) for answer in answers], expected)
    assert calls == [3, 3, 3, 3, 3]
    assert recorded.loglikelihood(instances("loglikelihood", PAIRS)) == answers
    assert len(calls) == 5


def test_a_batch_size_of_auto_is_not_probed() -> None:
    with passes_of(tiny_model("llama")) as passes:
        assert agrees(score(adapted(batch_size="auto")), score(adapted(batch_size=16)))
        assert generate(adapted(batch_size="auto"), CONTEXTS) == generate(adapted(batch_size=4), CONTEXTS)
    assert max(rows * tokens for rows, tokens in passes) <= 4 * 200


def test_models_tuned_by_lora_are_scored_and_those_with_virtual_tokens_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(fresh_model("llama"), lora).eval()
    scores = [score(kind(tuned, tokenizer=word_tokenizer())) for kind in (KVLayersLM, HFLM)]
    assert agrees(*scores)
    assert not agrees(scores[0], score(hf()))
    prompt_tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    tuned = peft.get_peft_model(fresh_model("llama"), prompt_tuning)
    with pytest.raises(kvlayers.OptionError, match="virtual tokens, got .*PROMPT_TUNING"):
        KVLayersLM(tuned, tokenizer=word_tokenizer())
    tuned.save_pretrained(tmp_path)
    with pytest.raises(kvlayers.OptionError, match="virtual tokens"):
        KVLayersLM("no model", tokenizer=word_tokenizer(), peft=str(tmp_path))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("harness") / "model", "llama")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"cache": "in4"}, kvlayers.errors.RegistryError, "unknown cache name 'in4': did you mean 'int4'"),
        ({"cache": 4}, kvlayers.OptionError, "`cache` must be the name of a cache here, such as 'int4', got "),
        ({"cahce": "int4"}, kvlayers.OptionError, "`cahce` is not a model argument: did you mean 'cache'"),
        ({"max_lenght": 9}, kvlayers.OptionError, "did you mean 'max_length'"),
        ({"nbits": 4}, kvlayers.OptionError, "`nbits` is no model argument.*belong in `cache_config`"),
        ({"cache_implementation": "int4"}, kvlayers.OptionError, "`cache_implementation` is no model argument"),
        ({"cache_config": "4"}, kvlayers.OptionError, "`cache_config` must be options of the cache, got '4'"),
        ({"cache_config": "{nbits: 4}"}, kvlayers.OptionError, "`cache_config` must be options"),
        ({"cache_config": [4]}, kvlayers.OptionError, "`cache_config` must be options"),
        ({"cache": "int4", "cache_config": "nbit:4"}, kvlayers.OptionError, "`nbit`.*did you mean 'nbits'"),
        ({"cache": "int4", "cache_config": "nbits:2"}, kvlayers.OptionError, "`nbits` is 4.*got 2"),
        ({"chunk": 0}, kvlayers.OptionError, "`chunk` must be a whole number, at least 1, got 0"),
        ({"batch_size": 0}, kvlayers.OptionError, "`batch_size` must be a whole number, at least 1, or 'auto', got 0"),
        ({"batch_size": "-1"}, kvlayers.OptionError, "`batch_size` must be a whole number.*got '-1'"),
        ({"batch_size": "auto", "max_batch_size": 0}, kvlayers.OptionError, "`max_batch_size` must be.*got 0"),
        ({"prefix_store": "lots"}, kvlayers.OptionError, "`prefix_store` must be a number of bytes.*'lots'"),
        ({"prefix_store": 1.5}, kvlayers.OptionError, "`prefix_store` must be a number of bytes.*1.5"),
        ({"prefix_store": -1}, kvlayers.OptionError, "`prefix_store` must not be negative, got -1"),
        ({"prefix_store": "1GiB", "cache": "int4"}, kvlayers.OptionError, "needs an exact cache, got cache='int4'"),
    ],
)
def test_wrong_arguments_raise_before_weights_are_loaded(
    directory: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], error: type, words: str
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(transformers.PreTrainedModel, "_load_pretrained_model", load)
    with pytest.raises(error, match=words):
        KVLayersLM(str(directory), device="cpu", **arguments)


def test_arguments_of_transformers_are_passed_on(directory: Path) -> None:
    model = KVLayersLM(str(directory), device="cpu", attn_implementation="eager", dtype="bfloat16", cache="int4")
    assert (model.model.config._attn_implementation, model.model.dtype) == ("eager", torch.bfloat16)


def test_a_model_with_an_encoder_is_refused(tmp_path: Path) -> None:
    save_with_tokenizer(tmp_path, fresh_model("t5"))
    with pytest.raises(kvlayers.errors.ConfigError, match="models without an encoder, got t5: use 'hf'"):
        KVLayersLM(str(tmp_path), device="cpu")


def test_the_readable_form_of_options_survives_what_the_harness_does_to_arguments() -> None:
    model = KVLayersLM.create_from_arg_string(
        "cache=quantized,cache_config=nbits:2+backend:hqq+residual_length:64,chunk=16,prefix_store=0",
        {"pretrained": tiny_model("llama"), "tokenizer": word_tokenizer()},
    )
    options = {"nbits": 2, "backend": "hqq", "residual_length": 64}
    info = model.get_model_info()
    assert (info["cache"], info["chunk"], info["cache_config"]) == ("quantized", 16, options)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (("w1 w2", ""), "at least one token, got '' behind a context that ends with 'w1 w2'"),
        (("", ""), "at least one token"),
        ((" ", "w1"), "a context must be empty or have a token of its own, got ' '"),
        (("", "<s>"), "at least one token, got '<s>'"),
        (("w1", " w2" * 40), "at most the 32 tokens of the model's context, got 40"),
    ],
)
def test_continuations_that_cannot_be_scored_raise_before_anything_is_computed(
    pair: tuple[str, str], words: str
) -> None:
    model = adapted(max_length=32)
    with passes_of(tiny_model("llama")) as passes, pytest.raises(kvlayers.OptionError, match=words):
        score(model, [("w1", " w2"), pair])
    assert passes == []


BEFORE = f"{fresh_process.BEFORE}; import lm_eval.__main__, lm_eval.models.huggingface, torch.utils.collect_env"
"""What takes seconds, once for all commands."""

COMMAND = """
import functools, sys
import lm_eval.tasks, torch.utils.collect_env

# The facts about the machine take seconds, and the index of the harness's own tasks ten.
torch.utils.collect_env.get_pretty_env_info = str
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
from kvlayers.__main__ import main

sys.argv = ["kvlayers", "lm-eval", *{arguments}]
main()
"""


NEEDLE = ("--tasks", "kvlayers_needle", "--metadata", '{"lengths": [200], "depths": [50]}', "--device", "cpu")


def ran(*arguments: str) -> str:
    """What the command prints, which must end with 0."""
    ended = fresh_process.run(COMMAND.format(arguments=arguments), BEFORE)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return str(ended.stdout)


@pytest.mark.slow
def test_the_command_runs_the_harness_and_its_results_name_the_cache(directory: Path, tmp_path: Path) -> None:
    model_args = f"pretrained={directory},cache=int4,cache_config=residual_length:64,chunk=16"
    output = str(tmp_path / "results.json")
    shown = ran("run", "--model", "kvlayers", *NEEDLE, "--model_args", model_args, "--output_path", output)
    assert "kvlayers_needle" in shown
    [path] = tmp_path.rglob("*.json")
    config = json.loads(path.read_text())["config"]
    assert (config["model"], config["cache"], config["chunk"]) == ("kvlayers", "int4", 16)
    assert (config["cache_config"], config["kvlayers_version"]) == ({"residual_length": 64}, kvlayers.__version__)
    assert config["torch_seed"] is not None


@pytest.mark.slow
def test_under_the_command_the_model_hf_generates_with_the_cache_that_is_named(directory: Path) -> None:
    model_args = ("--model_args", f"pretrained={directory}", "--gen_kwargs", "cache_implementation=int4")
    assert "kvlayers_needle" in ran("--model", "hf", *NEEDLE, "--include_path", str(HARNESS_TASKS), *model_args)


# The tasks of kvlayers


def test_the_tasks_are_those_of_kvlayers_and_a_cache_changes_their_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", str)
    directory, text = save_sharp_model(tmp_path / "model", queries=8, max_position_embeddings=512), random_text(600)
    (tmp_path / "text.txt").write_text(text)
    asked = {"lengths": [400], "depths": [0, 50], "samples": 1, "seed": 3, "text": str(tmp_path / "text.txt")}
    names = [f"kvlayers_{name}" for name in task_names()]
    said: list[list[Any]] = []
    for arguments in ({}, {**INT2, "chunk": 32}):
        found = lm_eval.simple_evaluate(
            "kvlayers",
            model_args={"pretrained": str(directory), **arguments},
            tasks=["kvlayers_long_context"],
            task_manager=TaskManager(
                include_path=str(HARNESS_TASKS),
                include_defaults=False,
                metadata={"pretrained": str(directory), **asked},
            ),
            device="cpu",
            bootstrap_iters=0,
        )
        assert {*names, "kvlayers_long_context"} == found["results"].keys()
        assert all(0 <= each["score,none"] <= 1 for each in found["results"].values())
        assert all("score_stderr,none" in found["results"][name] for name in names)
        said.append([each["resps"] for name in names for each in found["samples"][name]])
    assert said[0] != said[1]
    tokenizer = word_tokenizer()
    samples = samples_of(["keys"], [400], [0, 0.5], 1, 3, tokenizer, text)
    documents = [each["doc"] for each in found["samples"]["kvlayers_keys"]]
    assert [each["prompt"] for each in documents] == [
        tokenizer.decode(each.context_ids + each.question_ids, skip_special_tokens=True) for each in samples
    ]
    assert [tuple(each["expected"]) for each in documents] == [each.answers for each in samples]


def test_a_model_without_a_name_needs_the_name_of_a_tokenizer() -> None:
    manager = TaskManager(include_path=str(HARNESS_TASKS), include_defaults=False)
    with pytest.raises(
        kvlayers.OptionError, match="`tokenizer` must be the name or the directory of a tokenizer, got None"
    ):
        manager.load(["kvlayers_needle"])
