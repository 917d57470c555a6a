"""Static caches in compiled code: the logits of eager code, from a few graphs, whatever happens between the steps."""

import copy
import dataclasses
import functools
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvlayers
import versions
from agreement import same_state
from counted_graphs import COUNTS, CUDA_GRAPHS, MODELS, backend, graphs, recording_backend
from decodings import (
    OPERATIONS,
    Decoding,
    Operation,
    check_goes_on_after,
    deepcopy,
    fork,
    pickled,
    reorder,
    repeat,
    saved,
    select_fewer,
    select_more,
)
from kvlayers.upstream import cache_argument, compat
from matrix import once
from models import bare, fresh_model, given, prompt, without_mlps

pytestmark = pytest.mark.slow

HYBRID = ("hybrid", "llama4")

BUCKETS = kvlayers.stores.Buckets(minimum=32)
SIZES = (32, 64)
CAPACITY = 64
PROMPT = 9
STEPS = 40
"""The window of 8 has room for 23 tokens, and moves at tokens 24 and 40."""


@pytest.fixture(autouse=True)
def _no_limit() -> Iterator[None]:
    """Let tests share what is compiled: of all models, since their forward passes are one function to TorchDynamo."""
    with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=512):
        yield


@functools.cache
def small_model(family: str) -> Any:
    name, changes = MODELS[family]
    model = fresh_model(name, **changes)
    return without_mlps(model) if name in ("qwen2", "mistral") else model


@functools.cache
def bare_model(family: str) -> Any:
    return bare(copy.deepcopy(small_model(family)))


def static_cache(family: str, **options: Any) -> kvlayers.StaticCache:
    return kvlayers.StaticCache(
        small_model(family).config, **{"max_cache_len": CAPACITY, "buckets": BUCKETS, **options}
    )


def compiled(family: str, model: Any = None, **options: Any) -> Callable[..., Any]:
    model = bare_model(family) if model is None else model
    forward = torch.compile(model.forward, **{"fullgraph": True, "backend": backend, **options})

    def run(*args: Any, **kwargs: Any) -> Any:
        before = COUNTS["runs"]
        output = forward(*args, **{**versions.positions(args[0], cache_argument.passed_in(kwargs)), **kwargs})
        assert COUNTS["runs"] > before or "backend" in options, "TorchDynamo has given up, and ran eager code"
        return output

    return run


shared = functools.cache(compiled)
"""A compiled forward pass for tests that do not count graphs: what one of them has compiled, the others use."""


@pytest.fixture(scope="module", autouse=True)
def _forget_what_is_shared() -> Iterator[None]:
    yield
    shared.cache_clear()


Inputs = tuple[Tensor, ...]


@functools.cache
@torch.no_grad()
def reference(
    family: str, batch: int = 2, tokens: int = PROMPT, steps: int = STEPS, seed: int = 0
) -> tuple[Inputs, Tensor]:
    """A prompt and the tokens that follow it, and the logits `[steps + 1, batch, vocab]` of eager code."""
    model, step = small_model(family), prompt(batch, tokens, seed)
    cache, inputs, logits = transformers.DynamicCache(config=model.config), [step], []
    for _ in range(steps + 1):
        logits.append(model(step, **given(cache)).logits[:, -1])
        step = logits[-1].argmax(-1, keepdim=True)
        inputs.append(step)
    return tuple(inputs[:-1]), torch.stack(logits)


@torch.no_grad()
def decode(forward: Callable[..., Any], cache: kvlayers.StaticCache, inputs: Inputs, prefill: Any = None) -> Tensor:
    """Logits of each step, `prefill` in place of `forward` for the first; the length is a number after each."""
    logits, seen = [], cache.get_seq_length()
    for index, ids in enumerate(inputs):
        run = prefill if prefill is not None and not index else forward
        told = versions.positions(ids, cache)
        logits.append(run(ids, **given(cache), **told).logits[:, -1].clone())
        seen += ids.shape[1]
        assert isinstance(cache.get_seq_length(), int)
        assert cache.get_seq_length() == seen
    return torch.stack(logits)


