"""transformers' continuous batching under `install()`: answers are those of `generate()`, whatever else is asked."""

import asyncio
import contextlib
import functools
import gc
import inspect
import logging
import queue
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
import torch
import transformers

import families
import kvlayers
from kvlayers.batching import continuous_batching
from kvlayers.upstream import generate_calls, model_types
from matrix import once, some
from models import continued, fresh_model, prompt, tiny_model, under_install

pytestmark = pytest.mark.skipif(
    generate_calls.batching() is None,
    reason="this transformers gives continuous batching no config of its own",
)

PROMPTS = [prompt(1, tokens, tokens)[0].tolist() for tokens in (5, 12, 30, 7, 9, 22)]
NEW = 8


def config_of(**options: Any) -> transformers.GenerationConfig:
    return transformers.GenerationConfig(
        **{"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1, **options}
    )


def of_few_rows(rows: int, **options: Any) -> Any:
    if "max_requests_per_batch" not in inspect.signature(transformers.ContinuousBatchingConfig).parameters:
        pytest.skip("this transformers has no limit of rows in its ContinuousBatchingConfig")
    return transformers.ContinuousBatchingConfig(max_requests_per_batch=rows, **options)


def alone(model: Any, ids: list[int], **options: Any) -> list[int]:
    """What `generate()` answers."""
    output: torch.Tensor = under_install(continued, model, torch.tensor([ids]), NEW, **options)
    return output[0, len(ids) :].tolist()


@functools.cache
def expected() -> list[list[int]]:
    """The answers of a llama to `PROMPTS`."""
    return [alone(tiny_model("llama"), ids) for ids in PROMPTS]


def model_of(family: str) -> Any:
    return families.model_and_inputs(family)[0] if family in families.FAMILIES else fresh_model(family)


@pytest.fixture
def llama() -> Any:
    return fresh_model("llama")


def manager_of(model: Any, *configs: Any) -> Any:
    """A manager that has not been started."""
    with kvlayers.installed():
        return model.init_continuous_batching(*configs)


@pytest.fixture
def running(llama: Any) -> Iterator[Any]:
    """A manager that runs, with streamed outputs and few rows."""
    config = of_few_rows(2, max_batch_tokens=4)
    with (
        kvlayers.installed(),
        llama.continuous_batching_context_manager(config_of(), continuous_batching_config=config) as manager,
    ):
        yield manager


def wait_for(condition: Any, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


FAMILIES = (
    "llama", "gemma3", "qwen3", "mistral", "gpt2", "deepseek_v3", "mamba2", "jamba", "lfm2", "qwen3_next", "falcon_h1",
    "recurrent_gemma",
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "name"),
    once(FAMILIES, ["dynamic", "static", "int4", "sink:window_length=20", "offloaded", "fp8"], times=2),
)
def test_answers_are_those_of_generate_by_each_cache(family: str, name: str) -> None:
    model = model_of(family)
    with kvlayers.installed(cache=name):
        outputs = model.generate_batch(PROMPTS[:3], generation_config=config_of()).values()
        for output, ids in zip(outputs, map(torch.tensor, PROMPTS), strict=False):
            whole = model.generate(ids[None], attention_mask=torch.ones(1, len(ids)), generation_config=config_of())
            assert output.generated_tokens == whole[0, len(ids) :].tolist()
    assert all(output.error is None and output.status.name == "FINISHED" for output in outputs)
    assert [output.prompt_ids for output in outputs] == PROMPTS[:3]


@pytest.mark.parametrize("family", some(FAMILIES, ["llama", "gemma3", "deepseek_v3", "mamba2", "qwen3_next"]))
def test_an_answer_is_that_of_generate_whatever_others_ask_for(family: str) -> None:
    """Requests come at random moments, and some of them are given up, fail, or wait while the manager is paused."""
    model, chance = model_of(family), random.Random(family)
    config = of_few_rows(3, max_batch_tokens=4)
    expected = [alone(model, ids) for ids in PROMPTS]
    answered, failed, given_up = dict[str, int](), set[str](), list[str]()
    with (
        kvlayers.installed(),
        model.continuous_batching_context_manager(config_of(), continuous_batching_config=config) as manager,
    ):
        for _ in range(16):
            which, what = chance.randrange(len(PROMPTS)), chance.choice(("answer", "answer", "cancel", "fail", "pause"))
            if what == "cancel":
                given_up.append(
                    manager.add_request(PROMPTS[which], max_new_tokens=100, streaming=chance.random() < 0.5)
                )
            elif what == "fail":
                # Its processor raises when it first sees scores.
                failed.add(manager.add_request(PROMPTS[which], sequence_bias={(1000,): 1.0}))
            else:
                answered[manager.add_request(PROMPTS[which], streaming=what == "pause")] = which
            if what == "pause":
                with manager.pause():
                    pass
            if given_up and chance.random() < 0.5:
                manager.cancel_request(given_up.pop(0))
            time.sleep(chance.choice((0, 0, 0.002)))
        for name in given_up:
            manager.cancel_request(name)
        last = dict[str, Any]()
        # Before 5.17 a request that has failed does not say that it is finished.
        ended = answered.keys() | failed
        while {name for name, output in last.items() if output.is_finished() or output.error} < ended:
            output = manager.get_result(timeout=20)
            last[output.request_id] = output
        wait_for(lambda: not any(manager.metrics.values()))
        assert manager.background_thread_status.fatal_error is None
    assert {name: last[name].generated_tokens for name in answered} == {
        name: expected[which] for name, which in answered.items()
    }
    assert {last[name].status.name for name in failed} == {"FAILED"}


def test_what_a_request_inserts_belongs_to_the_session_of_its_caller(llama: Any) -> None:
    """The manager's thread reads the prompts of all callers."""
    store = kvlayers.PrefixStore()
    mine, others = store.session("mine"), store.session("others")
    prompts = [prompt(1, tokens, tokens)[0].tolist() for tokens in (20, 28, 36)]
    expected = [alone(llama, ids) for ids in prompts]
    with kvlayers.installed(prefix_store=store), llama.continuous_batching_context_manager(config_of()) as manager:
        with mine:
            names = [manager.add_request(prompts[0])]
        with others:
            names.append(manager.add_request(prompts[1]))
        names.append(manager.add_request(prompts[2]))
        found = {output.request_id: output for output in (manager.get_result(timeout=20) for _ in names)}
    assert [found[name].generated_tokens for name in names] == expected
    assert [mine.tokens, others.tokens] == [20, 28]


def test_requests_have_options_and_errors_of_their_own(running: Any, llama: Any) -> None:
    words = {"abcdef": 0, **{f"<{token}>": token for token in range(1, 97)}}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<1>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own)
    whole = expected()[0]
    ends = next(place for place in range(2, NEW) if whole[place] not in whole[:place])
    stop = {"stop_strings": [tokenizer.convert_ids_to_tokens(whole[ends])]}
    asked: list[tuple[list[int], dict[str, Any], list[int] | str]] = [
        (PROMPTS[0], {"max_new_tokens": 3}, whole[:3]),
        (PROMPTS[0], {"eos_token_id": whole[ends]}, whole[: ends + 1]),
        (PROMPTS[0], {**stop, "tokenizer": tokenizer}, whole[: ends + 1]),
        (PROMPTS[0], stop, "tokenizer"),
        (PROMPTS[1], {"repetition_penalty": 1.7}, alone(llama, PROMPTS[1], repetition_penalty=1.7)),
        (PROMPTS[2], {"no_such_option": 1}, "no_such_option"),
        ([5] * 256, {}, "256"),
        ([], {}, "must have 1 token at least"),
        *((ids, {}, answer) for ids, answer in zip(PROMPTS, expected(), strict=True)),
    ]
    names = [running.add_request(ids, **options) for ids, options, _ in asked]
    outputs = {output.request_id: output for output in (running.get_result(timeout=20) for _ in names)}
    for name, (_, _, wanted) in zip(names, asked, strict=True):
        if isinstance(wanted, str):
            assert wanted in outputs[name].error
            assert outputs[name].status.name == "FAILED"
        else:
            assert outputs[name].generated_tokens == wanted


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"max_length": len(PROMPTS[0])}, "max_new_tokens"),
        ({"num_beams": 2}, "beam_search"),
        ({"token_healing": True}, "token_healing"),
    ],
    ids=str,
)
def test_an_option_that_rows_do_not_have_fails_its_request_alone(
    options: dict[str, Any], words: str, llama: Any
) -> None:
    with (
        kvlayers.installed(),
        llama.continuous_batching_context_manager(config_of(max_new_tokens=None)) as manager,
    ):
        wrong = manager.add_request(PROMPTS[0], **options)
        other = manager.add_request(PROMPTS[1], max_length=len(PROMPTS[1]) + 3)
        outputs = {output.request_id: output for output in (manager.get_result(timeout=20) for _ in range(2))}
    assert words in outputs[wrong].error
    assert outputs[other].generated_tokens == expected()[1][:3]


