"""Samples of tasks through several caches: how they are read, what comes of failures, and the file of results."""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import kvlayers
import versions
from families import any_model_and_inputs
from kvlayers.errors import CapacityError, OptionError
from kvlayers.generation.cache_by_name import named_cache
from kvlayers_lab.measuring import contenders as contenders_module
from kvlayers_lab.measuring.contenders import Contender, against_contenders, is_installed, named_contender
from kvlayers_lab.measuring.run_file import ResultsFile, ResultsFileError, identity_of
from kvlayers_lab.measuring.scoring import newest_logits
from kvlayers_lab.tasks.contract import TaskSample
from kvlayers_lab.tasks.runner import (
    QueriesNeededError,
    SampleReader,
    TaskError,
    context_states,
    has_only_keys_and_values,
    replay,
    run_tasks,
)
from kvlayers_lab.tasks.summary import TaskFigures, TaskOutcome, summarize
from models import fresh_model, passes_of, prompt, tiny_model

CONTEXT, QUESTION = 192, 7
LENGTH = 256
"""The most tokens that a cache holds."""


class Words:
    """A tokenizer that has a line break every few token ids, so that random models end their answers."""

    eos_token_id = 5

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return " ".join("\n" if token % 11 == 0 else f"w{token}" for token in token_ids)


def ids(tokens: int, seed: int) -> tuple[int, ...]:
    return tuple(prompt(1, tokens, seed)[0].tolist())


def sample(index: int = 0, length: int = CONTEXT, **changes: Any) -> TaskSample:
    made = TaskSample(
        task="needle",
        length=length,
        depth=0.5,
        index=index,
        context_ids=ids(length, 3 * index),
        question_ids=ids(QUESTION, 3 * index + 1),
        answers=(f"w{index}",),
        answer_ids=ids(4, 3 * index + 2),
        max_answer_tokens=9,
    )
    return dataclasses.replace(made, **changes)


def named(model: Any, *names: str, length: int = LENGTH) -> list[Contender]:
    return [named_contender(name, model, length) for name in names]


def run(
    model: Any,
    samples: Sequence[TaskSample],
    caches: Sequence[Contender],
    chunk: int | None = None,
    question_chunk: int | None = None,
    **options: Any,
) -> list[TaskOutcome]:
    options = {"tokenizer": Words(), "done": None, "tick": lambda what: None, **options}
    return run_tasks(
        samples=samples,
        contenders=caches,
        read_of=lambda sample: SampleReader(model, sample, chunk, question_chunk).read,
        **options,
    )


# A slow loop: a cache for each thing that is asked, and no pass is shared.


def slow_read(model: Any, cache: Any, token_ids: Sequence[int], chunk: int | None) -> Tensor:
    size = chunk or len(token_ids)
    for start in range(0, len(token_ids), size):
        logits = newest_logits(model, torch.tensor([token_ids[start : start + size]]), cache, 1)[0]
    return logits


def slow_prompt(model: Any, cache: Any, asked: TaskSample, chunk: int | None) -> Tensor:
    slow_read(model, cache, asked.context_ids, chunk)
    scans_from_zero = model.config.model_type in ("mamba", "jamba")
    return slow_read(model, cache, asked.question_ids, 1 if scans_from_zero else chunk)


def slow_answer(model: Any, cache: Any, asked: TaskSample, chunk: int | None) -> str:
    logits, tokens = slow_prompt(model, cache, asked, chunk), []
    for _ in range(asked.max_answer_tokens):
        token = int(logits.argmax())
        if token == Words.eos_token_id:
            break
        tokens.append(token)
        logits = slow_read(model, cache, [token], None)
    lines = [line.strip() for line in Words().decode(tokens).split("\n")]
    return next((line for line in lines if line), "")


def slow_logprob(model: Any, cache: Any, asked: TaskSample, chunk: int | None) -> float:
    logits, total = slow_prompt(model, cache, asked, chunk), 0.0
    for token in asked.answer_ids:
        total += float(logits.double().log_softmax(-1)[token])
        logits = slow_read(model, cache, [token], None)
    return total / len(asked.answer_ids)


