"""Imports follow the arrows, late ones included, each class has a name of its own, and nothing grows unseen."""

import collections
import functools
import json
import pathlib
from collections.abc import Iterator

import pytest

from kvlayers import rooms
from kvlayers.utils import late
from sources import source

PACKAGE = pathlib.Path(__file__).parents[2] / "src" / "kvlayers"
LAB = pathlib.Path(__file__).parents[2] / "lab" / "src" / "kvlayers_lab"

GROUND = {"errors", "version", "utils", "upstream", "rope", "kernels"}
"""What knows nothing of caches."""

ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "utils": {"errors"},
    "upstream": {"errors"},
    "rope": {"errors", "upstream"},
    "kernels": {"errors", "upstream", "utils"},
    "core": GROUND,
    "rooms": {"utils"},
    # Kinds of layers
    "static": {*GROUND, "core"},
    "quantized": {*GROUND, "core"},
    "offload": {*GROUND, "core"},
    "recurrent": {*GROUND, "core"},
    "encoder_decoder": {*GROUND, "core", "offload"},
    "sinks": {*GROUND, "core", "quantized"},
    "recall": {*GROUND, "core", "quantized", "offload"},
    "eviction": {*GROUND, "core", "quantized"},
    "interop": {*GROUND, "core", "quantized", "static", "encoder_decoder"},
    "rows": {*GROUND, "core", "recurrent"},
    "memory": {*GROUND, "core", "quantized", "offload"},
}
"""Which rooms a room may import, besides itself. `LADDER` has the rest."""

FACADES = ("caches", "layers", "stores", "quantizers", "models", "options")
"""Public modules that only list names of others."""

LADDER = (
    "persistence",
    "prefix",
    "serving",
    "documents",
    "generation",
    "batching",
    "planning",
    "calls",
    "commands",
    "__main__",
    "__init__",
)
"""What people call, from the bottom: each may import every kind, and what stands below it."""

KINDS = set(ARROWS) - {"rooms"}
for number, step in enumerate(LADDER):
    ARROWS[step] = {*KINDS, *LADDER[:number]}
ARROWS.update(dict.fromkeys(FACADES, KINDS))
ARROWS["__init__"] |= {"rooms", *FACADES}


def modules() -> dict[str, pathlib.Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["kvlayers", *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports_of(module: str) -> Iterator[str]:
    """The modules of the package that a module imports, at its top or later."""
    found = source(MODULES[module])
    assert not found.has_relative_imports, f"{module}: expected absolute imports"
    for imported, name in found.imports:
        whole = f"{imported}.{name}"
        yield whole if whole in MODULES else imported


def room_of(module: str) -> str:
    """The room that a module stands in: the first part of its path."""
    return module.split(".")[1] if "." in module else "__init__"


@functools.cache
def arrows() -> dict[str, set[str]]:
    """What each module imports from the package."""
    return {module: {found for found in imports_of(module) if found in MODULES} - {module} for module in MODULES}


def test_every_room_is_drawn() -> None:
    assert {room_of(module) for module in MODULES} == set(ARROWS)


@pytest.mark.parametrize("room", ARROWS)
def test_imports_follow_the_arrows(room: str) -> None:
    others = [
        f"{module} -> {imported}"
        for module, imports in arrows().items()
        if room_of(module) == room
        for imported in sorted(imports)
        if room_of(imported) not in {room, *ARROWS[room]}
    ]
    assert others == []


def test_rooms_that_register_kinds_are_those_that_are_drawn() -> None:
    kinds = {room for room, others in ARROWS.items() if "core" in others and room not in {*LADDER, *FACADES}}
    assert {name.removeprefix("kvlayers.") for name in rooms.ROOMS} == {*kinds, "core", "planning"}


def test_kinds_that_no_other_room_imports_are_those_that_can_be_removed() -> None:
    # What only lists a public name is no import.
    imported = {
        room_of(found)
        for module, imports in arrows().items()
        for found in imports
        if room_of(module) not in {room_of(found), *FACADES}
    }
    assert {name.removeprefix("kvlayers.") for name in rooms.ROOMS} - imported == {"recall", "sinks"}


def test_what_the_core_asks_for_is_where_the_table_says() -> None:
    for name in rooms.PROVIDED:
        assert callable(late.function(name)), name


def test_no_modules_import_each_other_in_a_circle() -> None:
    left = arrows()
    while ends := [
        name for name in left if not left[name] & left.keys() or not any(name in left[other] for other in left)
    ]:
        for name in ends:
            del left[name]
    assert sorted(left) == []


def test_each_class_has_a_name_of_its_own() -> None:
    homes = collections.defaultdict(list)
    for module, path in MODULES.items():
        for name, _ in source(path).classes:
            homes[name].append(module)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


BUDGETS: dict[str, int] = json.loads(pathlib.Path(__file__).with_name("budgets.json").read_text())
"""The most statements of each room, of the rest of the package, and of the lab. A change may only lower them."""
MOST_FILES = 241
LONGEST_CHAIN = 5


@functools.cache
def counted() -> dict[str, int]:
    """The statements of each room, of the rest of the package, and of the lab."""
    found: collections.Counter[str] = collections.Counter()
    for module, path in MODULES.items():
        room = room_of(module)
        # Some files belong to no folder.
        found[room if (PACKAGE / room).is_dir() else "rest"] += source(path).statements
    found["lab"] = sum(source(path).statements for path in LAB.rglob("*.py"))
    return dict(found)


@pytest.mark.parametrize("room", BUDGETS)
def test_each_room_is_within_its_budget(room: str) -> None:
    assert counted()[room] <= BUDGETS[room]


def test_every_room_has_a_budget() -> None:
    assert counted().keys() == BUDGETS.keys()
    assert len(MODULES) <= MOST_FILES


def test_no_chain_of_classes_is_longer_than_it_was() -> None:
    bases = {name: names for path in MODULES.values() for name, names in source(path).classes}

    def chain(name: str, below: tuple[str, ...] = ()) -> tuple[str, ...]:
        if name not in bases or name in below:
            return below
        return max((chain(base, (*below, name)) for base in bases[name]), key=len, default=(*below, name))

    longest = max((chain(name) for name in bases), key=len)
    assert len(longest) <= LONGEST_CHAIN, " > ".join(longest)


SPELL_ITS_LENGTH = {
    # Caches and layers have the name for transformers.
    "core/cache.py",
    "core/cache_layer.py",
    "core/cache_operations.py",
    "core/legacy_api.py",
    "encoder_decoder/encoder_decoder_cache.py",
    "static/static_layer.py",
    # The cache, or the layer, may be one of transformers' own.
    "interop/adapter.py",
    "generation/assisted.py",
    "generation/transformers4_names.py",
}


def test_rooms_ask_a_cache_for_its_length_by_the_name_of_kvlayers() -> None:
    spelling = (path for path in MODULES.values() if "get_seq_length" in source(path).names)
    assert {path.relative_to(PACKAGE).as_posix() for path in spelling} == SPELL_ITS_LENGTH
