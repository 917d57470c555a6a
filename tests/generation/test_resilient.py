"""resilient_generate(): where memory runs out, the tokens are those of a call in which it does not."""

import contextlib
import copy
import gc
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from torch import Tensor

import fresh_process
import kvlayers
import versions
from kvlayers import OptionError
from kvlayers.core import named_caches
from kvlayers.core.buffer import TokenBuffer
from kvlayers.errors import RegistryError
from kvlayers.generation import call_cache, resilient
from kvlayers.generation.ladder import AS_REQUESTED, DEFAULT_LADDER, Rung
from kvlayers.generation.resilient import SteppedDownWarning, resilient_generate
from kvlayers.upstream import cache_argument
from kvlayers.utils.tensor_memory import is_out_of_memory
from matrix import once
from models import CONFIGS, ENCODER_DECODERS, fresh_model, prompt

NEW_TOKENS = 8
PADDED = torch.tensor([[0] * 5 + [1] * 7, [1] * 12])
MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB.\nMore than anybody wants to read."

LAST_LAYER: dict[str, Callable[[Any], torch.nn.Module]] = {
    "gpt2": lambda model: model.transformer.h[-1],
    "mamba": lambda model: model.backbone.layers[-1],
    "t5": lambda model: model.decoder.block[-1],
    "bart": lambda model: model.model.decoder.layers[-1],
}

Arguments = dict[str, Any]


def last_layer(model: Any) -> torch.nn.Module:
    """The last layer with a cache: where it fails, the earlier ones have taken the tokens of the step."""
    return LAST_LAYER.get(model.config.model_type, lambda model: model.model.layers[-1])(model)


class RunningOut:
    """Makes the forward passes of a model run out of memory, those with the given numbers from 1 on.

    Attributes:
        passes: forward passes that were begun.
        caches: classes of the caches that they were given, without repetitions.
    """

    def __init__(self, model: Any, at: Iterable[int], error: BaseException | None = None) -> None:
        self.at, self.error = set(at), error
        self.passes = 0
        self.caches: list[type] = []
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        last_layer(model).register_forward_pre_hook(self._fail)

    def _begin(self, model: Any, args: Any, kwargs: Any) -> None:
        self.passes += 1
        cache = type(cache_argument.passed_in(kwargs))
        if not self.caches or self.caches[-1] is not cache:
            self.caches.append(cache)

    def _fail(self, module: Any, args: Any) -> None:
        if self.passes in self.at:
            raise self.error or torch.OutOfMemoryError(MESSAGE)


ALWAYS = range(1, 1000)


def arguments_for(ids: Tensor, **arguments: Any) -> Arguments:
    return {"inputs": ids, "max_new_tokens": NEW_TOKENS, "do_sample": False, **arguments}


def uninterrupted(model: Any, ids: Tensor, **arguments: Any) -> Any:
    torch.manual_seed(3)
    return model.generate(**arguments_for(ids, **arguments))


def interrupted(model: Any, at: Iterable[int], ids: Tensor, **arguments: Any) -> tuple[Any, RunningOut]:
    """What comes of a call in which the given forward passes run out of memory."""
    running_out = RunningOut(model, at)
    torch.manual_seed(3)
    with pytest.warns(SteppedDownWarning) as seen:
        output = resilient_generate(model, **{"ladder": ["dynamic"], **arguments_for(ids, **arguments)})
    assert sum(warning.category is SteppedDownWarning for warning in seen) == len(running_out.at)
    return output, running_out


@contextlib.contextmanager
def no_step_down() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SteppedDownWarning)
        yield


# Tokens that are kept


@pytest.mark.parametrize("family", CONFIGS)
def test_a_call_goes_on_from_the_token_that_it_had(family: str) -> None:
    ids = prompt(2)
    expected = uninterrupted(fresh_model(family), ids, num_beams=1)
    for at in ([1], [2], [NEW_TOKENS], [3, 6], [2, 3]):
        seen, running_out = interrupted(
            fresh_model(family), at, ids, num_beams=1, ladder=["dynamic", ("dynamic", {"length_hint": 9})]
        )
        assert torch.equal(seen, expected), at
        # A pass for each token, and one for each that failed: no token was generated twice.
        assert running_out.passes == NEW_TOKENS + len(at)


@pytest.mark.parametrize(
    ("family", "name"), once(["qwen2", "gemma3", "t5"], ["static", "int8", "int4", "offloaded", "offloaded_quantized"])
)
def test_caches_that_are_exact_so_far_give_the_same_tokens(family: str, name: str) -> None:
    ids = prompt(2)
    expected = uninterrupted(fresh_model(family), ids)
    seen, running_out = interrupted(fresh_model(family), [5], ids, ladder=[name])
    assert torch.equal(seen, expected)
    assert running_out.passes == NEW_TOKENS + 1
    assert running_out.caches[-1].__module__.startswith("kvlayers.")


