"""Compiles a C++ source for this machine, in a process of its own, and keeps the library on disk."""

import contextlib
import hashlib
import logging
import os
import pathlib
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time

from kvlayers.utils.native_builds import FLAGS, NATIVE, headers

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 600

# Done by the process that compiles, so that the library is kept even if this one ends before. The library gets its name
# in one step, because other processes may do the same.
SCRIPT = 'made=$1; target=$2; shift 2; "$@" -o "$made" && mv -f "$made" "$target" || { rm -f "$made"; exit 1; }'


class Compilation:
    """One source, as it is compiled for this machine. A library that is on disk already counts as compiled.

    Args:
        source: the file.

    Attributes:
        library: where the compiled library is, or will be.
        was_kept: whether it was on disk before.

    Raises:
        OSError: there is no compiler, or the cache directory is not writable.
        ValueError: `$CXX` is no command.
        subprocess.SubprocessError: the compiler does not tell its version.
    """

    def __init__(self, source: pathlib.Path) -> None:
        found = shutil.which("g++") or shutil.which("clang++")
        # With arguments, as in "ccache g++".
        compiler = shlex.split(os.environ.get("CXX") or found or "")
        if not compiler:
            raise FileNotFoundError("no g++ or clang++ on the PATH")
        version = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, errors="replace", check=True, timeout=30
        ).stdout
        command = [*compiler, NATIVE, *FLAGS, str(source)]
        texts = [path.read_text() for path in (source, *headers(source))]
        facts = "\n".join([*texts, version, cpu_features(), *command])
        name = f"{source.stem}-{hashlib.sha256(facts.encode()).hexdigest()[:20]}.so"
        self.library = cache_directory() / name
        self.was_kept = self.library.exists()
        self._process: subprocess.Popen[bytes] | None = None
        if self.was_kept:
            return
        logger.info("kvlayers compiles %s for this CPU, once: %s", source.name, " ".join(command))
        self.library.parent.mkdir(parents=True, exist_ok=True)
        handle, self._made = tempfile.mkstemp(prefix=self.library.stem, suffix=".part", dir=self.library.parent)
        os.close(handle)
        # The compiler writes it anew, with the permissions of an ordinary file.
        os.unlink(self._made)
        # No pipe: it would break if this process ended first.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._deadline = time.monotonic() + COMPILE_SECONDS
        # In a session of its own, which is not interrupted with this process.
        self._process = subprocess.Popen(
            ["sh", "-c", SCRIPT, "sh", self._made, str(self.library), *command],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def yield_cores(self) -> None:
        """Let the compiler run where nothing else does: this process has something to do meanwhile."""
        if self._process is not None:
            os.setpriority(os.PRIO_PGRP, self._process.pid, 10)

    def wait(self) -> None:
        """Return when the library is there.

        Raises:
            RuntimeError: the compiler failed, or took more than `COMPILE_SECONDS`.
        """
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, self._deadline - time.monotonic()))
        self.is_done()

    def is_done(self) -> bool:
        """Whether the library is there.

        Raises:
            RuntimeError: as in `wait`.
        """
        if self._process is None:
            return True
        if self._process.poll() is None:
            if time.monotonic() < self._deadline:
                return False
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            pathlib.Path(self._made).unlink(missing_ok=True)
            raise RuntimeError(f"the compiler was stopped after {COMPILE_SECONDS} seconds")
        # A process that ignores the end of others is not told how they ended.
        if self._process.returncode or not self.library.exists():
            self._output.seek(0)
            raise RuntimeError(self._output.read().decode(errors="replace").strip() or "the compiler failed")
        self._output.close()
        self._process = None
        return True


def cache_directory() -> pathlib.Path:
    """Directory of compiled kernels: `$KVLAYERS_CACHE`, or `kvlayers` in the user's cache directory."""
    if os.environ.get("KVLAYERS_CACHE"):
        return pathlib.Path(os.environ["KVLAYERS_CACHE"]).expanduser().resolve()
    if os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(os.environ["XDG_CACHE_HOME"]) / "kvlayers"
    return pathlib.Path.home() / ".cache" / "kvlayers"


def cpu_features() -> str:
    """Names of what the CPU can do, as the kernel of Linux has them, separated by spaces; elsewhere the CPU's name."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features"))).partition(":")[2]
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
