"""The notebook runs, and shows what it says. KVLAYERS_WRITE_DOCS=1 writes what it shows."""

import json
import os
import pathlib
from typing import Any

import pytest

from respelling import respelled

ROOT = pathlib.Path(__file__).parents[2]
TOUR = ROOT / "docs" / "tour.ipynb"
MODEL = pathlib.Path(os.environ.get("KVLAYERS_DEMO_MODEL", ROOT / ".models" / "SmolLM2-135M-Instruct"))
VARIES = "varies"
"""A tag of cells whose outputs depend on the machine: times, and what rounded states make a model say."""


@pytest.fixture
def stored() -> Any:
    return json.loads(TOUR.read_text())


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def texts(cell: Any) -> list[str]:
    """What a cell prints and shows, without pictures."""
    return [
        "".join(output.get("text") or output["data"]["text/plain"])
        for output in cell["outputs"]
        if "image/png" not in output.get("data", {})
    ]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(not MODEL.is_dir(), reason=f"no model at {MODEL}: `make test` brings it")
def test_it_runs_and_shows_what_is_stored(stored: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(package, reason=f"no {package} here: `make test` installs it with the extra dev")
    import nbclient
    import nbformat

    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setenv("KVLAYERS_DEMO_MODEL", str(MODEL))
    # tqdm asks for widgets, which would be one more package for a bar that is not drawn.
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:IProgress")
    notebook = nbformat.read(TOUR, as_version=4)
    for cell in code_cells(notebook):
        cell["source"] = respelled(cell["source"])
    how = {"timeout": 250, "kernel_name": "python3", "record_timing": False, "coalesce_streams": True}
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}, **how).execute()
    if os.environ.get("KVLAYERS_WRITE_DOCS"):
        nbformat.write(notebook, TOUR)
        stored = json.loads(TOUR.read_text())
    for seen, cell in zip(code_cells(notebook), code_cells(stored), strict=True):
        if VARIES not in cell["metadata"].get("tags", ()):
            assert texts(seen) == texts(cell)


def test_it_is_stored_as_it_ran(stored: Any) -> None:
    assert stored["metadata"]["kernelspec"]["name"] == "python3"
    cells = code_cells(stored)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "execute_result", "display_data"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}, "a warning is stored"
    shown = {kind for output in outputs for kind in output.get("data", ())}
    assert {"image/png", "text/html"} <= shown


def test_nothing_of_a_machine_is_stored() -> None:
    text = TOUR.read_text()
    for path in (*("/root", "/home", "/tmp", "/work", "/usr", "site-packages"), str(ROOT), str(pathlib.Path.home())):
        assert path not in text, path
    assert len(text) < 300_000


def test_its_page_has_its_prose_its_code_and_its_outputs(stored: Any, hooks: Any) -> None:
    page = hooks.page_of(stored)
    for cell in stored["cells"]:
        assert "".join(cell["source"]) in page
    for cell in code_cells(stored):
        for output in cell["outputs"]:
            shown = output.get("text") or output["data"].get("image/png") or output["data"]["text/html"]
            assert "".join(shown).strip() in page
    assert page.count("```python") == len(code_cells(stored))


def test_links_to_notebooks_lead_to_their_pages(hooks: Any) -> None:
    given = "[a](tour.ipynb), [b](../tour.ipynb#c), [d](https://example.org/e.ipynb), `f.ipynb`, [g](h.md)"
    seen = "[a](tour.md), [b](../tour.md#c), [d](https://example.org/e.ipynb), `f.ipynb`, [g](h.md)"
    assert hooks.on_page_markdown(given, page=None) == seen
