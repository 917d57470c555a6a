"""Which versions of transformers and torch kvlayers runs on: checked first, as others may lack what it imports."""

import contextlib
import importlib.metadata
import sys
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

SUPPORTED = {"transformers": SpecifierSet(">=4.57,<6"), "torch": SpecifierSet(">=2.6")}


def check_supported(package: str, version: str) -> Version:
    """The release that `version` belongs to, development builds included.

    Raises:
        ImportError: kvlayers does not work with it.
    """
    release = Version(Version(version).base_version)
    if release not in SUPPORTED[package]:
        raise ImportError(
            f"expected {package} {SUPPORTED[package]}, but saw {version}: install '{package}{SUPPORTED[package]}', or "
            "another version of kvlayers."
        )
    return release


def check_installed() -> None:
    """Check the versions that are there, without an import of either package. Raises as `check_supported`."""
    for package in SUPPORTED:
        loaded = sys.modules.get(package)
        # A build of one's own may have no metadata: then `compat` finds out.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            check_supported(package, loaded.__version__ if loaded else importlib.metadata.version(package))


def is_command() -> bool:
    """Whether this process is the command `kvlayers`, or `python -m kvlayers`.

    The command answers `--help` without transformers, and names a version that it cannot run on in one line. Where
    this is true of another process by mistake, `compat` raises for such a version when it is first imported.
    """
    started = Path(sys.argv[0]).stem if sys.argv else ""
    # While Python looks for the module to run, that is the first argument.
    return started in ("kvlayers", "kvlayers-script") or (started == "-m" and "kvlayers" in sys.orig_argv)