WAYS: dict[str, Arguments] = {
    "sampling": {"do_sample": True, "top_k": 20},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "chunked prefill": {"prefill_chunk_size": 5},
    "max_length": {"max_length": 18, "max_new_tokens": None},
    "the default length": {"max_new_tokens": None},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": list(range(90))},
    "min_length": {"min_length": 17, "eos_token_id": list(range(90))},
    "forced end": {"forced_eos_token_id": 7},
    "repetition penalty": {"repetition_penalty": 1.7},
    "penalty of the prompt's tokens": {"encoder_repetition_penalty": 3.0},
    "n-grams of the prompt": {"encoder_no_repeat_ngram_size": 1},
    "a length penalty from the prompt on": {"exponential_decay_length_penalty": (3, 1.9), "eos_token_id": 7},
    "suppressed at the beginning": {"begin_suppress_tokens": list(range(3, 60))},
    "a prefix": {"prefix_allowed_tokens_fn": lambda row, ids: [10 + row, 20 + len(ids) % 5, 30]},
}


@pytest.mark.parametrize("way", WAYS)
def test_options_mean_what_they_mean_without_an_error(way: str) -> None:
    if way == "chunked prefill":
        versions.need_since("5.3", "chunks that are read before the first token, and without a given cache")
    ids = prompt(2)
    expected = uninterrupted(fresh_model("qwen2"), ids, **WAYS[way])
    assert not torch.equal(expected, uninterrupted(fresh_model("qwen2"), ids)) or way == "chunked prefill"
    for at in (2, 5):
        model = fresh_model("qwen2")
        seen, _ = interrupted(model, [at], ids, **WAYS[way])
        assert torch.equal(seen, expected), at


@pytest.mark.parametrize("way", ["sampling", "several sequences", "min_new_tokens", "repetition penalty"])
def test_options_of_an_encoder_decoder_mean_the_same_too(way: str) -> None:
    ids = prompt(2)
    for beginning in ({}, {"decoder_input_ids": torch.tensor([[0, 5, 6], [0, 7, 8]])}):
        expected = uninterrupted(fresh_model("t5"), ids, **WAYS[way], **beginning)
        seen, _ = interrupted(fresh_model("t5"), [4], ids, **WAYS[way], **beginning)
        assert torch.equal(seen, expected)


def test_what_an_encoder_returned_is_not_repeated_twice() -> None:
    ids, model = prompt(2), fresh_model("t5")
    arguments = {"num_return_sequences": 2, "do_sample": True, "encoder_outputs": model.get_encoder()(ids)}
    expected = uninterrupted(fresh_model("t5"), ids, **{**arguments, "encoder_outputs": model.get_encoder()(ids)})
    seen, _ = interrupted(model, [4], ids, **arguments)
    assert torch.equal(seen, expected)
    assert arguments["encoder_outputs"].last_hidden_state.shape[0] == 2


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma3", "gpt2"])
def test_padding_on_the_left_stays_masked(family: str) -> None:
    ids = torch.where(PADDED == 1, prompt(2), 0)
    for mask in ({"attention_mask": PADDED}, {}):
        expected = uninterrupted(fresh_model(family), ids, **mask)
        seen, _ = interrupted(fresh_model(family), [6], ids, **mask)
        assert torch.equal(seen, expected)


@pytest.mark.parametrize("padding", [0, "the end itself"])
def test_sequences_that_have_ended_stay_ended(padding: Any) -> None:
    ids = torch.where(PADDED == 1, prompt(2), 0)
    for row, step in ((0, 2), (1, 2)):
        for mask in ({"attention_mask": PADDED}, {}):
            end = int(uninterrupted(fresh_model("qwen2"), ids, **mask)[row, 12 + step])
            how = {**mask, "eos_token_id": end, "pad_token_id": end if padding else 0}
            expected = uninterrupted(fresh_model("qwen2"), ids, **how)
            assert (expected[row, 13 + step :] == how["pad_token_id"]).all()
            for at in range(2, expected.shape[1] - 12 + 1):
                seen, running_out = interrupted(fresh_model("qwen2"), [at], ids, **how)
                assert torch.equal(seen, expected), (row, at)
                assert running_out.passes == expected.shape[1] - 12 + 1


def test_sampled_sequences_that_have_ended_draw_no_other_numbers() -> None:
    ids, model = prompt(3), fresh_model("qwen2")
    how = {"do_sample": True, "eos_token_id": list(range(3, 25)), "pad_token_id": 0, "max_new_tokens": 16}
    expected = uninterrupted(model, ids, **how)
    ends = (expected[:, 12:] == 0).sum(dim=1)
    assert 0 in ends or len(set(ends.tolist())) > 1
    for at in range(2, expected.shape[1] - 12 + 1):
        seen, _ = interrupted(fresh_model("qwen2"), [at], ids, **how)
        assert torch.equal(seen, expected), at