def asked_variously(model: Any) -> list[TaskSample]:
    """Samples whose right answers part from what the model says at once, later, and never."""
    greedy: list[int] = []
    cache = kvlayers.DynamicCache(config=model.config)
    logits = slow_prompt(model, cache, sample(), None)
    for _ in range(4):
        greedy.append(int(logits.argmax()))
        logits = slow_read(model, cache, greedy[-1:], None)
    other = (greedy[2] + 1) % 97
    return [
        sample(answer_ids=tuple(greedy)),
        sample(1),
        sample(answer_ids=(*greedy[:2], other, *greedy[3:])),
        sample(answer_ids=(*greedy[:3], other)),
    ]


CACHES = ("dynamic", "static", "int4", "int2", "sink", "offloaded", "transformers:dynamic", "transformers:static")


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        *((name, None) for name in CACHES),
        *((name, 48) for name in ("dynamic", "static", "int4", "sink")),
        *(
            pytest.param(name, chunk, marks=pytest.mark.skipif(not is_installed(package), reason=f"no {package} here"))
            for name, chunk, package in (("transformers:quanto:2", None, "quanto"), ("transformers:hqq", 48, "hqq"))
        ),
    ],
)
def test_outcomes_are_those_of_a_plain_loop(name: str, chunk: int | None) -> None:
    if name == "transformers:hqq":
        versions.need_since("5.23", "hqq of a head_dim of 8")
    model = tiny_model("llama")
    reference, contender = named(model, "dynamic", name)
    caches = [reference] if name == "dynamic" else [reference, contender]
    for asked in asked_variously(model):
        outcome = run(model, [asked], caches, chunk=chunk)[-1]
        assert outcome.failure is None
        assert outcome.cache == contender.name
        assert outcome.answer == slow_answer(model, contender.make(), asked, chunk)
        # A copy of a cache may add the same products in another order.
        assert outcome.logprob == pytest.approx(slow_logprob(model, contender.make(), asked, chunk), abs=1e-4)


class TwoTokenLines(Words):
    """A tokenizer of which two tokens are a line."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "\n" + "".join(f"w{token}\n" if index % 2 else f"w{token} " for index, token in enumerate(token_ids))


class OneLine(Words):
    """A tokenizer that has no line break."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return " ".join(f"w{token}" for token in token_ids)


def test_an_answer_ends_with_its_line_or_a_token_that_ends_texts_or_the_most_tokens() -> None:
    model = fresh_model("llama")
    greedy = asked_variously(model)[0].answer_ids
    assert len(set(greedy)) == 4

    def answered(tokenizer: Any, **changes: Any) -> tuple[str, int]:
        asked = {"answer_ids": ((greedy[0] + 1) % 97,), "max_answer_tokens": 3, **changes}
        with passes_of(model) as passes:
            [found] = run(model, [sample(**asked)], named(model, "dynamic"), tokenizer=tokenizer)
        return found.answer, passes.count((1, 1))

    words, plain = [f"w{token}" for token in greedy], OneLine()
    assert answered(plain) == (" ".join(words[:3]), 2)
    assert answered(plain, max_answer_tokens=1, answer_ids=greedy) == (words[0], 3)
    assert answered(TwoTokenLines()) == (" ".join(words[:2]), 1)
    plain.eos_token_id = greedy[1]
    assert answered(plain) == (words[0], 1)
    plain.eos_token_id = None  # type: ignore[assignment]
    model.generation_config.eos_token_id = [96, greedy[0]]
    assert answered(plain) == ("", 0)


@pytest.mark.parametrize("family", ["mamba", "jamba", "lfm2", "deepseek_v32", "gemma4"])
def test_models_with_other_states_read_for_each_cache(family: str) -> None:
    versions.need_recurrent_layers(family)
    if family == "gemma4":
        versions.need_since("5.23", "states of gemma4 beside keys and values")
    model = tiny_model(family) if family in ("mamba", "jamba") else any_model_and_inputs(family)[0]
    assert not has_only_keys_and_values(model)
    asked, caches = sample(length=40), named(model, "dynamic", "transformers:dynamic")
    with passes_of(model) as passes:
        outcomes = run(model, [asked], caches)
    assert passes.count((1, 40)) == 2
    assert [outcome.answer for outcome in outcomes] == [slow_answer(model, each.make(), asked, None) for each in caches]


