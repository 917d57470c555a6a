"""Hooks of mkdocs: the version and the repository on each page, pages of notebooks, drawings in the site's colours.

The pages of notebooks are Markdown with the stored outputs, so mkdocs checks their links as on any other page. None
of them is run.

A drawing has rules for dark pages, which an image applies by the reader's system and not by the site's switch. So the
site has two files of each such drawing, one for light pages and one for dark ones, and shows the one that fits.
"""

import json
import os
import pathlib
import re
import runpy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

LINK_TO_A_NOTEBOOK = re.compile(r"(\]\((?!\w+:)[^)#]*)\.ipynb(?=[)#])")


IF_DARK = re.compile(r"@media\s*\(prefers-color-scheme:\s*dark\)\s*\{((?:[^{}]*\{[^{}]*\})*)\s*\}")
DRAWING = re.compile(r'<img ([^>]*)src="([^"#]*)\.svg"([^>]*)>')

VERSION = pathlib.Path(__file__).parents[1] / "src" / "kvlayers" / "version.py"


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    """Name the version, and link to the repository where GitHub builds the site."""
    config.site_name = f"{config.site_name} {runpy.run_path(str(VERSION))['__version__']}"
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        config.repo_url = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
        config.repo_name = repository
    return config


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Replace each notebook by a page, and add the light and the dark file of each drawing."""
    from mkdocs.structure.files import File

    for file in [file for file in files if file.src_uri.endswith(".svg")]:
        for scheme, drawing in schemes_of(file.content_string).items():
            name = f"{file.src_uri.removesuffix('.svg')}.{scheme}.svg"
            files.append(File.generated(config, name, content=drawing))

    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        page = file.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, page, content=page_of(json.loads(file.content_string))))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Change links to notebooks into links to their pages. On a forge they still lead to the notebooks."""
    return LINK_TO_A_NOTEBOOK.sub(r"\1.md", markdown)


def on_page_content(html: str, files: "Files", **_: object) -> str:
    """Show of each drawing with two files the one for the site's colours."""
    names = {file.src_uri for file in files}

    def both(found: re.Match[str]) -> str:
        before, path, after = found.groups()
        if f"plots/{pathlib.PurePosixPath(path).name}.light.svg" not in names:
            return found[0]
        # The theme hides an image by the end of its address.
        shown = (f'<img {before}src="{path}.{scheme}.svg#only-{scheme}"{after}>' for scheme in ("light", "dark"))
        return "".join(shown)

    return DRAWING.sub(both, html)


def schemes_of(drawing: str) -> dict[str, str]:
    """A drawing for light pages and one for dark pages; nothing if it has no rules for dark pages."""
    if not IF_DARK.search(drawing):
        return {}
    return {"light": IF_DARK.sub("", drawing), "dark": IF_DARK.sub(r"\1", drawing)}


def page_of(notebook: Mapping[str, Any]) -> str:
    """The Markdown of a notebook: its text, its code, and the outputs."""
    return "\n\n".join(part for cell in notebook["cells"] for part in parts_of(cell)) + "\n"


def parts_of(cell: Mapping[str, Any]) -> Iterator[str]:
    """The Markdown of one cell."""
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        yield source
        return
    yield fenced("python", source)
    for output in cell["outputs"]:
        yield shown(output)


def shown(output: Mapping[str, Any]) -> str:
    """The Markdown of one output, in its richest format."""
    if "text" in output:
        return fenced("text", "".join(output["text"]))
    data = {kind: "".join(text) for kind, text in output["data"].items()}
    if "image/png" in data:
        encoded = data["image/png"].replace("\n", "")
        return f'<img alt="" src="data:image/png;base64,{encoded}">'
    return data.get("text/html") or fenced("text", data["text/plain"])


def fenced(language: str, text: str) -> str:
    """A block of code."""
    return f"```{language}\n{text.rstrip()}\n```"