class EndsRows(transformers.StoppingCriteria):
    """A caller's criterion: ends each sequence at a length of its own, and says it once only."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.seen: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids.shape[1])
        return torch.tensor([length == input_ids.shape[1] for length in self.lengths])


@pytest.mark.parametrize("end", [{}, {"eos_token_id": 96, "pad_token_id": 0}])
def test_the_callers_criteria_see_each_token_once(end: Arguments) -> None:
    ids = prompt(2)
    expected = uninterrupted(fresh_model("qwen2"), ids, stopping_criteria=[EndsRows([14, 17])], **end)
    assert expected.shape == (2, 17)
    for at in (2, 3, 4, 5):
        mine = [EndsRows([14, 17])]
        seen, _ = interrupted(fresh_model("qwen2"), [at], ids, stopping_criteria=mine, **end)
        assert torch.equal(seen, expected), at
        assert mine[0].seen == [13, 14, 15, 16, 17]
        assert len(mine) == 1


class OnceForEachToken(transformers.LogitsProcessor):
    """A caller's processor that counts its calls, and goes by their number."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.index_fill(1, torch.arange(self.calls * 7, self.calls * 7 + 7), 100.0)


def test_the_callers_processors_see_each_token_once() -> None:
    ids = prompt(2)
    expected = uninterrupted(fresh_model("qwen2"), ids, logits_processor=[OnceForEachToken()])
    seen, _ = interrupted(fresh_model("qwen2"), [5], ids, logits_processor=[OnceForEachToken()])
    assert torch.equal(seen, expected)


def test_stop_strings_stop() -> None:
    words = {"abcdef": 0, **{f"w{token}": token for token in range(1, 97)}}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own)
    model, ids = fresh_model("qwen2"), prompt(1)
    stop = tokenizer.convert_ids_to_tokens(int(uninterrupted(model, ids)[0, 16]))
    how = {"stop_strings": [stop], "tokenizer": tokenizer}
    expected = uninterrupted(model, ids, **how)
    assert expected.shape[1] < 12 + NEW_TOKENS
    # Also where the options are in a config, and the model has others.
    config = transformers.GenerationConfig(stop_strings=[stop], max_new_tokens=NEW_TOKENS)
    model.generation_config.stop_strings = ["no such string"]
    for given in (how, {"generation_config": config, "tokenizer": tokenizer, "max_new_tokens": NEW_TOKENS}):
        for at in (1, 3):
            running = copy.deepcopy(model)
            assert torch.equal(interrupted(running, [at], ids, **given)[0], expected)
    assert config.stop_strings == [stop]
    with pytest.raises(ValueError, match="tokenizer"):
        resilient_generate(model, ids, stop_strings=[stop])


def test_time_is_counted_from_the_first_attempt() -> None:
    model, ids = fresh_model("qwen2"), prompt(1)
    uninterrupted(model, ids)
    waiting = last_layer(model).register_forward_pre_hook(
        lambda *_: time.sleep(0.5) if running_out.passes == 3 else None
    )
    running_out = RunningOut(model, [3])
    for given in ({"max_time": 0.4}, {"generation_config": transformers.GenerationConfig(max_time=0.4)}):
        running_out.passes = 0
        with pytest.warns(SteppedDownWarning):
            seen = resilient_generate(model, ids, max_new_tokens=100, ladder=["dynamic"], **given)
        # Two tokens, and the one that it takes to see how late it is.
        assert seen.shape[1] == 12 + 3
    waiting.remove()


def test_tokens_that_are_kept_are_exact_where_the_next_cache_is_not() -> None:
    ids, coarse = prompt(1, 220, seed=3), ("int2", {"residual_length": 1, "sink_tokens": 0})
    expected = uninterrupted(fresh_model("llama"), ids)
    with kvlayers.installed():
        how = {"cache_implementation": coarse[0], "cache_config": coarse[1]}
        assert not torch.equal(uninterrupted(fresh_model("llama"), ids, **how)[:, :224], expected[:, :224])
    seen, running_out = interrupted(fresh_model("llama"), [5], ids, ladder=[coarse])
    assert torch.equal(seen[:, :224], expected[:, :224])
    assert running_out.passes == NEW_TOKENS + 1


@pytest.mark.parametrize("family", ["qwen2", "t5"])
def test_outputs_are_of_the_same_class(family: str) -> None:
    ids = prompt(2)
    expected = uninterrupted(fresh_model(family), ids, return_dict_in_generate=True)
    seen, running_out = interrupted(fresh_model(family), [4], ids, return_dict_in_generate=True)
    assert type(seen) is type(expected)
    assert seen.keys() == expected.keys()
    assert torch.equal(seen.sequences, expected.sequences)
    assert seen.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    assert running_out.passes == NEW_TOKENS + 1


# Where memory runs out


def test_memory_may_run_out_in_any_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, allocate = prompt(2), TokenBuffer.allocate
    expected = uninterrupted(fresh_model("gemma3"), ids)
    allocations, failing = 0, 0

    def count(*args: Any, **kwargs: Any) -> TokenBuffer:
        nonlocal allocations
        allocations += 1
        if allocations == failing:
            raise torch.OutOfMemoryError(MESSAGE)
        return allocate(*args, **kwargs)

    monkeypatch.setattr(TokenBuffer, "allocate", count)
    model = fresh_model("gemma3")
    with kvlayers.installed():
        uninterrupted(model, ids)
        assert allocations >= 8
        for failing in range(1, allocations + 1):
            allocations = 0
            with pytest.warns(SteppedDownWarning, match="now with cache_implementation='int8'"):
                seen = resilient_generate(model, **arguments_for(ids))
            assert torch.equal(seen, expected), failing