def test_tokens_are_streamed_and_timed(running: Any, llama: Any) -> None:
    name = running.add_request(PROMPTS[2], streaming=True, record_timestamps=True)
    outputs = list(running.request_id_iter(name))
    assert [len(output.generated_tokens) for output in outputs] == [*range(1, NEW), NEW]
    assert outputs[-1].generated_tokens == expected()[2]
    assert [output.is_finished() for output in outputs] == [False] * (NEW - 1) + [True]
    assert (len(outputs[-1].timestamps), outputs[-1].timestamps) == (NEW, sorted(outputs[-1].timestamps))
    began, ended = outputs[-1].lifespan
    assert outputs[-1].created_time <= began <= ended


def test_log_probabilities_are_those_of_the_scores(llama: Any) -> None:
    keeping = transformers.ContinuousBatchingConfig(return_logprobs=True)
    outputs = under_install(
        llama.generate_batch, PROMPTS[:2], generation_config=config_of(), continuous_batching_config=keeping
    )
    for ids, output in zip(PROMPTS, outputs.values(), strict=False):
        whole = torch.tensor([[*ids, *output.generated_tokens]])
        logits = llama(whole).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        expected = logits.gather(-1, torch.tensor(output.generated_tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=1e-4)


def test_a_request_that_is_given_up_changes_no_other(running: Any, llama: Any) -> None:
    names = [running.add_request(ids, max_new_tokens=200) for ids in PROMPTS[:3]]
    others = [running.add_request(ids) for ids in PROMPTS[3:]]
    wait_for(lambda: running.metrics["decoding"])
    for name in (*names, "nobody"):
        running.cancel_request(name)
    outputs = {output.request_id: output for output in (running.get_result(timeout=20) for _ in others)}
    assert [outputs[name].generated_tokens for name in others] == expected()[3:]
    assert list(running.request_id_iter(names[0])) == []
    assert running.get_result(timeout=0.05) is None
    assert running.metrics == {"waiting": 0, "reading": 0, "decoding": 0}


def test_a_prompt_that_has_been_read_does_not_wait_until_it_joins(
    running: Any, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks while another prompt is read before the same step."""
    forward, seen = llama.forward, list[dict[str, int]]()

    def looked_at(*given: Any, **named: Any) -> Any:
        seen.append(running.metrics)
        return forward(*given, **named)

    monkeypatch.setattr(llama, "forward", looked_at)
    with running.pause():
        # Without rows that would wait, both are read before the first step.
        names = [running.add_request(ids[:4], max_new_tokens=2) for ids in PROMPTS[:2]]
    for name in names:
        running.get_result(name, timeout=20)
    assert seen[1] == {"waiting": 0, "reading": 1, "decoding": 1}


def test_whoever_gives_up_a_request_gives_up_its_copies(llama: Any) -> None:
    manager = manager_of(llama, config_of(num_return_sequences=3, do_sample=True))
    name = manager.add_request(PROMPTS[0])
    assert manager.metrics["waiting"] == 3
    manager.cancel_request(name)
    manager.start()
    manager.stop()
    assert manager.metrics == {"waiting": 0, "reading": 0, "decoding": 0}
    assert manager.get_result(timeout=0.05) is None


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_answer_without_an_end_ends_where_the_model_has_no_positions_left(family: str) -> None:
    """Positions of GPT-2 are learned, and there are none behind the last one."""
    model = model_of(family)
    positions = model_types.most_positions(model.config)
    with (
        kvlayers.installed(),
        model.continuous_batching_context_manager(config_of(max_new_tokens=None)) as manager,
    ):
        endless, longer = manager.add_request(PROMPTS[0]), manager.add_request(PROMPTS[1], max_new_tokens=positions)
        other = manager.add_request(PROMPTS[3], max_new_tokens=NEW)
        outputs = {output.request_id: output for output in (manager.get_result(timeout=60) for _ in range(3))}
        again = manager.add_request(PROMPTS[3], max_new_tokens=NEW)
        expected = alone(model, PROMPTS[3])
        assert [outputs[other].generated_tokens, manager.get_result(again, timeout=20).generated_tokens] == 2 * [
            expected
        ]
    assert len(outputs[endless].generated_tokens) == positions - len(PROMPTS[0])
    assert outputs[endless].error is None
    if family == "gpt2":
        assert "out of range" in outputs[longer].error
    else:
        assert len(outputs[longer].generated_tokens) == positions


def test_an_answer_of_a_model_that_counts_no_positions_is_as_long_behind_a_long_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("mamba2")
    assert model_types.most_positions(model.config) is None
    monkeypatch.setattr(continuous_batching, "CHUNK_TOKENS", 1)
    most = continuous_batching.MAX_ROWS
    with kvlayers.installed(), model.continuous_batching_context_manager(config_of(max_new_tokens=None)) as manager:
        manager.add_request(PROMPTS[0] * (1 + most // len(PROMPTS[0])))
        assert len(manager.get_result(timeout=60).generated_tokens) == most


def test_a_pass_that_fails_fails_all_and_is_told(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = manager_of(llama, config_of())
    monkeypatch.setattr(llama, "forward", lambda *_, **__: 1 / 0)
    manager.start()
    names = [manager.add_request(ids) for ids in PROMPTS]
    outputs = [manager.get_result(timeout=20) for _ in names]
    # Each prompt is read by itself, so each fails by itself.
    assert all("division by zero" in output.error for output in outputs)
    manager.stop()
    assert not manager.is_running()


def test_nothing_moves_in_a_pause_and_all_goes_on_after_it(running: Any, llama: Any) -> None:
    names = [running.add_request(ids, streaming=True) for ids in PROMPTS]
    last: dict[str, Any] = {}
    with running.pause():
        while (output := running.get_result(timeout=0.05)) is not None:
            last[output.request_id] = output
        assert running.get_result(timeout=0.2) is None
        with pytest.raises(RuntimeError, match="leave the block"):
            running.stop()
    while sum(output.is_finished() for output in last.values()) < len(names):
        output = running.get_result(timeout=20)
        last[output.request_id] = output
    assert [last[name].generated_tokens for name in names] == expected()


def test_pauses_of_several_threads_overlap(running: Any) -> None:
    name = running.add_request(PROMPTS[0], max_new_tokens=100)
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with running.pause():
            entered.set()
            leave.wait(20)

    thread = threading.Thread(target=hold)
    with running.pause():
        thread.start()
        assert entered.wait(20)
    assert running.get_result(name, timeout=0.2) is None
    leave.set()
    thread.join(20)
    assert len(running.get_result(name, timeout=20).generated_tokens) == 100


def test_who_is_interrupted_before_the_pause_holds_nothing_up(
    running: Any, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = running.background_thread_status
    with monkeypatch.context() as patched:
        patched.setattr(running, "is_running", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), running.pause():
            pass
    assert status.holders == []
    name = running.add_request(PROMPTS[0])
    assert running.get_result(name, timeout=20).generated_tokens == expected()[0]


def test_a_pause_of_a_thread_that_has_failed_says_why(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = manager_of(llama, config_of())
    error = RuntimeError("broken")
    monkeypatch.setattr(continuous_batching.RowEngine, "admit", lambda *_: (_ for _ in ()).throw(error))
    manager.start()
    wait_for(lambda: not manager.is_running())
    with pytest.raises(RuntimeError, match="call start") as raised, manager.pause():
        pass
    assert raised.value.__cause__ is error


def test_a_stop_waits_for_all_and_a_hard_stop_for_none(llama: Any) -> None:
    for is_hard in (False, True):
        manager = manager_of(llama, config_of())
        manager.start()
        names = [manager.add_request(ids, max_new_tokens=NEW if not is_hard else 230) for ids in PROMPTS[:2]]
        manager.stop(hard_stop=is_hard)
        outputs = [manager.get_result(timeout=0.1) for _ in names]
        assert {output.status.name for output in outputs} == {"FAILED" if is_hard else "FINISHED"}
        assert manager.add_request(PROMPTS[0]) is None
        with pytest.raises(RuntimeError, match="start"), manager.pause():
            pass


def test_outputs_are_handed_to_an_event_loop(running: Any, llama: Any) -> None:
    async def ask(ids: list[int]) -> list[int]:
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        name = f"mine-{len(ids)}"
        running.register_result_handler(name, outputs.put_nowait)
        running.add_request(ids, request_id=name, streaming=True)
        while not (output := await asyncio.wait_for(outputs.get(), 20)).is_finished():
            pass
        return list(output.generated_tokens)

    async def ask_all() -> list[list[int]]:
        return list(await asyncio.gather(*map(ask, PROMPTS)))

    assert asyncio.run(ask_all()) == expected()
    assert running.get_result(timeout=0.05) is None


def test_what_came_before_its_handler_is_handed_to_it(running: Any, llama: Any) -> None:
    async def ask() -> list[int]:
        early, late = (running.add_request(PROMPTS[0], streaming=True, max_new_tokens=3) for _ in range(2))
        while any(running.metrics.values()):
            await asyncio.sleep(0.005)
        counts = list[int]()
        running.register_result_handler(late, lambda output: counts.append(len(output.generated_tokens)))
        while len(counts) < 3:
            await asyncio.sleep(0.005)
        assert [len(running.get_result(early, timeout=20).generated_tokens) for _ in range(3)] == [1, 2, 3]
        return counts

    assert asyncio.run(asyncio.wait_for(ask(), 20)) == [1, 2, 3]
    assert running.get_result(timeout=0.05) is None


def test_two_requests_of_one_name_are_refused(running: Any, llama: Any) -> None:
    running.add_request(PROMPTS[0], request_id="mine", max_new_tokens=50)
    with pytest.raises(kvlayers.OptionError, match="`request_id` must be one that no other request has, got 'mine'"):
        running.add_request(PROMPTS[1], request_id="mine")
    assert running.get_result("mine", timeout=20).generated_tokens[:NEW] == expected()[0]
    running.add_request(PROMPTS[1], request_id="mine")
    assert running.get_result("mine", timeout=20).generated_tokens == expected()[1]


def test_a_name_may_be_used_again_by_the_time_its_request_has_been_given_up(
    running: Any, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = llama.forward
    monkeypatch.setattr(llama, "forward", lambda *given, **named: (time.sleep(0.01), forward(*given, **named))[1])
    other = running.add_request(PROMPTS[0])
    running.add_request(PROMPTS[1], request_id="mine", max_new_tokens=200)
    wait_for(lambda: running.metrics["decoding"] == 2)
    running.cancel_request("mine")

    def asked_again() -> bool:
        with contextlib.suppress(kvlayers.OptionError):
            return running.add_request(PROMPTS[1], request_id="mine") is not None
        return False

    # While its row is still there.
    wait_for(asked_again)
    assert [running.get_result(name, timeout=20).generated_tokens for name in (other, "mine")] == expected()[:2]
    assert running.get_result(timeout=0.05) is None


def test_a_request_that_has_ended_takes_none_of_its_name_along_if_it_is_given_up(running: Any, llama: Any) -> None:
    for _ in range(3):
        running.add_request(PROMPTS[0], request_id="mine", max_new_tokens=1)
        wait_for(lambda: not any(running.metrics.values()))
        with running.pause():
            running.cancel_request("mine")
            running.add_request(PROMPTS[1], request_id="mine")
        assert running.get_result("mine", timeout=20).generated_tokens == expected()[1]
    assert running.get_result(timeout=0.05) is None


def test_an_answer_that_ends_as_it_is_given_up_is_not_told(
    running: Any, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, names = llama.forward, list[str]()

    def given_up(*given: Any, **named: Any) -> Any:
        output = forward(*given, **named)
        # In the pass after which it has its last token.
        if names and running._asked[names[0]].ids.shape[1] == len(PROMPTS[0]) + 2:
            running.cancel_request(names.pop())
        return output

    monkeypatch.setattr(llama, "forward", given_up)
    with running.pause():
        names.append(running.add_request(PROMPTS[0], max_new_tokens=3, streaming=True))
    wait_for(lambda: not any(running.metrics.values()))
    assert names == []
    assert running.get_result(timeout=0.05) is None


def test_threads_that_ask_by_one_name_get_one_answer(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they do meanwhile, and also by the name of another one's copy."""
    with kvlayers.installed():
        manager = llama.init_continuous_batching(config_of())
    meeting, config_with = threading.Barrier(2, timeout=20), manager._config_with

    def met(*given: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait()
        return config_with(*given)

    monkeypatch.setattr(manager, "_config_with", met)
    refused = list[str]()

    def ask() -> None:
        try:
            manager.add_request(PROMPTS[0], request_id="mine")
        except kvlayers.OptionError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    meeting.abort()
    assert len(refused) == 1
    child = manager.add_request(PROMPTS[1], request_id="other__child#0")
    with pytest.raises(kvlayers.OptionError, match="`request_id`"):
        manager.add_request(PROMPTS[2], request_id="other", num_return_sequences=2, do_sample=True)
    # A name that is made is one that nobody has.
    made = [manager.add_request(PROMPTS[3], request_id="req_0"), manager.add_request(PROMPTS[3])]
    manager.start()
    outputs = {
        output.request_id: output.generated_tokens for output in (manager.get_result(timeout=20) for _ in "four")
    }
    manager.stop()
    assert outputs == {"mine": expected()[0], child: expected()[1], **dict.fromkeys(made, expected()[3])}
    assert manager.metrics["waiting"] == 0


def test_who_finds_the_queue_full_is_told_and_leaves_nothing(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuous_batching, "SECONDS_FOR_A_PLACE", 0.01)
    manager = manager_of(llama, config_of(), transformers.ContinuousBatchingConfig(max_queue_size=1))
    first = manager.add_request(PROMPTS[0])
    with pytest.raises(queue.Full):
        manager.add_request(PROMPTS[1])
    manager.start()
    assert manager.get_result(first, timeout=20).generated_tokens == expected()[0]
    manager.stop()
    assert manager.metrics["waiting"] == 0


def test_a_manager_is_told_how_many_answers_a_prompt_gets(running: Any, llama: Any) -> None:
    running.num_return_sequences = 2
    names = {running.add_request(PROMPTS[0]), running.add_request(PROMPTS[1], num_return_sequences=1)}
    outputs = [running.get_result(timeout=20) for _ in range(3)]
    assert {output.request_id for output in outputs} == {*names, f"{min(names)}__child#0"}
    assert sorted(output.generated_tokens for output in outputs) == sorted([*2 * [expected()[0]], expected()[1]])


def test_a_client_whose_loop_is_gone_is_no_error(running: Any, llama: Any) -> None:
    async def ask() -> None:
        running.register_result_handler("gone", lambda _: None)
        running.add_request(PROMPTS[0], request_id="gone", max_new_tokens=60, streaming=True)

    asyncio.run(ask())
    name = running.add_request(PROMPTS[1])
    assert running.get_result(name, timeout=20).generated_tokens == expected()[1]
    wait_for(lambda: running.metrics["decoding"] == 0)
    assert running.background_thread_status.fatal_error is None


def caches() -> int:
    gc.collect()
    return sum(isinstance(each, kvlayers.Cache) for each in gc.get_objects())


def test_five_hundred_requests_at_once_are_all_answered_and_leave_nothing(llama: Any) -> None:
    prompts, before = [PROMPTS[number % len(PROMPTS)] for number in range(500)], caches()
    outputs = under_install(llama.generate_batch, prompts, generation_config=config_of(max_new_tokens=2))
    assert [each.generated_tokens for each in outputs.values()] == [
        expected()[number % len(PROMPTS)][:2] for number in range(500)
    ]
    assert not any(thread.name == "kvlayers rows" for thread in threading.enumerate())
    assert caches() <= before


@pytest.mark.skipif(
    'f"req_{i}"' in inspect.getsource(transformers.GenerationMixin.generate_batch),
    reason="this transformers finds the answers of a manager's first call alone",
)
def test_a_manager_may_be_kept_and_destroyed(llama: Any) -> None:
    with kvlayers.installed():
        first = llama.generate_batch(PROMPTS, generation_config=config_of(), persistent_manager=True)
        kept = llama.init_continuous_batching()
        second = llama.generate_batch(PROMPTS, generation_config=config_of(), persistent_manager=True)
        assert llama.init_continuous_batching() is kept
        llama.destroy_cached_continuous_batching_manager()
        assert llama.init_continuous_batching(config_of()) is not kept
    tokens = [[output.generated_tokens for output in outputs.values()] for outputs in (first, second)]
    assert tokens[0] == tokens[1]


def test_what_rows_refuse_and_who_asks_for_it_is_served_by_transformers(
    llama: Any, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = transformers.generation.continuous_batching.ContinuousBatchingManager
    with kvlayers.installed(continuous_batching=False):
        assert isinstance(llama.init_continuous_batching(config_of()), theirs)
    with kvlayers.installed(cache="auto"):
        assert isinstance(llama.init_continuous_batching(config_of()), theirs)
    assert "is that of transformers" in caplog.text
    llama.set_attn_implementation("sdpa")
    with pytest.raises(kvlayers.OptionError, match="`continuous_batching` must be True or False"):
        kvlayers.install(continuous_batching="yes")  # type: ignore[arg-type]


def test_what_of_a_config_means_nothing_is_said_once(llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = transformers.ContinuousBatchingConfig(num_blocks=8, scheduler_type="prefill_first")
    with kvlayers.installed(), caplog.at_level(logging.WARNING):
        for _ in range(2):
            llama.generate_batch(PROMPTS[:1], generation_config=config_of(), continuous_batching_config=config)
    assert caplog.text.count("no use for num_blocks, scheduler_type") == 1


def test_pages_of_the_attention_are_put_back_behind_drafts(llama: Any) -> None:
    # Newer versions need no other name for pages with SDPA.
    llama.set_attn_implementation("paged|eager")
    # Drafts that are looked up change no answer.
    config = config_of(prompt_lookup_num_tokens=3)
    outputs = under_install(llama.generate_batch, PROMPTS, generation_config=config)
    assert llama.config._attn_implementation == "paged|eager"
    assert [output.generated_tokens for output in outputs.values()] == expected()
