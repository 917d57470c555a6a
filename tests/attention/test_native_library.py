"""Where the libraries of the C++ sources come from, and what happens until one is there."""

import contextlib
import itertools
import logging
import os
import pathlib
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from typer.testing import CliRunner

import kvlayers
from kvlayers.__main__ import make_app
from kvlayers.kernels.attention.cpu import kernel
from kvlayers.kernels.attention.segment_kinds import DenseSegment
from kvlayers.kernels.attention.segments import KVSegments
from kvlayers.utils import native_library
from kvlayers.utils.native_builds import BUILDS, best_build, cpu_features, headers
from spies import spy

needs_compiler = pytest.mark.skipif(kernel.library() is None, reason="there is no C++ compiler for the kernel")
forks = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")

SOURCE = pathlib.Path(kernel.__file__).with_name("kernel.cpp")
NO_COMPILER = {"CXX": "", "PATH": ""}
# The compilers of these tests copy what was compiled before. They wait for a file first.
STAND_IN = """#!/bin/sh
if [ "$1" = --version ]; then echo {made}; exit; fi
until [ -e {gate} ]; do sleep 0.02; done
while [ "$1" != -o ]; do shift; done
cp {made} "$2"
"""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> native_library.NativeLibrary:
    """The kernel, as in a process that has not looked for it yet."""
    monkeypatch.setattr(native_library, "_announced", set())
    return native_library.NativeLibrary(
        SOURCE, "kvlayers_attend", "kvlayers_score", "kvlayers_combine", purpose="attention"
    )


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """A compiler that runs in the background, until this file is there."""
    gate = tmp_path / "gate"
    stand_in(monkeypatch, tmp_path, pathlib.Path(loaded_from()), gate)
    monkeypatch.setenv("KVLAYERS_COMPILE", "background")
    return gate


def loaded_from() -> str:
    loaded = kernel.library()
    return loaded._name


def stand_in(
    monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, made: pathlib.Path, gate: pathlib.Path | None = None
) -> pathlib.Path:
    """Use a compiler that makes this file, and an empty cache directory, which is returned."""
    script = folder / "stand-in"
    script.write_text(STAND_IN.format(made=made, gate=gate or "/"))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("KVLAYERS_CACHE", str(folder / "cache"))
    return folder / "cache"


def until(condition: Callable[[], object]) -> None:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + 30
        time.sleep(0.01)


def decoded() -> Tensor:
    torch.manual_seed(0)
    layer = kvlayers.QuantizedLayer(kvlayers.Quantization("fp8", residual_length=8, sink_tokens=4))
    return torch.cat([attended(layer, tokens) for tokens in (300, 1, 1, 40, 1)], 2)


def attended(layer: kvlayers.QuantizedLayer, tokens: int) -> Tensor:
    keys, values = layer.update(torch.randn(1, 2, tokens, 16), torch.randn(1, 2, tokens, 8))
    return scaled_dot_product_attention(torch.randn(1, 4, tokens, 16), keys, values, enable_gqa=True)


# Libraries of a wheel


def test_the_fastest_build_that_a_cpu_can_run_is_chosen() -> None:
    features = {build.name: build.features for build in BUILDS}
    for machine, has, name in (
        ("x86_64", features["avx512-bf16"] | {"sse"}, "avx512-bf16"),
        ("x86_64", features["avx512-bf16"] - {"avx512_bf16"}, "avx2"),
        ("x86_64", features["avx2"] - {"fma"}, None),
        ("aarch64", ["fp", "asimd"], "arm64"),
        ("riscv64", ["fp"], None),
    ):
        assert getattr(best_build(machine, has), "name", None) == name


@needs_compiler
def test_the_library_of_a_wheel_needs_no_compiler_and_no_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    build = best_build(platform.machine(), cpu_features().split())
    if build is None:
        pytest.skip("wheels have no libraries for this machine")
    shutil.copy(loaded_from(), build.library(tmp_path / "kernel.cpp"))
    for name, value in {**NO_COMPILER, "KVLAYERS_CACHE": "/proc/kvlayers"}.items():
        monkeypatch.setenv(name, value)
    loaded = native_library.NativeLibrary(tmp_path / "kernel.cpp", "kvlayers_attend", purpose="attention").get()
    assert loaded._name == str(tmp_path / f"kernel-{build.name}.so")