class FailsInTheLastStep(transformers.generation.streamers.BaseStreamer):
    """Runs out of memory after the last token was generated, and before generate() returns."""

    def __init__(self, fails_at: int) -> None:
        self.fails_at = fails_at
        self.had: list[list[int]] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        if len(self.had) == self.fails_at:
            self.fails_at = -1
            raise torch.OutOfMemoryError(MESSAGE)
        self.had.append(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("family", ["qwen2", "t5"])
@pytest.mark.parametrize("as_dict", [False, True])
def test_memory_may_run_out_after_the_last_token(family: str, as_dict: bool) -> None:
    versions.need_since("5.17", "the criteria of a call before its streamer hears a token")
    model, ids = fresh_model(family), prompt(1)
    expected = uninterrupted(model, ids, return_dict_in_generate=as_dict)
    tokens = (expected.sequences if as_dict else expected)[0]
    streamer = FailsInTheLastStep(NEW_TOKENS)
    running_out = RunningOut(model, [])
    with pytest.warns(SteppedDownWarning, match=f"continues after {NEW_TOKENS} new tokens"):
        seen = resilient_generate(model, **arguments_for(ids, return_dict_in_generate=as_dict, streamer=streamer))
    assert type(seen) is type(expected)
    assert torch.equal((seen.sequences if as_dict else seen)[0], tokens)
    assert running_out.passes == NEW_TOKENS
    assert streamer.had[1:] == [[token] for token in tokens[-NEW_TOKENS:].tolist()]
    assert streamer.ends == 1
    if as_dict and family == "qwen2":
        # Its cache is empty, from which a later call goes on rightly.
        longer = torch.cat([seen.sequences, prompt(1, 3, seed=5)], dim=1)
        assert torch.equal(
            uninterrupted(model, longer, past_key_values=seen.past_key_values), uninterrupted(model, longer)
        )


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory."),
    torch.cuda.OutOfMemoryError(),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to ..."),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    RuntimeError("MPS backend out of memory (MPS allocated: 17.50 GB)"),
    # Another process has left so little of a GPU's memory that a library, a kernel or the driver finds none.
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
def test_errors_that_say_that_memory_ran_out(error: BaseException) -> None:
    assert is_out_of_memory(error)
    model, ids = fresh_model("qwen2"), prompt(1)
    expected = uninterrupted(model, ids)
    RunningOut(model, [3], error)
    with pytest.warns(SteppedDownWarning):
        assert torch.equal(resilient_generate(model, **arguments_for(ids)), expected)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory"), KeyboardInterrupt()],
    ids=repr,
)
def test_other_errors_are_left_alone(error: BaseException) -> None:
    assert not is_out_of_memory(error)
    model, ids = fresh_model("qwen2"), prompt(1)
    running_out = RunningOut(model, ALWAYS, error)
    with no_step_down(), pytest.raises(type(error)) as seen:
        resilient_generate(model, ids)
    assert seen.value is error
    assert running_out.passes == 1


def test_another_error_on_a_lower_rung_is_left_alone_too() -> None:
    model, ids = fresh_model("qwen2"), prompt(1)
    running_out = RunningOut(model, [3])
    other = ArithmeticError("of the caller's own")
    last_layer(model).register_forward_pre_hook(lambda *_: raise_it(other) if running_out.passes == 5 else None)
    with pytest.warns(SteppedDownWarning), pytest.raises(ArithmeticError) as seen:
        resilient_generate(model, ids)
    assert seen.value is other
    assert not kvlayers.is_installed()


def raise_it(error: BaseException) -> None:
    raise error


# What starts again


RESTARTING: dict[str, Arguments] = {
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "guidance": {"guidance_scale": 1.5},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "hidden states": {"return_dict_in_generate": True, "output_hidden_states": True},
}


@pytest.mark.parametrize("way", RESTARTING)
def test_what_cannot_keep_tokens_starts_again(way: str) -> None:
    model, ids = fresh_model("qwen2"), prompt(1)
    expected = uninterrupted(model, ids, **RESTARTING[way])
    running_out = RunningOut(model, [4])
    with pytest.warns(SteppedDownWarning, match="starts again from the prompt, as "):
        seen = resilient_generate(model, ladder=["dynamic"], **arguments_for(ids, **RESTARTING[way]))
    assert running_out.passes >= NEW_TOKENS + (4 if way != "prompt lookup" else 1)
    assert type(seen) is type(expected)
    for one, other in zip(tensors_of(seen), tensors_of(expected), strict=True):
        torch.testing.assert_close(one, other)


