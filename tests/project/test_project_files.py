"""What other tools read of the repository says what the repository does, and pages and code are in plain English.

No file has one of a few phrases that only the old style used.
"""

import pathlib
import re
from typing import Any

import pytest
import yaml

import kvlayers
from sources import source

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


# Plain English

OLD_STYLE = re.compile(
    r"""\b(?:
        theirs | ours | of \s ours
        | what(?:ever)? \s (?:came | comes) \s of | what \s (?:it | they) \s (?:came | comes?) \s to
        | (?:as \s)? (?<! there \s) (?:is | are) \s (?-i:none) | that \s are \s some
        | by \s nobody | nobody's | be \s it \s by
        | what \s there \s is | (?:as | those) \s that \s there \s (?:is | are)
        | goes? \s by \s (?:the | a) \s store
    )\b""",
    re.VERBOSE | re.IGNORECASE,
)
"""Plain English has a better word for each. "Ours" and "theirs" are "kvlayers' caches" and "transformers' caches"."""

FILES = [
    *(ROOT / "README.md", ROOT / "lab" / "benchmarks" / "README.md"),
    *(path for folder in ("src", "docs") for path in sorted((ROOT / folder).rglob("*.md"))),
    *(path for folder in ("lab", "src") for path in sorted((ROOT / folder).rglob("*.py"))),
]


def prose_of(path: pathlib.Path) -> str:
    """The text of a file. A page loses its code, in blocks and in lines, since names of code are not prose."""
    text = path.read_text()
    if path.suffix == ".md":
        text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return text


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_file_has_a_phrase_of_the_old_style() -> None:
    assert len(FILES) > 100
    found = {name_of(path): [" ".join(each.split()) for each in OLD_STYLE.findall(prose_of(path))] for path in FILES}
    assert {name: phrases for name, phrases in found.items() if phrases} == {}


def test_errors_have_one_grammar() -> None:
    """An error says "`name` must be X, got Y: do Z", and not what was expected, or seen."""
    files = sorted((ROOT / "src" / "kvlayers").rglob("*.py"))
    assert [name_of(path) for path in files if "but saw" in " ".join(path.read_text().split())] == []
    found = [(name_of(path), beginning) for path in files for beginning in source(path).errors]
    assert len(found) > 100
    assert [each for each in found if each[1].lower().startswith("expected")] == []
