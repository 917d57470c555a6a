"""Puts compiled kernels into the wheel, if `KVLAYERS_WHEEL` names the platform that it is for. See CONTRIBUTING.md.

The compiler is that of `ziglang`, which compiles for every platform on every machine. `KVLAYERS_WHEEL_CXX` is the
command of another one, which takes the options of g++.
"""

import os
import pathlib
import runpy
import shlex
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = pathlib.Path(__file__).parent / "src" / "kvlayers"
PLATFORMS = {"manylinux_2_17_x86_64": "x86_64", "manylinux_2_17_aarch64": "aarch64"}
"""The tag of a wheel, and the machine that it is for. manylinux_2_17 means glibc 2.17 and newer."""


class KernelHook(BuildHookInterface):
    """Compiles the C++ sources for each kind of CPU of one platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries to the wheel, and give it the tag of its platform."""
        platform = os.environ.get("KVLAYERS_WHEEL")
        if self.target_name != "wheel" or version == "editable" or not platform:
            return
        if platform not in PLATFORMS:
            raise ValueError(f"KVLAYERS_WHEEL must be one of {', '.join(PLATFORMS)}, got {platform!r}")
        self.scratch = tempfile.TemporaryDirectory()
        builds = SimpleNamespace(**runpy.run_path(str(PACKAGE / "utils" / "native_builds.py")))
        for build in builds.BUILDS:
            if build.machine != PLATFORMS[platform]:
                continue
            for name in builds.SOURCES:
                source = PACKAGE / name
                library = pathlib.Path(self.scratch.name) / build.library(source).name
                command = [*compiler(build), *builds.FLAGS, "-s", name, "-o", str(library)]
                self.app.display_info(shlex.join(command))
                # With a relative path, so that the same sources give the same file in every directory.
                subprocess.run(command, check=True, cwd=PACKAGE)
                build_data["force_include"][str(library)] = build.library(pathlib.PurePath("kvlayers", name)).as_posix()
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled: it is in the wheel."""
        if scratch := getattr(self, "scratch", None):
            scratch.cleanup()


def compiler(build: Any) -> list[str]:
    """Command of the compiler, with the options that say what it compiles for."""
    cpu, *extensions = build.cpu.split("+")
    if chosen := os.environ.get("KVLAYERS_WHEEL_CXX"):
        return [*shlex.split(chosen), f"-march={cpu}", *(f"-m{extension}" for extension in extensions)]
    # zig writes x86_64_v3 instead of x86-64-v3, and generic instead of armv8-a.
    name = "generic" if cpu == "armv8-a" else cpu.replace("-", "_")
    zig = [sys.executable, "-m", "ziglang", "c++"]
    return [*zig, "-target", f"{build.machine}-linux-gnu.2.17", "-mcpu=" + "+".join([name, *extensions])]