def tensors_of(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if not isinstance(output, tuple | dict):
        return []
    parts = output.values() if isinstance(output, dict) else output
    return [tensor for part in parts for tensor in tensors_of(part)]


def test_a_prompt_of_embeddings_starts_again() -> None:
    model, ids = fresh_model("qwen2"), prompt(1)
    embeddings = model.get_input_embeddings()(ids)
    expected = model.generate(inputs_embeds=embeddings, max_new_tokens=NEW_TOKENS)
    RunningOut(model, [4])
    with pytest.warns(SteppedDownWarning, match="as the prompt is given as embeddings"):
        assert torch.equal(resilient_generate(model, inputs_embeds=embeddings, max_new_tokens=NEW_TOKENS), expected)


def test_a_generate_of_the_models_own_starts_again() -> None:
    class Own(transformers.Qwen2ForCausalLM):  # type: ignore[misc]
        calls = 0

        def generate(self, inputs: Tensor, *more: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return super().generate(inputs, *more, **kwargs)

    model, ids = fresh_model("qwen2"), prompt(1)
    expected = uninterrupted(model, ids)
    model.__class__ = Own
    RunningOut(model, [4])
    with pytest.warns(SteppedDownWarning, match=r"as this generate\(\) is not the one of transformers"):
        assert torch.equal(resilient_generate(model, ids, max_new_tokens=NEW_TOKENS, do_sample=False), expected)
    assert model.calls == 2


def test_a_loop_of_the_callers_own_is_used() -> None:
    model, ids, calls = fresh_model("qwen2"), prompt(1), []

    def loop(model: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return model._sample(*args, **kwargs)

    expected = uninterrupted(model, ids)
    RunningOut(model, [4])
    with pytest.warns(SteppedDownWarning, match="starts again"):
        assert torch.equal(resilient_generate(model, **arguments_for(ids, custom_generate=loop)), expected)
    assert len(calls) == 2


# Streamers


class Heard(FailsInTheLastStep):
    """A streamer that keeps what it hears."""

    def __init__(self) -> None:
        super().__init__(fails_at=-1)


@pytest.mark.parametrize("at", [[1], [4], [3, 4]])
def test_a_streamer_hears_each_token_once(at: list[int]) -> None:
    ids, expected, heard = prompt(2), Heard(), Heard()
    uninterrupted(fresh_model("qwen2"), ids, streamer=expected)
    interrupted(fresh_model("qwen2"), at, ids, streamer=heard, ladder=["dynamic", "static"])
    assert heard.had == expected.had
    assert heard.ends == 1


@pytest.mark.parametrize("fails_at", [0, 1, 4])
def test_a_streamer_that_runs_out_itself_is_given_the_token_again(fails_at: int) -> None:
    ids, expected, heard = prompt(2), Heard(), FailsInTheLastStep(fails_at)
    model = fresh_model("qwen2")
    uninterrupted(model, ids, streamer=expected)
    with pytest.warns(SteppedDownWarning):
        resilient_generate(model, **arguments_for(ids, streamer=heard))
    assert heard.had == expected.had
    assert heard.ends == 1


def test_a_streamer_hears_tokens_again_where_they_are_generated_again() -> None:
    ids, expected, heard = prompt(1), Heard(), Heard()
    how = {"return_dict_in_generate": True, "output_scores": True}
    uninterrupted(fresh_model("qwen2"), ids, streamer=expected, **how)
    interrupted(fresh_model("qwen2"), [4], ids, streamer=heard, **how)
    assert heard.had == expected.had[:4] + expected.had[1:]
    assert heard.ends == 1


# Ladders


@versions.generate_makes_the_cache
def test_the_default_ladder_is_gone_down_to_its_end() -> None:
    model, ids = fresh_model("qwen2"), prompt(1)
    expected = uninterrupted(model, ids)
    running_out = RunningOut(model, [2, 4, 6, 8])
    with pytest.warns(SteppedDownWarning) as seen:
        assert torch.equal(resilient_generate(model, **arguments_for(ids)), expected)
    said = [str(warning.message) for warning in seen]
    assert said == [
        "resilient_generate ran out of memory with the requested cache, after 1 new token: OutOfMemoryError: CUDA out "
        "of memory. Tried to allocate 20.00 MiB. It continues after 1 new token, now with cache_implementation='int8'.",
        "resilient_generate ran out of memory with cache_implementation='int8', after 2 new tokens: OutOfMemoryError: "
        "CUDA out of memory. Tried to allocate 20.00 MiB. It continues after 2 new tokens, now with "
        "cache_implementation='int4'.",
        "resilient_generate ran out of memory with cache_implementation='int4', after 3 new tokens: OutOfMemoryError: "
        "CUDA out of memory. Tried to allocate 20.00 MiB. It continues after 3 new tokens, now with "
        "cache_implementation='offloaded'.",
        "resilient_generate ran out of memory with cache_implementation='offloaded', after 4 new tokens: "
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. It continues after 4 new tokens, "
        "now with cache_implementation='offloaded_quantized' with {'nbits': 4}.",
    ]
    assert all(warning.filename == __file__ for warning in seen)
    assert running_out.caches == [
        transformers.DynamicCache,
        kvlayers.QuantizedCache,
        kvlayers.OffloadedCache,
        kvlayers.QuantizedCache,
    ]


def test_the_error_in_the_end_says_what_was_tried() -> None:
    model, ids = fresh_model("qwen2"), prompt(1)
    running_out = RunningOut(model, [3, *range(5, 100)])
    with pytest.warns(SteppedDownWarning), pytest.raises(torch.OutOfMemoryError) as seen:
        resilient_generate(model, ids, ladder=[None, "int4", ("offloaded_quantized", {"nbits": 2})])
    line = "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"
    assert str(seen.value) == (
        f"{MESSAGE}\n\nresilient_generate ran out of memory on every rung of its ladder:\n"
        f"  1. the requested cache, after 2 new tokens: {line}\n"
        f"  2. cache_implementation='int4', after 3 new tokens: {line}\n"
        f"  3. cache_implementation='offloaded_quantized' with {{'nbits': 2}}, after 3 new tokens: {line}\n"
        "Shorten the prompt, generate fewer tokens or sequences at once, or add smaller caches to the ladder."
    )
    assert isinstance(seen.value.__cause__, torch.OutOfMemoryError)
    assert str(seen.value.__cause__) == MESSAGE
    # Where it was raised in the end is still known.
    assert seen.value.__cause__.__traceback__ is not None
    assert running_out.passes == 6
    assert not kvlayers.is_installed()


@pytest.mark.parametrize(
    ("asked", "below"),
    [
        ({"cache_implementation": "int4"}, ["offloaded", "offloaded_quantized"]),
        ({"cache_implementation": "int8"}, ["int4", "offloaded", "offloaded_quantized"]),
        ({"cache_implementation": "offloaded_quantized", "cache_config": {"nbits": 4}}, []),
        ({"cache_implementation": "offloaded_quantized"}, ["int8", "int4", "offloaded", "offloaded_quantized"]),
        ({"cache_implementation": "static"}, ["int8", "int4", "offloaded", "offloaded_quantized"]),
        (
            {"generation_config": transformers.GenerationConfig(max_new_tokens=4), "cache_implementation": "int4"},
            ["offloaded", "offloaded_quantized"],
        ),
    ],
)
def test_what_was_asked_for_is_not_tried_twice(installed: None, asked: Arguments, below: list[str]) -> None:
    model, ids = fresh_model("qwen2"), prompt(1)
    RunningOut(model, ALWAYS)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", SteppedDownWarning)
        with pytest.raises(torch.OutOfMemoryError):
            resilient_generate(model, ids, **asked)
    said = [str(warning.message) for warning in seen if warning.category is SteppedDownWarning]
    names = [words.split("now with cache_implementation='")[1].split("'")[0] for words in said]
    assert names == below


@pytest.mark.parametrize(
    ("ladder", "error", "message"),
    [
        ([], OptionError, "`ladder` must have at least one rung"),
        ("int4", OptionError, "`ladder` must be a sequence of rungs, got 'int4'"),
        (Rung("int4"), OptionError, "must be a sequence of rungs"),
        (7, OptionError, "must be a sequence of rungs, got 7"),
        ([""], RegistryError, "unknown cache name ''.*int4"),
        (["int4", "in4"], RegistryError, "unknown cache name 'in4'.*int4"),
        ([7], OptionError, "a rung must be the name of a cache, a pair .* got 7"),
        ([("int4",)], OptionError, "a rung must be the name"),
        (("offloaded_quantized", {"nbits": 4}), OptionError, r"got \{'nbits': 4\}"),
        ([("int4", 4)], OptionError, "`options` of a Rung must be a mapping .* got 4"),
        ([("int4", {"nbit": 4})], OptionError, "did you mean 'nbits'"),
        ([("int4", {"nbits": 2})], OptionError, "`nbits` is 4 for a cache of this name"),
        ([("int4", {"q_group_size": -7})], kvlayers.KVLayersError, "-7"),
        (["int4", None], OptionError, "None in `ladder` stands for the requested cache"),
        ([(None, {"nbits": 4})], OptionError, "`options` of a Rung need a `name`"),
    ],
    ids=repr,
)
def test_mistakes_in_a_ladder_are_errors_before_anything_is_generated(
    ladder: Any, error: type[Exception], message: str
) -> None:
    model, ids = fresh_model("qwen2"), prompt(1)
    running_out = RunningOut(model, [])
    with pytest.raises(error, match=message):
        resilient_generate(model, ids, ladder=ladder)
    assert running_out.passes == 0


def test_rungs_of_the_default_ladder_that_a_model_cannot_have_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: Any) -> Any:
        raise kvlayers.errors.ConfigError("expected a model with heads, but saw one without.")

    monkeypatch.setitem(named_caches._factories._entries, "int8", refuse)
    model, ids = fresh_model("qwen2"), prompt(1)
    RunningOut(model, ALWAYS)
    with (
        pytest.warns(SteppedDownWarning, match="now with cache_implementation='int4'"),
        pytest.raises(torch.OutOfMemoryError, match="int8.*expected a model with heads") as seen,
    ):
        resilient_generate(model, ids)
    assert "  4. cache_implementation='offloaded_quantized'" in str(seen.value)
    with pytest.raises(kvlayers.errors.ConfigError):
        resilient_generate(model, ids, ladder=list(DEFAULT_LADDER))


def test_a_ladder_may_have_a_cache_of_ones_own() -> None:
    made: list[Any] = []

    @kvlayers.register("of one's own")
    def own(request: Any) -> Any:
        made.append(request)
        return kvlayers.DynamicCache(config=request.config)

    try:
        model, ids = fresh_model("qwen2"), prompt(1)
        expected = uninterrupted(model, ids)
        seen, _ = interrupted(model, [4], ids, ladder=iter([AS_REQUESTED, Rung("of one's own", {"size": 3})]))
    finally:
        kvlayers.unregister("of one's own")
    assert torch.equal(seen, expected)
    # Once to see whether it can be made, once to use it.
    assert len(made) == 2
    assert made[-1].length_hint == 12 + NEW_TOKENS - 1
    assert [request.options for request in made] == [{"size": 3}] * 2


# Calls


@versions.generate_makes_the_cache
def test_nothing_is_changed_where_memory_suffices() -> None:
    model, ids = fresh_model("qwen2"), prompt(2)
    for how in ({}, *WAYS.values(), *(way for name, way in RESTARTING.items() if name != "prompt lookup")):
        expected, heard = uninterrupted(model, ids, **how), Heard()
        torch.manual_seed(3)
        streaming = {} if "num_beams" in how else {"streamer": heard}
        with no_step_down():
            seen = resilient_generate(model, **arguments_for(ids, **how), **streaming)
        for one, other in zip(tensors_of(seen), tensors_of(expected), strict=True):
            assert torch.equal(one, other)
        if streaming:
            assert heard.ends == 1
    assert not kvlayers.is_installed()


@versions.generate_makes_the_cache
def test_positional_arguments_and_a_config_are_as_for_generate() -> None:
    ids, config = prompt(2), transformers.GenerationConfig(max_new_tokens=NEW_TOKENS, repetition_penalty=1.5)
    before, model = config.to_dict(), fresh_model("qwen2")
    expected = model.generate(ids, config)
    running_out = RunningOut(model, [3])
    with pytest.warns(SteppedDownWarning):
        assert torch.equal(resilient_generate(model, ids, config, ladder=[("int4", {"sink_tokens": 4})]), expected)
    assert running_out.caches == [transformers.DynamicCache, kvlayers.QuantizedCache]
    assert config.to_dict() == before
    for call in (model.generate, lambda *args, **kwargs: resilient_generate(model, *args, **kwargs)):
        with pytest.raises(TypeError, match="inputs"):
            call(ids, inputs=ids)
        with pytest.raises(ValueError, match="no_such_option"):
            call(ids, no_such_option=1)


@versions.generate_makes_the_cache
@pytest.mark.parametrize("explicitly", [False, True])
def test_kvlayers_stays_as_it_was_installed(explicitly: bool) -> None:
    if explicitly:
        kvlayers.install()
    try:
        _, running_out = interrupted(fresh_model("qwen2"), [4], prompt(1), ladder=["static"])
        assert kvlayers.is_installed() == explicitly
        first = kvlayers.DynamicCache if explicitly else transformers.DynamicCache
        assert running_out.caches == [first, kvlayers.StaticCache]
    finally:
        kvlayers.uninstall()


@versions.generate_makes_the_cache
def test_a_failed_attempt_leaves_no_memory_behind() -> None:
    model, ids, alive = fresh_model("qwen2"), prompt(1), []
    caches: list[weakref.ref[Any]] = []

    def watch(model: Any, args: Any, kwargs: Any) -> None:
        cache = cache_argument.passed_in(kwargs)
        if all(known() is not cache for known in caches):
            caches.append(weakref.ref(cache))
            alive.append(sum(known() is not None for known in caches))

    model.register_forward_pre_hook(watch, with_kwargs=True)
    RunningOut(model, [3, 5])
    with pytest.warns(SteppedDownWarning):
        resilient_generate(model, **arguments_for(ids, ladder=["int4", "static"]))
    assert alive == [1, 1, 1]


HELD_BY_THE_CALL = """
import weakref
import torch
import kvlayers
from kvlayers.upstream import cache_argument
from models import fresh_model, prompt

model, alive, caches, passes = fresh_model("qwen2"), [], [], []

def watch(model, args, kwargs):
    cache = cache_argument.passed_in(kwargs)
    passes.append(cache is None)
    if all(known() is not cache for known in caches):
        caches.append(weakref.ref(cache))
        alive.append(sum(known() is not None for known in caches))

def fail(module, args):
    if len(passes) == 3:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

model.register_forward_pre_hook(watch, with_kwargs=True)
model.model.layers[-1].register_forward_pre_hook(fail)
kvlayers.resilient_generate(model, prompt(1), past_key_values=kvlayers.DynamicCache(config=model.config))
print(alive)
"""


@versions.generate_makes_the_cache
def test_a_failed_attempt_gives_back_a_cache_that_only_the_call_holds() -> None:
    # In a process of its own: once torch has compiled something, Python itself keeps the arguments of calls alive.
    ran = fresh_process.run(HELD_BY_THE_CALL)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[1, 1]"


def test_the_memory_of_an_accelerator_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[Any] = []

    class Module:
        def __init__(self, device: Any) -> None:
            self.device = device

        def empty_cache(self) -> None:
            emptied.append(self.device)

    monkeypatch.setattr(torch, "get_device_module", Module)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    for available in (True, False):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda available=available: available)
        resilient.free_memory()
        assert emptied == [torch.device("cuda")]


def test_what_refers_to_itself_alone_is_given_back() -> None:
    gc.disable()
    try:
        circle = torch.nn.Linear(1, 1)
        circle.self = [circle]
        known = weakref.ref(circle)
        del circle
        assert known() is not None
        resilient.free_memory()
        assert known() is None
    finally:
        gc.enable()


def test_memory_that_is_kept_for_the_next_call_is_given_back(installed: None) -> None:
    model, ids = fresh_model("qwen2"), prompt(1)
    # Only compiled calls keep memory for the next one.
    compiling = {"compile_config": transformers.CompileConfig(backend="eager", fullgraph=False)}
    uninterrupted(model, ids, cache_implementation="static", **compiling)
    idle = [weakref.ref(cache) for cache in call_cache._idle.values()]
    assert len(idle) == 1
    resilient.free_memory()
    assert idle[0]() is None


@pytest.mark.parametrize("family", ["qwen2", "t5"])
def test_a_cache_that_was_passed_is_left_behind_with_its_tokens_read_again(family: str) -> None:
    model, ids = fresh_model(family), prompt(1)
    past: Callable[[], Any] = kvlayers.DynamicCache
    arguments: Arguments = {}
    if family == "t5":
        past = lambda: kvlayers.EncoderDecoderCache(kvlayers.DynamicCache(), kvlayers.DynamicCache())  # noqa: E731
        arguments = {"decoder_input_ids": torch.tensor([[0, 5, 9, 4]])}
    expected = uninterrupted(model, ids, **arguments)
    mine = past()
    begun = uninterrupted(model, ids, past_key_values=mine, max_new_tokens=3, **arguments)
    if family == "t5":
        arguments = {"decoder_input_ids": begun, "decoder_attention_mask": torch.ones_like(begun)}
    else:
        ids = begun
    seen, _ = interrupted(model, [3], ids, past_key_values=mine, **{**arguments, "max_new_tokens": NEW_TOKENS - 3})
    assert torch.equal(seen, expected)


def test_a_prompt_that_only_the_callers_cache_knows_cannot_step_down() -> None:
    versions.need_since("5.4", "new tokens alone behind a cache")
    model, ids = fresh_model("qwen2"), prompt(1)
    mine = kvlayers.DynamicCache(config=model.config)
    model(ids[:, :8], past_key_values=mine)
    arguments = {"attention_mask": torch.ones_like(ids), "past_key_values": mine}
    running_out = RunningOut(model, [2])
    with no_step_down(), pytest.raises(torch.OutOfMemoryError, match="No other cache was tried, as the prompt is not"):
        resilient_generate(model, ids[:, 8:], **arguments)
    assert running_out.passes == 2


def test_without_a_cache_there_is_nothing_to_step_down_from() -> None:
    model, ids = fresh_model("qwen2"), prompt(1)
    RunningOut(model, ALWAYS)
    with no_step_down(), pytest.raises(torch.OutOfMemoryError, match="as use_cache=False leaves no cache"):
        resilient_generate(model, ids, use_cache=False)


def test_it_stands_in_for_the_function_of_transformers_documentation() -> None:
    """Which catches the error, and asks for `cache_implementation="offloaded"`."""
    inputs = transformers.BatchEncoding({"input_ids": prompt(1), "attention_mask": torch.ones(1, 12, dtype=torch.long)})
    beams = {"num_beams": 10, "num_return_sequences": 5, "max_new_tokens": 6, "early_stopping": True}
    model = fresh_model("llama")
    expected = model.generate(**inputs, **beams)
    with no_step_down():
        assert torch.equal(resilient_generate(model, **inputs, **beams), expected)
    running_out = RunningOut(model, [4])
    with pytest.warns(SteppedDownWarning, match="offloaded"):
        assert torch.equal(resilient_generate(model, **inputs, **beams, ladder=["offloaded"]), expected)
    assert running_out.caches[-1] is kvlayers.OffloadedCache


def test_every_family_here_is_of_a_known_kind() -> None:
    assert set(ENCODER_DECODERS) < set(LAST_LAYER)
