"""Caches whose states are not those of their text: they say so, whatever is done to them, and stores refuse them.

Decoding goes on after each way of moving them, and positions stay right.
"""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvlayers
from kvlayers.documents import recomputing
from kvlayers.errors import ConfigError, OptionError, StateMismatchError
from matrix import once
from models import fresh_model, prompt, read, row_logits, tiny_model

FIRST, SECOND, QUESTION = prompt(1, 9, 0), prompt(1, 14, 1), prompt(1, 4, 2)
WHOLE = torch.cat([FIRST, SECOND], dim=1)
TOLERANCE = {"rtol": 0, "atol": 2e-4}
"""The same sums in another order of float32."""


def concatenated(model: Any, recompute: int | str) -> Any:
    documents = [read(model, ids)[0] for ids in (FIRST, SECOND)]
    return kvlayers.concatenate(documents, model, recompute=recompute, ids=[FIRST, SECOND])


@pytest.mark.parametrize(("recompute", "exact"), [(0, 9), (3, 12), ("50%", ...), (14, None), ("100%", None)])
def test_a_cache_knows_how_many_tokens_are_exact_and_a_store_takes_no_others(recompute: Any, exact: Any) -> None:
    model, store = tiny_model("llama"), kvlayers.PrefixStore("1MiB")
    cache = concatenated(model, recompute)
    # Which tokens change most is known to the model alone.
    exact = max(cache.exact_tokens, 9) if exact is ... else exact
    assert cache.exact_tokens == exact
    if exact is None:
        assert store.insert(WHOLE[0], cache, model.config)
        return
    with pytest.raises(StateMismatchError, match="insert its documents instead"):
        store.insert(WHOLE[0], cache, model.config)
    fork = cache.fork()
    fork.crop(exact)
    assert (len(store), cache.exact_tokens, fork.exact_tokens) == (0, exact, None)
    assert store.insert(WHOLE[0, :exact], fork, model.config)
    ids = torch.cat([WHOLE[:, :exact], QUESTION], dim=1)
    hit = store.lookup(ids, model.config)
    assert hit.covered == exact
    torch.testing.assert_close(read(model, QUESTION, hit.cache)[1], read(model, ids)[1][:, -4:], **TOLERANCE)
    cache.reset()
    assert cache.exact_tokens is None