# Reading


REPLAYED = ("dynamic", "static", "hybrid", "int8", "int4", "int2", "fp8", "offloaded", "offloaded_static")
REPLAYED_IF_POSSIBLE = ("sink", "sliding_window", "transformers:quanto", "transformers:quanto:2", "transformers:hqq")


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gpt2", "llama4", "deepseek_v3"])
def test_given_states_are_as_good_as_reading(family: str) -> None:
    """To the last bit, for the question and for a token behind it."""
    model = tiny_model(family)
    assert has_only_keys_and_values(model)
    asked, states = sample(), context_states(model, sample().context_ids)
    compared = []
    for name in (*REPLAYED, *REPLAYED_IF_POSSIBLE, "transformers:dynamic"):
        try:
            [contender] = named(model, name)
            contender.make()
        except kvlayers.KVLayersError:
            assert name in REPLAYED_IF_POSSIBLE
            continue
        assert replay(states, contender.make()), name
        read, given = contender.make(), SampleReader(model, asked, None).read(contender)
        expected = slow_prompt(model, read, asked, None)
        assert torch.equal(given.logits, expected), name
        given.append([7])
        assert torch.equal(given.logits, slow_read(model, read, [7], None)), name
        compared.append(name)
    assert set(REPLAYED) < set(compared)


class OtherPackage(tf.DynamicCache):
    """A cache that could look at anything."""


