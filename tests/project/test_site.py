"""The site has every page and every public name, and what it repeats from elsewhere is what stands there.

`make docs` builds it, and follows its links.
"""

import importlib
import pathlib
import re
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

import kvlayers
import kvlayers_lab

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"


def pages_in(entries: list[Any]) -> list[str]:
    """The pages of a navigation: each entry is a page, a title of a page, or a title of entries."""
    found = []
    for entry in entries:
        for target in entry.values() if isinstance(entry, dict) else [entry]:
            found += pages_in(target) if isinstance(target, list) else [target]
    return found


@pytest.fixture(scope="module")
def site() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    return read


def test_every_page_is_in_the_navigation_once(site: dict[str, Any]) -> None:
    sources = [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    there = [page.relative_to(DOCS).with_suffix(".md").as_posix() for page in sources]
    assert sorted(pages_in(site["nav"])) == sorted(there)


def test_nothing_of_a_page_comes_from_the_network(site: dict[str, Any]) -> None:
    assert site["theme"]["font"] is False
    assert "extra_javascript" not in site
    for name in site["extra_css"]:
        style = (DOCS / name).read_text()
        assert "url(" not in style
        assert "@import" not in style
    assert "privacy" not in str(site["plugins"])


def test_every_public_name_is_in_the_reference_once_and_what_is_there_exists() -> None:
    pages = (page.read_text() for page in (DOCS / "reference").glob("*.md"))
    listed = [name for page in pages for name in re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE)]
    public = [f"kvlayers.{name}" for name in kvlayers.__all__ if name != "__version__"]
    public += [f"kvlayers_lab.{name}" for name in kvlayers_lab.__all__]
    assert sorted(name for name in listed if name.count(".") == 1) == sorted(public)
    assert len(set(listed)) == len(listed)
    for name in listed:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_mkdocs_takes_the_configuration() -> None:
    config = pytest.importorskip("mkdocs.config", reason="no mkdocs here: `make docs` installs it")
    pytest.importorskip("mkdocstrings", reason="no mkdocstrings here: `make docs` installs it")
    assert config.load_config(str(ROOT / "mkdocs.yml")).site_name == "kvlayers"


def test_drawings_follow_the_colours_of_the_site(hooks: Any) -> None:
    drawings = sorted((DOCS / "plots").glob("*.svg"))
    assert drawings
    for drawing in drawings:
        source = drawing.read_text()
        light, dark = hooks.schemes_of(source)["light"], hooks.schemes_of(source)["dark"]
        for made in (light, dark):
            assert "@media" not in made
            assert ElementTree.fromstring(made).tag.endswith("svg")
        assert "#e6edf3" in dark
        assert "#e6edf3" not in light
        files = [SimpleNamespace(src_uri=f"plots/{drawing.stem}.{scheme}.svg") for scheme in ("light", "dark")]
        shown = hooks.on_page_content(f'<p><img alt="what" src="../plots/{drawing.name}"></p>', files=files)
        assert shown == (
            f'<p><img alt="what" src="../plots/{drawing.stem}.light.svg#only-light">'
            f'<img alt="what" src="../plots/{drawing.stem}.dark.svg#only-dark"></p>'
        )
    assert hooks.schemes_of("<svg></svg>") == {}
    plain = '<img src="other.svg">'
    assert hooks.on_page_content(plain, files=[]) == plain
