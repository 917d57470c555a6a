"""Code compiled around a cache that grows: few graphs, none for one layer alone, and the logits of eager code."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import kvlayers
import kvlayers.offload.offloading
from kvlayers.kernels.attention.packed_tensor import PackedStates
from kvlayers.kernels.attention.segments import KVSegments
from kvlayers.upstream import compat
from matrix import some
from models import COMMON, bare, given, prompt, without_mlps
from recording_transfers import RecordingTransfers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not compat.COMPILES_TENSOR_SUBCLASSES, reason="TorchDynamo is known to trace it from torch 2.13"
    ),
]

SIZES: dict[str, Any] = {**COMMON, "num_hidden_layers": 2}
"""Two layers tell a graph for each layer from one for all of them. One is compiled sooner."""
QUANTIZATION = {"nbits": 4, "residual_length": 8}
AWAY = {"offloading": True, "offload_only_non_sliding": False}


def model_of(config_class: Any = tf.LlamaConfig, layers: int = 2, attention: str = "sdpa", **options: Any) -> Any:
    config = config_class(**{**SIZES, "num_hidden_layers": layers, **options})
    config._attn_implementation = attention
    return bare(without_mlps(tf.AutoModelForCausalLM.from_config(config).eval()))


mistral = functools.partial(model_of, tf.MistralConfig, sliding_window=30)


CACHES: dict[str, Callable[[Any], Any]] = {
    "packed": lambda model: kvlayers.QuantizedCache(config=model.config, **QUANTIZATION),
    "packed windows": lambda model: kvlayers.QuantizedCache(config=model.config, **QUANTIZATION, quantize_sliding=True),
    "packed sinks": lambda model: kvlayers.SinkCache(
        config=model.config, window_length=90, num_sink_tokens=4, quantization=QUANTIZATION
    ),
    "dense": lambda model: kvlayers.DynamicCache(config=model.config, length_hint=40),
    "packed, offloaded": lambda model: kvlayers.QuantizedCache(config=model.config, **QUANTIZATION, **AWAY),
    "offloaded": lambda model: kvlayers.DynamicCache(config=model.config, length_hint=40, **AWAY),
    "static, offloaded": lambda model: kvlayers.StaticCache(model.config, max_cache_len=160, **AWAY),
    "without a hint": lambda model: kvlayers.DynamicCache(config=model.config),
    "sinks": lambda model: kvlayers.SinkCache(config=model.config, window_length=101, num_sink_tokens=4),
}


# A prompt, and steps: over where blocks are packed, windows are full, and buffers, which have room for 40 tokens, grow.
KINDS: dict[str, tuple[Callable[[], Any], str, int, int]] = {
    "packed": (model_of, "packed", 140, 20),
    "packed windows": (mistral, "packed windows", 26, 30),
    "packed sinks": (model_of, "packed sinks", 80, 36),
    "dense": (model_of, "dense", 16, 28),
    "packed, offloaded": (model_of, "packed, offloaded", 140, 20),
    "windows, offloaded": (mistral, "offloaded", 26, 24),
    "static, offloaded": (model_of, "static, offloaded", 16, 24),
}


@pytest.fixture(autouse=True)
def _alone_and_away_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled yet, and offloaded caches move their states between two memories of the host."""
    torch._dynamo.reset()
    make = functools.partial(kvlayers.offload.Prefetcher, transfers=lambda device: RecordingTransfers(None))
    monkeypatch.setattr(kvlayers.offload.offloading, "Prefetcher", make)


