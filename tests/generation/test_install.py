"""install(), uninstall() and installed(): what they change in transformers is put back, in whatever order they come."""

import functools
import importlib
import pathlib
import random
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.generation import configuration_utils
from transformers.generation.utils import GenerationMixin

import fresh_process
import kvlayers
from kvlayers.core.legacy_api import LegacySurface
from kvlayers.generation import transformers4_names
from kvlayers.generation.prefix_reuse import active_store
from kvlayers.generation.prefix_reuse.eligibility import StorePart
from kvlayers.generation.transformers4_names import HOMES
from matrix import seeds
from models import continued, fresh_model, prompt, tiny_model
from versions import TRANSFORMERS

OWNERS: list[Any] = [
    *map(importlib.import_module, HOMES),
    configuration_utils,
    kvlayers.Cache,
    LegacySurface,
    transformers.Cache,
    transformers.DynamicCache,
    transformers.EncoderDecoderCache,
    transformers.GenerationConfig,
    transformers.PreTrainedModel,
    GenerationMixin,
]
"""All that something may be put into: modules and classes."""


def surface() -> dict[Any, dict[str, Any]]:
    # What is imported lazily stays in a module once it was asked for, and abc caches what it was asked.
    return {owner: {name: value for name, value in vars(owner).items() if name != "_abc_impl"} for owner in OWNERS}


def cache_of_a_call() -> type:
    output = tiny_model("llama").generate(prompt(), max_new_tokens=2, return_dict_in_generate=True)
    return type(output.past_key_values)


def takes_tuples() -> bool:
    with torch.no_grad():
        return isinstance(tiny_model("llama")(prompt(), past_key_values=()).past_key_values, tuple)


@pytest.fixture(autouse=True, scope="module")
def what_is_imported_lazily_is_there() -> None:
    with kvlayers.installed():
        cache_of_a_call()
        takes_tuples()


def check(is_installed: bool, has_names: bool) -> None:
    assert kvlayers.is_installed() is is_installed
    assert cache_of_a_call() is (kvlayers if is_installed else transformers).DynamicCache
    assert not is_installed or takes_tuples()
    assert ("__getattr__" in vars(transformers.cache_utils)) is has_names
    assert not has_names or transformers.SinkCache is transformers.cache_utils.SinkCache is kvlayers.SinkCache


@pytest.mark.parametrize("seed", seeds(5, 40))
def test_any_order_of_calls_and_blocks(seed: int) -> None:
    """Blocks overlap, and the last one uninstalls; one that `uninstall()` has ended ends nothing later."""
    assert cache_of_a_call() is transformers.DynamicCache
    with kvlayers.installed(legacy_names=True):
        # What is imported when it is first asked for stays.
        check(True, True)
    chance, before = random.Random(seed), surface()
    for_good, names_for_good = False, False
    entered: list[tuple[AbstractContextManager[None], bool]] = []
    ended: list[AbstractContextManager[None]] = []
    state = (False, False)
    for step in [*chance.choices(["install", "uninstall", "enter", "leave"], [3, 2, 4, 4], k=12), "uninstall"]:
        names = chance.random() < 0.5
        if step == "install":
            kvlayers.install(legacy_names=names)
            for_good, names_for_good = True, names_for_good or names
        elif step == "uninstall":
            kvlayers.uninstall()
            for_good, names_for_good = False, False
            ended, entered = [*ended, *(block for block, _ in entered)], []
        elif step == "enter":
            entered.append((kvlayers.installed(legacy_names=names), names))
            entered[-1][0].__enter__()
        elif ended and names:
            ended.pop().__exit__(None, None, None)
        elif entered:
            entered.pop(chance.randrange(len(entered)))[0].__exit__(None, None, None)
        before_step, state = state, (for_good or bool(entered), names_for_good or any(names for _, names in entered))
        assert kvlayers.is_installed() is state[0]
        if state != before_step:
            check(*state)
        assert state[0] or surface() == before
    for block in ended:
        block.__exit__(None, None, None)
    assert surface() == before


