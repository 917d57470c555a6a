"""Decoding goes on after each way of moving states that are not those of their text, and the cache says so."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvlayers
from kvlayers.errors import OptionError, StateMismatchError
from matrix import once
from models import prompt, row_logits, tiny_model

FIRST, SECOND, QUESTION = prompt(1, 9, 0), prompt(1, 14, 1), prompt(1, 3, 2)
TOLERANCE = {"rtol": 0, "atol": 2e-4}
"""The same sums in another order of float32."""

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
def read(cache: Any, ids: Tensor, begin: int = 0) -> Tensor:
    """Logits of tokens that are at positions from `begin` on."""
    positions = begin + torch.arange(ids.shape[1])[None]
    logits: Tensor = tiny_model("llama")(ids, past_key_values=cache, position_ids=positions).logits
    return logits


def filled(make: Callable[[], Any], ids: Tensor) -> Any:
    cache = make()
    read(cache, ids)
    return cache


def moved(make: Callable[[], Any]) -> Any:
    return kvlayers.moved(filled(make, FIRST), 10, tiny_model("llama"))


def joined(make: Callable[[], Any]) -> Any:
    documents = [filled(make, ids) for ids in (FIRST, SECOND)]
    return kvlayers.concatenate(documents, tiny_model("llama"), recompute=0)


def facts(cache: Any) -> tuple[int, int | None]:
    return cache.first_position, cache.exact_tokens


def loaded_state(cache: Any, make: Callable[[], Any], path: Path) -> Any:
    other = make()
    other.load_state(pickle.loads(pickle.dumps(cache.state())))
    return other


def loaded_over_another(cache: Any, make: Callable[[], Any], path: Path) -> Any:
    other = moved(make)
    other.load_state(cache.state())
    return other


def loaded(cache: Any, make: Callable[[], Any], path: Path) -> Any:
    kvlayers.save_cache(cache, path)
    return kvlayers.load_cache(path)


def loaded_into(cache: Any, make: Callable[[], Any], path: Path) -> Any:
    kvlayers.save_cache(cache, path)
    return kvlayers.load_cache(path, into=make())


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


def last_of_merged(cache: Any, make: Callable[[], Any], path: Path) -> Any:
    return kvlayers.merge([filled(make, SECOND), cache]).extract(1)


def first_of_merged(cache: Any, make: Callable[[], Any], path: Path) -> Any:
    return kvlayers.merge([cache, filled(make, SECOND)]).extract(0)


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
    "load_state": loaded_state,
    "load_state over another": loaded_over_another,
    "load_cache": loaded,
    "load_cache(into=)": loaded_into,
    "select": selected,
    "expand": expanded,
    "last of merge": last_of_merged,
    "first of merge": first_of_merged,
    "extend, keep_rows": kept_of_extended,
    "merge of rows, pickle": merged_twice,
    "crop_rows": cropped_rows,
}


def as_text(make: Callable[[], Any]) -> Any:
    return filled(make, FIRST)


@pytest.mark.parametrize(
    ("make", "origin", "way"), once(CACHES, [moved, joined, as_text], WAYS, times=2), indirect=["make"]
)
def test_the_fact_goes_with_the_states(make: Callable[[], Any], origin: Any, way: str, tmp_path: Path) -> None:
    cache = origin(make)
    expected, begin = facts(cache), cache.first_position + cache.get_seq_length()
    assert expected == {moved: (10, 0), joined: (0, 9), as_text: (0, None)}[origin]
    got = WAYS[way](cache, make, tmp_path / "cache.safetensors")
    assert facts(got) == facts(cache) == expected
    torch.testing.assert_close(read(got, QUESTION, begin), read(cache, QUESTION, begin), **TOLERANCE)
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
    read(cache, SECOND)
    # Rows of their own lengths are not concatenated, so one is taken out.
    document = cache.extract(0)
    torch.testing.assert_close(read(cache, QUESTION, 14), read(filled(make, SECOND), QUESTION, 14), **TOLERANCE)
    whole = kvlayers.concatenate([document, filled(make, FIRST)], model, ids=[SECOND, FIRST])
    expected = filled(make, torch.cat([SECOND, FIRST], dim=1))
    assert facts(whole) == (0, None)
    torch.testing.assert_close(read(whole, QUESTION, 23), read(expected, QUESTION, 23), **TOLERANCE)


def test_rows_of_different_origins_go_on_at_their_positions(make: Callable[[], Any]) -> None:
    rows = kvlayers.merge([filled(make, SECOND), moved(make), joined(make)])
    assert (rows.first_position, rows.exact_tokens) == (10, 0)
    assert kvlayers.Rows(rows).position_ids().tolist() == [[14], [19], [23]]
    ids = prompt(3, 1, 7)
    got = row_logits(tiny_model("llama"), rows, ids)
    alone = [(filled(make, SECOND), 14), (moved(make), 19), (joined(make), 23)]
    expected = torch.cat([read(cache, ids[row : row + 1], begin) for row, (cache, begin) in enumerate(alone)])
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
    path = tmp_path / "cache.safetensors"
    kvlayers.save_cache(joined(make), path)
    cache = kvlayers.load_cache(path, length=length, into=make() if into else None)
    assert (cache.get_seq_length(), cache.exact_tokens) == (length, 9 if length > 9 else None)


def test_a_pair_says_what_its_own_part_says(tmp_path: Path) -> None:
    make = kvlayers.DynamicCache
    pair = kvlayers.EncoderDecoderCache(moved(make), filled(make, SECOND))
    copies = [pair, pair.fork(), pickle.loads(pickle.dumps(pair)), kvlayers.merge([pair, pair]).extract(1)]
    other = kvlayers.EncoderDecoderCache(make(), make())
    other.load_state(pair.state())
    kvlayers.save_cache(pair, tmp_path / "pair.safetensors")
    copies += [other, kvlayers.load_cache(tmp_path / "pair.safetensors")]
    assert [facts(own) for own in copies] == [(10, 0)] * 6
    pair.truncate(0)
    assert facts(pair) == facts(pair.self_attention_cache) == (0, None)


@pytest.mark.parametrize("fact", [{"first_position": "ten"}, {"exact_tokens": 0.5}])
def test_a_wrong_fact_of_a_description_is_refused(fact: dict[str, Any]) -> None:
    cache = kvlayers.DynamicCache()
    with pytest.raises(OptionError):
        type(cache).from_description({**cache.describe(), **fact}, [], None)  # type: ignore[arg-type]