@pytest.fixture
def read_in_full(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each time that codes, or a prefix that sequences share, are brought to full precision."""
    read: list[str] = []
    of_segments = KVSegments.dense

    def noted(self: KVSegments, *arguments: Any) -> torch.Tensor:
        if not self.are_dense:
            read.append("codes")
        if self.shares_rows:
            read.append("prefix")
        return of_segments(self, *arguments)

    monkeypatch.setattr(KVSegments, "dense", noted)
    return read


class OverwritingInterpreter(torch.fx.Interpreter):
    """Runs a graph, and then overwrites what it handed to the operators, as the next replay of a CUDA graph does.

    It notes how many tensors these are.
    """

    def __init__(self, graph: Any, overwritten: list[int]) -> None:
        super().__init__(graph)
        self.overwritten = overwritten

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.handed_over: list[torch.Tensor] = []
        result = super().run(*args, **kwargs)
        for states in self.handed_over:
            states.fill_(torch.nan)
        self.overwritten.append(len(self.handed_over))
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.kvlayers.take_in.default:
            self.handed_over += args[2:]
        return super().call_function(target, args, kwargs)


@pytest.mark.parametrize("kind", some(KINDS, ["packed windows", "packed sinks", "dense", "static, offloaded"]))
@torch.no_grad()
def test_no_layer_is_compiled_for_on_its_own_and_caches_copy_what_they_are_handed(
    kind: str, read_in_full: list[str]
) -> None:
    make_model, cache_name, tokens, steps = KINDS[kind]
    graphs: list[Any] = []
    overwritten: list[int] = []

    def overwriting(graph: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return OverwritingInterpreter(graph, overwritten).run

    model = make_model()
    forward = torch.compile(model.forward, backend=overwriting, fullgraph=True)
    cache, eager = (CACHES[cache_name](model) for _ in range(2))
    for part in prompt(1, tokens + steps).split([tokens, *[1] * steps], dim=1):
        logits = forward(part, **given(cache)).logits
        # What is summed in another order in compiled code, a few units in the last place of float32.
        torch.testing.assert_close(logits, model(part, **given(eager)).logits, rtol=1e-4, atol=1e-5)
        assert cache.get_seq_length() == eager.get_seq_length()
    # The keys and the values of each of two layers; what holds states in full precision is traced through.
    assert set(overwritten) == ({0} if kind == "dense" else {4})
    # A prompt, and a step: with fixed numbers at first, then with any. Growing and its numbers are two more of dense
    # layers, where the graph itself grows.
    assert len(graphs) <= (5 if kind == "dense" else 3)
    # What was brought to the device of other layers than the last one is gone.
    assert cache._prefetcher is None or len(cache._handle.returned) == 1
    assert not read_in_full
    if "packed" in kind and "windows" not in kind:
        assert cache.explain().attention == eager.explain().attention != {}


@pytest.mark.parametrize("kind", ["packed", "offloaded"])
@torch.no_grad()
def test_another_cache_and_its_operations_go_on_in_the_same_graphs(kind: str, read_in_full: list[str]) -> None:
    """Until both branches have packed a block of their own."""
    model, graphs, ids = model_of(), CompileCounter(), prompt(2, 120)
    forward = torch.compile(model.forward, backend=graphs, fullgraph=True)

    def decoded(run: Any, cache: Any) -> torch.Tensor:
        model(ids[:, :90], **given(cache))
        logits = [run(ids[:, step : step + 1], **given(cache)).logits for step in range(90, 94)]
        twin = cache.fork()
        cache.crop(85)
        cache.reorder_cache(torch.tensor([1, 0]))
        # The fork is called by a handle of its own.
        for step in range(94, 110):
            for branch in (cache, twin):
                logits.append(run(ids[:, step : step + 1], **given(branch)).logits)
        assert (cache.get_seq_length(), twin.get_seq_length()) == (101, 110)
        return torch.cat(logits, 1)

    expected = decoded(model, CACHES[kind](model))
    for _ in range(2):
        torch.testing.assert_close(decoded(forward, CACHES[kind](model)), expected, rtol=1e-4, atol=1e-4)
    assert graphs.frame_count <= 3
    assert not read_in_full


@pytest.mark.parametrize(("kind", "tokens"), [("without a hint", 40), ("packed", 100), ("sinks", 80)])
@torch.no_grad()
def test_sequences_that_go_on_from_one_prompt(kind: str, tokens: int, read_in_full: list[str]) -> None:
    model, graphs, ids = model_of(layers=1), CompileCounter(), prompt(3, 60)
    forward = torch.compile(model.forward, backend=graphs, fullgraph=True)
    cache, eager = both = [CACHES[kind](model) for _ in range(2)]
    for each in both:
        model(prompt(1, tokens, seed=1), **given(each))
        each.expand(3)
    for step in range(30):
        for each in both:
            if step == 10:
                each.reorder_cache(torch.tensor([2, 0, 0]))
            if step == 20:
                each.crop(each.get_seq_length() - 4)
        part = ids[:, step : step + 1]
        logits = (model if step == 15 else forward)(part, **given(cache)).logits
        torch.testing.assert_close(logits, model(part, **given(eager)).logits, rtol=1e-4, atol=1e-5)
        assert cache.get_seq_length() == eager.get_seq_length()
    assert graphs.frame_count <= 2
    assert not read_in_full
    assert cache.explain().attention == eager.explain().attention != {}


@pytest.mark.parametrize(("kind", "layers"), [("packed", 1), ("offloaded", 2)])
@torch.no_grad()
def test_two_updates_in_one_graph_attend_each_to_what_it_was_given(kind: str, layers: int) -> None:
    model, ids = model_of(layers=layers), prompt(1, 100)

    def two(cache: Any) -> torch.Tensor:
        first = model(ids[:, 90:93], **given(cache)).logits
        return torch.cat([first, model(ids[:, 93:94], **given(cache)).logits], 1)

    caches = [CACHES[kind](model) for _ in range(2)]
    for cache in caches:
        model(ids[:, :90], **given(cache))
    seen = torch.compile(two, backend="aot_eager", fullgraph=True)(caches[0])
    torch.testing.assert_close(seen, two(caches[1]), rtol=1e-4, atol=1e-5)
    assert [cache.get_seq_length() for cache in caches] == [94, 94]


SOFT_CAPS = {"attn_logit_softcapping": 2.0, "sliding_window": 512}


@pytest.mark.parametrize(
    ("config_class", "options", "attention"),
    [
        (tf.LlamaConfig, {}, "sdpa"),
        *(pytest.param(tf.LlamaConfig, {}, each, marks=pytest.mark.nightly) for each in ("eager", "kvlayers")),
        (tf.Gemma2Config, SOFT_CAPS, "kvlayers"),
    ],
)
@torch.no_grad()
def test_padded_batches_attention_in_plain_torch_and_soft_caps(
    config_class: Any, options: dict[str, Any], attention: str, installed: None, read_in_full: list[str]
) -> None:
    model = model_of(config_class, 1, attention, **options)
    forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    ids, mask = prompt(2, 96), torch.ones(2, 96, dtype=torch.int64)
    mask[0, :5] = 0
    cache, eager = (CACHES["packed windows"](model) for _ in range(2))
    for start, end in ((0, 90), (90, 91), (91, 92), (92, 96)):
        options = {"attention_mask": mask[:, :end]}
        logits = forward(ids[:, start:end], **given(cache), **options).logits
        expected = model(ids[:, start:end], **given(eager), **options).logits
        for tokens in ((1, slice(None)), (0, -1)):
            torch.testing.assert_close(logits[tokens], expected[tokens], rtol=1e-4, atol=1e-5)
    assert not read_in_full


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gradients_of_queries_alone(attention: str) -> None:
    """The keys of the first layer require none, so the cache is called by operators."""
    model, ids = model_of(layers=1, attention=attention).requires_grad_(False), prompt(1, 94)
    weight, found = model.model.layers[0].self_attn.q_proj.weight.requires_grad_(), []
    for forward in (torch.compile(model.forward, backend="aot_eager"), model):
        cache = CACHES["packed"](model)
        with torch.no_grad():
            model(ids[:, :90], **given(cache))
        loss = forward(ids[:, 90:], **given(cache)).logits.square().mean()
        found.append(torch.autograd.grad(loss, weight)[0])
    torch.testing.assert_close(*found)


def test_compiled_code_does_not_run_on_a_cache_that_was_deleted() -> None:
    number, keys = kvlayers.QuantizedCache()._handle.number, torch.zeros(1, 2, 3, 64)
    with pytest.raises(kvlayers.errors.StaleStatesError, match="that was deleted: keep it"):
        torch.ops.kvlayers.take_in(number, 0, keys, keys)


def test_states_that_have_left_the_device_are_not_read() -> None:
    cache = CACHES["offloaded"](model_of())

    def late(states: torch.Tensor) -> torch.Tensor:
        keys, _ = cache.update(states, states, 0)
        cache.update(states, states, 1)
        return keys + 1

    states = torch.ones(1, 2, 3, 8)
    with (
        torch.no_grad(),
        pytest.raises(kvlayers.errors.StaleStatesError, match="Layer 0 must be read before other offloaded layers"),
    ):
        torch.compile(late, backend="eager", fullgraph=True)(states)


def test_a_cache_that_compiled_code_makes_is_traced_through() -> None:

    def made(states: torch.Tensor) -> torch.Tensor:
        return kvlayers.DynamicCache().update(states, states, 0)[0] + 1

    states = torch.ones(1, 2, 3, 8)
    assert torch.equal(torch.compile(made, backend="eager")(states), states + 1)


# Attention that is compiled on its own, and is given what the cache returned


def attended(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True) + 1


def stepped(cache: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A query, and the states of an update by one token."""
    return torch.randn(1, 4, 1, 8), *cache.update(*torch.randn(2, 1, 2, 1, 8), 0)


def filled() -> Any:
    cache = kvlayers.QuantizedCache(**QUANTIZATION)
    cache.update(*torch.randn(2, 1, 2, 100, 8), 0)
    return cache


@torch.no_grad()
def test_compiled_code_that_computes_otherwise_gets_full_precision(read_in_full: list[str]) -> None:
    def sums(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.add(keys, values).sum(2) + query.sum()

    cache = filled()
    given = stepped(cache)
    torch.testing.assert_close(torch.compile(sums, backend="aot_eager", fullgraph=True)(*given), sums(*given))
    assert read_in_full
    assert any(path.startswith("compiled code in full precision") for path in cache.explain().attention)


def test_gradients_go_through_compiled_attention() -> None:
    cache = filled()
    compiled = torch.compile(attended, backend="aot_eager")
    query, keys, values = stepped(cache)
    query.requires_grad_()
    new = torch.randn(1, 2, 1, 8, requires_grad=True)
    for followed, states in ((query, (keys, values)), (new, None)):
        states = cache.update(new, new, 0) if states is None else states
        found = [torch.autograd.grad(run(query, *states).square().sum(), followed)[0] for run in (compiled, attended)]
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("backend", some(["aot_eager", "inductor"], ["aot_eager"]))
@torch.no_grad()
def test_compiled_attention_reads_the_codes_that_it_is_given_and_no_later_ones(
    backend: str, read_in_full: list[str]
) -> None:
    """Later ones may be states of as many tokens."""
    caches, counter = [filled(), filled()], CompileCounterWithBackend(backend)
    compiled = torch.compile(attended, backend=counter, fullgraph=True)
    for cache in caches * 4:
        early = stepped(cache)
        torch.testing.assert_close(compiled(*early), attended(*early))
        cache.crop(cache.get_seq_length() - 1)
        given = stepped(cache)
        assert given[1].shape == early[1].shape
        torch.testing.assert_close(compiled(*given), attended(*given))
        with pytest.raises(kvlayers.errors.StaleStatesError, match="the states of the newest update"):
            compiled(*early)
    # The first one, and those for other numbers of tokens and of versions.
    assert counter.frame_count <= 3
    assert not read_in_full


@pytest.mark.parametrize("name", ["take_in", "attend", "multiply", "read", "attend_packed", "full_precision"])
@torch.no_grad()
def test_operators_do_what_they_declare(name: str) -> None:
    cache = filled()
    query, keys, values = stepped(cache)
    assert isinstance(keys, PackedStates)
    of_cache, of_store = cache._handle.number, keys.snapshot.version.handle
    version, shape, new = keys.snapshot.version_number, tuple(keys.shape), torch.randn(1, 2, 1, 8)
    tokens = shape[2]
    arguments: dict[str, tuple[Any, ...]] = {
        "take_in": (of_cache, 0, new, new),
        "attend": (of_cache, 0, query, tokens, 8, None, False, None),
        "multiply": (of_cache, 0, query, tokens, False, 2, tokens),
        "read": (of_cache, 0, False, query, shape),
        "attend_packed": (of_store, version, query, tokens, 8, None, False, None),
        "full_precision": (of_store, version, True, 2, (1, 4, *shape[2:]), torch.float32, torch.device("cpu")),
    }
    cache._handle.returned[0] = keys, values
    operator = getattr(torch.ops.kvlayers, name).default
    torch.library.opcheck(operator, arguments[name])
    # A replay of a CUDA graph runs no Python: only kernels of one step, on the memory that the cache had then.
    assert torch.Tag.cudagraph_unsafe in operator.tags


@torch.no_grad()
def test_attention_behind_a_graph_break_reads_codes(read_in_full: list[str]) -> None:
    cache = filled()

    def broken(query: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        keys, values = cache.update(states, states, 0)
        torch._dynamo.graph_break()
        return attended(query, keys, values)

    compiled = torch.compile(broken, backend="eager")
    for step in range(4):
        query, states = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 1, 8)
        twin = cache.fork()
        seen = compiled(query, states)
        if step == 1:
            # TorchDynamo has looked at the arguments of the code that it compiled.
            read_in_full.clear()
        torch.testing.assert_close(seen, attended(query, *twin.update(states, states, 0)))
    assert not read_in_full


@torch.no_grad()
def test_placeholders_of_states_are_no_numbers() -> None:
    """If code got hold of one, its results would say so."""
    cache = filled()

    def leak(states: torch.Tensor) -> torch.Tensor:
        keys, _ = cache.update(states, states, 0)
        with torch._C.DisableTorchFunctionSubclass():
            return keys * 1

    assert torch.compile(leak, backend="eager", fullgraph=True)(torch.zeros(1, 2, 1, 8)).isnan().all()


@pytest.mark.parametrize("kind", ["packed", "offloaded"])
@pytest.mark.parametrize("way", ["mul_", "__setitem__", "__imul__"])
def test_what_would_be_written_to_placeholders_is_refused(kind: str, way: str) -> None:
    model = model_of(layers=1)
    cache, states = CACHES[kind](model), torch.randn(1, 2, 20, 8)
    cache.update(states, states.clone(), 0)

    @torch.compile(backend="eager")
    def step(new: torch.Tensor) -> torch.Tensor:
        keys, values = cache.update(new, new.clone(), 0)
        if way == "mul_":
            keys.mul_(2.0)
        elif way == "__setitem__":
            keys[:, :, 0] = 0
        else:
            keys *= 2
        return torch.nn.functional.scaled_dot_product_attention(new, keys, values)

    with torch.no_grad(), pytest.raises(kvlayers.errors.ReadOnlyStatesError, match="read-only"):
        step(torch.randn(1, 2, 1, 8))
