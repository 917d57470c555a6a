"""How the C++ sources are compiled: for this machine, and for the kinds of CPU whose libraries are in wheels.

This file imports nothing of kvlayers and no torch, because the build of the package (`hatch_build.py`) reads it.
"""

import dataclasses
import pathlib
import platform
from collections.abc import Collection

FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-ffp-contract=fast", "-fPIC", "-shared", "-Wno-psabi")

NATIVE = "-march=native"

SOURCES = (
    "kernels/attention/cpu/kernel.cpp",
    "kernels/attention/cpu/many_queries.cpp",
    "kernels/attention/cpu/whole_products.cpp",
    "kernels/codes/pack.cpp",
    "kernels/attention/cpu/other_products.cpp",
)
"""The files that are compiled, each to one library, relative to the package."""

HEADERS = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Build:
    """A kind of CPU whose libraries are in wheels.

    Attributes:
        name: what its files are called after.
        machine: what `platform.machine()` says there.
        cpu: name that g++ has for it (-march), and behind + an extension of it (-m).
        features: what a CPU must be able to do, as the kernel of Linux calls it. A file would crash elsewhere.
    """

    name: str
    machine: str
    cpu: str
    features: frozenset[str]

    def library(self, source: pathlib.Path) -> pathlib.Path:
        """The file beside a source that holds its library."""
        return source.with_name(f"{source.stem}-{self.name}.so")


_X86_64_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"))
_X86_64_V4 = _X86_64_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

BUILDS = (
    Build(
        "avx512-bf16",
        "x86_64",
        "x86-64-v4+avx512bf16+avx512vnni",
        _X86_64_V4 | {"avx512_bf16", "avx512_vnni"},
    ),
    Build("avx2", "x86_64", "x86-64-v3", _X86_64_V3),
    # Every 64-bit Arm CPU can do what its compilers take for granted.
    Build("arm64", "aarch64", "armv8-a", frozenset()),
)
"""The fastest first."""


def cpu_features() -> str:
    """Names of what the CPU can do, as the kernel of Linux has them, separated by spaces; elsewhere the CPU's name."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features"))).partition(":")[2]
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def best_build(machine: str, features: Collection[str]) -> Build | None:
    """The fastest build that runs on a machine, `None` if no build does."""
    return next((build for build in BUILDS if build.machine == machine and build.features.issubset(features)), None)


def headers(source: pathlib.Path) -> list[pathlib.Path]:
    """The files that a source may include, in an order that is the same everywhere."""
    return sorted({*source.parent.glob("*.h"), *HEADERS.glob("*.h")})