class Halving(kvlayers.DynamicCache):
    """Attends to other states than it is given, from the first pass on."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(*args, **kwargs)
        return keys, values / 2


def of_class(cache_class: Any, model: Any, *args: Any) -> Contender:
    return Contender("package", cache_class.__name__, lambda: cache_class(*args, config=model.config))


def test_a_context_is_read_once_for_all_caches_that_can_be_given_its_states() -> None:
    model = fresh_model("llama")
    caches = named(model, "dynamic", "int4", "static", "sink", "offloaded", "transformers:dynamic")
    others = [*named(model, "transformers:static"), of_class(OtherPackage, model)]
    with passes_of(model) as passes:
        run(model, [sample()], caches)
        assert passes.count((1, CONTEXT)) == 1
        run(model, [sample()], [*caches, *others])
        assert passes.count((1, CONTEXT)) == 1 + 3
        run(model, [sample()], caches, chunk=CONTEXT // 2)
        assert passes.count((1, CONTEXT // 2)) == 2 * len(caches)


def test_a_cache_that_changes_the_first_pass_reads_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    contender = of_class(Halving, model)
    monkeypatch.setattr(Halving, "__module__", "kvlayers.made_up")
    assert not replay(context_states(model, sample().context_ids), contender.make())
    outcome = run(model, [sample()], [*named(model, "dynamic"), contender])[-1]
    assert outcome.answer == slow_answer(model, contender.make(), sample(), None)


class LayerOfOtherPackage(kvlayers.DynamicLayer):
    """A layer that could look at anything."""


def test_a_cache_with_layers_of_another_package_or_of_another_model_reads_for_itself() -> None:
    model, larger = tiny_model("llama"), fresh_model("llama", num_hidden_layers=3)
    states = context_states(model, sample().context_ids)
    assert replay(states, kvlayers.Cache([kvlayers.DynamicLayer(), kvlayers.DynamicLayer()]))
    assert not replay(states, kvlayers.Cache([kvlayers.DynamicLayer(), LayerOfOtherPackage()]))
    assert not replay(states, kvlayers.DynamicCache(config=larger.config))
    one_more = dataclasses.replace(states, states=[*states.states, (None, None)])
    assert not replay(one_more, kvlayers.DynamicCache(config=larger.config))


OPTIONS_OF_EVICTION = "keep=0.4,recent_tokens=16,sink_tokens=2"
FORGETTING = (
    f"knorm:{OPTIONS_OF_EVICTION}",
    f"snapkv:{OPTIONS_OF_EVICTION}",
    f"snapkv:{OPTIONS_OF_EVICTION},per_head=false",
    f"expected_attention:{OPTIONS_OF_EVICTION}",
    f"h2o:{OPTIONS_OF_EVICTION}",
    f"tova:{OPTIONS_OF_EVICTION}",
    f"random:{OPTIONS_OF_EVICTION}",
    "recall:recall.pages=1,recall.page_tokens=8,recall.recent_tokens=8",
)


@pytest.mark.parametrize(
    ("family", "attention"), [("llama", "sdpa"), ("gemma3", "sdpa"), ("gpt2", "sdpa"), ("llama", "eager")]
)
def test_caches_that_evict_are_given_contexts_as_if_they_had_read_them(family: str, attention: str) -> None:
    """To the last bit, for the question and for a token behind it. The context is read twice for all of them."""
    model, asked = fresh_model(family), sample()
    model.set_attn_implementation(attention)
    for name in FORGETTING:
        [contender] = named(model, name)
        read, given = contender.make(), SampleReader(model, asked, None).read(contender)
        assert given.cache.get_seq_length() == CONTEXT + QUESTION
        assert torch.equal(given.logits, slow_prompt(model, read, asked, None)), name
        given.append([7])
        assert torch.equal(given.logits, slow_read(model, read, [7], None)), name
        assert given.cache.nbytes == read.nbytes, name
    with passes_of(model) as passes:
        outcomes = run(model, [asked], named(model, "dynamic", *FORGETTING))
    assert passes.count((1, CONTEXT)) == 2
    assert [each.failure for each in outcomes] == [None] * len(outcomes)
    assert len({each.logprob for each in outcomes}) > len(FORGETTING) // 2
    with pytest.raises(QueriesNeededError):
        replay(context_states(model, asked.context_ids), named(model, FORGETTING[1])[0].make())


class LatterHalf(kvlayers.DynamicLayer):
    """Lets a single query attend to the newest half of the tokens."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(*args, **kwargs)
        single = args[0].shape[2] == 1
        return (keys[:, :, self.length // 2 :], values[:, :, self.length // 2 :]) if single else (keys, values)


def test_the_question_is_read_in_pieces_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatterHalf, "__module__", "kvlayers.made_up")
    model = fresh_model("llama")
    halves = Contender("package", "halves", lambda: kvlayers.Cache([LatterHalf() for _ in range(2)]))
    caches = [*named(model, "dynamic"), halves]
    with passes_of(model) as passes:
        exact, found = run(model, [sample()], caches, question_chunk=1)
    assert passes.count((1, CONTEXT)) == 1
    assert passes.count((1, QUESTION)) == 0
    expected = slow_read(model, cache := halves.make(), sample().context_ids, None)
    for token in sample().question_ids:
        expected = slow_read(model, cache, [token], None)
    assert torch.equal(SampleReader(model, sample(), None, 1).read(halves).logits, expected)
    at_once = run(model, [sample()], caches)
    assert found.logprob != pytest.approx(at_once[1].logprob)
    assert exact.logprob == pytest.approx(at_once[0].logprob, abs=1e-5)


class Uncopyable(tf.DynamicCache):
    """Reads again, as it cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("holds a stream")


@pytest.mark.parametrize(("name", "reads"), [("transformers:quanto", 1), (None, 2)], ids=["a copy", "no copy"])
def test_a_cache_that_can_be_copied_reads_once(name: str | None, reads: int) -> None:
    model = fresh_model("llama")
    if name is not None:
        pytest.importorskip("optimum.quanto")
    asked, [contender] = asked_variously(model)[2], named(model, name) if name else [of_class(Uncopyable, model)]
    with passes_of(model) as passes:
        outcome = run(model, [asked], [*named(model, "dynamic"), contender], chunk=CONTEXT)[-1]
    assert passes.count((1, CONTEXT)) == 1 + reads
    assert outcome.logprob == pytest.approx(slow_logprob(model, contender.make(), asked, CONTEXT), abs=1e-5)


# Failures


class Full(kvlayers.DynamicCache):
    """Has room for few tokens."""

    error: Exception = CapacityError("no more\nthan 100")

    def update(self, key_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if key_states.shape[2] > 100:
            raise self.error
        return super().update(key_states, *args, **kwargs)


class Broken(Full):
    """Fails at long passes, but not for want of room."""

    error = RuntimeError("broken")


class Undefined(kvlayers.DynamicCache):
    """Has values that are no numbers."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(*args, **kwargs)
        return keys, values * math.nan


def test_a_failure_is_one_line_and_only_want_of_room_ends_a_cache() -> None:
    model = fresh_model("llama")
    samples = [sample(index, length) for index, length in enumerate((40, 120, 120, 160))]
    caches = [*named(model, "dynamic"), *(of_class(kind, model) for kind in (Full, Broken, Undefined))]
    with passes_of(model) as passes:
        outcomes = run(model, samples, caches)
    _, full, broken, undefined = ([each for each in outcomes if each.cache == cache.name] for cache in caches)
    assert [each.failure for each in full] == [None, *["CapacityError: no more than 100"] * 3]
    assert [each.failure for each in broken] == [None, *["RuntimeError: broken"] * 3]
    assert all(
        each.failure == "FloatingPointError: the mean log-probability of a right answer is nan" for each in undefined
    )
    assert (full[1].score, full[1].logprob, full[1].answer) == (None, None, "")
    # With every cache, but at a greater length not with the one that is known to be full.
    assert (passes.count((1, 120)), passes.count((1, 160))) == (2 * 4, 3)


def test_the_exact_cache_must_not_fail() -> None:
    model = tiny_model("llama")
    with pytest.raises(TaskError, match="task needle of 120 tokens with the exact cache .RuntimeError: broken.: check"):
        run(model, [sample(length=120)], [of_class(Broken, model)])


# Results files

IDENTITY = {"model": "tiny", "seed": 0, "chunk": None, "versions": {"torch": "2.0"}}


def outcomes_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def test_a_second_start_computes_only_what_is_missing(tmp_path: Path) -> None:
    model, path = fresh_model("llama"), tmp_path / "results.jsonl"
    identity = identity_of(model, "tiny", "text", {"seed": 0})
    caches, samples = named(model, "dynamic", "int4", "sink"), [sample(index) for index in range(3)]
    expected = run(model, samples, caches)
    ticks: list[str] = []
    done = ResultsFile(path, identity)
    assert run(model, samples[:2], caches[:2], done=done, tick=ticks.append) == expected[:2] + expected[3:5]
    assert ticks == [f"needle, {CONTEXT} tokens: {each.name}" for each in caches[:2]] * 2
    with passes_of(model) as passes:
        done = ResultsFile(path, identity)
        run(model, samples[:2], caches[:2], done=done)
        assert passes == []
        assert run(model, samples, caches, done=done) == expected
    # The first two with the cache that is new, and the third with all.
    assert passes.count((1, CONTEXT)) == 3
    assert [TaskOutcome(**each) for each in outcomes_in(path)] == [
        *expected[:2], *expected[3:5], expected[2], *expected[5:]
    ]  # fmt: skip


def test_a_failure_is_tried_again(tmp_path: Path) -> None:
    model = tiny_model("llama")
    caches = [*named(model, "dynamic"), of_class(Broken, model)]
    done = ResultsFile(tmp_path / "results", IDENTITY)
    assert run(model, [sample()], caches, done=done)[1].failure == "RuntimeError: broken"
    caches[1] = dataclasses.replace(caches[1], make=kvlayers.DynamicCache)
    for _ in range(2):
        done = ResultsFile(tmp_path / "results", IDENTITY)
        assert run(model, [sample()], caches, done=done)[1].failure is None
    assert [each["failure"] for each in outcomes_in(tmp_path / "results")] == [None, "RuntimeError: broken", None]


def outcome(index: int, cache: str = "exact", score: float | None = 1.0, **changes: Any) -> TaskOutcome:
    failure = "failed" if score is None else None
    made = TaskOutcome(cache, "needle", 100, 0.1, index, score, None if score is None else -0.25, "é\n", failure)
    return dataclasses.replace(made, **changes)


def test_a_file_that_was_cut_anywhere_goes_on_from_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "results"
    every = [outcome(index) for index in range(3)]
    done = ResultsFile(path, IDENTITY)
    for each in every:
        done.add(each)
    content = path.read_bytes()
    assert content.count(b"\n") == 4
    ends = [index for index, byte in enumerate(content) if byte == ord("\n")]
    for cut in {0, 1, *(end + beside for end in ends for beside in (-30, 0, 1, 2) if end + beside < len(content))}:
        path.write_bytes(content[:cut])
        done = ResultsFile(path, IDENTITY)
        whole = max(content[:cut].count(b"\n") - 1, 0)
        for index, each in enumerate(every):
            found = done.outcome("exact", sample(index, 100, depth=0.1))
            assert found == (each if index < whole else None)
            if found is None:
                done.add(each)
        assert path.read_bytes() == content


OUTCOME = dataclasses.asdict(TaskOutcome("exact", "needle", 256, 0.5, 0, 1.0, -0.5, "yes"))
NO_OUTCOMES: list[dict[str, Any]] = [
    {"cache": ["exact"]}, {"task": {}}, {"length": "256"}, {"length": [1]}, {"index": None}, {"depth": "0.5"},
    {"depth": 50}, {"score": "1"}, {"score": math.nan}, {"score": 2}, {"score": None}, {"score": True},
    {"logprob": None}, {"logprob": -math.inf}, {"logprob": "x"}, {"answer": None}, {"failure": 3},
    {"failure": "it failed"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "changes", "words"),
    [
        ("HEADER", {"seed": 1}, r"is of another run, with seed 0 \(now 1\): name another file"),
        ("HEADER", {"versions": {"torch": "2.1"}}, r"versions.torch 2.0 \(now 2.1\)"),
        ("HEADER", {"seed": 1, "chunk": 8}, r"seed 0 \(now 1\), chunk None \(now 8\)"),
        ("My notes", {}, "it does not begin as such a file"),
        ("My notes\n", {}, "line 1 is not JSON"),
        ('{"a": 1}\n', {}, "it does not begin as such a file"),
        ("[]\n", {}, "line 1 is no object"),
        ('{"format": "kvlayers task results", "version": 9, "run": {}}\n', {}, "version 9 of the format"),
        ('HEADER{"cache": "exact"}\n', {}, "line 2 is no outcome"),
        ("HEADER\x00\x00\n", {}, "line 2 is not JSON"),
        ("HEADER" + "[" * 100_000 + "\n", {}, "line 2 is not JSON"),
        *((f"HEADER{json.dumps(OUTCOME | wrong)}\n", {}, "line 2 is no outcome") for wrong in NO_OUTCOMES),
    ],
)
def test_other_files_are_refused_as_they_are(tmp_path: Path, content: str, changes: dict[str, Any], words: str) -> None:
    path = tmp_path / "results"
    ResultsFile(path, IDENTITY)
    header = path.read_text()
    path.write_text(f"{header}{json.dumps(OUTCOME)}\n")
    ResultsFile(path, IDENTITY)
    path.write_text(content.replace("HEADER", header))
    before = path.read_bytes()
    with pytest.raises(ResultsFileError, match=words):
        ResultsFile(path, IDENTITY | changes)
    assert path.read_bytes() == before


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "results"):
        with pytest.raises(ResultsFileError, match="`results`: .* cannot be read and written"):
            ResultsFile(path, IDENTITY)