def decode_whole(forward: Callable[..., Any], cache: kvlayers.StaticCache, inputs: Inputs) -> Tensor:
    """As `decode`, with the prompt in compiled code too."""
    first = decode(forward, cache, inputs[:1])
    cache.settle()
    return torch.cat([first, decode(forward, cache, inputs[1:])])


def check(seen: Tensor, expected: Tensor) -> None:
    """Logits of a few units are the same, but for sums in another order: over free slots, or for heads together."""
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-5)


def most_graphs(family: str, reached: int = len(SIZES)) -> int:
    """One graph for a bucket; with a window another one for each, for the step in which the window moves."""
    if family == "mistral":
        # All its layers read the whole room of the window.
        return 2
    return 2 * reached if family in HYBRID else reached


@pytest.fixture
def counted_first() -> None:
    """Nothing is compiled yet, and what is stays for the tests that follow."""
    torch._dynamo.reset()
    COUNTS.clear()


# Loops of one's own


@pytest.mark.parametrize(
    ("family", "capacity"), [pytest.param("mistral", 64, marks=pytest.mark.nightly), ("hybrid", 128), ("llama4", 64)]
)
def test_cuda_graphs_of_a_window_are_as_few_as_its_buckets(counted: None, family: str, capacity: int) -> None:
    """If masks were made from a number, a CUDA graph would be recorded whenever the window has moved."""
    buckets = kvlayers.stores.Buckets(minimum=64)
    # The window moves for the third time at token 56, and for the second time in the larger bucket at token 88.
    inputs, expected = reference(family, steps=capacity // 2 + 18)
    mask = {"attention_mask": torch.ones(2, capacity, dtype=torch.long)} if family == "hybrid" else {}
    forward = compiled(family, backend=recording_backend)
    cache, after = static_cache(family, max_cache_len=capacity, buckets=buckets), []
    for _ in range(2):
        cache.reset()
        check(decode(functools.partial(forward, **mask), cache, inputs, prefill=small_model(family)), expected)
        after.append(len(CUDA_GRAPHS))
    assert 0 < after[0] <= most_graphs(family, len(buckets.sizes(capacity)))
    assert after[1] == after[0]


def check_few_graphs(family: str, forward: Callable[..., Any], most: int) -> None:
    """The logits of eager code, from so many graphs for all caches and prompts."""
    inputs, expected = reference(family)
    cache, model, before = static_cache(family), small_model(family), graphs()
    check(decode(forward, cache, inputs, prefill=model), expected)
    compiled_once = graphs() - before
    assert 0 < compiled_once <= most, family
    cache.reset()
    check(decode(forward, cache, inputs, prefill=model), expected)
    check(decode(forward, static_cache(family), inputs, prefill=model), expected)
    # Another prompt of another length: nothing in the graphs is a count of tokens.
    inputs, expected = reference(family, tokens=4, steps=30, seed=5)
    cache.reset()
    check(decode(forward, cache, inputs, prefill=model), expected)
    assert graphs() - before == compiled_once, family


def test_shapes_that_are_all_dynamic_change_no_logit(counted: None) -> None:
    # Where every size is dynamic from the first one on, a whole window is told from a part of it.
    check_few_graphs("mistral", compiled("mistral", dynamic=True), most_graphs("mistral") * 2)


def test_a_compiled_prefill_adds_one_graph_and_some_where_memory_is_there(counted: None) -> None:
    family = "qwen2"
    inputs, expected = reference(family, steps=30)
    forward, cache = compiled(family), static_cache(family)
    check(decode_whole(forward, cache, inputs), expected)
    compiled_once = graphs()
    assert compiled_once <= most_graphs(family) + 1
    check(decode_whole(forward, static_cache(family), inputs), expected)
    assert graphs() == compiled_once
    for _ in range(2):
        cache.reset()
        check(decode_whole(forward, cache, inputs), expected)
        assert graphs() <= compiled_once + 1
    if compat.MASKS_BY_CACHE_POSITION:
        # Their code is compiled for each length of a prompt.
        return
    # One for prompts of a length, one for those of any length.
    after = []
    for tokens in (5, 13, 11, 7):
        inputs, expected = reference(family, tokens=tokens, steps=2)
        cache.reset()
        check(decode_whole(forward, cache, inputs), expected)
        after.append(graphs())
    assert after[-1] == after[0] <= compiled_once + 2


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_code_from_inductor_gives_the_logits_of_eager_code(counted: None, family: str) -> None:
    # Few graphs, as inductor takes long: one for all buckets, or two where the window moves.
    inputs, expected = reference(family, steps=20)
    dynamic = True if family == "qwen2" else None
    cache = static_cache(family)
    forward = compiled(family, small_model(family), backend="inductor", dynamic=dynamic)
    check(decode(forward, cache, inputs, prefill=small_model(family)), expected)
    if family == "qwen2":
        cache.crop(-6)
        check(decode(forward, cache, inputs[-6:]), expected[-6:])


@pytest.mark.parametrize(("family", "reads_buckets"), [("hybrid", True), ("qwen2", False)])
def test_a_mask_made_outside_fits_what_a_compiled_layer_reads(counted: None, family: str, reads_buckets: bool) -> None:
    """Each layer compiled on its own, as regional compilation does, and masks made in eager code around them."""
    model = copy.deepcopy(small_model(family))
    for index, layer in enumerate(model.model.layers):
        # Where eager code reads the tokens that are there, each count of them is another shape.
        model.model.layers[index] = torch.compile(layer, backend=backend, fullgraph=reads_buckets)
    inputs, expected = reference(family, steps=34)
    cache = static_cache(family, compiled=reads_buckets)
    check(decode(model, cache, inputs), expected)
    if reads_buckets:
        # For each of two layers, and the prefill.
        assert graphs() <= 2 * (most_graphs(family) + 1)
    compiled_once = graphs()
    cache.reset()
    check(decode(model, cache, inputs[:20]), expected[:20])
    assert not reads_buckets or graphs() <= compiled_once + 2


def test_a_graph_break_in_attention_changes_no_logit(counted: None) -> None:
    family = "hybrid"
    model = bare(copy.deepcopy(small_model(family)))
    for layer in model.model.layers:
        attend = layer.self_attn.forward

        def broken(*args: Any, attend: Callable[..., Any] = attend, **kwargs: Any) -> Any:
            torch._dynamo.graph_break()
            return attend(*args, **kwargs)

        layer.self_attn.forward = broken
    inputs, expected = reference(family, steps=20)
    forward = torch.compile(model.forward, backend=backend)
    check(decode(forward, static_cache(family), inputs, prefill=model), expected)


def test_compiled_steps_give_the_logits_of_eager_code_from_a_graph_a_bucket(counted_first: None) -> None:
    for family in ("jamba", "mistral", "hybrid"):
        check_few_graphs(family, shared(family), most_graphs(family))


@torch.no_grad()
def test_several_tokens_at_once_and_single_ones_may_follow_each_other() -> None:
    """A prompt in chunks, then verification of drafts: whatever number of tokens comes at once, to a new cache."""
    for parts in ([11, 1, 7, 1, 1, 12, 1, 5], [22, 1, 6, 1, 1]):
        cache, ids = static_cache("mistral"), prompt(2, sum(parts))
        seen = [shared("mistral")(chunk, **given(cache)).logits for chunk in ids.split(parts, dim=1)]
        # Chunks change the order of sums in a matrix product, by a few units in the last place.
        torch.testing.assert_close(torch.cat(seen, dim=1), small_model("mistral")(ids).logits, rtol=1e-4, atol=1e-4)
        assert cache.get_seq_length() == sum(parts)


def test_attention_in_plain_torch_reads_buckets_too() -> None:
    model = bare(copy.deepcopy(small_model("hybrid")))
    model.set_attn_implementation("eager")
    inputs, expected = reference("hybrid", steps=20)
    forward = torch.compile(model.forward, fullgraph=True, backend=backend)
    check(decode(forward, static_cache("hybrid"), inputs, prefill=model), expected)


# Between compiled steps


TURNS: dict[str, str] = {
    "eager after compiled": "cccceeee" * 5,
    "one by one": "ce" * 20,
    # The window is full when the other kind of code takes over.
    "eager after a full window": "c" * 30 + "e" * 10,
    "compiled after a full window": "e" * 30 + "c" * 10,
}


@pytest.mark.parametrize(("turns", "family"), once(TURNS, ["qwen2", "hybrid", "mistral"]))
def test_eager_and_compiled_steps_may_take_turns(family: str, turns: str) -> None:
    steps = TURNS[turns]
    inputs, expected = reference(family)
    model, forward, cache = small_model(family), shared(family), static_cache(family)
    logits = [decode(model, cache, inputs[:1])]
    for turn, ids in zip(steps, inputs[1:], strict=False):
        logits.append(decode(forward if turn == "c" else model, cache, (ids,)))
    check(torch.cat(logits), expected[: len(steps) + 1])


@dataclasses.dataclass
class CompiledDecoding(Decoding):
    """Of a model whose single tokens are passed in compiled code."""

    family: str

    @torch.no_grad()
    def logits(self, tokens: Tensor, cache: Any) -> Tensor:
        model = small_model(self.family) if cache is None or tokens.shape[1] > 1 else shared(self.family)
        return model(tokens, **(given(cache) if cache is not None else {})).logits.clone()


COMPILED_AGAIN = [(operation, "hybrid") for operation in (select_fewer, select_more, repeat)]
"""A model with windows that is compiled for other numbers of sequences, as calls of `test_static_pool.py` are too."""


@pytest.mark.parametrize(
    ("operation", "family"),
    [
        pytest.param(*case, marks=pytest.mark.nightly if case in COMPILED_AGAIN else ())
        for case in itertools.product(OPERATIONS, ["qwen2", "hybrid"])
    ],
)
def test_decoding_goes_on_after_every_operation(family: str, operation: Operation) -> None:
    make = functools.partial(static_cache, family, max_batch_size=4)
    # The window moves at the next token but one.
    decoding = CompiledDecoding(prompt(2, 21), make(), make, family)
    for _ in range(3):
        decoding.step()
    compiled_once, address = graphs(), decoding.cache.layers[-1].keys.untyped_storage().data_ptr()
    check_goes_on_after(decoding, operation)
    assert decoding.cache.layers[-1].keys.untyped_storage().data_ptr() == address
    if operation in (reorder, fork, deepcopy, pickled, saved):
        assert graphs() == compiled_once


@pytest.mark.parametrize("reads_buckets", [False, True])
def test_a_full_window_is_not_taken_back_on_any_device(reads_buckets: bool) -> None:
    """Masks of buckets are made on GPUs, where tokens that have left the window are dropped later."""
    family = "hybrid"
    inputs, expected = reference(family, steps=40)
    model, cache = small_model(family), static_cache(family, compiled=reads_buckets)
    check(decode(model, cache, inputs[:1]), expected[:1])
    for step in range(1, 40):
        with pytest.raises(kvlayers.errors.RollbackError, match="have left the window of 8"):
            cache.crop(-1)
        check(decode(model, cache, inputs[step : step + 1]), expected[step : step + 1])


def test_inference_mode_and_no_grad_may_take_turns() -> None:
    family = "mistral"
    inputs, expected = reference(family)
    model, forward = small_model(family), shared(family)
    for prefill, run in ((torch.no_grad, model), (torch.inference_mode, model), (torch.inference_mode, forward)):
        cache, logits = static_cache(family), []
        for index, ids in enumerate(inputs[:20]):
            with prefill() if not index else torch.inference_mode() if index // 3 % 2 else torch.no_grad():
                logits.append((run if index else model)(ids, **given(cache)).logits[:, -1].clone())
        check(torch.stack(logits), expected[:20])
        # Outside of inference mode everything can still be done to what was written in it.
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.fork().reset()
        cache.reset()
        check(decode(run, cache, inputs[:4], prefill=model), expected[:4])


def test_compiled_steps_go_on_from_what_autograd_followed() -> None:
    """A loop that nobody put into `no_grad`: the states of eager code are followed, and held outside of the memory."""
    for family, followed, steps in (("mistral", 12, torch.no_grad), ("qwen2", 1, torch.enable_grad)):
        inputs, expected = reference(family)
        model, forward = small_model(family), shared(family)
        cache, logits = static_cache(family), []
        for index, ids in enumerate(inputs[:20]):
            with torch.enable_grad() if index < followed else steps():
                logits.append((model if index < followed else forward)(ids, **given(cache)).logits[:, -1])
        check(torch.stack(logits).detach(), expected[:20])


# The end of the reservation


def check_unchanged(cache: kvlayers.StaticCache, before: Any) -> None:
    assert all(map(same_state, cache.state().layers, before.layers))


@pytest.mark.parametrize(("family", "grow"), [("qwen2", True), ("hybrid", False)])
def test_a_full_cache_in_a_compiled_loop_says_so_and_stays_as_it_was(counted: None, family: str, grow: bool) -> None:
    inputs, expected = reference(family)
    forward, cache = compiled(family), static_cache(family, max_cache_len=20, grow=grow)
    fitting = 20 - PROMPT + 1
    check(decode(forward, cache, inputs[:fitting], prefill=small_model(family)), expected[:fitting])
    before = cache.state()
    for _ in range(2):
        with torch.no_grad(), pytest.raises(Exception, match=r"at most 20 tokens.*20 held and 1 new") as raised:
            forward(inputs[fitting], **given(cache))
        assert isinstance(raised.value, kvlayers.CapacityError | RuntimeError)
        check_unchanged(cache, before)
    if grow:
        # Eager code takes more, and compiled code goes on with it.
        check(decode(small_model(family), cache, inputs[fitting : fitting + 1]), expected[fitting : fitting + 1])
        check(decode(forward, cache, inputs[fitting + 1 : 30]), expected[fitting + 1 : 30])
    else:
        cache.reset()
        check(decode(forward, cache, inputs[:fitting], prefill=small_model(family)), expected[:fitting])


def test_a_past_that_outgrows_a_window_in_compiled_code_is_refused(counted: None) -> None:
    family = "mistral"
    inputs, expected = reference(family)
    forward, cache = compiled(family), static_cache(family)
    decode(small_model(family), cache, inputs[:1])
    cache.activate_past_recording()
    refused, steps = None, 1
    while refused is None:
        before = cache.state()
        try:
            check(decode(forward, cache, inputs[steps : steps + 1]), expected[steps : steps + 1])
            steps += 1
        except Exception as error:  # As what TorchDynamo makes of it.
            refused = str(error)
    assert "at most" in refused
    assert steps > 3
    check_unchanged(cache, before)
    cache.crop(-1)
    cache.deactivate_past_recording()
    check(decode(forward, cache, inputs[steps - 1 : steps + 6]), expected[steps - 1 : steps + 6])


def test_a_cache_that_is_full_after_others_of_another_size_says_so_too(counted: None) -> None:
    """Where compiled code has seen several sizes and prompts, and holds them for numbers that vary."""
    forward = compiled("qwen2")
    for tokens in (9, 22):
        decode(forward, static_cache("qwen2"), reference("qwen2", tokens=tokens, steps=1)[0])
    inputs, _ = reference("qwen2", tokens=20, steps=1)
    cache = static_cache("qwen2", max_cache_len=20)
    decode(small_model("qwen2"), cache, inputs[:1])
    before = cache.state()
    with torch.no_grad(), pytest.raises(Exception, match=r"at most 20 tokens.*20 held and 1 new"):
        forward(inputs[1], **given(cache))
    check_unchanged(cache, before)


def new_states(batch: int = 2, kv_heads: int = 2, tokens: int = 1, head_dim: int = 8, **options: Any) -> Inputs:
    return tuple(torch.randn(batch, kv_heads, tokens, head_dim, **options) for _ in range(2))


MISFITS: dict[str, tuple[type[kvlayers.KVLayersError], str, Callable[[], Inputs]]] = {
    "more sequences": (kvlayers.CapacityError, r"at most 2 sequences.* got 3", lambda: new_states(batch=3)),
    "other kv_heads": (kvlayers.errors.StateMismatchError, "kv_heads 2.*kv_heads 4", lambda: new_states(kv_heads=4)),
    "another head_dim": (
        kvlayers.errors.StateMismatchError,
        "head_dim 8.*head_dim 16",
        lambda: new_states(head_dim=16),
    ),
    "another dtype": (kvlayers.errors.StateMismatchError, "float32.*float64", lambda: new_states(dtype=torch.float64)),
    "another device": (kvlayers.errors.StateMismatchError, "cpu.*meta", lambda: new_states(device="meta")),
    "too many tokens": (kvlayers.CapacityError, "at most 64 tokens.*0 held and 65 new", lambda: new_states(tokens=65)),
}


@pytest.mark.parametrize(
    ("misfit", "family", "reads_buckets"), once(MISFITS, ["qwen2", "hybrid"], [True, False], times=2)
)
def test_states_that_a_reservation_is_not_for_leave_it_as_it_was(family: str, misfit: str, reads_buckets: bool) -> None:
    """Those that do not fit the states that are held are refused by every layer: `layers/test_layer_matrix.py`."""
    error, says, make = MISFITS[misfit]
    inputs, expected = reference(family)
    cache = static_cache(family, compiled=reads_buckets)
    decode(small_model(family), cache, inputs[:4])
    address, size = cache.layers[0].keys.untyped_storage().data_ptr(), cache.nbytes
    cache.reset()
    before = cache.state()
    for layer_idx in range(len(cache.layers)):
        with torch.no_grad(), pytest.raises(error, match=says):
            cache.update(*make(), layer_idx=layer_idx)
    check_unchanged(cache, before)
    assert (cache.layers[0].keys.untyped_storage().data_ptr(), cache.nbytes) == (address, size)
    check(decode(small_model(family), cache, inputs[:4]), expected[:4])


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 6), ("meta", 16)])
def test_beside_an_accelerator_only_states_on_it_have_masks_of_buckets(
    device: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    cache = static_cache("hybrid", max_cache_len=64, buckets=kvlayers.stores.Buckets(16))
    assert cache.compiled
    full = next(index for index, layer in enumerate(cache.layers) if isinstance(layer, kvlayers.StaticLayer))
    with torch.no_grad():
        cache.update(*torch.zeros(2, 1, 2, 5, 8, device=device), full)
        assert cache.compiled is (device != "cpu")
        assert cache.get_mask_sizes(1, full) == (tokens, 0)
        new = torch.zeros(2, 1, 2, 1, 8, device=device)
        assert cache.update(*new, full)[0].shape[2] == tokens


def test_a_cache_says_whether_it_reads_buckets() -> None:
    assert static_cache("hybrid").compiled is torch.accelerator.is_available()
    for family in ("qwen2", "hybrid", "jamba"):
        assert not static_cache(family, compiled=False).is_compileable
        cache = static_cache(family, compiled=True)
        assert cache.compiled
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                assert cache.is_compileable
                # Autograd cannot follow what is written in place, so masks are not of buckets where it is on.
                attending = next(layer for layer in cache.layers if layer.traits.attends)
                assert attending.reserved.mask_extent.mode.uses_buckets is not grad
        cache.compiled = False
        with torch.no_grad():
            assert not cache.is_compileable
    assert static_cache("qwen2", compiled=True).fork().compiled
    assert pickle.loads(pickle.dumps(static_cache("qwen2", compiled=True))).compiled
