"""What other tools read of the repository says what the repository does."""

import pathlib
import re
from typing import Any

import pytest
import yaml

import kvlayers

ROOT = pathlib.Path(__file__).parents[2]
CHAPTERS = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "src").rglob("README.md"))]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FIELDS = {"textarea", "input", "dropdown", "checkboxes", "markdown"}


def read(path: pathlib.Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == kvlayers.__version__
    assert citation["license"] in (ROOT / "pyproject.toml").read_text()
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_the_workflow_runs_what_ci_runs() -> None:
    workflow = read(ROOT / ".github" / "workflows" / "ci.yml")
    commands = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    assert commands[-1] == ".ci/run"
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    assert [step["run"] for step in workflow["jobs"]["docs"]["steps"] if "run" in step] == ["make docs"]


@pytest.mark.parametrize("form", [form for form in FORMS if form.name != "config.yml"], ids=lambda form: form.stem)
def test_a_form_for_issues_asks_for_something(form: pathlib.Path) -> None:
    asked = read(form)
    assert asked["name"]
    assert asked["description"]
    assert {field["type"] for field in asked["body"]} <= FIELDS
    names = [field["id"] for field in asked["body"]]
    assert len(set(names)) == len(names)
    assert any(field.get("validations", {}).get("required") for field in asked["body"])
    assert all(field["attributes"]["label"] for field in asked["body"])


def test_every_room_has_a_chapter_and_is_in_the_map_and_in_the_table() -> None:
    rooms = {path.parent for path in (ROOT / "src" / "kvlayers").glob("*/__init__.py")}
    assert {room.name for room in rooms if not (room / "README.md").is_file()} == set()
    page = (ROOT / "docs" / "design.md").read_text()
    drawn = page.split("```")[1]
    assert {room.name for room in rooms if not re.search(rf"^ .*\b{room.name}\b", drawn, re.MULTILINE)} == set()
    assert {room.name for room in rooms if f"| `{room.name}` |" not in page} == set()


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md", *CHAPTERS])
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    files = [path for path in ROOT.rglob("*") if path.suffix in {".py", ".cpp", ".h", ".md", ".txt", ".yml"}]
    there = {
        path.relative_to(ROOT).as_posix() for path in files if ".venv" not in path.parts and ".nox" not in path.parts
    }
    named = re.findall(r"[\w./-]+\.(?:py|cpp|h|md)\b", (ROOT / page).read_text().replace("../", ""))
    assert [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in there)] == []