def test_a_changed_middle_and_decoding_stay_inexact(tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache, exact = (read(model, WHOLE)[0] for _ in range(2))
    kvlayers.replace_tokens(cache, 5, 7, QUESTION[0], model, recompute=0)
    assert cache.exact_tokens == 9
    read(model, QUESTION, cache)
    kvlayers.save_cache(cache, tmp_path / "cache.safetensors")
    assert cache.exact_tokens == kvlayers.load_cache(tmp_path / "cache.safetensors").exact_tokens == 9
    kvlayers.replace_tokens(exact, 5, 7, QUESTION[0], model, known_ids=WHOLE)
    assert exact.exact_tokens is None


def test_a_moved_cache_knows_where_it_begins() -> None:
    model = tiny_model("llama")
    cache, second = (read(model, ids)[0] for ids in (FIRST, SECOND))
    moved = kvlayers.moved(cache, 30, model)
    assert (cache.first_position, moved.first_position, moved.exact_tokens) == (0, 30, 0)
    for to in (0, 50):
        again, expected = (kvlayers.moved(each, to, model).layers for each in (moved, cache))
        torch.testing.assert_close([own.keys for own in again], [own.keys for own in expected], **TOLERANCE)
    parts = [moved, kvlayers.moved(second, 3, model)]
    together = kvlayers.concatenate(parts, model, recompute="100%", ids=[FIRST, SECOND])
    # The first document's states are taken as they are: at its first position, they are those of the text.
    logits = [read(model, QUESTION, each)[1] for each in (together, concatenated(model, "100%"))]
    torch.testing.assert_close(*logits, **TOLERANCE)
    with pytest.raises(StateMismatchError, match="must begin at position 0"):
        kvlayers.replace_tokens(moved, 2, 3, QUESTION[0], model, known_ids=FIRST)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("recompute", ["40%", "100%"])
def test_many_tokens_are_recomputed_in_parts(family: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh_model(family)
    expected = read(model, QUESTION, concatenated(model, recompute))[1]
    passes: list[int] = []
    monkeypatch.setattr(recomputing, "MOST_IN_MASK", 3 * WHOLE.shape[1])
    with model.register_forward_pre_hook(lambda module, args: passes.append(args[0].shape[1])):
        cache = concatenated(model, recompute)
    assert max(passes) <= max(FIRST.shape[1], SECOND.shape[1])
    assert passes.count(3) >= 14 * int(recompute[:-1]) // 100 // 3
    torch.testing.assert_close(read(model, QUESTION, cache)[1], expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda model, caches, known: kvlayers.concatenate(known, model, ids=[SECOND[:, :9], SECOND]),
            StateMismatchError,
            "`ids` must be the tokens that the cache has seen",
        ),
        (
            lambda model, caches, known: kvlayers.replace_tokens(known[0], 2, 3, [5], model, known_ids=SECOND[:, :9]),
            StateMismatchError,
            "`known_ids` must be the tokens that the cache has seen",
        ),
        (
            lambda model, caches, known: kvlayers.concatenate(known, model, beginning_tokens=3),
            StateMismatchError,
            "`beginning_tokens` must be tokens that all caches begin with",
        ),
        (
            lambda model, caches, known: kvlayers.replace_tokens(
                read(model, QUESTION, known[0].fork())[0], 2, 3, [5], model
            ),
            StateMismatchError,
            "knows 9 of its 13 tokens",
        ),
        *(
            (
                lambda model, caches, known, recompute=recompute: kvlayers.concatenate(
                    caches, fresh_model("llama", num_hidden_layers=3), recompute=recompute, ids=[FIRST, SECOND]
                ),
                StateMismatchError,
                "the 3 layers of `model`, got 2",
            )
            for recompute in (0, "100%")
        ),
        *(
            (
                lambda model, caches, known, ids=ids: kvlayers.concatenate(caches, model, ids=ids),
                OptionError,
                "ids",
            )
            for ids in (5, None, ["a", "b"])
        ),
        (
            lambda model, caches, known: kvlayers.replace_tokens(caches[0], 0, 1, None, model, known_ids=FIRST),
            OptionError,
            "`ids` must be whole numbers",
        ),
        (
            lambda model, caches, known: kvlayers.concatenate(caches, model.config, ids=[FIRST, SECOND]),
            OptionError,
            "`model` must be a model",
        ),
    ],
)
def test_what_contradicts_the_caches_is_named(call: Any, error: Any, message: str) -> None:
    model = tiny_model("llama")
    caches = [read(model, ids)[0] for ids in (FIRST, SECOND)]
    with kvlayers.installed():
        known = [read(model, ids)[0] for ids in (FIRST, SECOND)]
    with pytest.raises(error, match=message):
        call(model, caches, known)
    assert [cache.get_seq_length() for cache in (*caches, *known)] == [9, 14] * 2


def test_states_of_another_dtype_and_dropout_are_named() -> None:
    half = fresh_model("llama").to(torch.bfloat16)
    documents = [read(half, ids)[0] for ids in (FIRST, SECOND)]
    model = fresh_model("llama")
    with pytest.raises(StateMismatchError, match=r"needs states in torch\.float32.*got torch\.bfloat16"):
        kvlayers.concatenate(documents, model, ids=[FIRST, SECOND])
    assert kvlayers.concatenate(documents, model, recompute=0).get_seq_length() == 23
    dropping = fresh_model("llama", attention_dropout=0.5)
    documents = [read(dropping, ids)[0] for ids in (FIRST, SECOND)]
    dropping.train()
    with pytest.raises(ConfigError, match="needs a model in eval mode"):
        kvlayers.concatenate(documents, dropping, ids=[FIRST, SECOND])


# What is done to them

CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: kvlayers.DynamicCache(config=config),
    "static": lambda config: kvlayers.StaticCache(config, max_cache_len=64, grow=True),
    "int4": lambda config: kvlayers.QuantizedCache(config=config, nbits=4, residual_length=64),
    "offloaded": lambda config: kvlayers.OffloadedCache(config=config),
}


@pytest.fixture(params=CACHES)
def make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    config = tiny_model("llama").config
    return lambda: CACHES[request.param](config)


@torch.no_grad()
def behind(cache: Any, ids: Tensor, begin: int = 0) -> Tensor:
    """Logits of tokens that are at positions from `begin` on."""
    positions = begin + torch.arange(ids.shape[1])[None]
    logits: Tensor = tiny_model("llama")(ids, past_key_values=cache, position_ids=positions).logits
    return logits


