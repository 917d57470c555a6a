"""Every Python block that a reader sees runs, in the order of the page, and prints what the page shows."""

import os
import pathlib
import re

import pytest
import transformers

import kvlayers
import versions
from respelling import respelled

ROOT = pathlib.Path(__file__).parents[2]
MODEL = pathlib.Path(os.environ.get("KVLAYERS_DEMO_MODEL", ROOT / ".models" / "SmolLM2-135M-Instruct"))
MODEL_OF_PAGES = "HuggingFaceTB/SmolLM2-135M-Instruct"
LAYERS = 2
DOCS = sorted((ROOT / "docs").rglob("*.md"))
LINKING = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "lab/benchmarks/README.md", "docs/tour.ipynb")]
LINKING += [*DOCS, *sorted((ROOT / "src").rglob("README.md"))]

needs_the_model = pytest.mark.skipif(not MODEL.is_dir(), reason=f"no model at {MODEL}: `make test` brings it")


def name_of(page: pathlib.Path) -> str:
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


SHOW_THE_MODEL = ("index.md", "out-of-memory.md", "planning.md", "prefix.md", "scoring.md", "tasks.md")
"""Pages that print what the whole model says, or its bytes. For the others, its first layers are enough."""

TAKE_LONG = ("lm-eval.md", "out-of-memory.md", "prefix.md", "scoring.md", "static.md")


def marks_of(page: pathlib.Path) -> list[pytest.MarkDecorator]:
    needed = [needs_the_model] if MODEL_OF_PAGES in page.read_text() else []
    return [*needed, pytest.mark.nightly] if name_of(page) in TAKE_LONG else needed


PAGES = [
    pytest.param(page, id=name_of(page), marks=marks_of(page))
    for page in (ROOT / "README.md", *DOCS)
    if "```python" in page.read_text()
]


def blocks_of(page: pathlib.Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def on_one_line(text: str) -> str:
    return " ".join(text.split())


def check_shown(shown: str, printed: str) -> None:
    """Three dots stand for anything, as in doctests, and lines may break anywhere."""
    rest = on_one_line(printed)
    for piece in map(on_one_line, shown.split("...")):
        assert piece in rest, f"the page shows {piece!r}, but what is printed goes on with {rest!r}"
        rest = rest.partition(piece)[2]


@pytest.fixture(scope="module")
def first_layers(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The model with its first layers alone."""
    directory = tmp_path_factory.mktemp("first-layers")
    transformers.AutoModelForCausalLM.from_pretrained(MODEL, num_hidden_layers=LAYERS).save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(directory)
    return directory


@pytest.mark.slow
@pytest.mark.usefixtures("usual_smoothing")
@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(
    page: pathlib.Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name_of(page) in ("static.md", "recipes/compile.md"):
        # Run graphs as they are. Inductor would take ten seconds here, and other tests compile such graphs with it.
        monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, *_, **__: graph.forward)
        versions.need_since("5.4", "compiled decode loops without cache_position")
    if name_of(page) == "rows.md":
        versions.need_since("5.2", "continuous batching on a CPU")
    if name_of(page) == "recurrent.md":
        versions.need_recurrent_layers("jamba")
    code = "\n".join(blocks_of(page, "python"))
    if MODEL_OF_PAGES in code:
        # The build machines reach no hub: the same model is a directory here.
        directory = MODEL if name_of(page) in SHOW_THE_MODEL else request.getfixturevalue("first_layers")
        code = code.replace(MODEL_OF_PAGES, str(directory))
    names, quantizers = kvlayers.cache_names(), kvlayers.quantizers.quantizer_names()
    try:
        exec(compile(respelled(code), page.name, "exec"), {"__name__": "__main__"})
    finally:
        kvlayers.uninstall()
        for name in set(kvlayers.cache_names()) - set(names):
            kvlayers.unregister(name)
        for name in set(kvlayers.quantizers.quantizer_names()) - set(quantizers):
            kvlayers.quantizers.unregister_quantizer(name)
    printed = capsys.readouterr().out
    for shown in blocks_of(page, "text"):
        check_shown(shown, printed)
    if page.name == "README.md":
        assert str(names) in printed


def anchors_of(page: pathlib.Path) -> set[str]:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_links_between_pages_lead_somewhere(page: pathlib.Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", page.read_text()):
        aim = page.parent / target if target else page
        assert aim.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors_of(aim), f"{page.name} links to {target}#{anchor}"
