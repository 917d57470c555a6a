"""The package as it is built: the same bytes from the same sources, with what users need in it and nothing else."""

import email.message
import email.parser
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import kvlayers

ROOT = pathlib.Path(__file__).parents[2]
NOT_SOURCES = (
    *(".git", ".venv", ".nox", ".models", ".hypothesis", ".pytest_cache", ".mypy_cache", ".ruff_cache", "__pycache__"),
    *("site", "dist", "build", "results"),
)
BUILDERS = ("build", "hatchling", "hatch_fancy_pypi_readme")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in BUILDERS),
        reason="no build, hatchling or hatch-fancy-pypi-readme here: `make test` installs them with the extra dev",
    ),
]


def built(sources: pathlib.Path, year: int) -> dict[str, bytes]:
    """Wheel and sdist of a copy of the sources of which every file is from some year, by name."""
    shutil.copytree(ROOT, sources, ignore=shutil.ignore_patterns(*NOT_SOURCES), symlinks=True)
    for path in sources.rglob("*"):
        os.utime(path, ((year - 1970) * 31_557_600.0,) * 2)
    output = sources.with_name(f"{sources.name}-dist")
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(sources)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.name: path.read_bytes() for path in output.iterdir()}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return built(tmp_path_factory.mktemp("one") / "kvlayers", 2021)


@pytest.fixture(scope="module")
def wheel(files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    (name,) = (name for name in files if name.endswith(".whl"))
    path = tmp_path_factory.mktemp("wheel") / name
    path.write_bytes(files[name])
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    return email.parser.Parser().parsestr(wheel.read(f"{information()}/METADATA").decode())


def information() -> str:
    return f"kvlayers-{kvlayers.__version__}.dist-info"


def test_the_same_sources_give_the_same_files(files: dict[str, bytes], tmp_path: pathlib.Path) -> None:
    """Whatever the directory and its name, and the times of the files."""
    version = kvlayers.__version__
    assert sorted(files) == [f"kvlayers-{version}-py3-none-any.whl", f"kvlayers-{version}.tar.gz"]
    assert built(tmp_path / "elsewhere", 2025) == files


def test_the_wheel_is_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    sources = ROOT / "src" / "kvlayers"
    expected = {
        f"kvlayers/{path.relative_to(sources).as_posix()}"
        for path in sources.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    seen = set(wheel.namelist())
    assert {name for name in seen if not name.startswith(information())} == expected
    assert {"kvlayers/py.typed", "kvlayers/attention/cpu/kernel.cpp", f"{information()}/licenses/LICENSE"} <= seen


def test_the_metadata_says_what_it_needs_and_what_it_is(metadata: email.message.Message) -> None:
    assert metadata["Name"] == "kvlayers"
    assert metadata["Version"] == kvlayers.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    always = [needed for needed in metadata.get_all("Requires-Dist", []) if "extra ==" not in needed]
    names = {re.split(r"[<>=!~;\[ ]", needed)[0] for needed in always}
    optional = {"typer", "rich", "gguf", "hqq", "optimum-quanto", "redis", "triton", "matplotlib", "pytest"}
    assert {"torch", "transformers", "safetensors"} <= names
    assert not names & optional


def test_the_long_description_links_to_no_file_of_the_repository(metadata: email.message.Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = str(metadata.get_payload())
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert re.findall(r"\]\((?!https?://)[^)]*\)", prose) == []
    assert "choosing a cache" in prose
    assert "https://github.com/huggingface/transformers" in prose
    shown = (ROOT / "README.md").read_text()
    assert re.findall(r"```python.*?```", text, flags=re.DOTALL) == re.findall(
        r"```python.*?```", shown, flags=re.DOTALL
    )


def test_twine_takes_what_is_built(files: dict[str, bytes], tmp_path: pathlib.Path) -> None:
    pytest.importorskip("twine", reason="no twine here: `make test` installs it with the extra dev")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, tmp_path.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_the_sdist_has_what_its_tests_need(files: dict[str, bytes], tmp_path: pathlib.Path) -> None:
    (name,) = (name for name in files if name.endswith(".tar.gz"))
    (tmp_path / name).write_bytes(files[name])
    with tarfile.open(tmp_path / name) as archive:
        there = {member.name.partition("/")[2] for member in archive.getmembers()}
    needed = ("src/kvlayers/py.typed", "tests/conftest.py", "docs/tour.ipynb", "scripts/notebook_pages.py", "Makefile")
    more = (".ci/run", ".github/workflows/ci.yml", "constraints.txt", "noxfile.py", "mkdocs.yml", "benchmarks/plots.py")
    assert {*needed, *more} <= there