def filled(make: Callable[[], Any], ids: Tensor = FIRST) -> Any:
    cache = make()
    behind(cache, ids)
    return cache


def moved(make: Callable[[], Any]) -> Any:
    return kvlayers.moved(filled(make, FIRST), 10, tiny_model("llama"))


def joined(make: Callable[[], Any]) -> Any:
    documents = [filled(make, ids) for ids in (FIRST, SECOND)]
    return kvlayers.concatenate(documents, tiny_model("llama"), recompute=0)


def facts(cache: Any) -> tuple[int, int | None]:
    return cache.first_position, cache.exact_tokens


def loaded(state: Any, cache: Any) -> Any:
    cache.load_state(state)
    return cache


def saved(cache: Any, path: Path) -> Path:
    kvlayers.save_cache(cache, path)
    return path


def selected(cache: Any, make: Callable[[], Any], path: Path) -> Any:
    rows = cache.fork()
    rows.batch_repeat_interleave(3)
    rows.reorder_cache(torch.tensor([2, 0]))
    rows.batch_select_indices([1])
    return rows


def expanded(cache: Any, make: Callable[[], Any], path: Path) -> Any:
    rows = cache.fork()
    rows.expand(2)
    return rows.extract(1)


def kept_of_extended(cache: Any, make: Callable[[], Any], path: Path) -> Any:
    rows = filled(make, SECOND)
    rows.extend(cache, filled(make, FIRST))
    rows.keep_rows([2, 1])
    rows.keep_rows([1])
    return rows.extract(0)


def merged_twice(cache: Any, make: Callable[[], Any], path: Path) -> Any:
    rows = kvlayers.merge([filled(make, SECOND), cache])
    return pickle.loads(pickle.dumps(kvlayers.merge([filled(make, FIRST), rows]).fork())).extract(2)


def cropped_rows(cache: Any, make: Callable[[], Any], path: Path) -> Any:
    rows = kvlayers.merge([filled(make, SECOND), cache])
    row_logits(tiny_model("llama"), rows, prompt(2, 1, 5))
    rows.crop_rows([0, rows.row_lengths[1] - 1])
    return rows.extract(1)


WAYS: dict[str, Callable[[Any, Callable[[], Any], Path], Any]] = {
    "fork": lambda cache, make, path: cache.fork(2)[1],
    "copy": lambda cache, make, path: copy.deepcopy(cache),
    "pickle": lambda cache, make, path: pickle.loads(pickle.dumps(cache)),
    "load_state": lambda cache, make, path: loaded(pickle.loads(pickle.dumps(cache.state())), make()),
    "load_state over another": lambda cache, make, path: loaded(cache.state(), moved(make)),
    "load_cache": lambda cache, make, path: kvlayers.load_cache(saved(cache, path)),
    "load_cache(into=)": lambda cache, make, path: kvlayers.load_cache(saved(cache, path), into=make()),
    "select": selected,
    "expand": expanded,
    "last of merge": lambda cache, make, path: kvlayers.merge([filled(make, SECOND), cache]).extract(1),
    "first of merge": lambda cache, make, path: kvlayers.merge([cache, filled(make, SECOND)]).extract(0),
    "extend, keep_rows": kept_of_extended,
    "merge of rows, pickle": merged_twice,
    "crop_rows": cropped_rows,
}


@pytest.mark.parametrize(
    ("make", "origin", "way"), once(CACHES, [moved, joined, filled], WAYS, times=2), indirect=["make"]
)
def test_the_fact_goes_with_the_states(make: Callable[[], Any], origin: Any, way: str, tmp_path: Path) -> None:
    cache = origin(make)
    expected, begin = facts(cache), cache.first_position + cache.get_seq_length()
    assert expected == {moved: (10, 0), joined: (0, 9), filled: (0, None)}[origin]
    got = WAYS[way](cache, make, tmp_path / "cache.safetensors")
    assert facts(got) == facts(cache) == expected
    torch.testing.assert_close(behind(got, QUESTION, begin), behind(cache, QUESTION, begin), **TOLERANCE)
    if expected[1] is not None:
        store, config = kvlayers.PrefixStore("4MiB"), tiny_model("llama").config
        with pytest.raises(StateMismatchError, match="only the first"):
            store.insert(torch.zeros(99, dtype=torch.int64), got, config)
        if expected[1]:
            got.crop(expected[1])
            assert got.exact_tokens is None
            store.insert(FIRST, got, config)


