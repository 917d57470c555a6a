"""Compiles a C++ source for this machine, in a process of its own, and keeps the library on disk.

Of all processes with the same cache directory, one compiles at a time. The compiler itself holds the lock: it may go on
when the process that began it ends, and the lock is free when the compiler ends, however it does.
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import tempfile
import time

from kvlayers.utils.native_builds import FLAGS, NATIVE, cpu_features, headers

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 600

SECONDS_BETWEEN_LOOKS = 0.2
"""At which a process looks whether another one has compiled."""

LOCK = "compile.lock"

# Done by the process that compiles, so that the library is kept even if this one ends before. The library gets its name
# in one step, because other processes may do the same.
SCRIPT = 'made=$1; target=$2; shift 2; "$@" -o "$made" && mv -f "$made" "$target" || { rm -f "$made"; exit 1; }'


class Compilation:
    """One source, as it is compiled for this machine. A library that is on disk already counts as compiled.

    Args:
        source: the file.
        niceness: of the compiler; 10 lets it run where nothing else does.

    Attributes:
        library: where the compiled library is, or will be.
        was_kept: whether it was on disk before.

    Raises:
        OSError: there is no compiler, or the cache directory is not writable.
        ValueError: `$CXX` is no command.
        subprocess.SubprocessError: the compiler does not tell its version.
    """

    def __init__(self, source: pathlib.Path, niceness: int = 0) -> None:
        found = shutil.which("g++") or shutil.which("clang++")
        # With arguments, as in "ccache g++".
        compiler = shlex.split(os.environ.get("CXX") or found or "")
        if not compiler:
            raise FileNotFoundError("no g++ or clang++ on the PATH")
        version = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, errors="replace", check=True, timeout=30
        ).stdout
        options = [*compiler, NATIVE, *FLAGS]
        self._command = [*options, str(source)]
        self._niceness = niceness
        texts = [path.read_text() for path in (source, *headers(source))]
        # Not the path: what one checkout has compiled serves another one with the same sources.
        facts = "\n".join([*texts, version, cpu_features(), *options])
        name = f"{source.stem}-{hashlib.sha256(facts.encode()).hexdigest()[:20]}.so"
        self.library = cache_directory() / name
        self.was_kept = self.library.exists()
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = self._next_look = time.monotonic()
        if not self.was_kept:
            self.library.parent.mkdir(parents=True, exist_ok=True)
            self._begin()

    def _begin(self) -> None:
        """Start the compiler, unless one runs for another process."""
        with open(self.library.parent / LOCK, "w") as lock:
            if not _is_locked_by_us(lock.fileno()) or self.library.exists():
                return
            for left in self.library.parent.glob(f"{self.library.stem}*.part"):
                # Its compiler was killed.
                left.unlink(missing_ok=True)
            logger.info("kvlayers runs %s", shlex.join(self._command))
            # The compiler makes it, with the permissions of an ordinary file.
            self._made = self.library.with_name(f"{self.library.stem}-{os.getpid()}.part")
            # No pipe: it would break if this process ended first.
            self._output = tempfile.TemporaryFile()  # noqa: SIM115
            self._deadline = time.monotonic() + COMPILE_SECONDS
            # In a session of its own, which is not interrupted with this process. It holds the lock.
            self._process = subprocess.Popen(
                ["sh", "-c", SCRIPT, "sh", str(self._made), str(self.library), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
                pass_fds=(lock.fileno(),),
            )
            if self._niceness:
                os.setpriority(os.PRIO_PGRP, self._process.pid, self._niceness)

    def wait(self) -> None:
        """Return when the library is there.

        Raises:
            RuntimeError: the compiler failed, or took more than `COMPILE_SECONDS`.
        """
        while not self.is_done():
            if self._process is None:
                time.sleep(SECONDS_BETWEEN_LOOKS)
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(max(0.0, self._deadline - time.monotonic()))

    def is_done(self) -> bool:
        """Whether the library is there. If another process compiled it, and failed, this one begins.

        Raises:
            RuntimeError: as in `wait`.
        """
        if self._process is None:
            if self.was_kept or self.library.exists():
                return True
            if time.monotonic() >= self._next_look:
                self._next_look = time.monotonic() + SECONDS_BETWEEN_LOOKS
                self._begin()
            return self.library.exists()
        if self._process.poll() is None:
            if time.monotonic() < self._deadline:
                return False
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._made.unlink(missing_ok=True)
            raise RuntimeError(f"the compiler was stopped after {COMPILE_SECONDS} seconds")
        # A process that ignores the end of others is not told how they ended.
        if self._process.returncode or not self.library.exists():
            self._output.seek(0)
            raise RuntimeError(self._output.read().decode(errors="replace").strip() or "the compiler failed")
        self._output.close()
        self._process = None
        return True


def _is_locked_by_us(descriptor: int) -> bool:
    """Whether the lock of an open file was free, and is held now; true where files have no locks."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # Some network file systems have none.
        return True
    return True


def cache_directory() -> pathlib.Path:
    """Directory of compiled kernels: `$KVLAYERS_CACHE`, or `kvlayers` in the user's cache directory."""
    if os.environ.get("KVLAYERS_CACHE"):
        return pathlib.Path(os.environ["KVLAYERS_CACHE"]).expanduser().resolve()
    if os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(os.environ["XDG_CACHE_HOME"]) / "kvlayers"
    return pathlib.Path.home() / ".cache" / "kvlayers"
