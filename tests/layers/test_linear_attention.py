"""Layers with recurrent states, against a slow oracle that holds all columns ever seen."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvlayers
from agreement import bytes_reached
from families import model_and_inputs
from kvlayers.layers import Checkpoints
from models import given, prompt, tiny_model
from versions import need_recurrent_layers

CHANNELS, KERNEL = 6, 4


class Oracle:
    """All columns that were ever seen. The recurrent state is a sum over them, which decays."""

    def __init__(self, batch: int = 2) -> None:
        self.columns = torch.zeros(batch, CHANNELS, 0)

    @property
    def length(self) -> int:
        return self.columns.shape[-1]

    @property
    def conv_state(self) -> torch.Tensor:
        return torch.nn.functional.pad(self.columns, (KERNEL, 0))[..., -KERNEL:]

    @property
    def recurrent_state(self) -> torch.Tensor:
        state = torch.zeros(self.columns.shape[0], CHANNELS, 3)
        for column in self.columns.unbind(-1):
            state = 0.5 * state + column[..., None] * torch.arange(1.0, 4)
        return state


def step(layer: Any, oracle: Oracle, tokens: int, seed: int = 0, in_place: bool = False) -> None:
    """Give both the same columns, as a model does: what comes back is what a convolution needs."""
    generator = torch.Generator().manual_seed(1000 * oracle.length + seed)
    columns = torch.randn(oracle.columns.shape[0], CHANNELS, tokens, generator=generator)
    before = oracle.conv_state if oracle.length else torch.zeros(len(columns), CHANNELS, max(KERNEL - tokens, 0))
    replaces = in_place and tokens == 1 and oracle.length > 0
    oracle.columns = torch.cat([oracle.columns, columns], dim=-1)
    full = layer.update_conv_state(columns, conv_kernel_size=KERNEL)
    assert torch.equal(full, torch.cat([before, columns], dim=-1))
    if replaces:
        # As kernels for a single token do it.
        layer.recurrent_states[0].copy_(oracle.recurrent_state)
    else:
        held = layer.update_recurrent_state(oracle.recurrent_state)
        assert torch.equal(held, oracle.recurrent_state)
    check(layer, oracle)


def check(layer: Any, oracle: Oracle) -> None:
    assert (layer.length, layer.exact_from, layer.nbytes) == (oracle.length, 0, bytes_reached(layer))
    assert layer.has_previous_state == {0: oracle.length > 0}
    if oracle.length:
        assert torch.equal(layer.conv_states[0], oracle.conv_state)
        assert torch.equal(layer.recurrent_states[0], oracle.recurrent_state)
        assert layer.batch_size == oracle.columns.shape[0]


def at(oracle: Oracle, length: int) -> Oracle:
    earlier = Oracle()
    earlier.columns = oracle.columns[..., :length]
    return earlier


def filled(*updates: int, **options: Any) -> tuple[kvlayers.LinearAttentionLayer, Oracle]:
    layer, oracle = kvlayers.LinearAttentionLayer(**options), Oracle()
    for tokens in updates:
        step(layer, oracle, tokens, in_place=True)
    return layer, oracle


@pytest.mark.parametrize("updates", [(1,), (2, 1), (3, 1, 1), (4, 1), (5, 1, 3, 1), (1, 1, 1, 1, 1, 1), (12, 7, 1)])
def test_states_are_those_of_all_columns(updates: tuple[int, ...]) -> None:
    filled(*updates)


def test_states_stay_at_their_address() -> None:
    layer, oracle = filled(5)
    addresses = layer.conv_states[0].data_ptr(), layer.recurrent_states[0].data_ptr()
    for tokens in (1, 3, 1):
        step(layer, oracle, tokens)
    layer.select(torch.tensor([1, 0]))
    layer.truncate(5)
    layer.reset()
    step(layer, Oracle(), 2)
    assert (layer.conv_states[0].data_ptr(), layer.recurrent_states[0].data_ptr()) == addresses


def test_autograd_follows_the_states() -> None:
    layer = kvlayers.LinearAttentionLayer()
    weight = torch.randn(2, CHANNELS, 5, requires_grad=True)
    layer.update_conv_state(weight * 2, conv_kernel_size=KERNEL)
    first = layer.update_recurrent_state(weight.sum(-1))
    # A backward pass needs these states as they are now.
    loss = (first**2).sum() + (layer.conv_states[0] ** 2).sum()
    full = layer.update_conv_state(torch.randn(2, CHANNELS, 1), conv_kernel_size=KERNEL)
    state = layer.update_recurrent_state(first * 3)
    (loss + full.sum() + state.sum()).backward()
    expected = 2 * weight.detach().sum(-1) + 8 * weight.detach()[..., -1] + 2 + 3
    torch.testing.assert_close(weight.grad[..., -1], expected)
    # Those of the graph are not written to afterwards.
    with torch.no_grad():
        layer.update_conv_state(torch.randn(2, CHANNELS, 1), conv_kernel_size=KERNEL)
        layer.update_recurrent_state(torch.zeros(2, CHANNELS))
    assert not layer.recurrent_states[0].requires_grad


# Counting


def test_a_token_whose_column_the_model_writes_itself_is_counted() -> None:
    """As kimi_linear does it: for a single token it gives the recurrent state alone."""
    layer = kvlayers.LinearAttentionLayer(checkpoints=Checkpoints(every=2, most=3))
    layer.update_conv_state(torch.randn(2, CHANNELS, 5), conv_kernel_size=KERNEL)
    layer.update_recurrent_state(torch.zeros(2, 3))
    for token in range(6, 11):
        layer.conv_states[0].fill_(token)
        layer.update_recurrent_state(torch.full((2, 3), float(token)))
        assert layer.length == token
    assert layer.truncate(9) == 1
    assert {*layer.conv_states[0].unique().tolist(), *layer.recurrent_states[0].unique().tolist()} == {8}


def test_columns_that_need_not_be_tokens_are_not_counted() -> None:
    layer = kvlayers.LinearAttentionLayer()
    for _ in range(2):
        layer.update_conv_state(torch.randn(2, CHANNELS, KERNEL))
        layer.update_recurrent_state(torch.zeros(2, 3))
    assert layer.length is None
    assert layer.conv_states[0].shape[-1] == KERNEL
    for roll_back in (lambda: layer.truncate(1), lambda: layer.check_truncate(1), layer.get_seq_length):
        with pytest.raises(
            (kvlayers.errors.RollbackError, kvlayers.errors.UnsupportedLayerError),
            match="counts its tokens|how many tokens",
        ):
            roll_back()
    layer.reset()
    assert layer.length == 0


def test_the_first_state_counts_whatever_the_order() -> None:
    layer = kvlayers.LinearAttentionLayer(number_of_states=3)
    for _ in range(2):
        layer.update_conv_state(torch.zeros(1, 4, dtype=torch.int64), state_idx=2, conv_kernel_size=4)
        for index in (1, 0):
            layer.update_conv_state(torch.randn(1, CHANNELS, 3), state_idx=index, conv_kernel_size=KERNEL)
    assert (layer.length, layer.truncate(3), layer.length) == (6, 0, 3)


# Checkpoints


def lengths(layer: kvlayers.LinearAttentionLayer) -> list[int]:
    return sorted({layer.nearest_restorable(length) for length in range(layer.length + 1)} - {layer.length, 0})


EACH_TOKEN = (3, *[1] * 10)


@pytest.mark.parametrize(
    ("updates", "checkpoints", "taken"),
    [
        ((5, 1, 1), None, [5]),
        ((5, 1, 3, 1), None, [5, 9]),
        ((5, 2, 3, 1), None, [7, 10]),
        ((1, 1, 1), None, []),
        ((5, 2, 3, 1), {"most": 5}, [5, 7, 10]),
        ((5, 2, 3, 1), {"most": 1}, [10]),
        ((5, 2, 3, 1), {"most": 0}, []),
        (EACH_TOKEN, {"every": 4, "most": 9}, [3, 4, 8, 12]),
        (EACH_TOKEN, {"every": 4}, [8, 12]),
        ((4, *[1] * 5), {"every": 4, "most": 9}, [4, 8]),
    ],
    ids=str,
)
def test_checkpoints_are_taken_at_the_end_of_several_tokens_and_every_so_many(
    updates: tuple[int, ...], checkpoints: dict[str, int] | None, taken: list[int]
) -> None:
    assert lengths(filled(*updates, **({"checkpoints": checkpoints} if checkpoints else {}))[0]) == taken


@pytest.mark.parametrize("target", range(12))
def test_a_rollback_restores_the_latest_state_before_and_says_what_is_missing(target: int) -> None:
    layer, oracle = filled(4, 1, 1, 2, 1, 1, 1, checkpoints={"every": 3, "most": 9})
    expected = max(length for length in (0, 4, 6, 8, 9, 11) if length <= target)
    assert layer.truncate(target) == target - expected
    oracle = at(oracle, expected)
    check(layer, oracle)
    assert layer.nearest_restorable(expected) == expected
    for tokens in (1, 3, 1):
        step(layer, oracle, tokens, seed=1)


def test_layers_that_have_other_checkpoints_agree_on_one() -> None:
    layers = [kvlayers.LinearAttentionLayer(checkpoints={"every": every, "most": 9}) for every in (2, 3)]
    cache, oracles = kvlayers.Cache(layers=layers), [Oracle(), Oracle()]
    for _ in range(12):
        for layer, oracle in zip(layers, oracles, strict=True):
            step(layer, oracle, 1)
    assert [layer.nearest_restorable(11) for layer in layers] == [10, 9]
    assert cache.truncate(11) == 5
    for layer, oracle in zip(layers, oracles, strict=True):
        check(layer, at(oracle, 6))


def test_recording_keeps_where_it_began_whatever_the_number_of_checkpoints() -> None:
    layer, oracle = filled(4, 1, 1, checkpoints=Checkpoints(most=0))
    layer.activate_past_recording()
    for rejected in (3, 2, 0, 5):
        begin = oracle.length
        step(layer, oracle, 5, seed=2)
        layer.crop(-5 if rejected else 0)
        oracle = at(oracle, begin if rejected else begin + 5)
        check(layer, oracle)
    layer.deactivate_past_recording()
    assert (layer.is_recording, layer.record_past) == (False, True)


def test_an_update_that_broke_off_is_not_taken_for_a_state() -> None:
    layer, oracle = filled(4, 1)
    layer.update_conv_state(torch.randn(2, CHANNELS, 3), conv_kernel_size=KERNEL)
    assert (layer.length, layer.nearest_restorable(8), layer.truncate(8)) == (8, 4, 4)
    check(layer, at(oracle, 4))


def test_columns_are_recorded_where_there_is_nothing_else() -> None:
    layer = kvlayers.LinearAttentionLayer()
    columns = torch.randn(2, CHANNELS, 30)
    layer.update_conv_state(columns[..., :2], conv_kernel_size=KERNEL)
    layer.activate_past_recording()
    layer.update_conv_state(columns[..., 2:3], conv_kernel_size=KERNEL)
    layer.update_conv_state(columns[..., 3:9], conv_kernel_size=KERNEL)
    # What is recorded follows the sequences.
    layer.reorder_cache(torch.tensor([1, 0]))
    columns = columns[[1, 0]]
    assert layer.is_croppable
    assert layer.nbytes == bytes_reached(layer)
    for removed, length in ((2, 7), (0, 7)):
        layer.crop(-removed)
        assert layer.length == length
        assert torch.equal(layer.conv_states[0], columns[..., length - KERNEL : length])
    layer.update_conv_state(columns[..., 7:9], conv_kernel_size=KERNEL)
    assert layer.nearest_restorable(8) == 8
    layer.deactivate_past_recording()
    assert layer.nearest_restorable(8) < 8


# Operations


def _twin(make: Callable[[Any], Any]) -> Callable[[Any, Oracle], Any]:
    def operation(layer: Any, oracle: Oracle) -> Any:
        other = make(layer)
        mine = at(oracle, oracle.length)
        for tokens in (1, 4, 1):
            step(layer, mine, tokens, seed=9)
        return other

    return operation


def _state(layer: Any, oracle: Oracle) -> Any:
    fresh = layer.fork()
    fresh.reset()
    step(fresh, Oracle(), 7)
    fresh.load_state(layer.state())
    layer.reset()
    return fresh


TWINS: dict[str, Callable[[Any, Oracle], Any]] = {
    "fork": _twin(lambda layer: layer.fork()),
    "deepcopy": _twin(copy.deepcopy),
    "pickle": _twin(lambda layer: pickle.loads(pickle.dumps(layer))),
    "state": _state,
}


@pytest.mark.parametrize("operation", TWINS)
@pytest.mark.parametrize("updates", [(), (1,), (6,), (6, 1, 1, 3, 1)])
def test_a_copy_goes_its_own_way_and_back(updates: tuple[int, ...], operation: str) -> None:
    layer, oracle = filled(*updates)
    places = lengths(layer)
    other = TWINS[operation](layer, oracle)
    check(other, oracle)
    assert lengths(other) == places
    for tokens in (1, 2):
        step(other, oracle, tokens, seed=4)
    if places:
        assert other.truncate(places[-1]) == 0
        check(other, at(oracle, places[-1]))


@pytest.mark.parametrize("rows", [[1, 0], [1, 1], [0], [1, 0, 1]])
def test_checkpoints_follow_the_sequences(rows: list[int]) -> None:
    layer, oracle = filled(4, 1, 1)
    for turn in ([1, 0], rows):
        layer.batch_select_indices(torch.tensor(turn))
        oracle.columns = oracle.columns[turn]
        check(layer, oracle)
    twin = layer.fork()
    twin.load_state(layer.state())
    step(layer, oracle, 1)
    for copied in (twin, layer):
        assert copied.truncate(4) == 0
        check(copied, at(oracle, 4))


def test_an_empty_layer_takes_another_batch() -> None:
    layer, _ = filled(4, 1)
    layer.reset()
    oracle = Oracle(batch=3)
    for tokens in (3, 1):
        step(layer, oracle, tokens)


# Bad input


def _update(
    layer: kvlayers.LinearAttentionLayer, *shape: int, kernel: int = KERNEL, idx: int = 0, **form: Any
) -> torch.Tensor:
    return layer.update_conv_state(torch.zeros(*shape, **form), idx, conv_kernel_size=kernel)


MISUSES: dict[str, tuple[type[Exception], Callable[[kvlayers.LinearAttentionLayer], object]]] = {
    "another batch size": (kvlayers.errors.StateMismatchError, lambda layer: _update(layer, 3, CHANNELS, 1)),
    "other channels": (kvlayers.errors.StateMismatchError, lambda layer: _update(layer, 2, CHANNELS + 1, 1)),
    "another dtype": (
        kvlayers.errors.StateMismatchError,
        lambda layer: _update(layer, 2, CHANNELS, 1, dtype=torch.float64),
    ),
    "another device": (kvlayers.errors.StateMismatchError, lambda layer: _update(layer, 2, CHANNELS, 1, device="meta")),
    "a text for columns": (
        kvlayers.errors.StateMismatchError,
        lambda layer: layer.update_conv_state("columns", conv_kernel_size=KERNEL),
    ),
    "no recurrent state": (kvlayers.errors.StateMismatchError, lambda layer: layer.update_recurrent_state(None)),
    "another kernel": (kvlayers.errors.StateMismatchError, lambda layer: _update(layer, 2, CHANNELS, 1, kernel=3)),
    "a state index too high": (kvlayers.errors.LayerIndexError, lambda layer: _update(layer, 2, CHANNELS, 1, idx=1)),
    "a negative state index": (kvlayers.errors.LayerIndexError, lambda layer: _update(layer, 2, CHANNELS, 1, idx=-1)),
    "a recurrent state of another shape": (
        kvlayers.errors.StateMismatchError,
        lambda layer: layer.update_recurrent_state(torch.zeros(2, CHANNELS, 4)),
    ),
    "a recurrent state of another dtype": (
        kvlayers.errors.StateMismatchError,
        lambda layer: layer.update_recurrent_state(torch.zeros(2, CHANNELS, 3, dtype=torch.bfloat16)),
    ),
    "a recurrent state index too high": (
        kvlayers.errors.LayerIndexError,
        lambda layer: layer.update_recurrent_state(torch.zeros(2, CHANNELS, 3), 1),
    ),
    "keys and values": (kvlayers.errors.UnsupportedLayerError, lambda layer: layer.update(*torch.zeros(2, 1, 2, 3, 4))),
    "a length that was not reached": (kvlayers.errors.RollbackError, lambda layer: layer.truncate(7)),
    "a negative length": (kvlayers.errors.RollbackError, lambda layer: layer.truncate(-1)),
    "a length that is no number": (kvlayers.OptionError, lambda layer: layer.truncate(1.5)),
    "an option that does not exist": (TypeError, lambda layer: layer.update_conv_state(torch.zeros(2, 6, 1), kernel=4)),
    "the state of another kind": (
        kvlayers.errors.StateMismatchError,
        lambda layer: layer.load_state(kvlayers.DynamicLayer().state()),
    ),
    "the state of more states": (
        kvlayers.errors.StateMismatchError,
        lambda layer: layer.load_state(kvlayers.LinearAttentionLayer(number_of_states=2).state()),
    ),
    "a sequence that does not exist": (kvlayers.errors.BatchIndexError, lambda layer: layer.batch_select_indices([2])),
    "moving": (kvlayers.errors.UnsupportedLayerError, lambda layer: layer.offload()),
}


@pytest.mark.parametrize(("error", "act"), MISUSES.values(), ids=MISUSES)
def test_misuse_is_a_named_error_and_changes_nothing(
    error: type[Exception], act: Callable[[kvlayers.LinearAttentionLayer], object]
) -> None:
    layer, oracle = filled(4, 1, 1)
    with pytest.raises(error):
        act(layer)
    check(layer, oracle)
    step(layer, oracle, 1)
    assert layer.truncate(4) == 0


def cache_for(family: str) -> kvlayers.Cache:
    return kvlayers.DynamicCache(config=tiny_model(family).config)


WRONG: list[tuple[type[Exception], str | None, Callable[[], object]]] = [
    *(
        (kvlayers.OptionError, None, make)
        for make in (
            lambda: kvlayers.LinearAttentionLayer(number_of_states=0),
            lambda: kvlayers.LinearAttentionLayer(number_of_states=True),
            lambda: kvlayers.LinearAttentionLayer(states=2),
            lambda: kvlayers.LinearAttentionLayer(checkpoints=3),
            lambda: kvlayers.LinearAttentionLayer(checkpoints={"evry": 3}),
            lambda: Checkpoints(every=0),
            lambda: Checkpoints(most=-1),
            lambda: Checkpoints(every=1.5),
            lambda: kvlayers.DynamicCache(checkpoints=Checkpoints()),
            lambda: kvlayers.DynamicCache(config=tiny_model("mamba").config, checkpoints="often"),
            lambda: kvlayers.StaticCache(tiny_model("jamba").config, 8, checkpoints={"most": None}),
            lambda: kvlayers.MambaCache(tiny_model("mamba").config, max_batch_size=0),
            lambda: kvlayers.MambaCache(tiny_model("mamba").config, dtype="float17"),
            lambda: kvlayers.MambaCache(tiny_model("mamba").config, device=1.5),
            lambda: kvlayers.MambaCache(tiny_model("mamba").config, batch=2),
            lambda: kvlayers.HybridMambaAttentionDynamicCache(),
        )
    ),
    *(
        (kvlayers.errors.ConfigError, None, make)
        for make in (
            lambda: kvlayers.MambaCache(tiny_model("jamba").config),
            lambda: kvlayers.MambaCache(None),
            lambda: kvlayers.HybridMambaAttentionDynamicCache(tiny_model("llama").config, 2),
        )
    ),
    *(
        (kvlayers.errors.LayerIndexError, None, make)
        for make in (
            lambda: cache_for("jamba").get_conv_state(4),
            lambda: cache_for("jamba").get_recurrent_state(9),
            lambda: cache_for("jamba").get_conv_state(0, state_idx=1),
            lambda: cache_for("jamba").get_recurrent_state(0, state_idx=-1),
            lambda: cache_for("jamba").has_previous_state(0, state_idx=3),
            lambda: cache_for("jamba").update_conv_state(torch.zeros(1, 4, 1), 7, conv_kernel_size=4),
            lambda: cache_for("jamba").update_recurrent_state(torch.zeros(1, 4), 0, state_idx=2),
        )
    ),
    *(
        (kvlayers.errors.UnsupportedLayerError, said, make)
        for said, make in (
            ("another model", lambda: cache_for("jamba").get_conv_state(1)),
            ("another model", lambda: cache_for("jamba").update_recurrent_state(torch.zeros(1, 4), 1)),
            ("recurrent state, got none", lambda: cache_for("llama").has_previous_state()),
            ("must be a", lambda: kvlayers.HybridLayer(kvlayers.LinearAttentionLayer(), kvlayers.DynamicLayer())),
            (
                "must be a",
                lambda: kvlayers.HybridLayer(
                    kvlayers.HybridLayer(kvlayers.DynamicLayer(), kvlayers.LinearAttentionLayer()),
                    kvlayers.LinearAttentionLayer(),
                ),
            ),
        )
    ),
]


@pytest.mark.parametrize(("error", "said", "make"), WRONG)
def test_what_cannot_be_made_or_asked_for_is_refused(
    error: type[Exception], said: str | None, make: Callable[[], object]
) -> None:
    with pytest.raises(error, match=said):
        make()


FORWARD: dict[str, tuple[str, str, Callable[[], kvlayers.Cache]]] = {
    "mamba without a config": ("mamba", "cache_params", kvlayers.DynamicCache),
    "jamba without a config": ("jamba", "past_key_values", kvlayers.DynamicCache),
    "llama with the cache of mamba": ("llama", "past_key_values", lambda: cache_for("mamba")),
    "llama with the cache of jamba": ("llama", "past_key_values", lambda: cache_for("jamba")),
    "mamba with the cache of llama": ("mamba", "cache_params", lambda: cache_for("llama")),
    "jamba with a static cache of llama": (
        "jamba",
        "past_key_values",
        lambda: kvlayers.StaticCache(tiny_model("llama").config, max_cache_len=32),
    ),
    "jamba with the cache of mamba": ("jamba", "past_key_values", lambda: cache_for("mamba")),
}


@pytest.mark.parametrize(("family", "name", "make"), FORWARD.values(), ids=FORWARD)
def test_the_cache_of_another_model_is_refused_and_stays_as_it_was(
    family: str, name: str, make: Callable[[], kvlayers.Cache]
) -> None:
    cache = make()
    with pytest.raises(kvlayers.errors.UnsupportedLayerError, match="config"), torch.no_grad():
        tiny_model(family)(prompt(1, 6), **{name: cache}, use_cache=True)
    assert all(not layer.length for layer in cache.adapted_layers())


# Names of transformers 4


@torch.no_grad()
def test_the_old_names_construct_the_caches_of_their_models() -> None:
    mamba, jamba = tiny_model("mamba"), tiny_model("jamba")
    old = kvlayers.MambaCache(mamba.config, max_batch_size=2, dtype=torch.float32, device="cpu")
    new = cache_for("mamba")
    for ids in (prompt(2, 7), prompt(2, 1)):
        expected = mamba(ids, cache_params=new, use_cache=True).logits
        assert torch.equal(mamba(ids, cache_params=old, use_cache=True).logits, expected)
    assert [states.shape for states in (*old.conv_states, *old.ssm_states)] == [(2, 64, 4)] * 4
    hybrid_cache = kvlayers.HybridMambaAttentionDynamicCache(jamba.config, 2, torch.float32, device=torch.device("cpu"))
    jamba(prompt(2, 7), past_key_values=hybrid_cache)
    assert [states is None for states in hybrid_cache.conv_states] == [False, True, False, True]
    assert hybrid_cache.key_cache[1].shape[2] == hybrid_cache.get_seq_length() == 7
    assert [states is None for states in hybrid_cache.ssm_states[:2]] == [False, True]
    with pytest.raises(kvlayers.errors.LayerIndexError):
        hybrid_cache.ssm_states[4]


@pytest.mark.parametrize("family", ["mamba2", "falcon_h1"])
def test_rows_may_differ_in_how_many_checkpoints_they_keep(family: str) -> None:
    need_recurrent_layers(family)
    model = model_and_inputs(family)[0]
    caches = [kvlayers.make_cache("dynamic", model, checkpoints={"most": most}) for most in (2, 5)]
    with torch.no_grad():
        for tokens, cache in enumerate(caches, start=4):
            model(prompt(1, tokens), **given(cache, model))
    rows = kvlayers.merge(caches)
    assert rows.row_lengths == (4, 5)
    assert kvlayers.merge([rows, caches[0]]).row_lengths == (4, 5, 4)