def test_a_run_is_identified_by_weights_text_and_versions() -> None:
    model, other = fresh_model("llama"), fresh_model("llama", seed=1)
    one = identity_of(model, "tiny", "text", {"seed": 0})
    assert json.loads(json.dumps(one)) == one
    assert one["versions"].keys() >= {"kvlayers", "torch", "transformers"}
    assert identity_of(other, "tiny", "text", {})["weights"] != one["weights"]
    assert identity_of(model, "tiny", "texts", {})["text"] != one["text"]


# Summaries


def figures(cache: str, *values: Any) -> TaskFigures:
    """Those of all tasks, lengths and depths."""
    return TaskFigures(cache, None, None, None, *values)


def test_figures_by_hand() -> None:
    exact = [1.0, 1.0, 0.5, 0.0]
    lossy = [1.0, 0.0, 0.5, None]
    outcomes = [
        *(outcome(index, "exact", score, depth=index % 2) for index, score in enumerate(exact)),
        *(outcome(index, "int2", score, depth=index % 2) for index, score in enumerate(lossy)),
        outcome(0, "exact", 0.2, task="words", depth=None, length=200),
        outcome(0, "int2", 0.1, task="words", depth=None, length=200, answer="other", logprob=-1.0),
    ]
    summary = summarize(outcomes, "exact")
    assert summary.too_weak == (("words", 200),)
    # Of the four pairs, the losses are 0, 1, 0 and 0.1.
    spread = sum((loss - 0.275) ** 2 for loss in (0, 1, 0, 0.1)) / 3
    assert summary.overall == (
        figures("exact", 5, 0, pytest.approx(2.7 / 5), -0.25, 0, 0, 1),
        figures(
            *("int2", 4, 1, pytest.approx(1.6 / 4), pytest.approx((3 * -0.25 - 1) / 4)),
            *(pytest.approx(0.275), pytest.approx(math.sqrt(spread / 4)), 0.75),
        ),
    )
    comparable = summary.comparable[1]
    assert (comparable.samples, comparable.loss) == (3, pytest.approx(1 / 3))
    assert [(each.cache, each.task) for each in summary.by_task] == [
        (cache, task) for task in ("needle", "words") for cache in ("exact", "int2")
    ]
    at_one = [each for each in summary.by_depth if each.depth == 1 and each.cache == "int2"]
    assert [(each.samples, each.failed, each.score, each.loss, each.loss_error) for each in at_one] == [
        (1, 1, 0, 1, None)
    ]
    assert json.loads(json.dumps(summary.plain()))["overall"][1]["loss"] == pytest.approx(0.275)


