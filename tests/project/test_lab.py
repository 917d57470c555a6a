"""kvlayers-lab stands upon public names of kvlayers, which knows nothing of it, and both have one version."""

import ast
import importlib
import pathlib

import pytest

import kvlayers
from sources import source

try:
    import tomllib
except ImportError:  # Python 3.10
    tomllib = pytest.importorskip("tomli", reason="Python 3.10 has no tomllib")

ROOT = pathlib.Path(__file__).parents[2]
LIBRARY, LAB = ROOT / "src" / "kvlayers", ROOT / "lab" / "src" / "kvlayers_lab"
INTERNALS = ROOT / "lab" / "benchmarks" / "lib" / "internals.py"
"""What the benchmarks measure beneath public names: kernels by themselves, for one."""

PUBLIC = (
    *("kvlayers", "kvlayers.caches", "kvlayers.calls", "kvlayers.documents", "kvlayers.errors", "kvlayers.eviction"),
    *("kvlayers.layers", "kvlayers.models", "kvlayers.offload", "kvlayers.options", "kvlayers.persistence"),
    *("kvlayers.planning", "kvlayers.prefix", "kvlayers.quantizers", "kvlayers.stores"),
    *("kvlayers.commands.common", "kvlayers.commands.console"),
)
"""Modules with public names: those in `__all__`, and every class of errors."""


def is_public(module: str, name: str) -> bool:
    """Whether a name of the library is public."""
    if f"{module}.{name}" in PUBLIC or (not name and module in PUBLIC):
        return True
    if module == "kvlayers.errors":
        return name in {found for found, value in vars(kvlayers.errors).items() if isinstance(value, type)}
    return module in PUBLIC and name in importlib.import_module(module).__all__


def private_names(path: pathlib.Path) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {module}.{name}".rstrip(".")
        for module, name in source(path).imports
        if module.partition(".")[0] == "kvlayers" and not is_public(module, name)
    ]


def test_the_lab_imports_public_names_only() -> None:
    files = [path for path in (ROOT / "lab").rglob("*.py") if path != INTERNALS]
    assert len(files) > 60
    assert [name for path in sorted(files) for name in private_names(path)] == []


def test_attributes_of_a_public_module_are_public_too() -> None:
    """Of what a file of the lab imports as a module, such as `models.config_of`."""
    for path in sorted(LAB.rglob("*.py")):
        tree = ast.parse(path.read_text())
        imports = source(path).imports
        modules = {name: f"{module}.{name}" for module, name in imports if f"{module}.{name}" in PUBLIC}
        modules |= {"kvlayers": "kvlayers"} if ("kvlayers", "") in imports else {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                assert is_public(modules[node.value.id], node.attr), f"{path.name}: {ast.unparse(node)}"


def test_the_library_never_imports_its_lab() -> None:
    files = [*LIBRARY.rglob("*.py"), *LIBRARY.rglob("*.pyi")]
    imports = [(path, module) for path in files for module, _ in source(path).imports]
    assert [path for path, module in imports if module.partition(".")[0] == "kvlayers_lab"] == []


def test_the_lab_pins_the_version_of_the_library() -> None:
    project = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
    assert project["version"] == kvlayers.__version__
    assert f"kvlayers[cli]=={kvlayers.__version__}" in project["dependencies"]
    assert (ROOT / "lab" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
