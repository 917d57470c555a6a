"""What files of Python say of themselves. Each is read once, whatever number of tests asks."""

import ast
import functools
import pathlib
from typing import NamedTuple


class Source(NamedTuple):
    """A file of Python.

    Attributes:
        imports: the modules that it imports, at its top or later, and the names from them; "" for the module itself.
        has_relative_imports: whether one of them is relative.
        classes: the name of each class, and those of its bases.
        statements: how many it has, docstrings aside.
        names: of functions, attributes and variables.
        errors: how the messages begin that it makes errors of.
    """

    imports: tuple[tuple[str, str], ...]
    has_relative_imports: bool
    classes: tuple[tuple[str, tuple[str, ...]], ...]
    statements: int
    names: frozenset[str]
    errors: tuple[str, ...]


@functools.cache
def source(path: pathlib.Path) -> Source:
    """What a file says."""
    imports, classes, names, errors = (
        list[tuple[str, str]](),
        list[tuple[str, tuple[str, ...]]](),
        set[str](),
        list[str](),
    )
    statements, is_relative = 0, False
    for node in ast.walk(ast.parse(path.read_text())):
        statements += isinstance(node, ast.stmt) and not _is_docstring(node)
        names |= {
            getattr(node, field) for field in ("attr", "name", "id") if isinstance(getattr(node, field, None), str)
        }
        if isinstance(node, ast.ImportFrom):
            is_relative = is_relative or bool(node.level)
            imports += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            imports += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ClassDef):
            bases = (base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in node.bases)
            classes.append((node.name, tuple(bases)))
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith("Error"):
            first = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                errors.append(first.value)
    return Source(tuple(imports), is_relative, tuple(classes), statements, frozenset(names), tuple(errors))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