@needs_compiler
def test_a_damaged_library_of_a_wheel_is_compiled_instead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    cache = stand_in(monkeypatch, tmp_path, pathlib.Path(loaded_from()))
    shutil.copy(SOURCE, tmp_path)
    for build in BUILDS:
        build.library(tmp_path / SOURCE.name).write_bytes(b"half of a")
    loaded = native_library.NativeLibrary(tmp_path / SOURCE.name, "kvlayers_attend", purpose="attention").get()
    assert pathlib.Path(loaded._name).parent == cache


def test_a_library_depends_on_the_headers_that_its_source_includes() -> None:
    assert {"call.h", "packed.h", "parallel.h"} <= {path.name for path in headers(SOURCE)}


# Compiling


UNCOMPILABLE: dict[str, dict[str, str]] = {
    "no such compiler": {"CXX": "/nonexistent/g++"},
    "no compiler at all": NO_COMPILER,
    "a compiler that fails": {"CXX": "/bin/false"},
    "a compiler that fails later": {"CXX": "sh -c 'test $0 = --version'"},
    "no place to keep it": {"KVLAYERS_CACHE": "/proc/kvlayers"},
}


@pytest.mark.parametrize(("case", "choice"), list(itertools.product(UNCOMPILABLE, ["wait", "background"])))
def test_what_hinders_the_compiler_is_one_warning(
    case: str,
    choice: str,
    library: native_library.NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: pathlib.Path,
) -> None:
    environment = {"KVLAYERS_CACHE": str(tmp_path), "KVLAYERS_COMPILE": choice, **UNCOMPILABLE[case]}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        assert library.get() is None
        until(lambda: library.get() is None and library.obstacle.startswith("could not"))
        assert library.get() is None
    *begun, failed = [record.getMessage() for record in caplog.records]
    assert [message.partition(" for this CPU")[0] for message in begun] == ["kvlayers compiles its kernels"] * (
        case == "a compiler that fails later"
    )
    assert "install g++" in failed
    assert {path.name for path in tmp_path.iterdir()} <= {native_library.LOCK}


def test_a_library_that_is_not_wanted_is_no_warning(
    library: native_library.NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: pathlib.Path,
) -> None:
    monkeypatch.setenv("KVLAYERS_CACHE", str(tmp_path))
    monkeypatch.setenv("KVLAYERS_COMPILE", "never")
    with caplog.at_level(logging.INFO):
        assert library.get() is library.get() is None
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert library.obstacle == "is not compiled, as $KVLAYERS_COMPILE is never"
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_library_is_a_warning(
    library: native_library.NativeLibrary,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "broken").write_bytes(b"half of a")
    stand_in(monkeypatch, tmp_path, tmp_path / "broken")
    assert library.get() is None
    assert ["install g++" in record.getMessage() for record in caplog.records] == [False, True]


