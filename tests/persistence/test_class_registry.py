"""The registries of classes: names in files, threads, entry points of other packages."""

import importlib.metadata
import inspect
import pathlib
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import kvlayers
from kvlayers import inspect_cache, load_cache, save_cache
from kvlayers.core.cache import CACHE_CLASSES
from kvlayers.core.cache_layer import LAYER_CLASSES
from kvlayers.errors import CacheFileError, RegistryError
from kvlayers.utils.registry import ClassRegistry


class Thing:
    pass


def _things() -> ClassRegistry[Any]:
    return ClassRegistry("thing", "kvlayers.things_of_tests", "unregister_thing", Thing)


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_that_register_and_unregister_lose_no_name(frequent_switches: None) -> None:
    things = _things()
    for number in range(200):
        things.register(type(f"Other{number}", (Thing,), {}))

    def change(thread: int) -> None:
        for turn in range(100):
            kept, dropped = (type(f"{word}_{thread}_{turn}", (Thing,), {}) for word in ("Kept", "Dropped"))
            things.register(kept)
            things.register(dropped)
            things.remove(dropped.__name__)
            assert things.name_of(kept) == kept.__name__

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(change, range(4)))
    assert all(things.name_of(things.get(name)) == name for name in things.names())


def test_a_class_goes_by_its_other_name_when_one_is_removed() -> None:
    things = _things()
    things.register(Thing, name="first")
    things.register(Thing, name="second")
    assert things.name_of(Thing) == "second"
    things.remove("second")
    assert things.name_of(Thing) == "first"
    things.remove("first")
    assert things.name_of(Thing) == f"{__name__}.Thing"


# Entry points of other packages


class Mine(kvlayers.DynamicLayer):
    """Defined in `the_package.implementation`, which `the_package` imports it from."""


Mine.__module__ = "the_package.implementation"


class Chat(kvlayers.Cache):
    pass


Chat.__module__ = "the_package.implementation"


@pytest.fixture
def the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = types.ModuleType("the_package")
    package.Mine, package.Chat = Mine, Chat
    monkeypatch.setitem(sys.modules, "the_package", package)
    for classes, group, value in ((LAYER_CLASSES, "layers", "Mine"), (CACHE_CLASSES, "caches", "Chat")):
        values = {
            f"{value}-broken": "the_package.missing:It",
            value: f"the_package:{value}",
            "other": "the_package:Chat",
        }
        points = [importlib.metadata.EntryPoint(name, value, f"kvlayers.{group}") for name, value in values.items()]
        monkeypatch.setitem(vars(classes), "_entry_points", importlib.metadata.EntryPoints(points))


def test_an_entry_point_of_a_class_from_another_module_names_it_in_files(
    the_package: None, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "chat.safetensors"
    save_cache(Chat(layers=[Mine()]), path)
    assert {"Mine", "other"} <= {*kvlayers.layers.layer_names()}
    assert inspect_cache(path).layers == ("Mine",)
    loaded = load_cache(path)
    assert (type(loaded), type(loaded.layers[0])) == (Chat, Mine)


def test_a_loaded_entry_point_names_its_class_whatever_its_package(the_package: None) -> None:
    elsewhere = type("Elsewhere", (kvlayers.DynamicLayer,), {"__module__": "another_package"})
    vars(sys.modules["the_package"])["Mine"] = elsewhere
    assert LAYER_CLASSES.get("Mine") is elsewhere
    assert LAYER_CLASSES.name_of(elsewhere) == "Mine"


def test_an_entry_point_that_cannot_be_loaded_is_named(the_package: None, tmp_path: pathlib.Path) -> None:
    with pytest.raises(RegistryError, match=r"'Mine-broken'.*the_package\.missing:It.*ModuleNotFoundError"):
        LAYER_CLASSES.get("Mine-broken")
    with pytest.raises(RegistryError, match=r"derived from kvlayers\.core\.cache_layer\.CacheLayer"):
        LAYER_CLASSES.get("other")
    path = tmp_path / "chat.safetensors"
    save_cache(Chat(layers=[Mine()]), path)
    assert type(load_cache(path, into=Chat(layers=[Mine()])).layers[0]) is Mine
    for kind in ("Mine", "Chat"):
        delattr(sys.modules["the_package"], kind)
        with pytest.raises(CacheFileError, match=rf"chat\.safetensors.*'{kind}'.*the_package:{kind}"):
            load_cache(path)
    assert not inspect_cache(path).has_prefixes


# Classes with arguments of their own


def _with_an_argument(base: Any, **members: Any) -> Any:
    """A subclass of `base` that takes a further argument, `title`."""

    def initialise(self: Any, *given: Any, title: str = "untitled", **options: Any) -> None:
        base.__init__(self, *given, **options)
        self.title = title

    parameters = inspect.signature(base.__init__).parameters
    title = inspect.signature(initialise).parameters["title"]
    initialise.__signature__ = inspect.Signature([*parameters.values(), title])  # type: ignore[attr-defined]
    return type(f"Titled{base.__name__}", (base,), {"__init__": initialise, **members})


LAYERS: dict[Any, dict[str, Any]] = {
    kvlayers.StaticLayer: {"max_cache_len": 40},
    kvlayers.StaticSlidingLayer: {"max_cache_len": 40, "sliding_window": 8},
    kvlayers.SlidingLayer: {"sliding_window": 8},
    kvlayers.SinkLayer: {"window_length": 8, "num_sink_tokens": 2, "rotary": None},
    kvlayers.QuantizedLayer: {},
    kvlayers.DynamicLayer: {},
}
STORES: dict[Any, dict[str, Any]] = {
    kvlayers.stores.DenseStore: {},
    kvlayers.stores.StaticStore: {"capacity": 40},
    kvlayers.stores.QuantizedStore: {"quantization": kvlayers.Quantization()},
}


@pytest.mark.parametrize("base", [*LAYERS, *STORES])
def test_an_argument_that_files_would_lose_is_refused(base: Any) -> None:
    register = kvlayers.layers.register_layer if base in LAYERS else kvlayers.stores.register_store
    with pytest.raises(RegistryError, match=r"`title`.*`describe` and `from_description`"):
        register(_with_an_argument(base))


@pytest.mark.parametrize("base", [*LAYERS, *STORES])
def test_a_described_argument_is_in_files(base: Any, tmp_path: pathlib.Path) -> None:
    path, titled = tmp_path / "chat.safetensors", _with_an_argument(base, described=(*base.described, "title"))
    if base in LAYERS:
        kvlayers.layers.register_layer(titled)
        layer = titled(**LAYERS[base], title="a chat")
    else:
        kvlayers.stores.register_store(titled)
        layer = kvlayers.DynamicLayer(store=titled(**STORES[base], title="a chat"))
    try:
        cache = kvlayers.Cache(layers=[layer])
        states = torch.randn(1, 2, 20, 32)
        cache.update(states, states, 0)
        save_cache(cache, path)
        loaded = load_cache(path)
    finally:
        (kvlayers.layers.unregister_layer if base in LAYERS else kvlayers.stores.unregister_store)(titled.__name__)
    found = loaded.layers[0] if base in LAYERS else loaded.layers[0].store
    assert (type(found), found.title) == (titled, "a chat")
    for one, other in zip(
        loaded.update(states[:, :, :1], states[:, :, :1], 0),
        cache.update(states[:, :, :1], states[:, :, :1], 0),
        strict=True,
    ):
        assert torch.equal(torch.Tensor(one), torch.Tensor(other))