def test_a_cache_that_always_fails_has_no_figures() -> None:
    summary = summarize([outcome(0), outcome(0, "int2", None)], "exact")
    assert summary.overall[1] == figures("int2", 0, 1, *[None] * 5)


# Contenders by name


@pytest.fixture
def in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("made_caches", "broken_caches"):
        sys.modules.pop(name, None)


def test_a_callable_of_the_current_directory_makes_caches(in_directory: Path) -> None:
    (in_directory / "made_caches.py").write_text(
        "import kvlayers, transformers\n"
        "class Makers:\n    small = staticmethod(lambda config: kvlayers.QuantizedCache(config=config, nbits=2))\n"
        "def dynamic(config): return transformers.DynamicCache(config=config)\n"
        "def wrong(config): return []\n"
    )
    model = tiny_model("llama")
    small, dynamic, wrong = named(model, "made_caches:Makers.small", "made_caches:dynamic", "made_caches:wrong")
    assert (small.name, small.generate_options, small.fidelity()) == ("made_caches:Makers.small", None, "rounded")
    outcomes = run(model, [sample()], [*named(model, "dynamic", "int2"), small, dynamic, wrong])
    assert dataclasses.replace(outcomes[2], cache="kvlayers int2") == outcomes[1]
    assert dataclasses.replace(outcomes[3], cache="kvlayers dynamic") == outcomes[0]
    assert "made_caches:wrong must return a cache of transformers, got a list" in str(outcomes[4].failure)
    with pytest.raises(kvlayers.errors.UnsupportedLayerError, match="made_caches:dynamic makes a DynamicCache"):
        dynamic.fidelity()


