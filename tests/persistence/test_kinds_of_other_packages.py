"""Kinds that kvlayers does not have: saved, loaded if they are registered, else refused by name. And registries."""

import functools
import importlib.metadata
import inspect
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import kvlayers
from kvlayers import inspect_cache, load_cache, save_cache
from kvlayers.core import named_caches
from kvlayers.core.cache import CACHE_CLASSES
from kvlayers.core.cache_layer import LAYER_CLASSES
from kvlayers.core.named_caches import cache_class_names, register_cache_class, unregister_cache_class
from kvlayers.core.token_store import STORE_CLASSES
from kvlayers.errors import CacheFileError, OptionError, RegistryError, StateMismatchError
from kvlayers.kernels.codes import quantizer_contract
from kvlayers.persistence.load import check_remakeable
from kvlayers.utils.registry import ClassRegistry
from models import prompt, read, tiny_model
from other_package import HalvesBackend, RecentLayer, SteppedStore

REGISTRIES = (LAYER_CLASSES, STORE_CLASSES, CACHE_CLASSES, named_caches._factories, quantizer_contract._backends)


@pytest.fixture(autouse=True)
def _forgotten_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers, nobody knows after it."""
    for registry in REGISTRIES:
        # Rooms that are imported later would register what they have only for this test.
        assert registry.names()
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


class ChatCache(kvlayers.DynamicCache):
    """A cache with an attribute of its own."""

    def __init__(self, title: str, **options: Any) -> None:
        super().__init__(**options)
        self.title = title

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "title": self.title}

    @classmethod
    def from_description(cls, options: Any, layers: list[Any], context: Any) -> "ChatCache":
        cache = super().from_description(options, layers, context)
        cache.title = options["title"]
        return cache


AGAIN: dict[str, Callable[[], object]] = {
    "RecentLayer": lambda: kvlayers.layers.register_layer(RecentLayer),
    "SteppedStore": lambda: kvlayers.stores.register_store(SteppedStore),
    "ChatCache": lambda: register_cache_class(ChatCache),
    "halves": lambda: kvlayers.quantizers.register_quantizer("halves")(HalvesBackend),
}


@pytest.fixture
def registered() -> None:
    for register in AGAIN.values():
        register()


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "chat.safetensors"


def _of(make_layer: Callable[[], Any], **options: Any) -> Callable[[], kvlayers.Cache]:
    return lambda: kvlayers.Cache(layers=[make_layer() for _ in range(2)], **options)


HALVES: dict[str, Any] = {"nbits": 1, "residual_length": 2, "sink_tokens": 0}
MAKES: dict[str, Callable[[], kvlayers.Cache]] = {
    "layer": _of(lambda: RecentLayer(12, 3)),
    "layer over a registered store": _of(lambda: RecentLayer(12, 6, store=SteppedStore(5))),
    "layer over packed codes": _of(
        lambda: RecentLayer(70, 35, kvlayers.stores.QuantizedStore(kvlayers.Quantization("halves", **HALVES)))
    ),
    "layer, offloaded": _of(lambda: RecentLayer(12, 6), offloading=True),
    "window over a registered store": _of(lambda: kvlayers.SlidingLayer(8, SteppedStore(3))),
    "layer over a static store": _of(lambda: kvlayers.DynamicLayer(store=kvlayers.stores.StaticStore(7, grow=True))),
    "static layers that grow": _of(lambda: kvlayers.StaticLayer(4, 3, kvlayers.stores.Buckets(8, 1.5), grow=True)),
    "cache": lambda: ChatCache("a chat"),
    "quantizer": lambda: kvlayers.QuantizedCache("halves", **HALVES),
}


def _decoded(cache: Any) -> Tensor:
    """Logits of tokens that come one by one."""
    return torch.cat([read(tiny_model("llama"), ids, cache)[1] for ids in prompt(1, 8).split(1, dim=1)])


def _filled(make: Callable[[], kvlayers.Cache]) -> kvlayers.Cache:
    cache = make()
    for tokens in (70, 1, 3):
        read(tiny_model("llama"), prompt(1, tokens, seed=tokens), cache)
    return cache


@pytest.mark.parametrize("kind", MAKES)
def test_what_is_registered_is_loaded_and_decodes_on(kind: str, registered: None, path: pathlib.Path) -> None:
    cache = _filled(MAKES[kind])
    save_cache(cache, path)
    assert not inspect_cache(path).needs_config
    loaded = load_cache(path)
    for one, other in zip([loaded, *loaded.layers], [cache, *cache.layers], strict=True):
        assert (type(one), one.describe()) == (type(other), other.describe())
    assert torch.equal(_decoded(loaded), _decoded(cache))


@pytest.mark.parametrize(
    ("kind", "named", "forget"),
    [
        ("layer", "RecentLayer", kvlayers.layers.unregister_layer),
        ("window over a registered store", "SteppedStore", kvlayers.stores.unregister_store),
        ("cache", "ChatCache", unregister_cache_class),
        ("quantizer", "halves", kvlayers.quantizers.unregister_quantizer),
    ],
)
def test_what_is_not_registered_is_refused_by_its_name(
    kind: str, named: str, forget: Callable[[str], None], registered: None, path: pathlib.Path
) -> None:
    cache = _filled(MAKES[kind])
    save_cache(cache, path)
    forget(named)
    with pytest.raises(CacheFileError, match=named):
        load_cache(path)
    AGAIN[named]()
    assert load_cache(path).get_seq_length() == cache.get_seq_length()


def test_an_unregistered_layer_is_saved_and_loaded_into_a_cache_of_the_callers(path: pathlib.Path) -> None:
    cache = _filled(MAKES["layer"])
    save_cache(cache, path)
    assert inspect_cache(path).layers == ("other_package.recent_layer.RecentLayer",) * 2
    with pytest.raises(CacheFileError, match=r"RecentLayer.*import the package that registers them"):
        load_cache(path)
    loaded = load_cache(path, into=MAKES["layer"]())
    assert torch.equal(_decoded(loaded), _decoded(cache))


def test_a_prefix_store_holds_registered_layers_in_memory_and_in_files(
    registered: None, tmp_path: pathlib.Path
) -> None:
    cache, _ = read(tiny_model("llama"), prompt(1, 20), MAKES["layer"]())
    with kvlayers.PrefixStore("1MiB", tmp_path) as store:
        assert store.insert(prompt(1, 20), cache, model="mine")
    expected = _decoded(cache)
    for each in (store, kvlayers.PrefixStore("1MiB", tmp_path)):
        hit = each.lookup(torch.cat([prompt(1, 20), prompt(1, 3)], 1), model="mine")
        assert hit.covered == 20
        assert torch.equal(_decoded(hit.cache), expected)


# Nesting


def test_layers_describe_the_layers_that_they_are_made_of(registered: None) -> None:
    linear = kvlayers.LinearAttentionLayer(2, kvlayers.layers.Checkpoints(every=8, most=3), tokens_at_once=1)
    hybrid = kvlayers.HybridLayer(kvlayers.OffloadedLayer(RecentLayer(12, 6, store=SteppedStore(5))), linear)
    twin = kvlayers.HybridLayer.from_description(hybrid.describe(), kvlayers.stores.DescriptionContext())
    assert (twin.describe(), type(twin.attention)) == (hybrid.describe(), kvlayers.OffloadedLayer)
    assert (type(twin.attention.wrapped), twin.attention.wrapped.store.step) == (RecentLayer, 5)
    assert (twin.linear.number_of_states, twin.linear.tokens_at_once) == (2, 1)
    assert twin.linear.checkpoints == linear.checkpoints


@pytest.mark.parametrize("within", ["HybridLayer", "OffloadedLayer", "nothing", None, 3])
@pytest.mark.parametrize(
    ("layer_class", "name"), [(kvlayers.HybridLayer, "attention"), (kvlayers.OffloadedLayer, "offloaded")]
)
def test_a_description_of_a_layer_in_itself_is_refused(layer_class: Any, name: str, within: object) -> None:
    with pytest.raises((KeyError, kvlayers.KVLayersError)):
        layer_class.from_description({name: within}, kvlayers.stores.DescriptionContext())


# What is refused when it is registered


class Unfinished(kvlayers.layers.TokenLayer):
    described = ("most",)

    def __init__(self, most: int, store: kvlayers.stores.TokenStore | None = None) -> None:
        super().__init__(kvlayers.stores.DenseStore() if store is None else store)


class Storeless(RecentLayer):
    described = ("most",)

    def __init__(self, most: int) -> None:
        super().__init__(most)


@pytest.mark.parametrize(
    ("register", "cls", "named"),
    [
        (kvlayers.layers.register_layer, Unfinished, "`capacity`"),
        (kvlayers.layers.register_layer, type("Bare", (kvlayers.CacheLayer,), {}), "`batch_size`"),
        (kvlayers.layers.register_layer, type("Undescribed", (RecentLayer,), {"described": ("most",)}), "`kept`"),
        (kvlayers.layers.register_layer, Storeless, "`store`"),
        (kvlayers.layers.register_layer, dict, "CacheLayer"),
        (kvlayers.layers.register_layer, 3, "CacheLayer"),
        (kvlayers.stores.register_store, type("ForgetfulStore", (SteppedStore,), {"described": ()}), "`step`"),
        (kvlayers.stores.register_store, RecentLayer, "TokenStore"),
        (register_cache_class, RecentLayer, "kvlayers.core.cache.Cache"),
    ],
)
def test_a_class_that_lacks_a_member_is_refused_with_its_name(register: Any, cls: Any, named: str) -> None:
    before = kvlayers.layers.layer_names(), kvlayers.stores.store_names(), cache_class_names()
    with pytest.raises(RegistryError, match=named):
        register(cls)
    assert (kvlayers.layers.layer_names(), kvlayers.stores.store_names(), cache_class_names()) == before


def test_names_are_taken_once_and_given_up(registered: None) -> None:
    with pytest.raises(RegistryError, match=r"'DynamicLayer' is already registered by kvlayers.*unregister_layer"):
        kvlayers.layers.register_layer(RecentLayer, name="DynamicLayer")
    with pytest.raises(RegistryError, match="not empty"):
        kvlayers.stores.register_store(SteppedStore, name=" ")
    for unregister in (kvlayers.layers.unregister_layer, kvlayers.stores.unregister_store, unregister_cache_class):
        with pytest.raises(RegistryError, match="'nothing'"):
            unregister("nothing")


class Contradicting(RecentLayer):
    """A layer with a fact that its store has too."""

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "step": 3}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (_of(lambda: Contradicting(5, store=SteppedStore(4))), StateMismatchError, "step in both"),
        *(
            (_of(lambda most=most: RecentLayer(most)), StateMismatchError, "plain facts")
            for most in (float("nan"), float("inf"), [3])
        ),
        *(
            (functools.partial(ChatCache, [None, {"most": limit}]), OptionError, "must be finite")
            for limit in (float("nan"), float("inf"), -float("inf"))
        ),
    ],
    ids=[
        "a fact twice",
        "not a number",
        "infinity",
        "a list",
        *("an option: " + text for text in ("nan", "inf", "-inf")),
    ],
)
def test_what_a_file_cannot_say_is_refused_before_anything_is_written(
    make: Callable[[], Any], error: type[Exception], message: str, path: pathlib.Path
) -> None:
    with pytest.raises(error, match=message):
        save_cache(make(), path)
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize("within", ["hybrid", "offloaded"])
def test_a_prefix_is_not_written_if_a_layer_within_another_one_is_not_registered(within: str) -> None:
    hybrid = kvlayers.HybridLayer(RecentLayer(12), kvlayers.LinearAttentionLayer())
    layer = hybrid if within == "hybrid" else RecentLayer(12)
    cache = kvlayers.Cache(layers=[layer], offloading=within == "offloaded")
    with pytest.raises(CacheFileError, match=r"got a \S*RecentLayer: register"):
        check_remakeable(cache)
    kvlayers.layers.register_layer(RecentLayer)
    check_remakeable(cache)


def test_only_states_of_tokens_are_cut_to_a_length(path: pathlib.Path) -> None:
    @kvlayers.layers.register_layer(name="scaled, for this test")
    class Scaled(kvlayers.DynamicLayer):
        """A layer with a tensor that has no row for each token."""

        scale = torch.ones(1, 1, 9, 1)

        def state(self) -> Any:
            state = super().state()
            return type(state)(state.kind, {**state.tensors, "scale": self.scale}, state.facts)

        def load_state(self, state: Any) -> None:
            tensors = dict(state.tensors)
            self.scale = tensors.pop("scale")
            super().load_state(type(state)(state.kind, tensors, state.facts))

    cache, states = kvlayers.Cache(layers=[Scaled()]), torch.randn(1, 2, 6, 8)
    cache.update(states, states, 0)
    save_cache(cache, path)
    assert inspect_cache(path).layers == ("scaled, for this test",)
    (found,) = load_cache(path, length=3).layers
    assert (type(found), found.scale.shape) == (Scaled, (1, 1, 9, 1))
    assert torch.equal(found.keys, states[:, :, :3])


# Plans


@pytest.mark.parametrize("tokens", [9, 40, 100])
def test_a_plan_of_a_registered_layer_is_what_a_cache_of_it_holds(tokens: int) -> None:
    model = tiny_model("llama")

    @kvlayers.register("recent")
    def recent(request: kvlayers.CacheRequest) -> kvlayers.Cache:
        return kvlayers.Cache(layers=[RecentLayer(64, 16) for _ in range(request.config.num_hidden_layers)])

    planned = kvlayers.plan(model, tokens, dtype=torch.float32, names=["recent"])["recent"]
    cache, _ = read(model, prompt(1, tokens), kvlayers.make_cache("recent", model))
    assert planned.fidelity == "evicting"
    assert sum(layer.store.length for layer in cache.layers) == len(cache.layers) * (tokens if tokens <= 64 else 16)
    assert planned.nbytes == cache.nbytes


# Registries


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


# Defined in `the_package.implementation`, which `the_package` imports them from.
Mine: Any = type("Mine", (kvlayers.DynamicLayer,), {"__module__": "the_package.implementation"})
Chat: Any = type("Chat", (kvlayers.Cache,), {"__module__": "the_package.implementation"})


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


def test_an_entry_point_of_a_class_from_another_module_names_it_in_files(the_package: None, path: pathlib.Path) -> None:
    save_cache(Chat(layers=[Mine()]), path)
    assert {"Mine", "other"} <= {*kvlayers.layers.layer_names()}
    assert inspect_cache(path).layers == ("Mine",)
    loaded = load_cache(path)
    assert (type(loaded), type(loaded.layers[0])) == (Chat, Mine)


def test_a_loaded_entry_point_names_its_class_whatever_its_package(the_package: None) -> None:
    elsewhere = type("Elsewhere", (kvlayers.DynamicLayer,), {"__module__": "another_package"})
    vars(sys.modules["the_package"])["Mine"] = elsewhere
    assert (LAYER_CLASSES.get("Mine"), LAYER_CLASSES.name_of(elsewhere)) == (elsewhere, "Mine")


def test_an_entry_point_that_cannot_be_loaded_is_named(the_package: None, path: pathlib.Path) -> None:
    with pytest.raises(RegistryError, match=r"'Mine-broken'.*the_package\.missing:It.*ModuleNotFoundError"):
        LAYER_CLASSES.get("Mine-broken")
    with pytest.raises(RegistryError, match=r"derived from kvlayers\.core\.cache_layer\.CacheLayer"):
        LAYER_CLASSES.get("other")
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
def test_an_argument_is_described_or_refused_as_files_would_lose_it(base: Any, path: pathlib.Path) -> None:
    register = kvlayers.layers.register_layer if base in LAYERS else kvlayers.stores.register_store
    with pytest.raises(RegistryError, match=r"`title`.*`describe` and `from_description`"):
        register(_with_an_argument(base))
    titled = register(_with_an_argument(base, described=(*base.described, "title")))
    made = titled(**{**LAYERS, **STORES}[base], title="a chat")
    cache = kvlayers.Cache(layers=[made if base in LAYERS else kvlayers.DynamicLayer(store=made)])
    states = torch.randn(1, 2, 20, 32)
    cache.update(states, states, 0)
    save_cache(cache, path)
    loaded = load_cache(path)
    found = loaded.layers[0] if base in LAYERS else loaded.layers[0].store
    assert (type(found), found.title) == (titled, "a chat")
    new = states[:, :, :1]
    for one, other in zip(loaded.update(new, new, 0), cache.update(new, new, 0), strict=True):
        assert torch.equal(torch.Tensor(one), torch.Tensor(other))
