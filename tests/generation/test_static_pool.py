"""generate() with static caches: the tokens of eager code, few graphs, and memory that a compiled call uses again."""

import functools
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvlayers
from counted_graphs import MODELS, backend, graphs
from kvlayers.stores import Buckets
from matrix import some
from models import continued, fresh_model, prompt, without_mlps

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


def generate(model: Any, ids: Tensor, tokens: int = NEW_TOKENS, **arguments: Any) -> Any:
    torch.manual_seed(3)
    return continued(model, ids, tokens, **arguments)


def logits_of(model: Any, ids: Tensor, **arguments: Any) -> Tensor:
    """Of each step: random models may repeat one token, which says little."""
    return torch.stack(generate(model, ids, output_logits=True, return_dict_in_generate=True, **arguments).logits)


def calling(function: Callable[[], object], at: int = 3) -> dict[str, Any]:
    """Arguments of a call in whose middle a function is called."""
    steps = itertools.count(1)

    def process(input_ids: Tensor, scores: Tensor) -> Tensor:
        if next(steps) == at:
            function()
        return scores

    return {"logits_processor": [process]}


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


@pytest.mark.parametrize(("family", "compiled"), [("t5", False), ("bart", False), ("t5", True)])
def test_encoders_may_have_read_another_length_in_each_call(family: str, compiled: bool) -> None:
    model, how = new_model(family), {"tokens": 8, "num_beams": 1}
    prompts = [prompt(2, tokens, seed) for seed, tokens in enumerate((7, 12, 12))]
    expected = [logits_of(model, ids, **how) for ids in prompts]
    exact_model = new_model(family).double()
    exact = [logits_of(exact_model, ids, **how) for ids in prompts]
    # T5 does not scale its scores, so that float32 rounds them by more, on some processors than on others.
    rounding = max(float((logits - wanted).abs().max()) for logits, wanted in zip(expected, exact, strict=True))
    with kvlayers.installed():
        how |= compiling() if compiled else STATIC
        seen = [logits_of(model, ids, **how) for ids in prompts]
        # These are answered from a pair that is kept, if they are compiled.
        for ids, logits in zip(prompts, expected, strict=True):
            assert torch.equal(generate(model, ids, **how)[:, 1:], logits.argmax(-1).T)
    torch.testing.assert_close(seen, exact, rtol=0, atol=max(1e-5, 2 * rounding), check_dtype=False)


# Graphs


CALLS = ((PROMPT, NEW_TOKENS), (PROMPT, NEW_TOKENS), (PROMPT, 12), (4, 30), (30, 19))
"""Calls by their tokens and new tokens, of which the first takes the most."""
BUCKETS = Buckets(minimum=16)
FEW_BUCKETS = {"cache_config": {"buckets": BUCKETS}}
RETURNED = {"return_dict_in_generate": True}


@pytest.mark.parametrize(
    ("family", "dynamic", "how"),
    [
        ("hybrid", None, FEW_BUCKETS),
        pytest.param("hybrid", False, FEW_BUCKETS, marks=pytest.mark.nightly),
        *((family, False, RETURNED) for family in ("hybrid", "jamba", "deepseek_v3")),
    ],
)
def test_a_later_call_of_the_same_or_a_smaller_size_compiles_nothing(
    counted: None, installed: None, family: str, dynamic: bool | None, how: dict[str, Any]
) -> None:
    """Also where the caches that were compiled for are returned: then each call has another one."""
    model, how = new_model(family), {**compiling(dynamic=dynamic), **how}
    outputs, compiled = [], []
    for tokens, new_tokens in CALLS:
        ids = prompt(2, tokens, seed=tokens)
        outputs.append(generate(model, ids, new_tokens, **how))
        compiled.append(graphs())
        assert torch.equal(getattr(outputs[-1], "sequences", outputs[-1]), generate(model, ids, new_tokens))
    # The mask is made outside, and a window moved there: there is nothing else to be compiled for.
    assert 0 < compiled[0] <= (len(BUCKETS.sizes(PROMPT + NEW_TOKENS)) if how.get("cache_config") else 8)
    assert compiled == [compiled[0]] * len(CALLS)
    if "return_dict_in_generate" in how:
        # Whether autograd is on says nothing of what generate() may compile: it turns it off.
        assert torch.is_grad_enabled()
        assert all(output.past_key_values.is_compileable for output in outputs)
        lengths = [output.past_key_values.get_seq_length() for output in outputs]
        assert lengths == [sum(call) - 1 for call in CALLS], "what was returned is not used again"


def test_a_config_that_asks_for_no_compilation_is_not_compiled(counted: None, installed: None) -> None:
    model, ids = new_model("qwen2"), prompt(2, PROMPT)
    expected = generate(model, ids)
    for how in (STATIC, {"disable_compile": True, **compiling()}, {**compiling(), "cache_implementation": "dynamic"}):
        assert torch.equal(generate(model, ids, **how), expected)
    assert graphs() == 0


# Memory