def test_a_name_has_options_behind_a_colon() -> None:
    model, options = tiny_model("llama"), {"window_length": 16, "num_sink_tokens": 2}
    short, plain, wrong = named(model, "sink:window_length=16,num_sink_tokens=2", "sink", "sink:keep=3")
    assert (short.make().window_length, short.make().num_sink_tokens) == (16, 2)
    assert short.name == "kvlayers sink:window_length=16,num_sink_tokens=2"
    assert short.generate_options == {"cache_implementation": "sink", "cache_config": options}
    assert plain.generate_options == {"cache_implementation": "sink"}
    with pytest.raises(OptionError, match="`keep` is no option of"):
        wrong.make()


@pytest.mark.parametrize(
    ("written", "options"),
    [
        ("keep=0.5,rule=snapkv", {"keep": 0.5, "rule": "snapkv"}),
        ("per_head=false,budget=null", {"per_head": False, "budget": None}),
        ("layers=[0.5,0.25],keep=1", {"layers": [0.5, 0.25], "keep": 1}),
        ("a.b.c=1,a.b.d=x,a.e=2", {"a": {"b": {"c": 1, "d": "x"}, "e": 2}}),
        ("length=4k", {"length": "4k"}),
    ],
)
def test_options_are_numbers_words_lists_and_options_of_options(written: str, options: dict[str, Any]) -> None:
    found = named_cache(f"sink:{written}")
    assert (found.name, found.options) == ("sink", options)