@needs_compiler
def test_a_kept_library_that_is_damaged_is_compiled_again(
    library: native_library.NativeLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    stand_in(monkeypatch, tmp_path, pathlib.Path(loaded_from()))
    kept = native_library.Compilation(SOURCE)
    kept.wait()
    kept.library.write_bytes(b"half of a")
    assert library.get() is not None
    assert kept.library.read_bytes() == pathlib.Path(loaded_from()).read_bytes()


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.delenv("KVLAYERS_CACHE", raising=False)
    assert native_library.cache_directory() == pathlib.Path("/somewhere/kvlayers")
    monkeypatch.setenv("KVLAYERS_CACHE", "/elsewhere")
    assert native_library.cache_directory() == pathlib.Path("/elsewhere")


def test_an_unknown_way_to_compile_is_an_error(
    library: native_library.NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLAYERS_COMPILE", "later")
    with pytest.raises(kvlayers.OptionError, match="must be one of background, wait, never, got 'later'"):
        library.get()
    # Before a generation begins.
    with pytest.raises(kvlayers.OptionError, match="set it to one of these, or unset it"):
        kvlayers.DynamicCache()


@needs_compiler
@pytest.mark.parametrize("killed", [False, True])
def test_of_two_that_compile_at_once_one_runs_the_compiler_and_the_other_goes_on_if_it_is_killed(
    killed: bool, gate: pathlib.Path, caplog: pytest.LogCaptureFixture, tmp_path: pathlib.Path
) -> None:
    caplog.set_level(logging.INFO)
    first, second = native_library.Compilation(SOURCE), native_library.Compilation(SOURCE)
    assert not first.is_done()
    assert not second.is_done()
    if killed:
        os.killpg(first._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
        (tmp_path / "cache" / f"{first.library.stem}-1.part").touch()
    gate.touch()
    second.wait()
    assert caplog.text.count("kvlayers runs") == 1 + killed
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {first.library.name, native_library.LOCK}
    with pytest.raises(RuntimeError, match="the compiler failed") if killed else contextlib.nullcontext():
        first.wait()


@needs_compiler
def test_it_is_compiled_when_a_cache_is_made_and_one_line_says_so(
    library: native_library.NativeLibrary,
    gate: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(kernel, "LIBRARY", library)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for _ in range(2):
        kvlayers.DynamicCache()
    (record,) = caplog.records
    assert record.getMessage().startswith("kvlayers compiles its kernels for this CPU, once, in the background")
    assert "`kvlayers compile`" in record.getMessage()
    gate.touch()
    until(library.get)


@needs_compiler
def test_a_process_that_waits_does_so_where_a_cache_is_made(
    library: native_library.NativeLibrary, gate: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "LIBRARY", library)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setenv("KVLAYERS_COMPILE", "wait")
    gate.touch()
    kvlayers.DynamicCache()
    assert library._loaded is not None


@needs_compiler
def test_it_can_be_compiled_ahead_of_time(
    library: native_library.NativeLibrary, gate: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(kernel, "LIBRARIES", (library,))
    monkeypatch.setenv("KVLAYERS_COMPILE", "never")
    gate.touch()
    assert kvlayers.compile_kernels()["attention"].parent == tmp_path / "cache"
    assert CliRunner().invoke(make_app(), ["compile"]).output.count(str(tmp_path / "cache")) == 1


@pytest.mark.parametrize("case", UNCOMPILABLE)
def test_what_hinders_the_compiler_ahead_of_time_is_an_error(
    case: str, library: native_library.NativeLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    for name, value in {"KVLAYERS_CACHE": str(tmp_path), **UNCOMPILABLE[case]}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(kernel, "LIBRARIES", (library,))
    for _ in range(2):
        with pytest.raises(kvlayers.errors.KernelError, match="kernel for attention must be compiled"):
            kvlayers.compile_kernels()
    ran = CliRunner().invoke(make_app(), ["compile"])
    assert ran.exit_code == 1


# In the background


@needs_compiler
@pytest.mark.parametrize("part", ["attention", "codes"])
def test_attention_does_not_wait_for_the_compiler_and_takes_the_kernel_when_it_is_there(
    part: str, library: native_library.NativeLibrary, gate: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed codes wait for their products, which states in full precision do without."""
    expected = decoded()
    late = library
    if part == "codes":
        late = native_library.NativeLibrary(
            SOURCE.with_name("other_products.cpp"), "kvlayers_multiply", purpose="other codes"
        )
        stand_in(monkeypatch, gate.parent, pathlib.Path(kernel.OTHER.compile()), gate)
    monkeypatch.setattr(kernel, "LIBRARY" if part == "attention" else "OTHER", late)
    called: list[bool] = []
    spy(monkeypatch, kernel, "attend", lambda *_, **__: called.append(True))
    # Sums in float32 of numbers of about 1, in another order.
    torch.testing.assert_close(decoded(), expected, rtol=1e-5, atol=1e-5)
    assert not called
    assert late.obstacle == "is still being compiled"
    dense = torch.randn(1, 2, 300, 16)
    obstacle = kernel.obstacle(torch.randn(1, 4, 1, 16), KVSegments((DenseSegment(dense, dense),)))
    assert (obstacle is None) == (part == "codes")
    gate.touch()
    until(late.get)
    assert torch.equal(decoded(), expected)
    assert called


@forks
@needs_compiler
def test_a_compilation_outlives_the_process_that_began_it(gate: pathlib.Path, tmp_path: pathlib.Path) -> None:
    child = os.fork()
    if not child:
        native_library.Compilation(SOURCE)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    gate.touch()
    until(lambda: {path.suffix for path in (tmp_path / "cache").iterdir()} == {".so", ".lock"})
    assert native_library.Compilation(SOURCE).was_kept


@forks
@needs_compiler
def test_a_forked_process_looks_for_itself(library: native_library.NativeLibrary, gate: pathlib.Path) -> None:
    assert library.get() is None
    with library._lock:
        # Another thread looks, at the time of the fork.
        child = os.fork()
        if not child:
            gate.touch()
            until(library.get)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    until(library.get)


# Threads


@needs_compiler
def test_the_threads_are_those_of_torch_or_there_is_one() -> None:
    loaded = kernel.library()
    address = native_library._start_parallel()
    assert address.value or sys.platform != "linux"
    torch.set_num_threads(2)
    expected = decoded()
    loaded.kvlayers_set_start_parallel(None)
    try:
        assert torch.equal(decoded(), expected)
    finally:
        loaded.kvlayers_set_start_parallel(address)
