"""generate() with static caches: the tokens of eager code, few graphs, and memory that a compiled call uses again."""

import copy
import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvlayers
from counted_graphs import COUNTS, MODELS, backend, graphs
from families import FAMILIES
from kvlayers import CapacityError
from kvlayers.stores import Buckets
from matrix import once, some
from models import fresh_model, prompt, tiny_model, without_mlps

pytestmark = pytest.mark.slow

PROMPT = 9
NEW_TOKENS = 40
"""The window of the hybrid model, 8 tokens with room for 23, moves at tokens 24 and 40."""

CLASSES = {
    "static": kvlayers.StaticCache,
    "hybrid": kvlayers.HybridCache,
    "hybrid_chunked": kvlayers.HybridChunkedCache,
    "sliding_window": kvlayers.SlidingWindowCache,
}
STATIC: dict[str, Any] = {"cache_implementation": "static"}


@pytest.fixture(autouse=True)
def _nothing_is_kept_and_any_number_of_graphs() -> Any:
    kvlayers.free_reservations()
    with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=512):
        yield


def new_model(family: str, seed: int = 0) -> Any:
    """A model that no other test has generated with."""
    name, changes = MODELS.get(family, (family, {}))
    model = fresh_model(name, seed, **changes)
    return without_mlps(model) if name == "qwen2" else model


shared_model = functools.cache(new_model)
"""A model for tests that do not count graphs: what is compiled for one of them, the others use."""


def compiling(**options: Any) -> dict[str, Any]:
    """Arguments of a call that compiles around a static cache; what compiles counts graphs."""
    config = transformers.CompileConfig(**{"backend": backend, "mode": None, **options})
    return {"cache_implementation": "static", "compile_config": config}


def generate(model: Any, ids: Tensor, **arguments: Any) -> Any:
    torch.manual_seed(3)
    defaults = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    return model.generate(ids, **{**defaults, **arguments})


def logits_of(model: Any, ids: Tensor, **arguments: Any) -> Tensor:
    """Of each step: random models may repeat one token, which says little."""
    return torch.stack(generate(model, ids, output_logits=True, return_dict_in_generate=True, **arguments).logits)


class Caches:
    """The caches that a model's calls of generate() use, in order, without keeping one alive.

    Attributes:
        addresses: where the keys of the first layer are.
    """

    def __init__(self, model: Any) -> None:
        self.used: list[weakref.ref[Any]] = []
        self.addresses: list[int] = []
        original = type(model)._update_model_kwargs_for_generation

        def update(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            cache = outputs.past_key_values
            if not self.used or self.used[-1]() is not cache:
                self.used.append(weakref.ref(cache))
                self.addresses.append(cache.layers[0].keys.untyped_storage().data_ptr())
            return original(known(), outputs, *args, **kwargs)

        known = weakref.ref(model)
        model._update_model_kwargs_for_generation = update

    def alive(self) -> int:
        gc.collect()
        return sum(cache() is not None for cache in self.used)


# Tokens


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "several sequences": {"do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize(
    ("family", "name"), [("hybrid", "static"), pytest.param("jamba", "hybrid_chunked", marks=pytest.mark.nightly)]
)
def test_compiled_tokens_are_those_of_the_eager_dynamic_cache(family: str, name: str) -> None:
    model, ids = shared_model(family), prompt(2, PROMPT)
    expected = {way: generate(model, ids, **WAYS[way]) for way in WAYS}
    with kvlayers.installed():
        for way, arguments in WAYS.items():
            before = COUNTS["runs"]
            how = {**compiling(), "cache_implementation": name, **arguments}
            assert torch.equal(generate(model, ids, **how), expected[way]), way
            assert COUNTS["runs"] >= before + NEW_TOKENS - 1
        output = generate(model, ids, return_dict_in_generate=True, **{**compiling(), "cache_implementation": name})
    assert torch.equal(output.sequences, expected["greedy"])
    assert type(output.past_key_values) is CLASSES[name]
    assert output.past_key_values.get_seq_length() == PROMPT + NEW_TOKENS - 1


@pytest.mark.parametrize("family", ["hybrid", "llama4", "jamba"])
def test_compiled_batches_may_be_padded_on_the_left(family: str) -> None:
    model = shared_model(family)
    mask = torch.tensor([[0] * 5 + [1] * 4, [1] * 9])
    ids = torch.where(mask == 1, prompt(2, 9), 0)
    expected = logits_of(model, ids, attention_mask=mask)
    with kvlayers.installed():
        seen = logits_of(model, ids, attention_mask=mask, **compiling())
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-5)


