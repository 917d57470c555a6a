"""The package as it is built: the same bytes from the same sources, with what users need in it and nothing else."""

import email.message
import email.parser
import importlib.util
import os
import pathlib
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from types import SimpleNamespace
from typing import Any

import pytest

import kvlayers
from kvlayers.kernels.attention.cpu import kernel
from kvlayers.utils.native_builds import BUILDS, SOURCES, best_build, cpu_features

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


PLATFORM = f"manylinux_2_17_{platform.machine()}"
# A compiler that copies what the tests have compiled for this machine.
STAND_IN = """#!/bin/sh
case "$*" in
{cases}
esac
while [ "$1" != -o ]; do shift; done
cp "$made" "$2"
"""
# Without a cache, which would import all that transformers does.
ATTEND = """
import torch
from kvlayers.kernels.attention.cpu import kernel
from kvlayers.kernels.attention.segment_kinds import DenseSegment
from kvlayers.kernels.attention.segments import KVSegments
from kvlayers.quantizers import SideOptions, backend, dequantize
torch.manual_seed(0)
query, keys, values = torch.randn(1, 4, 1, 16), *torch.randn(2, 1, 4, 300, 16)
segments = KVSegments((DenseSegment(keys, values),))
assert kernel.obstacle(query, segments) is None
expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
torch.testing.assert_close(kernel.attend(query, segments, None, 0.25), expected, rtol=1e-5, atol=1e-5)
quantizer = backend("native").quantizer(SideOptions("values", 4), 16)
back = dequantize(quantizer.quantize(keys), quantizer.format, torch.float32)
torch.testing.assert_close(back, keys, rtol=0, atol=1)
print(*(library.get()._name for library in kernel.LIBRARIES), sep="\\n")
"""


def built(sources: pathlib.Path, year: int) -> dict[str, bytes]:
    """Wheel and sdist of a copy of the sources of which every file is from some year, by name."""
    copy_of_sources(sources, year)
    return built_here(sources)


def built_here(sources: pathlib.Path) -> dict[str, bytes]:
    """What `build` makes of sources, by name: the sdist, and the wheel from it. In this process, which is quicker."""
    from hatchling import build

    output, unpacked = (sources.with_name(f"{sources.name}-{what}") for what in ("dist", "unpacked"))
    output.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SOURCE_DATE_EPOCH", raising=False)
        patch.setenv("KVLAYERS_WHEEL", "any")
        patch.chdir(sources)
        sdist = build.build_sdist(str(output))
        with tarfile.open(output / sdist) as archive:
            archive.extractall(unpacked, filter="data")
        patch.chdir(unpacked / sdist.removesuffix(".tar.gz"))
        build.build_wheel(str(output))
    return {path.name: path.read_bytes() for path in output.iterdir()}


def copy_of_sources(sources: pathlib.Path, year: int) -> None:
    shutil.copytree(ROOT, sources, ignore=shutil.ignore_patterns(*NOT_SOURCES), symlinks=True)
    for path in sources.rglob("*"):
        os.utime(path, ((year - 1970) * 31_557_600.0,) * 2)


def built_from(sources: pathlib.Path, *options: str, **variables: str) -> dict[str, bytes]:
    """What `build` makes of sources, by name."""
    output = sources.with_name(f"{sources.name}-dist")
    outside = ("SOURCE_DATE_EPOCH", "KVLAYERS_WHEEL_CXX")
    kept = {name: value for name, value in os.environ.items() if name not in outside}
    environment = {**kept, "KVLAYERS_WHEEL": "any", **variables}
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(output), str(sources)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=2000)
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


@pytest.mark.nightly
def test_the_same_sources_give_the_same_files(files: dict[str, bytes], tmp_path: pathlib.Path) -> None:
    """Whatever the directory and its name, and the times of the files."""
    version = kvlayers.__version__
    assert sorted(files) == [f"kvlayers-{version}-py3-none-any.whl", f"kvlayers-{version}.tar.gz"]
    assert built(tmp_path / "elsewhere", 2025) == files


