"""`upstream/README.md` lists each method of transformers that kvlayers replaces, and each private name it touches."""

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import torch

import kvlayers
from kvlayers.generation import cache_by_name, install
from kvlayers.upstream import supported

ROOT = Path(__file__).parents[2]
SOURCES = Path(kvlayers.__file__).parent

MOST_REPLACED, MOST_NAMES = 9, 16
"""Each one may break with a new version of transformers."""

MODULES = (
    "cache_utils",
    "configuration_utils",
    "generation.candidate_generator",
    "generation.configuration_utils",
    "generation.logits_process",
    "generation.stopping_criteria",
    "generation.utils",
    "integrations.sdpa_attention",
    "masking_utils",
    "modeling_outputs",
    "modeling_utils",
    "utils.generic",
)
"""Modules of transformers whose objects kvlayers is given, or gives something to."""

PROBES = "upstream/supported.py"
"""The file that looks at the names before they are used."""

NOT_PROBED = ("_commit_hash", "_mask_length")
"""Names without which kvlayers works. A config has the first if it comes from the hub, and the second if `generate()`
left out a mask."""

NOT_OF_TRANSFORMERS = ("_hf_hook", "_replace")
"""Names that transformers uses as well: of accelerate, and of named tuples."""

PRIVATE = re.compile(r"_[A-Za-z]\w*")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of src/kvlayers/upstream/README.md, without its first row."""
    text = (ROOT / "src" / "kvlayers" / "upstream" / "README.md").read_text(encoding="utf-8")
    lines = text.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0].splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in table]


def names_of_transformers() -> set[str]:
    """Each private name in those modules."""
    modules = [importlib.import_module(f"transformers.{name}") for name in MODULES]
    return {name for module in modules for name in re.findall(rf"\b{PRIVATE.pattern}", inspect.getsource(module))}


@functools.cache
def files() -> dict[str, list[ast.AST]]:
    """The nodes of each file."""
    return {
        path.relative_to(SOURCES).as_posix(): list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        for path in sorted(SOURCES.rglob("*.py"))
    }


def defined_names(nodes: list[ast.AST]) -> Iterator[str]:
    """Names that a file gives to something of its own: functions, classes, variables, attributes and slots."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            yield from ast.literal_eval(node.value)


def used_names(nodes: list[ast.AST]) -> Iterator[str]:
    """Private names that a file takes from some object: as an attribute, a text, an option or an import."""
    for node in nodes:
        is_private = isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr)
        if is_private and not ast.unparse(node.value).startswith(("torch", "sys")):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
            yield from (part for alias in node.names for part in (*str(node.module).split("."), alias.name))


def touched() -> dict[str, set[str]]:
    """The files that touch each private name of transformers. A name of kvlayers' own is taken for its own."""
    own = {name for nodes in files().values() for name in defined_names(nodes)} | set(vars(torch.nn.Module()))
    candidates = names_of_transformers() - own - set(NOT_OF_TRANSFORMERS)
    found: dict[str, set[str]] = {}
    for path, nodes in files().items():
        for name in used_names(nodes) if path != PROBES else ():
            if PRIVATE.fullmatch(name) and name in candidates:
                found.setdefault(name, set()).add(path)
    return found


def test_every_private_name_is_listed_with_the_files_that_touch_it() -> None:
    listed = {row[0].strip("`"): set(re.findall(r"`([\w/]+\.py)`", row[1])) for row in rows("### Private names")}
    found = touched()
    assert {name: paths for name, paths in found.items() if listed.get(name) != paths} == {}
    # An older version lacks some of them.
    assert listed.keys() - found.keys() <= {name for nodes in files().values() for name in used_names(nodes)}
    assert len(listed) <= MOST_NAMES


def test_every_private_name_is_probed_before_it_is_used() -> None:
    listed = {row[0].strip("`") for row in rows("### Private names")}
    probes = (*supported.OF_CACHES, *supported.OF_GENERATE)
    named = [probe.name for probe in probes if isinstance(probe, supported.Probe)]
    probed = {part for name in named for part in name.split(".") if PRIVATE.fullmatch(part)}
    assert probed == listed - set(NOT_PROBED)


def test_every_method_that_is_replaced_is_listed() -> None:
    listed = {row[0].strip("`") for row in rows("### Replaced methods")}
    methods = [patch for patch in install._PATCHES if patch._name != cache_by_name.FIELD]
    replaced = {f"{patch._owner.__name__}.{patch._name}" for patch in methods}
    assert replaced <= listed
    # An older version lacks some of them.
    said = (SOURCES / "generation" / "install.py").read_text(encoding="utf-8")
    assert all(f"`{name}`" in said for name in listed)
    assert len(listed) <= MOST_REPLACED