class _InterruptError(BaseException):
    """As of Ctrl-C, which no handler of errors sees."""


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (importlib, "import_module"),
        (transformers4_names, "_old_attributes"),
        (transformers.AttentionInterface, "register"),
    ],
)
def test_an_interruption_leaves_nothing_behind(where: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise _InterruptError

    # kvlayers imports them when it is asked for them.
    install, installed, uninstall = kvlayers.install, kvlayers.installed, kvlayers.uninstall
    before = surface()
    with monkeypatch.context() as patch:
        patch.setattr(where, name, interrupt)
        with pytest.raises(_InterruptError):
            install(legacy_names=True)
        uninstall()
        with pytest.raises(_InterruptError), installed(legacy_names=True):
            pass
    assert not kvlayers.is_installed()
    assert surface() == before
    with kvlayers.installed(legacy_names=True):
        assert transformers.SinkCache is kvlayers.SinkCache
    assert surface() == before


@pytest.mark.parametrize("call", [kvlayers.install, lambda **options: kvlayers.installed(**options).__enter__()])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(
            (option, value)
            for option in ("legacy_names", "strict_prompts", "replace_empty_caches")
            for value in (1, "yes")
        ),
        ("legacy_names", None),
    ],
)
def test_what_is_neither_true_nor_false_is_refused(option: str, value: Any, call: Callable[..., object]) -> None:
    with pytest.raises(kvlayers.OptionError, match=f"`{option}` must be True or False, got"):
        call(**{option: value})


# Other libraries


