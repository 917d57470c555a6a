"""What a browser would make of a page, as far as tests ask."""

from html.parser import HTMLParser

LOADING = ("src", "href", "xlink:href", "data", "action", "srcset", "poster", "background")
"""Attributes that make a browser ask for something."""

VOID = ("meta", "br", "img", "link", "hr", "input")


class WebPage(HTMLParser):
    """Parses a page, no element of which may load or run anything by its attributes.

    Attributes:
        text: all that is read.
        cells: of the tables, row by row.
        tags: of every element, in order.
        ids: of the elements.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.cells: list[list[str]] = []
        self.tags: list[str] = []
        self.ids: list[str | None] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == [], f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} runs {name}={value}"
            # Other than places in the page itself.
            assert name not in LOADING or (value or "").startswith("#"), f"{tag} loads {name}={value}"

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open and self._open[-1] in ("td", "th"):
            self.cells[-1][-1] += data


def check_self_contained(page: str) -> WebPage:
    """Parse a page, and see that it needs and runs nothing."""
    parsed = WebPage(page)
    assert not {"script", "link", "iframe", "img", "object", "embed"} & set(parsed.tags)
    assert "url(http" not in page
    assert "@import" not in page
    assert len(set(parsed.ids)) == len(parsed.ids)
    return parsed
