"""Puts compiled kernels into the wheel. See CONTRIBUTING.md.

`pip install .` makes a wheel for this machine: with g++ or clang++ (or `$CXX`), if there is one. `KVLAYERS_WHEEL` names
another platform, whose wheel has the kernels for all of its kinds of CPU, or is `any` for a wheel without kernels. The
compiler of such a wheel is that of `ziglang`, which compiles for every platform on every machine. `KVLAYERS_WHEEL_CXX`
is the command of another one, which takes the options of g++.
"""

import os
import pathlib
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent import futures
from types import SimpleNamespace
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = pathlib.Path(__file__).parent / "src" / "kvlayers"
PLATFORMS = {"manylinux_2_17_x86_64": "x86_64", "manylinux_2_17_aarch64": "aarch64"}
"""The tag of a wheel, and the machine that it is for. manylinux_2_17 means glibc 2.17 and newer."""
ANY = "any"
NATIVE_BUILDS = SimpleNamespace(**runpy.run_path(str(PACKAGE / "utils" / "native_builds.py")))


class KernelHook(BuildHookInterface):
    """Compiles the C++ sources for each kind of CPU of one platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries to the wheel, and give it the tag of its platform."""
        wanted = os.environ.get("KVLAYERS_WHEEL")
        if self.target_name != "wheel" or version == "editable" or wanted == ANY:
            return
        if wanted and wanted not in PLATFORMS:
            raise ValueError(f"KVLAYERS_WHEEL must be one of {', '.join((ANY, *PLATFORMS))}, got {wanted!r}")
        self.scratch = tempfile.TemporaryDirectory()
        if wanted:
            commands = {build: compiler(build) for build in NATIVE_BUILDS.BUILDS if build.machine == PLATFORMS[wanted]}
            libraries = self.compile(commands)
        else:
            libraries = self.compile_for_this_machine()
        if libraries:
            build_data["force_include"].update(libraries)
            build_data["tag"] = f"py3-none-{wanted or f'linux_{platform.machine()}'}"
            build_data["pure_python"] = False

    def compile_for_this_machine(self) -> dict[str, str]:
        """As `compile`, by this machine's compiler; nothing where it has none, or where that fails."""
        found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        build = NATIVE_BUILDS.best_build(platform.machine(), NATIVE_BUILDS.cpu_features().split())
        if build is None or platform.system() != "Linux":
            return self.without_kernels(f"there are none for {platform.system()} on this {platform.machine()}")
        if not found:
            return self.without_kernels("there is no C++ compiler: install g++ or clang++, and install kvlayers again")
        cpu, *extensions = build.cpu.split("+")
        command = [*shlex.split(found), f"-march={cpu}", *(f"-m{extension}" for extension in extensions)]
        try:
            return self.compile({build: command})
        except (OSError, subprocess.CalledProcessError) as error:
            return self.without_kernels(f"they cannot be compiled: {error}")

    def without_kernels(self, reason: str) -> dict[str, str]:
        """Say that the wheel has no kernels. pip shows it with `-v`, and `python -m build` always."""
        self.app.display_warning(
            f"kvlayers: the kernels for CPUs are not in the wheel, because {reason}. Without them, long contexts gain "
            "less on a CPU, and short ones lose: int4 is slower than transformers' DynamicCache at 1,024 tokens."
        )
        return {}

    def compile(self, commands: dict[Any, list[str]]) -> dict[str, str]:
        """Compile the sources for kinds of CPU, given the command of the compiler for each.

        Returns:
            For each file that was made, where it is in the wheel.
        """
        libraries, commands_of_files = {}, []
        for build, compiler_command in commands.items():
            for name in NATIVE_BUILDS.SOURCES:
                library = pathlib.Path(self.scratch.name) / build.library(PACKAGE / name).name
                command = [*compiler_command, *NATIVE_BUILDS.FLAGS, "-s", name, "-o", str(library)]
                self.app.display_info(shlex.join(command))
                commands_of_files.append(command)
                libraries[str(library)] = build.library(pathlib.PurePath("kvlayers", name)).as_posix()
        with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run_compiler, commands_of_files))
        return libraries

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled: it is in the wheel."""
        if scratch := getattr(self, "scratch", None):
            scratch.cleanup()


def run_compiler(command: list[str]) -> None:
    """Run a compiler. Its paths are relative, so that the same sources give the same file in every directory."""
    subprocess.run(command, check=True, cwd=PACKAGE)


def compiler(build: Any) -> list[str]:
    """Command of the compiler, with the options that say what it compiles for."""
    cpu, *extensions = build.cpu.split("+")
    if chosen := os.environ.get("KVLAYERS_WHEEL_CXX"):
        return [*shlex.split(chosen), f"-march={cpu}", *(f"-m{extension}" for extension in extensions)]
    # zig writes x86_64_v3 instead of x86-64-v3, and generic instead of armv8-a.
    name = "generic" if cpu == "armv8-a" else cpu.replace("-", "_")
    zig = [sys.executable, "-m", "ziglang", "c++"]
    return [*zig, "-target", f"{build.machine}-linux-gnu.2.17", "-mcpu=" + "+".join([name, *extensions])]
