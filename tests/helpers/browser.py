"""What a browser shows of pages: chromium opens them as on a screen, and as on a phone."""

import importlib.util
import pathlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (1280, 400)
LOOK = """() => ({
    page_width: document.documentElement.scrollWidth,
    text: document.body.innerText,
    broken: [...document.images].filter(image => image.loading != "lazy" && !image.naturalWidth)
        .map(image => image.getAttribute("src").slice(0, 100)),
    drawings: [...document.querySelectorAll("svg")].filter(svg => svg.getBoundingClientRect().width > 100).length,
})"""

needs_browser = pytest.mark.skipif(
    BROWSER is None or importlib.util.find_spec("playwright") is None,
    reason="no chromium or no playwright here: `apt-get install chromium` and the extra docs bring them",
)


@dataclass(frozen=True)
class Seen:
    """A page as it is shown.

    Attributes:
        page: the file.
        width: of the window, in pixels.
        page_width: of what is shown: more than `width` if the whole page scrolls sideways.
        text: all that can be read.
        broken: sources of pictures that are not shown.
        drawings: SVG elements that are wider than an icon.
    """

    page: pathlib.Path
    width: int
    page_width: int
    text: str
    broken: list[str]
    drawings: int

    def check(self) -> None:
        """See that the page is not empty, has all of its pictures, and does not scroll sideways."""
        assert self.text.strip(), f"{self.page} is empty"
        assert not self.broken, f"{self.page} lacks pictures: {self.broken}"
        assert self.page_width <= self.width, f"{self.page} scrolls sideways at {self.width} pixels"


def looked_at(pages: Iterable[pathlib.Path]) -> Iterator[Seen]:
    """Each page, at each width."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        tabs = {width: browser.new_page(viewport={"width": width, "height": 900}) for width in WIDTHS}
        for page in pages:
            for width, tab in tabs.items():
                tab.goto(page.as_uri())
                yield Seen(page, width, **tab.evaluate(LOOK))
        browser.close()
