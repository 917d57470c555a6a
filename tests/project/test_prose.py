"""Pages and code are in plain English: no file has one of a few phrases that only the old style used."""

import pathlib
import re

import pytest

from sources import source

ROOT = pathlib.Path(__file__).parents[2]
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

TREES = {
    "README": [ROOT / "README.md", ROOT / "lab" / "benchmarks" / "README.md"],
    "chapters": sorted((ROOT / "src").rglob("*.md")),
    "docs": sorted((ROOT / "docs").rglob("*.md")),
    "lab": sorted((ROOT / "lab").rglob("*.py")),
    "src": sorted((ROOT / "src").rglob("*.py")),
}


def prose_of(path: pathlib.Path) -> str:
    """The text of a file. A page loses its code, in blocks and in lines, since names of code are not prose."""
    text = path.read_text()
    if path.suffix == ".md":
        text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        text = re.sub(r"`[^`\n]*`", "", text)
    return text


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_file_has_a_phrase_of_the_old_style() -> None:
    files = [path for tree in TREES.values() for path in tree]
    assert len(files) > 100
    found = {name_of(path): [" ".join(each.split()) for each in OLD_STYLE.findall(prose_of(path))] for path in files}
    assert {name: phrases for name, phrases in found.items() if phrases} == {}


@pytest.mark.parametrize(
    "sentence",
    ["as fast as theirs", "What came of\nthe queries", "tokens, as is none", "The times are those of ours."],
)
def test_a_phrase_of_the_old_style_is_found(sentence: str) -> None:
    assert OLD_STYLE.search(sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        "kvlayers' caches and transformers' caches",
        "tours and hours",
        "None is the default",
        "there is none",
        "what it holds",
    ],
)
def test_plain_english_passes(sentence: str) -> None:
    assert OLD_STYLE.search(sentence) is None


def test_errors_have_one_grammar() -> None:
    """An error says "`name` must be X, got Y: do Z"."""
    package = ROOT / "src" / "kvlayers"
    files = sorted(package.rglob("*.py"))
    assert len(files) > 100
    assert [name_of(path) for path in files if "but saw" in " ".join(path.read_text().split())] == []


def test_errors_say_what_must_be_and_not_what_was_expected() -> None:
    package = ROOT / "src" / "kvlayers"
    files = sorted(package.rglob("*.py"))
    found = [(name_of(path), beginning) for path in files for beginning in source(path).errors]
    assert len(found) > 100
    assert [each for each in found if each[1].lower().startswith("expected")] == []