@pytest.mark.parametrize(
    ("owner", "name"),
    [(GenerationMixin, "generate"), (transformers.PreTrainedModel, "__call__")],
    ids=["generate", "pass"],
)
def test_what_another_library_puts_over_ours_stays(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, calls = surface(), []
    kvlayers.install()
    ours = getattr(owner, name)

    @functools.wraps(ours)
    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return ours(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, theirs)
        kvlayers.uninstall()
        assert getattr(owner, name) is theirs
        check(False, False)
        with kvlayers.installed():
            assert getattr(owner, name) is theirs
            check(True, False)
    assert calls
    kvlayers.install()
    kvlayers.uninstall()
    assert surface() == before


def test_installing_again_after_others_have_come_and_gone_uses_our_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    before = GenerationMixin.generate
    with monkeypatch.context() as patch:
        patch.setattr(GenerationMixin, "generate", lambda self, *args, **kwargs: before(self, *args, **kwargs))
        kvlayers.install()
    kvlayers.uninstall()
    with kvlayers.installed():
        check(True, False)
    assert GenerationMixin.generate is before


def test_names_that_others_add_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    held, names = vars(transformers.cache_utils), (*configuration_utils.ALL_CACHE_IMPLEMENTATIONS, "theirs")

    def theirs(name: str) -> Any:
        if name == "TheirCache":
            return int
        raise AttributeError(name)

    monkeypatch.setattr(configuration_utils, "ALL_CACHE_IMPLEMENTATIONS", names)
    monkeypatch.setitem(held, "__getattr__", theirs)
    with kvlayers.installed(legacy_names=True):
        assert "theirs" in configuration_utils.ALL_CACHE_IMPLEMENTATIONS
        assert transformers.cache_utils.TheirCache is int
        assert transformers.cache_utils.SinkCache is kvlayers.SinkCache
        transformers.Cache.key_cache = "theirs"
    assert names == configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    assert held["__getattr__"] is theirs
    assert transformers.Cache.key_cache == "theirs"
    # What monkeypatch would put back is the attribute of kvlayers.
    del transformers.Cache.key_cache


IMPORTING = """
import transformers.generation.utils as utils, transformers.generation.configuration_utils as configuration
import transformers.cache_utils as caches
before = {name: dict(vars(thing)) for name, thing in vars(caches).items() if isinstance(thing, type)}
mixin, names = dict(vars(utils.GenerationMixin)), configuration.ALL_CACHE_IMPLEMENTATIONS
maps = {name: dict(found) for name, found in vars(caches).items() if name.isupper() and isinstance(found, dict)}
import kvlayers
after = {name: dict(vars(thing)) for name, thing in vars(caches).items() if isinstance(thing, type)}
drop = lambda found: {k: {n: v for n, v in d.items() if not n.startswith("_abc")} for k, d in found.items()}
assert drop(after) == drop(before)
assert dict(vars(utils.GenerationMixin)) == mixin and configuration.ALL_CACHE_IMPLEMENTATIONS == names
assert {name: dict(vars(caches)[name]) for name in maps} == maps

# What a model imports may execute transformers once more, as another module.
import transformers
sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes))
kvlayers.install(legacy_names=True)
assert transformers.SinkCache is kvlayers.SinkCache
kvlayers.uninstall()
assert not hasattr(transformers, "HybridCache") or transformers.HybridCache is not kvlayers.HybridCache
"""

LISTING = """
import os, threading
import kvlayers
from kvlayers.generation import cache_by_name
from packaging.version import Version
from transformers.generation import configuration_utils

kinds = []

def list_names():
    if not kinds:
        kinds.append(kvlayers.register("while names are listed")(lambda request: kvlayers.DynamicCache()))
    return kvlayers.cache_names()

kvlayers.install()
thread = threading.Thread(target=cache_by_name.accept_names, args=(list_names,), daemon=True)
thread.start()
thread.join(30)
if thread.is_alive():
    # Whatever else ends the process would wait too.
    os._exit(1)
assert "while names are listed" in configuration_utils.ALL_CACHE_IMPLEMENTATIONS
kvlayers.unregister("while names are listed")
assert "while names are listed" not in configuration_utils.ALL_CACHE_IMPLEMENTATIONS
"""
"""A room registers its names when it is imported, which listing all names does."""


def test_a_process_that_imports_kvlayers_changes_nothing_and_then_what_it_asks_for() -> None:
    ran = fresh_process.run(IMPORTING + LISTING)
    assert ran.returncode == 0, ran.stderr


# How many calls into kvlayers' files a call makes: each is paid by every user, and is easily added.

PACKAGE = str(pathlib.Path(kvlayers.__file__).parent)

counted_on_5_24 = pytest.mark.skipif(
    Version("5.24") > TRANSFORMERS,
    # Other versions of transformers ask caches more often, and comprehensions are calls before Python 3.12.
    reason=f"the calls that are counted are those of transformers 5.24, not {TRANSFORMERS}",
)


def calls_of(run: Callable[[], Any]) -> int:
    count = 0

    def profile(frame: types.FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@counted_on_5_24
@pytest.mark.parametrize("most", [249, 495], ids=["alone", "with a hit in a store"])
def test_a_call_makes_few_calls(most: int) -> None:
    model, store = fresh_model("llama", num_hidden_layers=1), kvlayers.PrefixStore(2**24) if most > 300 else None
    with kvlayers.installed(prefix_store=store):
        for _ in range(3):
            count = calls_of(lambda: continued(model, prompt(1, 39), 1, attention_mask=None))
    assert count <= most
    assert store is None or store.statistics.hits == 2


@counted_on_5_24
def test_modules_of_a_model_cost_a_store_no_calls() -> None:
    """Weights are compared by torch's counts of writes to them, and modules are looked at in loops."""
    found = []
    for layers in (1, 3):
        model = fresh_model("llama", num_hidden_layers=layers)
        active = active_store.required_store(kvlayers.PrefixStore(2**24), "")
        StorePart(model, active, "dynamic", {})
        found.append(calls_of(lambda: StorePart(model, active, "dynamic", {})))  # noqa: B023
    # The config says of each layer what it holds.
    assert found[1] - found[0] <= 2 * 3
