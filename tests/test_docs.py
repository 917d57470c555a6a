"""Every Python block that a reader sees runs, in the order of the page."""

import os
import pathlib
import re

import pytest

import kvlayers
import versions

ROOT = pathlib.Path(__file__).parents[1]
MODEL = pathlib.Path(os.environ.get("KVLAYERS_DEMO_MODEL", ROOT / ".models" / "SmolLM2-135M-Instruct"))
PAGES = [
    page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if "```python" in page.read_text()
]


@pytest.mark.real_model
@pytest.mark.skipif(not MODEL.is_dir(), reason=f"no model at {MODEL}: `make test` brings it")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    if page.name == "static.md":
        versions.need_since("5.4", "compiled decode loops without cache_position")
    if page.name == "recurrent.md":
        versions.need_recurrent_layers("jamba")
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    # The build machines reach no hub: the same model is a directory here.
    code = "\n".join(blocks).replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(MODEL))
    names = kvlayers.cache_names()
    try:
        exec(compile(code, page.name, "exec"), {"__name__": "__main__"})
    finally:
        kvlayers.uninstall()
        for name in set(kvlayers.cache_names()) - set(names):
            kvlayers.unregister(name)
    if page.name == "README.md":
        assert str(names) in capsys.readouterr().out


@pytest.mark.fast
@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_links_between_pages_lead_somewhere(page: pathlib.Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
