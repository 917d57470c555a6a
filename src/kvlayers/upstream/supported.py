"""The supported versions of transformers and torch. They are checked first, as others may lack what is imported."""

import contextlib
import importlib.metadata
import sys
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

SUPPORTED = {"transformers": SpecifierSet(">=4.57"), "torch": SpecifierSet(">=2.6")}


def check_supported(package: str, version: str) -> Version:
    """The release of `version`, without development and local parts.

    Raises:
        ImportError: the release is not supported.
    """
    release = Version(Version(version).base_version)
    if release not in SUPPORTED[package]:
        raise ImportError(
            f"expected {package} {SUPPORTED[package]}, but saw {version}: install '{package}{SUPPORTED[package]}', "
            "or another version of kvlayers."
        )
    return release


def check_installed() -> None:
    """Check the installed versions, without importing either package. Raises as `check_supported`."""
    for package in SUPPORTED:
        loaded = sys.modules.get(package)
        # A package built from source may have no metadata. Then `compat` checks it.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            check_supported(package, loaded.__version__ if loaded else importlib.metadata.version(package))


def is_command() -> bool:
    """Whether this process is the command `kvlayers`, or `python -m kvlayers`.

    The command answers `--help` without transformers, and reports an unsupported version in one line. If another
    process is mistaken for the command, `compat` raises for such a version when it is first imported.
    """
    started = Path(sys.argv[0]).stem if sys.argv else ""
    # While Python looks for the module to run, the first argument is "-m".
    return started in ("kvlayers", "kvlayers-script") or (started == "-m" and "kvlayers" in sys.orig_argv)
