"""generate_many: every answer is that of its prompt alone, whatever joins and leaves beside it."""

import contextlib
import functools
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers

import every_causal_model
import families
import kvlayers
from kvlayers.batching.row_engine import MAX_OVERTAKEN
from kvlayers.core.buffer import TokenBuffer
from kvlayers.errors import CapacityError, OptionError, RegistryError
from kvlayers.generation import prefill
from kvlayers.generation.retried_pass import SteppedDownWarning
from kvlayers.planning import auto
from kvlayers.upstream import cache_argument, compat
from models import continued, fresh_model, passes_of, prompt, tiny_model, under_install
from rounds import NIGHTLY

PROMPTS = [prompt(1, 1 + 7 * number % 20, number)[0] for number in range(9)]


def alone(model: Any, ids: torch.Tensor, cache: str = "dynamic", **how: Any) -> list[int]:
    options = {"max_new_tokens": 6, "cache_implementation": cache, **how}
    found: list[int] = under_install(continued, model, ids[None], **options)[0].tolist()
    return found[len(ids) :]


@functools.cache
def expected(cache: str = "dynamic") -> list[list[int]]:
    """The answers of a llama to `PROMPTS`."""
    return [alone(tiny_model("llama"), ids, cache) for ids in PROMPTS]


def many(model: Any, prompts: Any = PROMPTS, **how: Any) -> list[Any]:
    options = {"max_new_tokens": 6, "max_rows": 3, "progress": False, **how}
    return list(kvlayers.generate_many(model, prompts, **options))


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", {}),
        ("llama", {"cache": "int4"}),
        ("llama", {"cache_implementation": "int8"}),
        ("llama", {"cache": "sink", "cache_config": {"window_length": 20, "num_sink_tokens": 2}}),
        ("llama", {"cache": "offloaded"}),
        ("llama", {"cache": "static"}),
        ("llama", {"cache": "static", "cache_config": {"max_cache_len": 32}}),
        ("mistral", {"cache": "offloaded_static"}),
        ("jamba", {"cache": "static"}),
        ("llama", {"repetition_penalty": 1.3}),
        ("gemma3", {}),
        ("mistral", {"cache": "int8"}),
        ("deepseek_v3", {}),
        ("mamba", {}),
        ("jamba", {}),
    ],
    ids=str,
)
def test_each_answer_is_that_of_the_prompt_alone(family: str, how: dict[str, Any]) -> None:
    model = tiny_model(family)
    answers = many(model, in_order=True, chunk_tokens=6, **how)
    assert [answer.index for answer in answers] == list(range(len(PROMPTS)))
    assert not any(answer.error for answer in answers)
    asked = {name: value for name, value in how.items() if name != "cache"}
    of_each = [alone(model, ids, how.get("cache", "dynamic"), **asked) for ids in PROMPTS]
    assert [answer.ids.tolist() for answer in answers] == of_each


