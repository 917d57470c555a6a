"""Loads kvlayers' C++ sources as libraries, from the wheel or compiled for this machine.

A compiler runs in a process of its own, and the library is kept on disk. Of all processes with the same cache
directory, one compiles at a time. The compiler itself holds the lock: it may go on when the process that began it ends,
and the lock is free when the compiler ends, however it does.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import pathlib
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import torch

from kvlayers.errors import KernelError, OptionError
from kvlayers.utils.native_builds import FLAGS, NATIVE, best_build, cpu_features, headers

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 600

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
        # `$CXX` may have arguments, as in "ccache g++".
        compiler = shlex.split(os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or "")
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
        self.library = cache_directory() / f"{source.stem}-{hashlib.sha256(facts.encode()).hexdigest()[:20]}.so"
        self.was_kept = self.library.exists()
        self._process: subprocess.Popen[bytes] | None = None
        if not self.was_kept:
            self.library.parent.mkdir(parents=True, exist_ok=True)
            self._begin()

    def _begin(self) -> None:
        """Start the compiler, unless one runs for another process."""
        with open(self.library.parent / LOCK, "w") as lock:
            try:
                import fcntl

                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            except (ImportError, OSError):
                # Windows has no locks, nor have some network file systems.
                logger.debug("kvlayers compiles without a lock in %s", self.library.parent)
            if self.library.exists():
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
            script = ["nice", "-n", str(self._niceness), "sh", "-c", SCRIPT]
            self._process = subprocess.Popen(
                [*script, "sh", str(self._made), str(self.library), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
                pass_fds=(lock.fileno(),),
            )

    def wait(self) -> None:
        """Return when the library is there.

        Raises:
            RuntimeError: the compiler failed, or took more than `COMPILE_SECONDS`.
        """
        while not self.is_done():
            time.sleep(0.02)

    def is_done(self) -> bool:
        """Whether the library is there. If another process compiled it, and failed, this one begins.

        Raises:
            RuntimeError: as in `wait`.
        """
        if self._process is None:
            if not self.library.exists():
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


def cache_directory() -> pathlib.Path:
    """Directory of compiled kernels: `$KVLAYERS_CACHE`, or `kvlayers` in the user's cache directory."""
    if own := os.environ.get("KVLAYERS_CACHE"):
        return pathlib.Path(own).expanduser().resolve()
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "kvlayers"


VARIABLE = "KVLAYERS_COMPILE"
"""Environment variable that says how a library is compiled: in the `background` (the default), while the process waits
(`wait`), or `never`."""

CHOICES = ("background", "wait", "never")

BACKGROUND_NICENESS = 10

ANNOUNCEMENTS = {
    "background": "kvlayers compiles its kernels for this CPU, once, in the background: up to half a minute, the most "
    "used first. Until then steps are slower than they will be. `kvlayers compile` does it ahead of time.",
    "wait": "kvlayers compiles its kernels for this CPU, once, and waits for them: up to half a minute.",
}

_announced: set[str] = set()
"""What this process has said already: one line tells of all libraries, and one of the first that failed."""


def compile_choice() -> str:
    """What `KVLAYERS_COMPILE` says.

    Raises:
        OptionError: it has another value than its three.
    """
    choice = os.environ.get(VARIABLE) or CHOICES[0]
    if choice not in CHOICES:
        raise OptionError(
            f"The environment variable {VARIABLE} must be one of {', '.join(CHOICES)}, got {choice!r}: set it to one "
            "of these, or unset it."
        )
    return choice


