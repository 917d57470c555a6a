"""Loads kvlayers' C++ sources, each compiled once for this machine and kept on disk.

The sources use only headers of the language, so compiling takes seconds and no build system.
"""

import ctypes
import functools
import glob
import hashlib
import logging
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-Wno-psabi",
)
COMPILE_SECONDS = 300

Made = TypeVar("Made")


def once(make: Callable[[], Made]) -> Callable[[], Made]:
    """Decorator for a function that runs once and keeps its result. Concurrent first calls wait for one of them.

    (`functools.cache` would let each of them do the work.)
    """
    making, made = threading.Lock(), list[Made]()

    @functools.wraps(make)
    def kept() -> Made:
        if not made:
            with making:
                if not made:
                    made.append(make())
        return made[0]

    return kept


def compiled_library(source: pathlib.Path, *functions: str) -> ctypes.CDLL | None:
    """A source file, compiled for this CPU and loaded; `None` if that fails, with the reason logged.

    Args:
        source: the file.
        functions: names of functions that it must have.
    """
    try:
        target = _compiled(source)
        try:
            return _loaded(target, functions)
        except (OSError, AttributeError):
            # The compiled file is damaged: compile the source once more.
            target.unlink(missing_ok=True)
            return _loaded(_compiled(source), functions)
    except (OSError, AttributeError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        output = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else ""
        logger.warning(
            "kvlayers does the work of %s in plain torch, which is slower, because it could not be compiled: install "
            "g++ (or set CXX to a C++ compiler), and make the cache directory writable ($KVLAYERS_CACHE): %s",
            source.name,
            output or error,
        )
        return None


def _loaded(library: pathlib.Path, functions: Sequence[str]) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library))
    for function in functions:
        getattr(loaded, function)
    return loaded


def cache_directory() -> pathlib.Path:
    """Directory of compiled kernels: `$KVLAYERS_CACHE`, or `kvlayers` in the user's cache directory."""
    if os.environ.get("KVLAYERS_CACHE"):
        return pathlib.Path(os.environ["KVLAYERS_CACHE"]).expanduser().resolve()
    if os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(os.environ["XDG_CACHE_HOME"]) / "kvlayers"
    return pathlib.Path.home() / ".cache" / "kvlayers"


def _compiled(source: pathlib.Path) -> pathlib.Path:
    found = shutil.which("g++") or shutil.which("clang++")
    # With arguments, as in "ccache g++".
    compiler = shlex.split(os.environ.get("CXX") or found or "")
    if not compiler:
        raise FileNotFoundError("no g++ or clang++ on the PATH")
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, text=True, errors="replace", check=True, timeout=30
    ).stdout
    command = [*compiler, *FLAGS, str(source), *_openmp_of_torch()]
    facts = "\n".join([source.read_text(), version, _processor(), *command])
    target = cache_directory() / f"{source.stem}-{hashlib.sha256(facts.encode()).hexdigest()[:20]}.so"
    if target.exists():
        return target
    logger.info("kvlayers compiles %s for this CPU, once: %s", source.name, " ".join(command))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = pathlib.Path(scratch) / target.name
        subprocess.run(
            [*command, "-o", str(made)],
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
            timeout=COMPILE_SECONDS,
        )
        # In one step, because other processes may do the same.
        made.replace(target)
    return target


def _openmp_of_torch() -> list[str]:
    """Options to link torch's OpenMP runtime: the threads of a second runtime would compete with those of the first."""
    brought = sorted(glob.glob(str(pathlib.Path(torch.__file__).parent / "lib" / "libgomp*.so*")))
    return ["-Wl,--no-as-needed", brought[0], "-Wl,--as-needed"] if brought else []


def _processor() -> str:
    """The CPU features that -march=native depends on."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
