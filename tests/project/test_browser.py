"""The site, as a browser shows it on a screen and on a phone."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

from browser import looked_at, needs_browser

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, needs_browser]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("no mkdocs here: `make docs` installs it with the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_of_the_site_is_shown_whole(site: pathlib.Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert {"index.html", "concepts.html", "tour.html"} <= {page.name for page in pages}
    for seen in looked_at(pages):
        seen.check()
        # The source of a diagram, or of a block of code that was never closed.
        assert "```" not in seen.text, seen.page
        assert "graph TD" not in seen.text, seen.page