class NativeLibrary:
    """A C++ source as a library, which is loaded when it is first asked for. Threads may ask at once.

    The first of these is used:

    1. The library that the wheel has for this CPU.
    2. One that was compiled for this CPU before, in the cache directory.
    3. One that is compiled now, in another process. Until it is done there is no library.

    Args:
        source: the file.
        functions: names of functions that it must have.
        purpose: what it is for, such as "attention", which is an attribute as well.
    """

    def __init__(self, source: pathlib.Path, *functions: str, purpose: str) -> None:
        self._source = source
        self.purpose = purpose
        self._functions = functions
        self._loaded: ctypes.CDLL | None = None
        self._failure: str | None = None
        self._reason = ""
        self.forget_compilation()
        if sys.platform != "win32":
            os.register_at_fork(after_in_child=self.forget_compilation)

    def forget_compilation(self) -> None:
        """Look anew when the library is next needed: a process cannot wait for what its parent has begun."""
        self._lock = threading.Lock()
        self._compilation: Compilation | None = None

    @property
    def obstacle(self) -> str:
        """Why `get` has returned no library."""
        return self._failure or "is still being compiled"

    def begin(self) -> None:
        """Begin to compile the library now if it is not there, or wait for it, rather than when it is first needed.

        Nothing is begun on a machine with an accelerator, whose states are rarely on the CPU.

        Raises:
            OptionError: as `get`.
        """
        compile_choice()
        if not (torch.compiler.is_compiling() or torch.accelerator.is_available()):
            self.get()

    def compile(self) -> pathlib.Path:
        """The file of the library. If it is not there, it is compiled now, whatever `KVLAYERS_COMPILE` says.

        Raises:
            KernelError: it cannot be compiled.
        """
        with self._lock:
            if self._loaded is None:
                self._failure = None
                self._look("wait")
        if self._loaded is None:
            raise KernelError(
                f"The kernel for {self.purpose} must be compiled by g++ or clang++ (or $CXX) into the cache directory "
                f"($KVLAYERS_CACHE), got: {self._reason}: install a compiler, or make the directory writable."
            )
        return pathlib.Path(self._loaded._name)

    def get(self) -> ctypes.CDLL | None:
        """The library; `None` while it is compiled, and if that has failed. The reason is logged once.

        Raises:
            OptionError: the environment variable `KVLAYERS_COMPILE` has another value than its three.
        """
        if self._loaded is None and self._failure is None:
            with self._lock:
                if self._loaded is None and self._failure is None:
                    self._look(compile_choice())
        return self._loaded

    def _look(self, choice: str) -> None:
        if self._compilation is None and self._load_built():
            return
        if choice == "never" and self._compilation is None:
            self._failure = f"is not compiled, as ${VARIABLE} is never"
            logger.info("kvlayers does the work of %s in plain torch, as $%s is never", self._source.name, VARIABLE)
            return
        try:
            self._compile(choice)
        except (OSError, AttributeError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            self._compilation = None
            self._failure = "could not be compiled (the log says why)"
            output = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else ""
            self._reason = output or str(error)
            if "failed" not in _announced:
                _announced.add("failed")
                logger.warning(
                    "kvlayers computes in plain torch, which is slower, because its kernels could not be compiled: "
                    "install a wheel of kvlayers for this platform, or install g++ (or set CXX to a C++ compiler) and "
                    "make the cache directory writable ($KVLAYERS_CACHE): %s",
                    self._reason,
                )

    def _load_built(self) -> bool:
        """Load the library of the wheel, if there is one for this CPU."""
        build = best_build(platform.machine(), cpu_features().split())
        if build is None or not (path := build.library(self._source)).exists():
            return False
        try:
            self._load(path)
        except (OSError, AttributeError) as error:
            logger.info("kvlayers compiles %s, because %s cannot be loaded: %s", self._source.name, path, error)
            return False
        return True

    def _compile(self, choice: str) -> None:
        if self._compilation is None:
            self._compilation = Compilation(self._source, BACKGROUND_NICENESS if choice == "background" else 0)
            if not self._compilation.was_kept and choice not in _announced:
                _announced.add(choice)
                logger.warning(ANNOUNCEMENTS[choice])
        if choice == "wait":
            self._compilation.wait()
        if self._compilation.is_done():
            compilation, self._compilation = self._compilation, None
            try:
                self._load(compilation.library)
            except (OSError, AttributeError):
                if not compilation.was_kept:
                    raise
                # The file is damaged: compile the source once more.
                compilation.library.unlink(missing_ok=True)
                self._compile(choice)

    def _load(self, path: pathlib.Path) -> None:
        library = ctypes.CDLL(str(path))
        for function in self._functions:
            getattr(library, function)
        library.kvlayers_set_start_parallel(_start_parallel())
        logger.info("kvlayers uses %s", path)
        self._loaded = library


def _start_parallel() -> ctypes.c_void_p:
    """Address of the function that starts threads of torch's OpenMP runtime (`parallel.h`); null if it is not found."""
    # As torch's own calls find it: what is loaded for all libraries comes first, then what torch was linked with.
    for place in (None, *map(str, sorted((pathlib.Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")))):
        with contextlib.suppress(OSError, AttributeError):
            return ctypes.cast(ctypes.CDLL(place).GOMP_parallel, ctypes.c_void_p)
    logger.info("kvlayers' kernels run on one thread: torch's OpenMP runtime has no GOMP_parallel")
    return ctypes.c_void_p()