EMPTIED: dict[str, Callable[[Any, Callable[[], Any]], Any]] = {
    "truncate": lambda cache, make: cache.truncate(0),
    "crop": lambda cache, make: cache.crop(-cache.get_seq_length()),
    "reset": lambda cache, make: cache.reset(),
    "load_state of an empty one": lambda cache, make: cache.load_state(filled(make, SECOND).state()) or cache.reset(),
    "crop_rows": lambda cache, make: cache.crop_rows([0]),
}


@pytest.mark.parametrize(("make", "origin", "way"), once(CACHES, [moved, joined], EMPTIED, times=2), indirect=["make"])
def test_an_empty_cache_begins_anew(make: Callable[[], Any], origin: Any, way: str) -> None:
    cache, model = origin(make), tiny_model("llama")
    EMPTIED[way](cache, make)
    assert facts(cache) == (0, None)
    behind(cache, SECOND)
    # Rows of their own lengths are not concatenated, so one is taken out.
    document = cache.extract(0)
    torch.testing.assert_close(behind(cache, QUESTION, 14), behind(filled(make, SECOND), QUESTION, 14), **TOLERANCE)
    whole = kvlayers.concatenate([document, filled(make, FIRST)], model, ids=[SECOND, FIRST])
    expected = filled(make, torch.cat([SECOND, FIRST], dim=1))
    assert facts(whole) == (0, None)
    torch.testing.assert_close(behind(whole, QUESTION, 23), behind(expected, QUESTION, 23), **TOLERANCE)


def test_rows_of_different_origins_go_on_at_their_positions(make: Callable[[], Any]) -> None:
    rows = kvlayers.merge([filled(make, SECOND), moved(make), joined(make)])
    assert (rows.first_position, rows.exact_tokens) == (10, 0)
    assert kvlayers.Rows(rows).position_ids().tolist() == [[14], [19], [23]]
    ids = prompt(3, 1, 7)
    got = row_logits(tiny_model("llama"), rows, ids)
    alone = [(filled(make, SECOND), 14), (moved(make), 19), (joined(make), 23)]
    expected = torch.cat([behind(cache, ids[row : row + 1], begin) for row, (cache, begin) in enumerate(alone)])
    torch.testing.assert_close(got, expected, **TOLERANCE)
    # What is exact of a row depends on its own length.
    rows.crop_rows([2, 3, 9])
    assert [facts(rows.extract(row)) for row in range(3)] == [(0, None), (10, 0), (0, None)]
    rows.crop_rows([2, 0, 9])
    assert facts(rows) == (0, None)


@pytest.mark.parametrize(
    ("make", "length", "into"), once(CACHES, [0, 5, 9, 12], [False, True], times=2), indirect=["make"]
)
def test_a_shorter_part_of_a_file_says_what_is_left(
    make: Callable[[], Any], length: int, into: bool, tmp_path: Path
) -> None:
    path = saved(joined(make), tmp_path / "cache.safetensors")
    cache = kvlayers.load_cache(path, length=length, into=make() if into else None)
    assert (cache.get_seq_length(), cache.exact_tokens) == (length, 9 if length > 9 else None)


def test_a_pair_says_what_its_own_part_says(tmp_path: Path) -> None:
    make = kvlayers.DynamicCache
    pair = kvlayers.EncoderDecoderCache(moved(make), filled(make, SECOND))
    copies = [
        *(pair, pair.fork(), pickle.loads(pickle.dumps(pair)), kvlayers.merge([pair, pair]).extract(1)),
        loaded(pair.state(), kvlayers.EncoderDecoderCache(make(), make())),
        kvlayers.load_cache(saved(pair, tmp_path / "pair.safetensors")),
    ]
    assert [facts(own) for own in copies] == [(10, 0)] * 6
    pair.truncate(0)
    assert facts(pair) == facts(pair.self_attention_cache) == (0, None)


@pytest.mark.parametrize("fact", [{"first_position": "ten"}, {"exact_tokens": 0.5}])
def test_a_wrong_fact_of_a_description_is_refused(fact: dict[str, Any]) -> None:
    cache = kvlayers.DynamicCache()
    with pytest.raises(OptionError):
        type(cache).from_description({**cache.describe(), **fact}, [], None)  # type: ignore[arg-type]