def test_compiled_decoding_stops_where_eager_decoding_stops(installed: None) -> None:
    model, ids = shared_model("hybrid"), prompt(2, PROMPT)
    free = generate(model, ids)
    for row, step in ((0, 4), (1, 11), (0, 0)):
        how = {"eos_token_id": int(free[row, PROMPT + step]), "pad_token_id": 0}
        expected = generate(model, ids, **how)
        assert torch.equal(generate(model, ids, **compiling(), **how), expected)
        # The next call starts from an empty cache, however far this one came.
        assert torch.equal(generate(model, ids, **compiling()), free)


OTHER_WAYS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "a draft model": {},
    "chunked prefill": {"prefill_chunk_size": 5},
    "beams and chunked prefill": {"num_beams": 2, "prefill_chunk_size": 5},
}


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *(("hybrid", way) for way in OTHER_WAYS if "chunked" not in way),
        pytest.param("hybrid", "chunked prefill", marks=pytest.mark.nightly),
        ("qwen2", "beams and chunked prefill"),
    ],
)
def test_ways_that_are_not_compiled_keep_their_tokens(installed: None, family: str, way: str) -> None:
    model = shared_model(family)
    arguments = {"assistant_model": shared_model(family, seed=1)} if way == "a draft model" else OTHER_WAYS[way]
    ids = torch.cat([prompt(1, 4)] * 3, dim=1)
    expected = generate(model, ids, **arguments)
    # Chunks are compiled for as well, which takes long: with beams, they are not.
    for how in (STATIC,) if "and" in way else (compiling(), STATIC):
        assert torch.equal(generate(model, ids, **how, **arguments), expected)
    # And from the memory that they leave behind:
    assert torch.equal(generate(model, ids, **STATIC), generate(model, ids))


@pytest.mark.parametrize(("family", "compiled"), [("t5", False), ("bart", False), ("t5", True)])
def test_encoders_may_have_read_another_length_in_each_call(family: str, compiled: bool) -> None:
    model, how = new_model(family), {"max_new_tokens": 8, "num_beams": 1}
    prompts = [prompt(2, tokens, seed=tokens) for tokens in (7, 12, 7, 5)]
    expected = [logits_of(model, ids, **how) for ids in prompts]
    exact_model = new_model(family).double()
    exact = [logits_of(exact_model, ids, **how) for ids in prompts]
    # T5 does not scale its scores, so that float32 rounds them by more, on some processors than on others.
    rounding = max(float((logits - wanted).abs().max()) for logits, wanted in zip(expected, exact, strict=True))
    with kvlayers.installed():
        for ids, wanted in zip(prompts, exact, strict=True):
            seen = logits_of(model, ids, **how, **(compiling() if compiled else STATIC))
            torch.testing.assert_close(seen, wanted, rtol=0, atol=max(1e-5, 2 * rounding))


def test_whisper_transcribes_the_same(installed: None) -> None:
    name, options = FAMILIES["whisper"]
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(getattr(transformers, name)(**options)).eval()
    for seed in range(2):
        features = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(seed))
        expected = model.generate(input_features=features, max_new_tokens=8)
        for how in (STATIC, compiling()):
            assert torch.equal(model.generate(input_features=features, max_new_tokens=8, **how), expected)


# Graphs


@pytest.mark.parametrize(
    ("family", "dynamic"), [("hybrid", None), pytest.param("hybrid", False, marks=pytest.mark.nightly)]
)
def test_a_second_call_of_the_same_or_a_smaller_size_compiles_nothing(
    counted: None, installed: None, family: str, dynamic: bool | None
) -> None:
    model = new_model(family)
    how = {**compiling(dynamic=dynamic), "cache_config": {"buckets": Buckets(minimum=16)}}
    sizes = Buckets(minimum=16).sizes(PROMPT + NEW_TOKENS)
    assert torch.equal(generate(model, prompt(2, PROMPT), **how), generate(model, prompt(2, PROMPT)))
    compiled_once = graphs()
    # The mask is made outside, and a window moved there: there is nothing else to be compiled for.
    assert 0 < compiled_once <= len(sizes)
    for tokens, new_tokens in ((PROMPT, NEW_TOKENS), (PROMPT, 12), (4, 30), (30, 19)):
        ids = prompt(2, tokens, seed=tokens)
        seen = generate(model, ids, max_new_tokens=new_tokens, **how)
        assert torch.equal(seen, generate(model, ids, max_new_tokens=new_tokens)), (tokens, new_tokens)
        assert graphs() == compiled_once, (tokens, new_tokens)