def test_the_lab_is_built_apart_and_joins_the_command(tmp_path: pathlib.Path) -> None:
    copy_of_sources(tmp_path / "kvlayers", 2021)
    files = built_here(tmp_path / "kvlayers" / "lab")
    version = kvlayers.__version__
    wheel = f"kvlayers_lab-{version}-py3-none-any.whl"
    assert sorted(files) == [wheel, f"kvlayers_lab-{version}.tar.gz"]
    (tmp_path / wheel).write_bytes(files[wheel])
    sources = ROOT / "lab" / "src"
    expected = {
        path.relative_to(sources).as_posix()
        for path in sources.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        about = f"kvlayers_lab-{version}.dist-info"
        assert {name for name in archive.namelist() if not name.startswith(about)} == expected
        assert "[kvlayers.commands]" in archive.read(f"{about}/entry_points.txt").decode()


def test_the_wheel_is_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    sources = ROOT / "src" / "kvlayers"
    expected = {
        f"kvlayers/{path.relative_to(sources).as_posix()}"
        for path in sources.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    seen = set(wheel.namelist())
    assert {name for name in seen if not name.startswith(information())} == expected
    assert {
        "kvlayers/py.typed",
        "kvlayers/kernels/attention/cpu/kernel.cpp",
        f"{information()}/licenses/LICENSE",
    } <= seen


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


@pytest.mark.nightly
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
    needed = ("src/kvlayers/py.typed", "tests/conftest.py", "docs/tour.ipynb", "scripts/site_hooks.py", "Makefile")
    more = (".ci/run", ".github/workflows/ci.yml", "constraints.txt", "noxfile.py", "mkdocs.yml")
    lab = ("lab/pyproject.toml", "lab/src/kvlayers_lab/py.typed", "lab/benchmarks/plots.py")
    assert {*needed, *more, *lab} <= there


# With compiled kernels

needs_build = pytest.mark.skipif(
    kernel.library() is None or best_build(platform.machine(), cpu_features().split()) is None,
    reason="there is no C++ compiler, or wheels have no kernels for this machine",
)


def found_in(wheel: pathlib.Path, tmp_path: pathlib.Path) -> list[str]:
    """What computes attention in a process that has the wheel and no compiler."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    no_compiler = {"PATH": "", "CXX": "", "KVLAYERS_CACHE": "/proc/kvlayers", "PYTHONPATH": str(tmp_path / "site")}
    environment = {**os.environ, **no_compiler, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ATTEND]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    libraries = done.stdout.splitlines()
    return [pathlib.Path(library).relative_to(tmp_path / "site" / "kvlayers").as_posix() for library in libraries]


def stand_in(folder: pathlib.Path) -> pathlib.Path:
    cases = [
        f"    *{pathlib.Path(source).name}*) made={(made := library.get()) and made._name};;"
        for source, library in zip(SOURCES, kernel.LIBRARIES, strict=True)
    ]
    script = folder / "stand-in"
    script.write_text(STAND_IN.format(cases="\n".join(cases)))
    script.chmod(0o755)
    return script


@pytest.mark.nightly
@needs_build
def test_pip_compiles_for_this_machine_where_it_installs(tmp_path: pathlib.Path) -> None:
    copy_of_sources(tmp_path / "kvlayers", 2021)
    ((name, content),) = built_from(
        tmp_path / "kvlayers", "--wheel", KVLAYERS_WHEEL="", CXX=str(stand_in(tmp_path))
    ).items()
    assert name == f"kvlayers-{kvlayers.__version__}-py3-none-linux_{platform.machine()}.whl"
    (tmp_path / name).write_bytes(content)
    best = best_build(platform.machine(), cpu_features().split())
    assert best is not None
    assert found_in(tmp_path / name, tmp_path) == [best.library(pathlib.Path(source)).as_posix() for source in SOURCES]


@pytest.mark.nightly
@pytest.mark.parametrize("compiler", ["/bin/false", "/no/compiler"])
def test_a_compiler_that_fails_does_not_hinder_an_installation(compiler: str, tmp_path: pathlib.Path) -> None:
    copy_of_sources(tmp_path / "kvlayers", 2021)
    (name,) = built_from(tmp_path / "kvlayers", "--wheel", KVLAYERS_WHEEL="", CXX=compiler)
    assert name == f"kvlayers-{kvlayers.__version__}-py3-none-any.whl"


@pytest.mark.nightly
@needs_build
def test_a_wheel_of_a_platform_needs_no_compiler(tmp_path: pathlib.Path) -> None:
    copy_of_sources(tmp_path / "kvlayers", 2021)
    options = {"KVLAYERS_WHEEL": PLATFORM, "KVLAYERS_WHEEL_CXX": str(stand_in(tmp_path))}
    ((name, content),) = built_from(tmp_path / "kvlayers", "--wheel", **options).items()
    assert name == f"kvlayers-{kvlayers.__version__}-py3-none-{PLATFORM}.whl"
    (tmp_path / name).write_bytes(content)
    there = {name for name in zipfile.ZipFile(tmp_path / name).namelist() if name.endswith(".so")}
    builds = [build for build in BUILDS if build.machine == platform.machine()]
    assert there == {
        build.library(pathlib.Path("kvlayers", source)).as_posix() for build in builds for source in SOURCES
    }
    assert f"Tag: py3-none-{PLATFORM}\n" in zipfile.ZipFile(tmp_path / name).read(f"{information()}/WHEEL").decode()
    best = best_build(platform.machine(), cpu_features().split())
    assert best is not None
    assert found_in(tmp_path / name, tmp_path) == [best.library(pathlib.Path(source)).as_posix() for source in SOURCES]


def kernel_hook(tmp_path: pathlib.Path, said: list[str]) -> Any:
    """What puts kernels into a wheel, and where it says why there are none."""
    hatch_build = runpy.run_path(str(ROOT / "hatch_build.py"))
    app = SimpleNamespace(display_warning=said.append, display_info=lambda message: None)
    return hatch_build["KernelHook"](str(ROOT), {}, None, None, str(tmp_path), "wheel", app)


def test_an_unknown_platform_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("KVLAYERS_WHEEL", "win_amd64")
    words = "must be one of any, manylinux_2_17_x86_64, manylinux_2_17_aarch64, got 'win_amd64'"
    with pytest.raises(ValueError, match=words):
        kernel_hook(tmp_path, []).initialize("standard", {})


@pytest.mark.nightly
@needs_build
@pytest.mark.timeout(3600)
def test_zig_gives_the_same_wheels_everywhere(tmp_path: pathlib.Path) -> None:
    files = []
    for year, place in enumerate((tmp_path / "one" / "kvlayers", tmp_path / "elsewhere"), 2021):
        copy_of_sources(place, year)
        made = {}
        for machine in ("x86_64", "aarch64"):
            made |= built_from(place, "--wheel", KVLAYERS_WHEEL=f"manylinux_2_17_{machine}")
        files.append(made)
    assert len(files[0]) == 2
    assert files[0] == files[1]
    (name,) = (name for name in files[0] if name.endswith(f"{PLATFORM}.whl"))
    (tmp_path / name).write_bytes(files[0][name])
    assert len(found_in(tmp_path / name, tmp_path)) == len(SOURCES)


@pytest.mark.parametrize("compiler", ["none", "broken"])
def test_a_wheel_without_kernels_says_why(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    said: list[str] = []
    monkeypatch.delenv("KVLAYERS_WHEEL", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if compiler == "broken":
        monkeypatch.setenv("CXX", "false-compiler")
    hook = kernel_hook(tmp_path, said)
    data: dict[str, object] = {"force_include": {}}
    hook.initialize("standard", data)
    hook.finalize("standard", data, "")
    assert data == {"force_include": {}}
    [line] = said
    assert "are not in the wheel" in line
    assert {"none": "install g++ or clang++", "broken": "false-compiler"}[compiler] in line