@pytest.mark.parametrize(
    "chunk",
    [
        {"chunk_tokens": 16},
        pytest.param(
            {"prefill_chunk_size": 16},
            marks=pytest.mark.skipif(
                not compat.PREFILLS_APART, reason="before transformers 5.0 the last token is not in the last chunk"
            ),
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("cache", "options"),
    [
        ("snapkv", {"budget": 24, "sink_tokens": 2, "recent_tokens": 8}),
        ("streaming", {"budget": 24, "sink_tokens": 2, "recent_tokens": 8}),
        ("quantized", {"nbits": 2, "residual_length": 8}),
        ("sink", {"window_length": 24}),
    ],
)
def test_a_chunk_does_not_change_what_is_kept(cache: str, options: dict[str, Any], chunk: dict[str, int]) -> None:
    """An evicting cache would evict between chunks, and later chunks would attend to what is left."""
    model = tiny_model("llama")
    prompts = [prompt(1, tokens, tokens)[0] for tokens in (90, 61, 75)]
    how = {"cache_config": options, "max_new_tokens": 8}
    asked = {name: value for name, value in chunk.items() if name != "chunk_tokens"}
    answers = many(model, prompts, cache=cache, in_order=True, **how, **chunk)
    for answer, ids in zip(answers, prompts, strict=True):
        assert answer.ids.tolist() == alone(model, ids, cache, **how, **asked)


@pytest.mark.skipif("dory" not in transformers.CONFIG_MAPPING, reason="this transformers has no model with loops")
def test_a_prompt_is_read_whole_if_states_depend_on_passes() -> None:
    model, ids = every_causal_model.of_loops(), prompt(1, 40)[0]
    with passes_of(model) as passes:
        (answer,) = many(model, [ids], chunk_tokens=8)
    assert passes[0] == (1, 40)
    assert answer.ids.tolist() == alone(model, ids)


def test_as_many_prompts_are_read_between_two_steps_as_fit_into_a_chunk() -> None:
    model, lengths = fresh_model("llama"), (6, 5, 2, 7, 4, 3, 8, 2, 15, 5)
    prompts = [prompt(1, tokens, tokens)[0] for tokens in lengths]
    said: dict[int, int] = {}

    def ends(number: int, token: int) -> bool:
        """The first row goes on, and others leave with their second token, so that those that wait join together."""
        said[number] = said.get(number, 0) + 1
        return number > 0 and said[number] == 2

    with passes_of(model) as passes:
        answers = many(model, prompts, max_rows=4, chunk_tokens=10, in_order=True, on_token=ends)
    assert passes[:14] == [
        *((1, 6), (1, 5), (1, 2), (1, 7), (4, 1)),
        *((1, 4), (1, 3), (3, 1)),
        *((1, 8), (1, 2), (3, 1)),
        *((1, 10), (1, 1)),
        (1, 5),
    ]
    first, *others = (alone(model, ids) for ids in prompts)
    assert [answer.ids.tolist() for answer in answers] == [first, *(answer[:2] for answer in others)]


def test_pad_tokens_of_a_tensor_are_padding_as_in_generate() -> None:
    model = fresh_model("llama", pad_token_id=0, eos_token_id=None)
    texts = [prompt(1, 4)[0], prompt(1, 9, seed=1)[0]]
    padded = torch.nn.utils.rnn.pad_sequence([text.flip(0) for text in texts], batch_first=True).flip(1)
    answers = list(kvlayers.generate_many(model, padded, max_new_tokens=5, in_order=True, progress=False))
    whole = model.generate(padded, attention_mask=(padded != 0).long(), max_new_tokens=5, do_sample=False)
    assert [answer.ids.tolist() for answer in answers] == whole[:, padded.shape[1] :].tolist()
    assert [answer.prompt_tokens for answer in answers] == [4, 9]


def test_wrapped_models_are_taken() -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(fresh_model("llama"), lora).eval()
    tuned = [alone(model, ids) for ids in PROMPTS]
    assert tuned != expected()
    for wrapped in (model, torch.compile(model, backend="eager")):
        answers = many(wrapped, in_order=True)
        assert [answer.ids.tolist() for answer in answers] == tuned
    drafted = many(model, in_order=True, assistant_model=torch.compile(tiny_model("llama"), backend="eager"))
    assert [answer.ids.tolist() for answer in drafted] == tuned
    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(OptionError, match="learned prompt"):
        many(peft.get_peft_model(fresh_model("llama"), tuning))


@pytest.mark.parametrize("drafts", ["looked up", "of the model itself", "of another model"])
def test_drafts_change_no_token(drafts: str) -> None:
    model = tiny_model("llama")
    how: dict[str, Any] = {
        "looked up": {"prompt_lookup_num_tokens": 3},
        "of the model itself": {"assistant_model": model, "num_assistant_tokens": 3},
        "of another model": {"assistant_model": fresh_model("mistral"), "num_assistant_tokens": 3},
    }[drafts]
    with passes_of(model) as passes:
        plain = many(model, in_order=True)
        of_plain = len(passes)
        drafted = many(model, in_order=True, **how)
    assert [answer.ids.tolist() for answer in plain] == [answer.ids.tolist() for answer in drafted]
    if drafts == "of another model":
        assert len(passes) - of_plain <= of_plain


def test_answers_come_as_they_end_and_prompts_are_asked_for_as_rows_become_free() -> None:
    model, asked = tiny_model("llama"), []

    def ask() -> Iterator[torch.Tensor]:
        for number, ids in enumerate(PROMPTS):
            asked.append(number)
            yield ids

    answers = kvlayers.generate_many(model, ask(), max_new_tokens=4, max_rows=2, progress=False)
    first = next(answers)
    assert first.index in (0, 1)
    assert asked == [0, 1]
    assert sorted(answer.index for answer in (first, *answers)) == list(range(len(PROMPTS)))


@contextlib.contextmanager
def caches_noted(model: Any, note: Callable[[Any], Any]) -> Iterator[list[Any]]:
    """What is noted of the cache before each forward pass."""
    found: list[Any] = []

    def look(_: Any, args: Any, arguments: dict[str, Any]) -> None:
        found.append(note(cache_argument.passed_in(arguments)))

    with model.register_forward_pre_hook(look, with_kwargs=True):
        yield found


def bytes_of(model: Any, tokens: int = 512, name: str = "dynamic") -> int:
    return kvlayers.plan(model.config, tokens, names=[name]).caches[0].device_bytes


def test_max_bytes_are_those_of_all_rows_and_prompts_wait_rather_than_being_rounded() -> None:
    model = tiny_model("llama")
    config = {"max_bytes": 3 * bytes_of(model), "ladder": ("int8",)}
    with caches_noted(model, lambda cache: cache.batch_size or 0) as rows:
        answers = many(model, in_order=True, max_rows=9, cache_config=config)
    assert [answer.ids.tolist() for answer in answers] == expected()
    assert 2 <= max(rows) <= 6


def test_recurrent_states_of_rows_that_join_one_by_one_stay_within_max_bytes() -> None:
    model = families.model_and_inputs("mamba2")[0]
    # A row leaves, and another one joins, which would take memory for a third one.
    max_bytes = int(2.1 * bytes_of(model))
    with caches_noted(model, lambda cache: cache.nbytes) as held:
        answers = many(model, on_token=lambda index, _: index % 2 == 0, cache_config={"max_bytes": max_bytes})
    assert not any(answer.error for answer in answers)
    assert max_bytes / 2 < max(held) <= max_bytes


def test_an_answer_that_outgrows_max_bytes_fails_alone() -> None:
    model = tiny_model("llama")
    long, *short = [prompt(1, 40, 1)[0], *PROMPTS[:3]]
    config = {"max_bytes": 42 * (bytes_of(model) // 512)}
    answers = many(model, [*short[:1], long, *short[1:]], in_order=True, cache_config=config)
    assert isinstance(answers[1].error, CapacityError)
    others = [answer.ids.tolist() for answer in answers if answer.index != 1]
    assert others == [alone(model, ids) for ids in short]


def test_a_lack_of_room_in_the_middle_of_a_pass_is_that_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    update, asked = kvlayers.DynamicCache.update, []

    def full(self: Any, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *rest: Any, **more: Any) -> Any:
        if layer_idx == 1 and keys.shape[0] > 1 and len(asked.append(1) or asked) == 4:
            raise CapacityError("the disk is full")
        return update(self, keys, values, layer_idx, *rest, **more)

    monkeypatch.setattr(kvlayers.DynamicCache, "update", full)
    with pytest.raises(CapacityError, match="the disk is full"):
        many(tiny_model("llama"), PROMPTS[:3])


@pytest.mark.parametrize("cache", ["dynamic", "int4", "static"])
def test_rows_take_no_more_than_the_memory(cache: str) -> None:
    model = tiny_model("llama")
    memory = 4 * bytes_of(model, name=cache)
    with caches_noted(model, lambda cache: (cache.batch_size or 0, cache.nbytes)) as taken:
        answers = many(model, in_order=True, max_rows=9, cache=cache, memory=memory)
    rows, nbytes = map(max, zip(*taken, strict=True))
    assert 2 <= rows <= 8
    assert nbytes <= memory
    assert [answer.ids.tolist() for answer in answers] == expected(cache)


def test_a_prompt_that_does_not_fit_into_the_memory_ends_alone() -> None:
    model, prompts = tiny_model("llama"), [PROMPTS[0], prompt(1, 600)[0], PROMPTS[1]]
    short, long, other = many(model, prompts, in_order=True, memory=bytes_of(model))
    assert isinstance(long.error, CapacityError)
    assert "`memory` must be at least" in str(long.error)
    assert [answer.ids.tolist() for answer in (short, other)] == expected()[:2]


def test_short_prompts_join_before_one_that_does_not_fit_and_a_bounded_number_of_them() -> None:
    model, prompts = tiny_model("llama"), [*PROMPTS[:2], prompt(1, 600)[0], *PROMPTS, *PROMPTS]
    said: dict[int, int] = {}

    def end(number: int, token: int) -> bool:
        """Rows end at different times, so that there is always one that the long prompt does not fit beside."""
        said[number] = said.get(number, 0) + 1
        return said[number] == 3 + 3 * (number % 3)

    how: dict[str, Any] = {"max_rows": 3, "memory": bytes_of(model, 768), "max_new_tokens": 12}
    answers = many(model, prompts, on_token=end, **how)
    assert sorted(answer.index for answer in answers) == list(range(len(prompts)))
    began, short = list(said), [alone(model, ids, max_new_tokens=12) for ids in PROMPTS]
    assert began[: began.index(2)] == [0, 1, *range(3, 3 + MAX_OVERTAKEN)]
    whole = [*short[:2], alone(model, prompts[2], max_new_tokens=12), *short, *short]
    for answer in answers:
        assert answer.ids.tolist() == whole[answer.index][: len(answer.ids)]


def test_nothing_behind_one_that_waits_is_looked_at_again_before_a_row_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fits = tiny_model("llama"), Mock(side_effect=auto.RoomForRows.fits)
    monkeypatch.setattr(auto.RoomForRows, "fits", lambda *given: fits(*given))
    prompts = [PROMPTS[0], prompt(1, 600)[0]]
    many(model, prompts, max_rows=3, memory=bytes_of(model, 768), max_new_tokens=24)
    assert fits.call_count == 3


def test_what_is_free_does_not_keep_a_prompt_from_being_tried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(auto, "free_memory", lambda device: 1)
    with passes_of(model) as passes:
        answers = many(model, in_order=True)
    assert [answer.ids.tolist() for answer in answers] == expected()
    assert max(rows for rows, _ in passes) == 1


WRONG_PROMPTS: list[tuple[str, list[Any]]] = [
    ("`prompts` must each be a text, a chat", [None, [], {"role": "user"}, [["a"]], 5]),
    ("`prompts` must each be a text, a chat", [torch.empty(0, dtype=torch.int64), torch.ones(3, dtype=torch.bool)]),
    ("`prompts` must each be a text, a chat", [torch.ones(3, dtype=torch.int64, device="meta")]),
    ("the vocabulary of the model, got 1000000", [[5, 10**6]]),
    # The template of a chat would end in an error of jinja, or leave the message out.
    (
        "`message` must be a text, or have a role and a content",
        [[{"who": "user", "text": "hi"}], [{"role": "user"}], [{"content": "hi"}]],
    ),
]
"""What is said of some prompts."""


def test_an_error_ends_one_answer_alone() -> None:
    wrong = [(prompt, said) for said, prompts in WRONG_PROMPTS for prompt in prompts]
    prompts = [*PROMPTS[:4], *(prompt for prompt, _ in wrong), *PROMPTS[4:]]
    answers = many(tiny_model("llama"), prompts, in_order=True, tokenizer=Mock())
    good = [answer for answer in answers if answer.error is None]
    assert [answer.ids.tolist() for answer in good] == expected()
    for answer, (_, said) in zip(answers[4 : 4 + len(wrong)], wrong, strict=True):
        assert isinstance(answer.error, OptionError)
        assert said in str(answer.error)


def test_a_wrong_call_is_no_error_of_one_prompt() -> None:
    model = tiny_model("llama")

    def on_token(number: int, token: int) -> None:
        raise ZeroDivisionError(f"prompt {number}")

    with pytest.raises(ZeroDivisionError, match="prompt 0"):
        many(model, on_token=on_token)
    with pytest.raises(OptionError, match="`tokenizer` must be given for prompts that are texts"):
        many(model, [*PROMPTS[:1], "a text"])


def test_a_store_serves_prompts_that_begin_alike() -> None:
    model, store = fresh_model("llama"), kvlayers.PrefixStore(max_bytes=2**24)
    common = prompt(1, 30, 5)[0]
    prompts = [torch.cat([common, ids]) for ids in PROMPTS[:5]]
    answers = many(model, prompts, prefix_store=store, in_order=True, max_rows=4)
    assert [answer.cached_tokens >= 30 for answer in answers] == [False, True, True, True, True]
    assert [answer.ids.tolist() for answer in answers] == [alone(model, ids) for ids in prompts]


def test_no_prompts() -> None:
    assert many(tiny_model("llama"), []) == []


def test_a_stop_at_the_first_token() -> None:
    model = tiny_model("llama")
    first = [answer[0] for answer in expected()]
    assert all(len(answer.ids) == 1 for answer in many(model, eos_token_id=first))


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"max_rows": 0}, "`max_rows`"),
        ({"max_new_tokens": -1}, "`max_new_tokens`"),
        ({"chunk_tokens": 1.5}, "`chunk_tokens`"),
        ({"num_beams": 2}, "`options`"),
        ({"num_return_sequences": 2, "do_sample": True}, "`options`"),
        ({"misspelt": 1}, "misspelt"),
        ({"assistant_model": 1}, "assistant_model"),
        ({"output_scores": True}, "output_scores"),
        ({"token_healing": True}, "token_healing"),
        ({"use_cache": False}, "use_cache"),
        ({"max_length": 20}, "max_length"),
        ({"generation_config": transformers.GenerationConfig(token_healing=True)}, "token_healing"),
        (
            {"generation_config": transformers.GenerationConfig(max_length=33), "max_new_tokens": None},
            "`max_length` alone",
        ),
        ({"cache": "auto"}, "`cache` must be one cache"),
        ({"cache": "int5"}, "int5"),
        ({"cache": "int8", "cache_implementation": "int4"}, "ask for different caches"),
        ({"memory": "much"}, "`memory`"),
        ({"memory": 0}, "`memory`"),
        (
            {"assistant_model": functools.partial(tiny_model, "llama"), "prompt_lookup_num_tokens": 3},
            "`prompt_lookup_num_tokens`",
        ),
        ({"cache_config": {"misspelt": 1}}, "misspelt"),
        ({"prefix_store": 1}, "`prefix_store`"),
        *(({"prompts": prompts}, "`prompts` must be a list") for prompts in ("one text", {"input_ids": [1]}, None, 5)),
        ({"model": functools.partial(tiny_model, "t5")}, "decoder-only"),
        ({"model": functools.partial(tiny_model, "jamba"), "prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        (
            {"assistant_model": functools.partial(tiny_model, "jamba")},
            "`assistant_model` must be a model without recurrent states",
        ),
        (
            {"assistant_model": functools.partial(fresh_model, "llama", vocab_size=50)},
            "`assistant_model` must have the vocabulary",
        ),
    ],
)
def test_wrong_calls_are_refused_at_once(how: dict[str, Any], named: str) -> None:
    # Not every version of transformers has all models, and one that is missing skips its case alone.
    given = {name: value() if isinstance(value, functools.partial) else value for name, value in how.items()}
    with pytest.raises((OptionError, RegistryError), match=named):
        kvlayers.generate_many(**{"model": tiny_model("llama"), "prompts": PROMPTS, **given})


def test_a_criterion_that_raises_ends_its_answer_alone() -> None:
    def stop(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if torch.equal(ids[0, :-2], PROMPTS[1]):
            raise ValueError("not this one")
        return torch.zeros(1, dtype=torch.bool)

    answers = many(tiny_model("llama"), stopping_criteria=[stop], in_order=True)
    assert [type(answer.error) for answer in answers if answer.error is not None] == [ValueError]


@pytest.mark.skipif(not compat.PREFILLS_APART, reason="before transformers 5.0 no prefill can be replaced")
@pytest.mark.parametrize(("repeats", "others"), [(4, 1), (2, 2), (3, 1)])
def test_equal_prompts_side_by_side_are_computed_once(repeats: int, others: int) -> None:
    model, ids = fresh_model("llama"), torch.cat([prompt(1, 40, number) for number in range(others)])
    each = under_install(continued, model, ids, 5)
    with passes_of(model) as seen:
        output = under_install(continued, model, ids.repeat_interleave(repeats, 0), 5)
    assert torch.equal(output, each.repeat_interleave(repeats, 0))
    assert seen[:2] == [(others, 40), (others * repeats, 1)]


@pytest.mark.parametrize(
    ("beside", "repeats"),
    [
        ({}, 4),
        ({"attention_mask": torch.ones(4, 6)}, 4),
        ({"scale": torch.tensor([1.0, 1.0, 2.0, 2.0])}, 2),
        ({"scale": torch.tensor([1.0, 2.0, 2.0, 2.0])}, 1),
        ({"adapter_names": ["a", "a", "b", "b"]}, 1),
    ],
)
def test_rows_are_equal_if_all_that_belongs_to_them_is(beside: dict[str, Any], repeats: int) -> None:
    assert prefill._repeats_in(prompt(1, 6).repeat(4, 1), beside) == repeats


def as_trainers_leave_it(model: Any) -> None:
    """The hook of the embeddings stays while trainers switch checkpointing off to generate."""
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.gradient_checkpointing_disable()


CHANGES: dict[str, tuple[int, bool, Callable[[Any, Any], Any]]] = {
    "nothing": (1, False, lambda model, layer: None),
    "padding": (3, False, lambda model, layer: None),
    "a hook": (3, False, lambda model, layer: layer.register_forward_pre_hook(lambda *_: None)),
    "training": (1, True, lambda model, layer: as_trainers_leave_it(model)),
    "a rate": (3, True, lambda model, layer: setattr(layer.self_attn, "attention_dropout", 0.1)),
    "a module": (3, True, lambda model, layer: layer.mlp.add_module("dropped", torch.nn.Dropout(0.1))),
    "a config": (
        3,
        True,
        lambda model, layer: setattr(layer.mlp, "config", transformers.LlamaConfig(hidden_dropout=0.1)),
    ),
    "checkpoints": (3, True, lambda model, layer: model.gradient_checkpointing_enable()),
}
"""Rows of three equal ones that are computed, whether the model trains, and what is done to it before."""


@pytest.mark.skipif(not compat.PREFILLS_APART, reason="before transformers 5.0 no prefill can be replaced")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing")
@pytest.mark.parametrize("change", CHANGES)
def test_equal_rows_are_computed_once_unless_something_may_tell_them_apart(change: str) -> None:
    rows, trains, prepare = CHANGES[change]
    model, ids = fresh_model("llama").train(trains), prompt(1, 40).repeat(3, 1)
    prepare(model, model.model.layers[1])
    mask = torch.ones_like(ids)
    mask[1, :3] = change != "padding"
    with passes_of(model) as seen:
        under_install(continued, model, ids, 2, attention_mask=mask)
    assert seen[0] == (rows, 40)


class _Terminal(io.StringIO):
    """A terminal for stdout and stderr."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What each line shows at last: a carriage return overwrites it from its start."""
        shown = []
        for line in self.getvalue().split("\n"):
            cells: list[str] = []
            for part in line.split("\r"):
                cells[: len(part)] = part
            shown.append("".join(cells).rstrip())
        return shown


@pytest.mark.parametrize("in_order", [False, True])
def test_what_is_printed_between_answers_stands_above_the_bar(in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    for answer in kvlayers.generate_many(tiny_model("llama"), PROMPTS, max_new_tokens=3, max_rows=2, in_order=in_order):
        print("answer", answer.index)
    *printed, last, after = terminal.lines()
    assert sorted(printed) == sorted(f"answer {index}" for index in range(len(PROMPTS)))
    assert "answers: 100%" in last
    assert after == ""


def test_there_is_no_bar_without_a_terminal_or_beside_on_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, how, on_token = tiny_model("llama"), {"max_new_tokens": 2, "progress": True}, Mock(return_value=False)
    assert len(many(model, PROMPTS[:2], **how)) == 2
    assert capsys.readouterr().err == ""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert len(many(model, PROMPTS[:2], on_token=on_token, **how)) == 2
    assert on_token.call_count == 4
    assert terminal.getvalue() == ""


# Passes that run out of memory are made again, and all answers are those of a run without a failure

TEXTS = [[5, 8, 13, 21, 34, 55, 60, 61, 62, 63, 64, 65, 66, 67], [21, 34], list(range(40, 57))]
MESSAGE = "CUDA out of memory."


class Operations:
    """Counts the operations of a model, of which one fails for lack of memory, or all from one on."""

    def __init__(self, model: Any) -> None:
        self.done, self.failing, self.for_good = 0, 0, False
        for module in model.modules():
            if not list(module.children()):
                module.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.done += 1
        if self.done == self.failing or (self.for_good and self.done >= self.failing):
            raise torch.OutOfMemoryError(MESSAGE)


def retried(model: Any, **how: Any) -> list[Any]:
    return many(model, TEXTS, **{"max_new_tokens": 4, "max_rows": 2, "in_order": True, **how})


@pytest.mark.usefixtures("quick_collections")
@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", {}),
        ("llama", {"prompt_lookup_num_tokens": 2}),
        ("mistral", {"chunk_tokens": 4}),
        ("gemma3", {"prompt_lookup_num_tokens": 2}),
        ("jamba", {}),
    ],
)
def test_any_operation_may_run_out_of_memory(family: str, how: dict[str, Any]) -> None:
    model = fresh_model(family)
    expected = [answer.ids.tolist() for answer in retried(model, **how)]
    operations = Operations(model)
    retried(model, **how)
    points = 20 if NIGHTLY else 8
    for failing in range(1, operations.done + 1, operations.done // points):
        operations.done, operations.failing, heard = 0, failing, []
        with pytest.warns(SteppedDownWarning):
            seen = retried(model, on_token=lambda index, token: heard.append((index, token)), **how)  # noqa: B023
        assert [answer.error for answer in seen] == [None] * 3
        assert [answer.ids.tolist() for answer in seen] == expected, failing
        for index, tokens in enumerate(expected):
            assert [token for row, token in heard if row == index] == tokens


@pytest.mark.usefixtures("quick_collections")
def test_what_gave_way_is_not_stored_as_if_it_were_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    model, store, allocate = fresh_model("llama"), kvlayers.PrefixStore(max_bytes=2**24), TokenBuffer.allocate
    failing: list[bool] = [True]

    def allocated(*args: Any, **kwargs: Any) -> TokenBuffer:
        if failing:
            failing.clear()
            raise torch.OutOfMemoryError(MESSAGE)
        return allocate(*args, **kwargs)

    monkeypatch.setattr(TokenBuffer, "allocate", allocated)
    with pytest.warns(SteppedDownWarning):
        retried(model, prefix_store=store, max_rows=1)
    assert (len(store), store.statistics.refused) == (2, 1)
    failing.append(True)
    with kvlayers.installed(prefix_store=store), pytest.warns(SteppedDownWarning):
        model.generate(torch.tensor(TEXTS[:1]), max_new_tokens=4)
    assert (len(store), store.statistics.refused) == (2, 2)


@pytest.mark.usefixtures("quick_collections")
def test_an_error_in_the_end_is_that_of_the_prompt_or_of_all_rows() -> None:
    model = fresh_model("llama")
    operations = Operations(model)
    operations.failing, operations.for_good = 3, True
    with pytest.warns(SteppedDownWarning):
        seen = retried(model)
    for answer in seen:
        assert isinstance(answer.error, torch.OutOfMemoryError)
        assert "no step left to give way by (steps taken: int8, int4)" in str(answer.error)
    operations.done, operations.failing = 0, 100
    with pytest.warns(SteppedDownWarning), pytest.raises(torch.OutOfMemoryError, match="no step left"):
        retried(model)