def test_a_config_that_asks_for_no_compilation_is_not_compiled(counted: None, installed: None) -> None:
    model, ids = new_model("qwen2"), prompt(2, PROMPT)
    expected = generate(model, ids)
    assert torch.equal(generate(model, ids, **STATIC), expected)
    assert torch.equal(generate(model, ids, disable_compile=True, **compiling()), expected)
    assert torch.equal(generate(model, ids, **{**compiling(), "cache_implementation": "dynamic"}), expected)
    assert graphs() == 0


# Memory


@pytest.mark.parametrize("family", ["hybrid", "jamba", "deepseek_v3"])
def test_a_shorter_call_compiles_nothing_else_although_the_cache_was_returned(
    counted: None, installed: None, family: str
) -> None:
    model, ids, shorter = new_model(family), prompt(2, PROMPT), prompt(2, 5, seed=1)
    expected = generate(model, ids), generate(model, shorter, max_new_tokens=9)
    how = {**compiling(dynamic=False), "return_dict_in_generate": True}
    first = generate(model, ids, **how)
    compiled_once = graphs()
    second = generate(model, shorter, max_new_tokens=9, **how)
    assert 0 < graphs() == compiled_once
    assert torch.equal(first.sequences, expected[0])
    assert torch.equal(second.sequences, expected[1])
    for output in (first, second):
        # Whether autograd is on says nothing of what generate() may compile: it turns it off.
        assert torch.is_grad_enabled()
        assert output.past_key_values.is_compileable
    kept = first.past_key_values
    assert kept.get_seq_length() == PROMPT + NEW_TOKENS - 1, "what was returned is not used again"


OTHERS: dict[str, dict[str, Any]] = {
    "of another class": {"cache_implementation": "hybrid"},
    "of more sequences": {"cache_config": {"max_batch_size": 3}},
    "that grows": {"cache_config": {"grow": True}},
    "of other buckets": {"cache_config": {"buckets": Buckets(minimum=16)}},
}
SCHEDULES: dict[str, tuple[list[tuple[int, int, dict[str, Any]]], int]] = {
    # Two, one and two sequences in one cache; and three, one and two in the next, which replaces it.
    "batches": ([(batch, NEW_TOKENS, {}) for batch in (2, 1, 2, 3, 1, 2)], 2),
    "lengths": ([(1, tokens, {}) for tokens in (10, 50, 10, 50)], 2),
    **{name: ([(1, NEW_TOKENS, how) for how in ({}, other, other, {})], 3) for name, other in OTHERS.items()},
    **{name: ([(2, tokens, {"cache_implementation": name}) for tokens in (40, 9, 40, 9)], 1) for name in CLASSES},
}
"""Calls by their sequences, new tokens and options, and how many caches they have between them."""


@pytest.mark.parametrize("schedule", some(SCHEDULES, [*SCHEDULES][:-2]))
def test_a_cache_serves_the_calls_that_it_is_large_enough_for(installed: None, schedule: str) -> None:
    model, (calls, used) = shared_model("hybrid"), SCHEDULES[schedule]
    asked = [{"ids": prompt(batch, PROMPT), "max_new_tokens": tokens} for batch, tokens, _ in calls]
    expected = [generate(model, **call) for call in asked]
    caches = Caches(model)
    for call, wanted, (*_, how) in zip(asked, expected, calls, strict=True):
        assert torch.equal(generate(model, **call, **{**compiling(), **how}), wanted)
    assert len(caches.used) == used
    assert caches.alive() == 1
    last = caches.used[-1]()
    assert type(last) is CLASSES[calls[-1][2].get("cache_implementation", "static")]
    assert last.layers[0].keys.untyped_storage().data_ptr() == caches.addresses[-1]


