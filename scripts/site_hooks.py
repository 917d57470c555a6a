"""Hooks of mkdocs: the version and the repository on each page, and a page for each notebook of the docs.

The pages of notebooks are Markdown with the stored outputs, so mkdocs checks their links as on any other page. None
of them is run.
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


VERSION = pathlib.Path(__file__).parents[1] / "src" / "kvlayers" / "version.py"


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    """Name the version, and link to the repository where GitHub builds the site."""
    config.site_name = f"{config.site_name} {runpy.run_path(str(VERSION))['__version__']}"
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        config.repo_url = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
        config.repo_name = repository
    return config


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Replace each notebook by a page."""
    from mkdocs.structure.files import File

    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        page = file.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, page, content=page_of(json.loads(file.content_string))))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Change links to notebooks into links to their pages. On a forge they still lead to the notebooks."""
    return LINK_TO_A_NOTEBOOK.sub(r"\1.md", markdown)


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