OTHERS: dict[str, dict[str, Any]] = {
    "of another class": {"cache_implementation": "hybrid"},
    "of more sequences": {"cache_config": {"max_batch_size": 3}},
    "that grows": {"cache_config": {"grow": True}},
    "of other buckets": FEW_BUCKETS,
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
    expected = [generate(model, prompt(batch, PROMPT), tokens) for batch, tokens, _ in calls]
    caches = Caches(model)
    for (batch, tokens, how), wanted in zip(calls, expected, strict=True):
        assert torch.equal(generate(model, prompt(batch, PROMPT), tokens, **{**compiling(), **how}), wanted)
    assert (len(caches.used), caches.alive()) == (used, 1)
    last = caches.used[-1]()
    assert type(last) is CLASSES[how.get("cache_implementation", "static")]
    assert last.layers[0].keys.untyped_storage().data_ptr() == caches.addresses[-1]


def test_memory_follows_the_model_to_another_dtype(installed: None) -> None:
    model, ids = new_model("hybrid"), prompt(2, PROMPT)
    for dtype, casts in (
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.float32, True),
        (torch.float32, False),
    ):
        model.to(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
            assert torch.equal(generate(model, ids, **compiling()), generate(model, ids))


def held(cache: Any) -> list[Tensor]:
    return [layer.tensors[name].clone() for layer in cache.state().layers for name in ("keys", "values")]


def test_a_cache_that_somebody_holds_is_never_used_again(installed: None) -> None:
    """Two that were returned, one that was passed, and one that code of the user's holds since a call."""
    model, ids, how = shared_model("hybrid"), prompt(2, PROMPT), compiling()
    expected = generate(model, ids)
    generate(model, ids, **how)
    mine = [generate(model, ids, **RETURNED, **how).past_key_values for _ in range(2)]
    mine.append(kvlayers.StaticCache(model.config, max_cache_len=64))
    passed = {**how, "cache_implementation": None, "past_key_values": mine[-1]}
    assert torch.equal(generate(model, ids, **passed), expected)
    caches = Caches(model)
    assert torch.equal(generate(model, ids, **how, **calling(lambda: mine.append(caches.used[-1]()))), expected)
    assert len(set(map(id, mine))) == 4
    before = [held(cache) for cache in mine]
    for _ in range(2):
        assert torch.equal(generate(model, prompt(2, PROMPT, seed=5), **how)[:, :PROMPT], prompt(2, PROMPT, seed=5))
        assert torch.equal(generate(model, ids, **how), expected)
    assert [cache.get_seq_length() for cache in mine] == [PROMPT + NEW_TOKENS - 1] * 4
    torch.testing.assert_close([held(cache) for cache in mine], before, rtol=0, atol=0)


def test_models_do_not_share_memory(installed: None) -> None:
    models, ids = [shared_model("hybrid", seed) for seed in (0, 1)], prompt(1, PROMPT)
    expected = [generate(model, ids) for model in models]
    caches = [Caches(model) for model in models]
    for _ in range(3):
        for model, tokens in zip(models, expected, strict=True):
            assert torch.equal(generate(model, ids, **compiling()), tokens)
    assert [len(seen.used) for seen in caches] == [1, 1]
    assert caches[0].used[0]() is not caches[1].used[0]()


def test_a_call_within_a_call_has_a_cache_of_its_own(installed: None) -> None:
    model, outer, inner, nested = shared_model("hybrid"), prompt(2, PROMPT), prompt(2, 6, seed=4), []
    expected, how = (generate(model, outer), generate(model, inner)), compiling()
    generate(model, outer, **how)
    caches = Caches(model)
    seen = generate(model, outer, **calling(lambda: nested.append(generate(model, inner, **how))), **how)
    assert all(map(torch.equal, (seen, *nested), expected))
    # The outer one, the inner one, and the outer one again.
    assert len(caches.used) == 3
    assert caches.used[0]() is not caches.used[1]()
    assert torch.equal(generate(model, outer, **how), expected[0])
    assert caches.alive() <= 3


@pytest.mark.parametrize("at", [1, 4, 30])
def test_an_error_within_a_call_leaves_later_calls_right(installed: None, at: int) -> None:
    model, ids = shared_model("hybrid"), prompt(2, PROMPT)
    with pytest.raises(ZeroDivisionError):
        generate(model, ids, **calling(lambda: 1 / 0, at), **compiling())
    assert torch.equal(generate(model, ids, **compiling()), generate(model, ids))


# Letting go


def test_memory_is_let_go_of_when_it_is_asked_for(installed: None) -> None:
    model = shared_model("hybrid")
    caches = Caches(model)
    for let_go in (kvlayers.free_reservations, kvlayers.uninstall):
        generate(model, prompt(2, PROMPT), **compiling())
        assert caches.alive() == 1
        let_go()
        assert caches.alive() == 0


def live_nbytes() -> int:
    """Bytes of all tensors that Python can reach, each piece of memory once."""
    with warnings.catch_warnings():
        # Looking at every object wakes deprecated ones.
        warnings.simplefilter("ignore")
        tensors = [each for each in gc.get_objects() if type(each) in (Tensor, torch.nn.Parameter)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


KEPT_BY_NOBODY = [
    *((family, name) for family in ("qwen2", "jamba", "t5") for name in ("static", "hybrid", "offloaded_static")),
    *(("hybrid", name) for name in (*CLASSES, "offloaded_static")),
]


@pytest.mark.parametrize("case", some(KEPT_BY_NOBODY, [*KEPT_BY_NOBODY[:-5:4], *KEPT_BY_NOBODY[-4:-1]]))
def test_eager_calls_keep_no_byte_for_a_call_that_may_never_come(installed: None, case: tuple[str, str]) -> None:
    family, name = case
    model, ids = new_model(family), prompt(1, PROMPT)
    how = {"cache_implementation": name, "tokens": 8, "cache_config": {"max_cache_len": 4096}}
    # The first call has what torch and transformers make once.
    assert torch.equal(generate(model, ids, **how), generate(model, ids, 8))
    gc.collect()
    before = live_nbytes()
    gc.disable()
    try:
        generate(model, ids, **how)
        assert live_nbytes() == before
    finally:
        gc.enable()


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