def test_memory_follows_the_model_to_another_dtype(installed: None) -> None:
    model, ids = new_model("hybrid"), prompt(2, PROMPT)
    generate(model, ids, **STATIC)
    model.to(torch.bfloat16)
    expected = generate(model, ids)
    assert torch.equal(generate(model, ids, **STATIC), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.to(torch.float32)
        expected = generate(model, ids)
        assert torch.equal(generate(model, ids, **STATIC), expected)
    expected = generate(model, ids)
    assert torch.equal(generate(model, ids, **STATIC), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_cache_that_somebody_holds_is_never_used_again(
    installed: None, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that were returned, one that was passed, and one that code of the user's holds since a call."""
    model, ids = shared_model("hybrid"), prompt(2, PROMPT)
    how = compiling() if compiled else STATIC
    expected = generate(model, ids)
    generate(model, ids, **how)
    mine = [generate(model, ids, return_dict_in_generate=True, **how).past_key_values for _ in range(2)]
    mine.append(kvlayers.StaticCache(model.config, max_cache_len=64))
    passed = {**how, "cache_implementation": None, "past_key_values": mine[-1]}
    assert torch.equal(generate(model, ids, **passed), expected)
    held: list[Any] = []
    original = type(model)._update_model_kwargs_for_generation

    def update(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        held.append(outputs.past_key_values)
        return original(model, outputs, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(model, "_update_model_kwargs_for_generation", update)
        assert torch.equal(generate(model, ids, **how), expected)
    mine.append(held[0])
    assert len(set(map(id, mine))) == 4
    states = [cache.state() for cache in mine]
    for _ in range(2):
        assert torch.equal(generate(model, prompt(2, 12, seed=5), **how)[:, :12], prompt(2, 12, seed=5))
        assert torch.equal(generate(model, ids, **how), expected)
    for cache, state in zip(mine, states, strict=True):
        assert cache.get_seq_length() == PROMPT + NEW_TOKENS - 1
        for now, then in zip(cache.state().layers, state.layers, strict=True):
            assert torch.equal(now.tensors["keys"], then.tensors["keys"])
            assert torch.equal(now.tensors["values"], then.tensors["values"])


def test_models_do_not_share_memory(installed: None) -> None:
    one, other = shared_model("hybrid"), shared_model("hybrid", seed=1)
    ids = prompt(1, PROMPT)
    expected = [generate(model, ids) for model in (one, other)]
    caches = [Caches(model) for model in (one, other)]
    for _ in range(3):
        for model, tokens in zip((one, other), expected, strict=True):
            assert torch.equal(generate(model, ids, **compiling()), tokens)
    assert [len(seen.used) for seen in caches] == [1, 1]
    assert caches[0].used[0]() is not caches[1].used[0]()
    twin = copy.deepcopy(tiny_model("qwen2"))
    assert torch.equal(generate(twin, ids, **STATIC), generate(twin, ids))


class Calling(transformers.LogitsProcessor):
    """Calls a function in the middle of generate()."""

    def __init__(self, function: Callable[[], None], at: int = 3) -> None:
        self.function, self.steps, self.at = function, 0, at

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.steps += 1
        if self.steps == self.at:
            self.function()
        return scores


@pytest.mark.parametrize("compiled", [False, True])
def test_a_call_within_a_call_has_a_cache_of_its_own(installed: None, compiled: bool) -> None:
    model, outer, inner = shared_model("hybrid"), prompt(2, PROMPT), prompt(2, 6, seed=4)
    how = compiling() if compiled else STATIC
    expected = generate(model, outer), generate(model, inner)
    generate(model, outer, **how)
    caches = Caches(model)
    nested: list[Tensor] = []
    calling = Calling(lambda: nested.append(generate(model, inner, **how)))
    seen = generate(model, outer, logits_processor=transformers.LogitsProcessorList([calling]), **how)
    assert torch.equal(seen, expected[0])
    assert torch.equal(nested[0], expected[1])
    # The outer one, the inner one, and the outer one again.
    # Eager calls keep none.
    assert not compiled or len({id(cache()) for cache in caches.used[:2]}) == 2
    assert len(caches.used) == 3
    assert torch.equal(generate(model, outer, **how), expected[0])
    assert caches.alive() <= 3


def test_an_error_within_a_call_leaves_later_calls_right(installed: None) -> None:
    model, ids = shared_model("hybrid"), prompt(2, PROMPT)
    expected = generate(model, ids)

    def fail() -> None:
        raise ArithmeticError("of the user's own")

    for how in (STATIC, compiling()):
        for at in (1, 4, 30):
            processors = transformers.LogitsProcessorList([Calling(fail, at)])
            with pytest.raises(ArithmeticError):
                generate(model, ids, logits_processor=processors, **how)
            assert torch.equal(generate(model, ids, **how), expected)


@pytest.mark.parametrize(("family", "compiled"), once(["hybrid", "qwen2"], [False, True]))
def test_a_reservation_that_is_too_small_refuses_before_anything_is_written(
    installed: None, family: str, compiled: bool
) -> None:
    model, ids = shared_model(family), prompt(2, PROMPT)
    expected, how = generate(model, ids), compiling() if compiled else STATIC
    for _ in range(2):
        with pytest.raises(CapacityError, match=r"at most 20 tokens.*20 held and 1 new|reservation of 20"):
            generate(model, ids, cache_config={"max_cache_len": 20}, **how)
        with pytest.raises(CapacityError, match=r"at most 6 tokens.*0 held and 9 new|reservation of 6"):
            generate(model, ids, cache_config={"max_cache_len": 6}, **how)
        with pytest.raises(CapacityError, match=r"at most 1 sequence, got 2"):
            generate(model, ids, cache_config={"max_batch_size": 1}, **how)
        assert torch.equal(generate(model, ids, **how), expected)
        grown = generate(model, ids, cache_config={"max_cache_len": 6, "grow": True}, **how)
        assert torch.equal(grown, expected)


# Letting go


def test_memory_is_let_go_of_when_it_is_asked_for() -> None:
    model, ids = shared_model("hybrid"), prompt(2, PROMPT)
    with kvlayers.installed():
        caches = Caches(model)
        generate(model, ids, **compiling())
        assert caches.alive() == 1
        kvlayers.free_reservations()
        assert caches.alive() == 0
        generate(model, ids, **compiling())
        assert caches.alive() == 1
        kvlayers.uninstall()
        assert caches.alive() == 0
    kvlayers.install()
    generate(model, ids, **compiling())
    kvlayers.uninstall()
    assert caches.alive() == 0
    kvlayers.free_reservations()


def live_nbytes() -> int:
    """Bytes of all tensors that Python can reach, each piece of memory once."""
    with warnings.catch_warnings():
        # Looking at every object wakes deprecated ones.
        warnings.simplefilter("ignore")
        tensors = [each for each in gc.get_objects() if type(each) in (Tensor, torch.nn.Parameter)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


RESERVED = 4096


KEPT_BY_NOBODY = [
    *((family, name) for family in ("qwen2", "jamba", "t5") for name in ("static", "hybrid", "offloaded_static")),
    *(("hybrid", name) for name in (*CLASSES, "offloaded_static")),
]


@pytest.mark.parametrize("case", some(KEPT_BY_NOBODY, [*KEPT_BY_NOBODY[:-5:4], *KEPT_BY_NOBODY[-4:-1]]))
def test_eager_calls_keep_no_byte_for_a_call_that_may_never_come(installed: None, case: tuple[str, str]) -> None:
    family, name = case
    model, ids = new_model(family), prompt(1, PROMPT)
    how = {"cache_implementation": name, "max_new_tokens": 8, "cache_config": {"max_cache_len": RESERVED}}
    expected = generate(model, ids, max_new_tokens=8)
    # What torch and transformers make once.
    assert torch.equal(generate(model, ids, **how), expected)
    held: list[int] = []
    processors = transformers.LogitsProcessorList([Calling(lambda: held.append(live_nbytes()))])
    gc.collect()
    before = live_nbytes()
    gc.disable()
    try:
        assert torch.equal(generate(model, ids, logits_processor=processors, **how), expected)
        after = live_nbytes()
    finally:
        gc.enable()
    # Within the call there is the reservation, or that of the windows, and behind it there is none.
    assert held[0] > before
    if family == "qwen2":
        shape = 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * RESERVED
        assert held[0] - before >= shape * model.config.head_dim * 4
    assert after == before


def test_eager_calls_leave_the_memory_of_a_compiled_program_alone(installed: None) -> None:
    model, ids = shared_model("hybrid"), prompt(2, PROMPT)
    expected, caches = generate(model, ids), Caches(model)
    others = (STATIC, {"cache_implementation": "dynamic"}, {**STATIC, "cache_config": {"max_cache_len": 300}})
    for how in (compiling(), *(how for other in others for how in (other, compiling()))):
        assert torch.equal(generate(model, ids, **how), expected)
    kept = [cache() for cache in caches.used]
    assert kept == [kept[0], None] * 3 + [kept[0]] != [None] * 7


def test_a_model_is_collected_although_its_memory_was_kept(counted: None, installed: None) -> None:
    model, ids = new_model("hybrid"), prompt(2, PROMPT)
    caches = Caches(model)
    generate(model, ids, **compiling())
    known = weakref.ref(model)
    assert caches.alive() == 1
    del model
    # What was compiled knows the model, and is let go of by torch alone.
    torch._dynamo.reset()
    gc.collect()
    assert known() is None
    assert caches.alive() == 0
