"""Out of memory is one pass that is made again: what a call returns, streams and draws is as in a call without it."""

import contextlib
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvlayers
import versions
from kvlayers import OptionError
from kvlayers.core.buffer import TokenBuffer
from kvlayers.core.forward_pass import in_module
from kvlayers.generation import call_cache, retried_pass
from kvlayers.generation.install import resilient_generate
from kvlayers.generation.retried_pass import SteppedDownWarning
from kvlayers.upstream import cache_argument
from kvlayers.utils.tensor_memory import is_out_of_memory
from matrix import once
from models import CONFIGS, fresh_model, prompt, read, under_install
from rounds import NIGHTLY

NEW_TOKENS = 8
PADDED = torch.tensor([[0] * 5 + [1] * 7, [1] * 12])
MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB.\nMore than anybody wants to read."

LAST_LAYER: dict[str, Callable[[Any], torch.nn.Module]] = {
    "gpt2": lambda model: model.transformer.h[-1],
    "mamba": lambda model: model.backbone.layers[-1],
    "t5": lambda model: model.decoder.block[-1],
    "bart": lambda model: model.model.decoder.layers[-1],
}
"""The last layer with a cache."""

Arguments = dict[str, Any]


pytestmark = pytest.mark.usefixtures("quick_collections")


class RunningOut:
    """Makes the forward passes of a model run out of memory, those with the given numbers from 1 on.

    Attributes:
        passes: forward passes that were begun.
        caches: the caches that they were given, each once.
    """

    def __init__(self, model: Any, at: Iterable[int], error: BaseException | None = None) -> None:
        self.at, self.error = set(at), error
        self.passes = 0
        self.caches: list[Any] = []
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        # Where it fails, the earlier ones have taken the tokens of the step.
        last = LAST_LAYER.get(model.config.model_type, lambda model: model.model.layers[-1])
        last(model).register_forward_pre_hook(self._fail)

    def _begin(self, model: Any, args: Any, kwargs: Any) -> None:
        self.passes += 1
        cache = cache_argument.passed_in(kwargs)
        if not any(known is cache for known in self.caches):
            self.caches.append(cache)

    def _fail(self, module: Any, args: Any) -> None:
        if self.passes in self.at:
            raise self.error or torch.OutOfMemoryError(MESSAGE)


