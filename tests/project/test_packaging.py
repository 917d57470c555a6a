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


def ran(command: list[str], **how: Any) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2000, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def built_from(sources: pathlib.Path, *options: str, **variables: str) -> dict[str, bytes]:
    """What `build` makes of sources, by name."""
    output = sources.with_name(f"{sources.name}-dist")
    outside = ("SOURCE_DATE_EPOCH", "KVLAYERS_WHEEL_CXX")
    kept = {name: value for name, value in os.environ.items() if name not in outside}
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(output), str(sources)]
    ran(command, env={**kept, "KVLAYERS_WHEEL": "any", **variables})
    return {path.name: path.read_bytes() for path in output.iterdir()}


def written(files: dict[str, bytes], ending: str, folder: pathlib.Path) -> pathlib.Path:
    """The one file whose name ends so, in a folder."""
    ((name, content),) = (each for each in files.items() if each[0].endswith(ending))
    (folder / name).write_bytes(content)
    return folder / name


def files_of(sources: pathlib.Path) -> set[str]:
    """The files of a package, from the folder that it is in."""
    there = (path for path in sources.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(sources.parent).as_posix() for path in there}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return built(tmp_path_factory.mktemp("one") / "kvlayers", 2021)


@pytest.fixture(scope="module")
def wheel(files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(written(files, ".whl", tmp_path_factory.mktemp("wheel")))


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
    assert sorted(files) == [f"kvlayers_lab-{version}-py3-none-any.whl", f"kvlayers_lab-{version}.tar.gz"]
    with zipfile.ZipFile(written(files, ".whl", tmp_path)) as archive:
        about = f"kvlayers_lab-{version}.dist-info"
        seen = {name for name in archive.namelist() if not name.startswith(about)}
        assert seen == files_of(ROOT / "lab" / "src" / "kvlayers_lab")
        assert "[kvlayers.commands]" in archive.read(f"{about}/entry_points.txt").decode()


def test_the_wheel_is_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    seen = set(wheel.namelist())
    assert {name for name in seen if not name.startswith(information())} == files_of(ROOT / "src" / "kvlayers")
    assert {
        "kvlayers/py.typed",
        "kvlayers/kernels/attention/cpu/kernel.cpp",
        f"{information()}/licenses/LICENSE",
    } <= seen


def test_the_metadata_says_what_it_needs_and_what_it_is(metadata: email.message.Message) -> None:
    facts = {"Name": "kvlayers", "Version": kvlayers.__version__, "License-Expression": "Apache-2.0"}
    assert dict(metadata.items()).items() >= {**facts, "Requires-Python": ">=3.10"}.items()
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
    made = [str(written(files, ending, tmp_path)) for ending in (".whl", ".tar.gz")]
    assert ran([sys.executable, "-m", "twine", "check", "--strict", *made]).stdout.count("PASSED") == 2


def test_the_sdist_has_what_its_tests_need(files: dict[str, bytes], tmp_path: pathlib.Path) -> None:
    with tarfile.open(written(files, ".tar.gz", tmp_path)) as archive:
        there = {member.name.partition("/")[2] for member in archive.getmembers()}
    needed = ("src/kvlayers/py.typed", "tests/conftest.py", "docs/tour.ipynb", "scripts/site_hooks.py", "Makefile")
    more = (".ci/run", ".github/workflows/ci.yml", "constraints.txt", "noxfile.py", "mkdocs.yml")
    lab = ("lab/pyproject.toml", "lab/src/kvlayers_lab/py.typed", "lab/benchmarks/plots.py")
    assert {*needed, *more, *lab} <= there


# With compiled kernels

BEST = best_build(platform.machine(), cpu_features().split())
needs_build = pytest.mark.skipif(
    kernel.library() is None or BEST is None,
    reason="there is no C++ compiler, or wheels have no kernels for this machine",
)


def check_kernels(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """See that the libraries of the wheel compute attention in a process that has the wheel and no compiler."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    no_compiler = {"PATH": "", "CXX": "", "KVLAYERS_CACHE": "/proc/kvlayers", "PYTHONPATH": str(tmp_path / "site")}
    done = ran([sys.executable, "-c", ATTEND], env={**os.environ, **no_compiler, "OMP_NUM_THREADS": "1"}, cwd=tmp_path)
    assert not done.stderr
    assert BEST is not None
    expected = [tmp_path / "site" / "kvlayers" / BEST.library(pathlib.Path(source)) for source in SOURCES]
    assert done.stdout.splitlines() == list(map(str, expected))


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
@pytest.mark.parametrize(
    ("wanted", "variable"), [("", "CXX"), (PLATFORM, "KVLAYERS_WHEEL_CXX")], ids=["this machine", "a platform"]
)
def test_a_wheel_with_kernels_needs_no_compiler(wanted: str, variable: str, tmp_path: pathlib.Path) -> None:
    copy_of_sources(tmp_path / "kvlayers", 2021)
    options = {"KVLAYERS_WHEEL": wanted, variable: str(stand_in(tmp_path))}
    made = built_from(tmp_path / "kvlayers", "--wheel", **options)
    tag = f"py3-none-{wanted or f'linux_{platform.machine()}'}"
    path = written(made, f"kvlayers-{kvlayers.__version__}-{tag}.whl", tmp_path)
    archive = zipfile.ZipFile(path)
    builds = [build for build in BUILDS if build.machine == platform.machine() and (wanted or build == BEST)]
    assert {name for name in archive.namelist() if name.endswith(".so")} == {
        build.library(pathlib.Path("kvlayers", source)).as_posix() for build in builds for source in SOURCES
    }
    assert f"Tag: {tag}\n" in archive.read(f"{information()}/WHEEL").decode()
    check_kernels(path, tmp_path)


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
    check_kernels(written(files[0], f"{PLATFORM}.whl", tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("compiler", "words"),
    [("", "install g++ or clang++"), ("no-compiler", "no-compiler"), ("/bin/false", "/bin/false")],
    ids=["none", "one that is not there", "one that fails"],
)
def test_a_wheel_without_kernels_says_why(
    compiler: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    for name, value in {"KVLAYERS_WHEEL": "", "PATH": str(tmp_path), "CXX": compiler}.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    data: dict[str, object] = {"force_include": {}}
    hook = kernel_hook(tmp_path, said)
    hook.initialize("standard", data)
    hook.finalize("standard", data, "")
    assert data == {"force_include": {}}
    [line] = said
    assert "are not in the wheel" in line
    assert words in line
