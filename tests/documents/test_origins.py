"""Every way of moving states takes along what is known of them: where they begin, and which are those of the text."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvlayers
from models import given, prompt, tiny_model

FIRST, SECOND = prompt(1, 12, 0), prompt(1, 9, 1)
CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: kvlayers.DynamicCache(config=config),
    "static": lambda config: kvlayers.StaticCache(config, max_cache_len=40, grow=True),
    "offloaded": lambda config: kvlayers.OffloadedCache(config=config),
    "int4": lambda config: kvlayers.QuantizedCache(config=config, nbits=4),
}


def loaded(cache: Any, empty: Any, _: Path) -> Any:
    empty.load_state(cache.state())
    return empty


def from_file(cache: Any, empty: Any, folder: Path) -> Any:
    kvlayers.save_cache(cache, folder / "cache.safetensors", config=tiny_model("llama").config)
    return kvlayers.load_cache(folder / "cache.safetensors", config=tiny_model("llama").config)


def into_another(cache: Any, empty: Any, folder: Path) -> Any:
    from_file(cache, empty, folder)
    kvlayers.load_cache(folder / "cache.safetensors", config=tiny_model("llama").config, into=empty)
    return empty


def reordered(cache: Any, *_: Any) -> Any:
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([2, 0]))
    cache.batch_select_indices(torch.tensor([1]))
    return cache


def of_rows(cache: Any, empty: Any, _: Path) -> Any:
    with torch.no_grad():
        tiny_model("llama")(prompt(1, 5, 2), **given(empty))
    rows = kvlayers.merge([empty, cache.fork(), cache])
    rows.keep_rows([0, 2])
    return rows.extract(1)


OPERATIONS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "fork": lambda cache, *_: cache.fork(),
    "deepcopy": lambda cache, *_: copy.deepcopy(cache),
    "pickle": lambda cache, *_: pickle.loads(pickle.dumps(cache)),
    "load_state": loaded,
    "load_cache": from_file,
    "load_cache(into=)": into_another,
    "beams": reordered,
    "merge, keep_rows, extract": of_rows,
}


def read(cache: Any, ids: Any) -> Any:
    with torch.no_grad():
        tiny_model("llama")(ids, **given(cache))
    return cache


def documents(kind: str) -> Any:
    """The second document behind the first one, as it was computed alone."""
    model = tiny_model("llama")
    plain = [read(CACHES["dynamic"](model.config), ids) for ids in (FIRST, SECOND)]
    return kvlayers.concatenate(plain, model, recompute=0, into=CACHES[kind](model.config))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", CACHES)
def test_documents_stay_what_they_are(kind: str, operation: str, tmp_path: Path) -> None:
    config = tiny_model("llama").config
    found = OPERATIONS[operation](documents(kind), CACHES[kind](config), tmp_path)
    assert (found.exact_tokens, found.first_position) == (12, 0)
    store = kvlayers.PrefixStore("4MiB")
    with pytest.raises(kvlayers.KVLayersError, match="insert its documents"):
        store.insert(torch.cat([FIRST, SECOND], 1), found, config=config)
    found.crop(12)
    assert found.exact_tokens is None
    store.insert(FIRST, found, config=config)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_moved_cache_stays_where_it_is(operation: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    moved = kvlayers.moved(read(CACHES["dynamic"](model.config), FIRST), 10, model)
    found = OPERATIONS[operation](moved, CACHES["dynamic"](model.config), tmp_path)
    assert (found.exact_tokens, found.first_position) == (0, 10)
    together = kvlayers.concatenate(
        [read(CACHES["dynamic"](model.config), SECOND), found], model, recompute="100%", ids=[SECOND, FIRST]
    )
    expected = read(CACHES["dynamic"](model.config), torch.cat([SECOND, FIRST], 1))
    for own, other in zip(together.layers, expected.layers, strict=True):
        # The same sums in another order of float32.
        torch.testing.assert_close(own.keys, other.keys, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_without_tokens_begins_anywhere(kind: str) -> None:
    config = tiny_model("llama").config
    for empty in (lambda cache: cache.reset(), lambda cache: cache.truncate(0)):
        cache = documents(kind)
        empty(cache)
        assert (cache.exact_tokens, cache.first_position) == (None, 0)
        kvlayers.PrefixStore("4MiB").insert(SECOND, read(cache, SECOND), config=config)