class Allocations:
    """Stands in for an allocator: operations of a model and buffers of its cache ask it in a pass, and one fails.

    Attributes:
        asked: how often it was asked.
        failing: the number of the request that fails, from 1 on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *models: Any) -> None:
        self.asked, self.failing, allocate = 0, 0, TokenBuffer.allocate

        def counted(*args: Any, **kwargs: Any) -> TokenBuffer:
            if in_module(sys.maxsize):
                self.ask()
            return allocate(*args, **kwargs)

        monkeypatch.setattr(TokenBuffer, "allocate", counted)
        for model in models:
            for module in model.modules():
                if not list(module.children()):
                    module.register_forward_pre_hook(self.ask)

    def ask(self, *_: Any) -> None:
        self.asked += 1
        if self.asked == self.failing:
            raise torch.OutOfMemoryError(MESSAGE)


ALWAYS = range(1, 1000)


def arguments_for(ids: Tensor | None, **arguments: Any) -> Arguments:
    return {"inputs": ids, "max_new_tokens": NEW_TOKENS, "do_sample": False, **arguments}


def uninterrupted(model: Any, ids: Tensor | None, **arguments: Any) -> Any:
    torch.manual_seed(3)
    return model.generate(**arguments_for(ids, **arguments))


def interrupted(
    model: Any, at: Iterable[int], ids: Tensor | None, error: BaseException | None = None, **arguments: Any
) -> tuple[Any, RunningOut]:
    """What comes of a call in which the given forward passes run out of memory."""
    running_out = RunningOut(model, at, error)
    torch.manual_seed(3)
    with pytest.warns(SteppedDownWarning) as seen:
        output = resilient_generate(model, **arguments_for(ids, **arguments))
    assert sum(warning.category is SteppedDownWarning for warning in seen) == len(running_out.at)
    return output, running_out


@contextlib.contextmanager
def no_step_down() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SteppedDownWarning)
        yield


def comparable(output: Any) -> Any:
    """What `generate()` returns, without its cache."""
    parts = output.items() if isinstance(output, dict) else ()
    return {name: part for name, part in parts if not isinstance(part, kvlayers.Cache)} or output


# The pass is made again


@pytest.mark.parametrize("family", [family for family in CONFIGS if family != "mamba"])
def test_a_call_goes_on_from_the_token_that_it_had(family: str) -> None:
    ids = prompt(2)
    expected = under_install(uninterrupted, fresh_model(family), ids, num_beams=1)
    for at in ([1, NEW_TOKENS + 1], [3, 6], [2, 3]):
        seen, running_out = interrupted(fresh_model(family), at, ids, num_beams=1)
        assert torch.equal(seen, expected), at
        # The same cache all the time.
        assert len(running_out.caches) == 1
        if running_out.caches[0].keeps_every_token:
            # A pass for each token, and one for each that failed: no token was generated twice.
            assert running_out.passes == NEW_TOKENS + len(at)


WAYS: dict[str, Arguments] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "assistant": {},
    "chunked prefill": {"prefill_chunk_size": 7},
    "hidden states": {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True},
    "left padding": {
        "attention_mask": torch.tensor([[0] * 5 + [1] * 35]),
        "return_dict_in_generate": True,
        "output_logits": True,
    },
}


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *once(["llama", "mistral"], list(WAYS)),
        *(("gemma3", "greedy"), ("gemma3", "left padding"), ("gpt2", "left padding")),
        *(("jamba", "greedy"), ("jamba", "beams")),
    ],
)
def test_memory_may_run_out_in_any_allocation(family: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "chunked prefill":
        versions.need_since("5.3", "chunks that are read before the first token, and without a given cache")
    model, ids, how = fresh_model(family), prompt(1, 40), {**WAYS[way], "max_new_tokens": 4}
    models = [model]
    if way == "assistant":
        models.append(fresh_model(family, num_hidden_layers=1))
        models[1].generation_config.num_assistant_tokens_schedule = "constant"
        how["assistant_model"] = models[1]
    streams = "num_beams" not in how
    with kvlayers.installed():
        expected = uninterrupted(model, ids, **how, **({"streamer": (heard := Heard())} if streams else {}))
        allocations = Allocations(monkeypatch, *models)
        uninterrupted(model, ids, **how)
        total = allocations.asked
        # Every one of a step, or every second one in the gate, and some of all others.
        for failing in {*range(total - 20, total + 1, 1 if NIGHTLY else 2), *range(1, total, 9)}:
            allocations.asked, allocations.failing, again = 0, failing, Heard()
            with pytest.warns(SteppedDownWarning):
                seen = uninterrupted(model, ids, **how, **({"streamer": again} if streams else {}))
            assert type(seen) is type(expected)
            if isinstance(expected, dict):
                assert seen.keys() == expected.keys()
                assert seen.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
            torch.testing.assert_close(comparable(seen), comparable(expected), rtol=1e-4, atol=1e-5)
            if streams:
                assert again.had == heard.had
                assert again.ends == 1


def test_padding_that_a_cache_has_learned_is_known_in_a_prompt_that_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvlayers.Cache, "give_way", lambda cache, ladder: "as if")
    ids = torch.where(PADDED == 1, prompt(2), 0)
    sinks = {"attention_mask": PADDED, "cache_implementation": "sink", "cache_config": {"window_length": 64}}
    expected = under_install(uninterrupted, fresh_model("qwen2"), ids, **sinks)
    for at in (1, 4):
        assert torch.equal(interrupted(fresh_model("qwen2"), [at], ids, **sinks)[0], expected)


def test_tokens_before_the_failure_are_exact_where_the_callers_cache_is_not_any_more() -> None:
    ids, mine, how = prompt(1, 220, seed=3), kvlayers.DynamicCache(), {"return_dict_in_generate": True}
    expected = uninterrupted(fresh_model("llama"), ids, output_logits=True, **how)
    seen, running_out = interrupted(fresh_model("llama"), [4, 5], ids, past_key_values=mine, output_logits=True, **how)
    assert running_out.passes == NEW_TOKENS + 2
    torch.testing.assert_close(seen.logits[:3], expected.logits[:3])
    assert not torch.equal(seen.logits[5], expected.logits[5])
    assert running_out.caches == [mine]
    assert mine.adapted_layers()[0].bits == (4, 4)


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
    expected = uninterrupted(fresh_model("qwen2"), prompt(1))
    seen, _ = interrupted(fresh_model("qwen2"), [3], prompt(1), error=error)
    assert torch.equal(seen, expected)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory"), KeyboardInterrupt()],
    ids=repr,
)
@pytest.mark.parametrize("at", [1, 3])
def test_other_errors_are_left_alone(error: BaseException, at: int) -> None:
    assert not is_out_of_memory(error)
    model = fresh_model("qwen2")
    running_out = RunningOut(model, [at], error)
    with no_step_down(), pytest.raises(type(error)) as seen:
        resilient_generate(model, prompt(1))
    assert seen.value is error
    assert running_out.passes == at
    assert not kvlayers.is_installed()


class Heard(transformers.generation.streamers.BaseStreamer):
    """A streamer that keeps what it hears, and may run out of memory."""

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at
        self.had: list[list[int]] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        if len(self.had) == self.fails_at:
            raise torch.OutOfMemoryError(MESSAGE)
        self.had.append(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize(
    ("how", "at", "note"),
    [
        ({"streamer": Heard(fails_at=3)}, (), "outside of forward passes"),
        ({"logits_processor": [lambda ids, scores: Heard(0).put(ids)]}, (), "outside of forward passes"),
        ({"use_cache": False}, ALWAYS, "with a cache of transformers"),
        ({"past_key_values": transformers.DynamicCache()}, ALWAYS, "with a cache of transformers"),
    ],
    ids=["streamer", "processor", "no cache", "a cache of transformers"],
)
def test_memory_that_no_cache_could_give_is_the_callers_to_find(how: Arguments, at: Iterable[int], note: str) -> None:
    model = fresh_model("qwen2")
    RunningOut(model, at)
    with no_step_down(), pytest.raises(torch.OutOfMemoryError) as seen:
        resilient_generate(model, **arguments_for(prompt(1), **how))
    assert str(seen.value) == MESSAGE
    # Before Python 3.11, errors have no notes.
    assert not hasattr(seen.value, "add_note") or any(note in each for each in seen.value.__notes__)


# Calls


def test_calls_under_install_go_on_too(installed: None) -> None:
    model, ids = fresh_model("qwen2"), prompt(1)
    expected = uninterrupted(model, ids)
    running_out = RunningOut(model, [4])
    with pytest.warns(SteppedDownWarning) as seen:
        assert torch.equal(uninterrupted(model, ids), expected)
    assert running_out.passes == NEW_TOKENS + 1
    (warning,) = [each for each in seen if each.category is SteppedDownWarning]
    assert warning.filename == __file__
    assert str(warning.message) == (
        "A forward pass ran out of memory (OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB). It is "
        "made again, and its cache has given way by one step: int8."
    )
    assert type(running_out.caches[0]) is kvlayers.DynamicCache
    running_out.passes = 0
    inputs = transformers.BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    with pytest.warns(SteppedDownWarning):
        assert torch.equal(resilient_generate(model, **inputs, max_new_tokens=NEW_TOKENS, do_sample=False), expected)
    assert kvlayers.is_installed()
    # Passes of one's own loop are one's own, as are those without kvlayers.
    running_out.passes = 3
    with no_step_down(), pytest.raises(torch.OutOfMemoryError):
        read(model, ids)
    kvlayers.uninstall()
    running_out.passes = 3
    with no_step_down(), pytest.raises(torch.OutOfMemoryError):
        model.generate(ids)


@pytest.mark.parametrize(
    ("seen", "at", "is_embedded"),
    [(38, 1, False), (12, 1, False), (0, 3, True)],
    ids=["few new tokens", "many new tokens", "embeddings"],
)
def test_windows_that_cannot_go_back_are_named_where_earlier_tokens_are_unknown(
    seen: int, at: int, is_embedded: bool
) -> None:
    """New tokens alone are not taken for the whole text, however many they are, nor the newest embeddings."""
    versions.need_since("5.4", "new tokens alone behind a cache")
    model, ids = fresh_model("mistral"), prompt(1, 40)
    mine = kvlayers.DynamicCache(config=model.config)
    if seen:
        read(model, ids[:, :seen], mine)
    embeddings = {"inputs_embeds": model.get_input_embeddings()(ids).detach()} if is_embedded else {}
    RunningOut(model, [at])
    with no_step_down(), pytest.raises(torch.OutOfMemoryError, match="earlier tokens cannot be read again") as raised:
        resilient_generate(
            model, input_ids=ids[:, seen:], attention_mask=torch.ones_like(ids), past_key_values=mine, **embeddings
        )
    assert str(raised.value).startswith(MESSAGE)


@pytest.mark.parametrize(("family", "how"), [("mamba", {}), ("qwen2", {"ladder": ("offloaded",)})], ids=str)
def test_a_cache_that_has_no_step_left_says_so(family: str, how: Arguments) -> None:
    model = fresh_model(family)
    RunningOut(model, [3])
    with no_step_down(), pytest.raises(torch.OutOfMemoryError, match="no step left"):
        resilient_generate(model, prompt(1), **how)


def test_the_error_in_the_end_says_what_was_done() -> None:
    model, ids = fresh_model("qwen2"), prompt(1)
    running_out = RunningOut(model, [3, *range(5, 100)])
    with pytest.warns(SteppedDownWarning), pytest.raises(torch.OutOfMemoryError) as seen:
        resilient_generate(model, ids)
    assert str(seen.value) == (
        f"{MESSAGE}\n\nThe forward pass could not be made again with less memory, as its DynamicCache has no step "
        "left to give way by (steps taken: int8, int4). Shorten the prompt, set prefill_chunk_size, generate fewer "
        "tokens or sequences at once, or begin with a smaller cache, such as "
        'cache_implementation="offloaded_quantized".'
    )
    assert isinstance(seen.value.__cause__, torch.OutOfMemoryError)
    assert str(seen.value.__cause__) == MESSAGE
    # Where it was raised in the end is still known.
    assert seen.value.__cause__.__traceback__ is not None
    assert running_out.passes == 6
    assert not kvlayers.is_installed()


def test_a_ladder_says_which_steps_may_be_taken() -> None:
    model, ids = fresh_model("qwen2"), prompt(1)
    RunningOut(model, [2])
    with pytest.warns(SteppedDownWarning, match="by one step: int4"):
        resilient_generate(model, ids, ladder=["int4"])
    running_out = RunningOut(model, ALWAYS)
    for ladder in ((), "int8", ["int2"], [("int4", {})], None, [None], {"int8": 1}):
        with pytest.raises(OptionError, match="`ladder` must be steps of 'int8', 'int4', 'offloaded', got"):
            resilient_generate(model, ids, ladder=ladder)
    assert running_out.passes == 0


# Memory


def test_a_pass_that_failed_leaves_no_memory_behind() -> None:
    model, ids = fresh_model("qwen2"), prompt(1)
    activations: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def watch(module: Any, args: Any) -> None:
        alive.append(sum(known() is not None for known in activations))

    model.register_forward_pre_hook(watch)
    model.model.layers[0].register_forward_hook(
        lambda module, args, output: activations.append(
            weakref.ref(output if isinstance(output, Tensor) else output[0])
        )
    )
    _, running_out = interrupted(model, [1, 3], ids)
    assert len(alive) == NEW_TOKENS + 2
    assert not any(alive)
    kept = under_install(uninterrupted, fresh_model("qwen2"), ids, return_dict_in_generate=True).past_key_values
    kept.pack(8)
    kept.pack(4)
    assert running_out.caches[0].nbytes == kept.nbytes


def test_memory_that_nobody_needs_is_given_back(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for the next call, what refers to itself alone, and what the allocator of an accelerator keeps."""
    model, emptied = fresh_model("qwen2"), []
    # Only compiled calls keep memory for the next one.
    compiling = {"compile_config": transformers.CompileConfig(backend="eager", fullgraph=False)}
    uninterrupted(model, prompt(1), cache_implementation="static", **compiling)
    circle = torch.nn.Linear(1, 1)
    circle.self = [circle]
    known = [weakref.ref(circle), *map(weakref.ref, call_cache._idle.values())]
    del circle

    def module_of(device: torch.device) -> types.SimpleNamespace:
        return types.SimpleNamespace(empty_cache=lambda: emptied.append(device))

    monkeypatch.setattr(torch, "get_device_module", module_of)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    for available in (False, True):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda available=available: available)
        retried_pass.release_memory()
        assert emptied == [torch.device("cuda")] * available
    assert [each() for each in known] == [None, None]