def test_a_callable_or_a_rule_may_be_in_a_file_and_have_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import kvlayers\n"
        "class Newest(kvlayers.eviction.EvictionRule):\n"
        "    def scores(self, keys, values, queries):\n"
        "        return keys.new_zeros(keys.shape[:3])\n"
        "newest = Newest()\n"
        "def made(config, nbits=4):\n"
        "    return kvlayers.QuantizedCache(config=config, nbits=nbits)\n"
    )
    model = tiny_model("llama")
    for name in ("mine.py:Newest:keep=0.25", f"{tmp_path}/mine.py:newest:keep=0.25", "mine:Newest:keep=0.25"):
        contender = named_contender(name, model, LENGTH)
        cache = contender.make()
        assert isinstance(cache, kvlayers.EvictingCache)
        assert (type(cache.rule).__name__, cache._options.keep) == ("Newest", 0.25)
        assert contender.fidelity() == "evicting"
    assert named_contender("mine.py:made:nbits=2", model, LENGTH).make().quantization.keys.nbits == 2
    for name, words in (("mine.py:Newest:kept=1", "kept"), ("mine.py:Oldest", "Oldest"), ("none.py:a", "none.py")):
        with pytest.raises(kvlayers.OptionError, match=words):
            named_contender(name, model, LENGTH).make()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sink:", "options behind the colon, as in sink:OPTION=VALUE"),
        ("sink:16", "options behind the colon, as in sink:OPTION=VALUE"),
        ("sink:a=1,a=2", "each option once, got 'a' twice"),
        ("sink:a=1,a.b=2", r"each option once, got 'a\.b' twice"),
        ("int5", r"got 'int5'\. Did you mean .*int4"),
        ("transformers:hqq:3", r"got 'transformers:hqq:3'\. Did you mean .*transformers:hqq:2"),
        (
            "nothing of the kind",
            r"\(package.module:callable, file.py:Rule\), got 'nothing of the kind'\. Known names are auto, ",
        ),
        ("", "got ''"),
        ("made_caches:", "got 'made_caches:'"),
        (":made", "can be imported, got ':made'"),
        (
            "no_such_package.caches:make",
            "got 'no_such_package.caches:make', ModuleNotFoundError .No module named 'no_s",
        ),
        ("json:no_such_name", "AttributeError"),
        ("json:__name__", "but json:__name__ is a str"),
        ("broken_caches:make", "RuntimeError .two lines."),
    ],
)
def test_names_that_stand_for_no_cache(in_directory: Path, name: str, words: str) -> None:
    (in_directory / "broken_caches.py").write_text("raise RuntimeError('two lines\\nof text')\n")
    with pytest.raises(OptionError, match=f"^`name` must (be|have) .*{words}") as error:
        named_contender(name, tiny_model("llama"), LENGTH)
    assert "\n" not in str(error.value)


@versions.windows_refuse_quantization
def test_caches_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders_module, "is_installed", lambda name: name != "quanto")
    model = tiny_model("llama")
    with pytest.raises(OptionError, match=r"`against` 'quanto' needs .*pip install \"\.\[quanto\]\""):
        against_contenders(["quanto"], model, LENGTH)
    found = against_contenders(["static", "transformers:static"], model, LENGTH)
    assert [each.name for each in found] == ["transformers static"]
    with pytest.raises(OptionError, match="transformers:hqq cannot make a cache for this model, ValueError"):
        against_contenders(["hqq"], tiny_model("mistral"), LENGTH)[0].make()


@versions.windows_refuse_quantization
@pytest.mark.skipif(not (is_installed("quanto") and is_installed("hqq")), reason="quanto or hqq is not installed")
def test_all_of_transformers_caches_are_those_that_the_model_supports() -> None:
    found = against_contenders(["transformers"], tiny_model("llama"), LENGTH)
    assert [each.cache for each in found] == ["quanto", "quanto:2", "hqq", "hqq:2"]
    assert against_contenders(["transformers"], tiny_model("mistral"), LENGTH) == []
