"""Imports run downwards, late ones included, each class has a name of its own, and nothing grows unseen."""

import ast
import collections
import functools
import pathlib
from collections.abc import Iterator

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "src" / "kvlayers"

FLOORS = (
    ("errors", "version"),
    ("utils",),
    ("upstream",),
    ("quantizers", "rope"),
    ("attention", "eviction"),
    ("stores",),
    ("offload",),
    ("layers",),
    ("caches",),
    ("persistence",),
    ("prefix",),
    ("generation",),
    ("planning",),
    ("evaluation",),
    ("tools",),
    ("__init__", "__main__"),
)
"""The rooms of the package, the ground floor first. A room imports from the floors below it, and from itself."""

FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


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
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: expected absolute imports"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def room_of(module: str) -> str:
    """The room that a module stands in: the first part of its path."""
    return module.split(".")[1] if "." in module else "__init__"


@functools.cache
def arrows() -> dict[str, set[str]]:
    """What each module imports from the package."""
    return {module: {found for found in imports_of(module) if found in MODULES} - {module} for module in MODULES}


def test_every_room_has_a_floor() -> None:
    assert {room_of(module) for module in MODULES} == set(FLOOR)


@pytest.mark.parametrize("room", FLOOR)
def test_imports_run_downwards(room: str) -> None:
    upwards = [
        f"{module} -> {imported}"
        for module, imports in arrows().items()
        if room_of(module) == room
        for imported in sorted(imports)
        if room_of(imported) != room and FLOOR[room_of(imported)] >= FLOOR[room]
    ]
    assert upwards == []


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
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


MOST_STATEMENTS = 29_156
MOST_FILES = 289
LONGEST_CHAIN = 7
"""Ceilings of the package. They go down with the code, and up only for a reason that the same commit gives."""


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_the_package_is_no_larger_than_it_was() -> None:
    trees = [ast.parse(path.read_text()) for path in MODULES.values()]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    assert sum(not is_docstring(node) for node in nodes) <= MOST_STATEMENTS
    assert len(trees) <= MOST_FILES


def test_no_chain_of_classes_is_longer_than_it_was() -> None:
    bases = {
        node.name: [base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in node.bases]
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }

    def chain(name: str, below: tuple[str, ...] = ()) -> tuple[str, ...]:
        if name not in bases or name in below:
            return below
        return max((chain(base, (*below, name)) for base in bases[name]), key=len, default=(*below, name))

    longest = max((chain(name) for name in bases), key=len)
    assert len(longest) <= LONGEST_CHAIN, " > ".join(longest)
