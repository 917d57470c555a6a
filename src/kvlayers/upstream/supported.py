"""The supported versions of transformers and torch. They are checked first, as older ones may lack what is imported."""

import contextlib
import importlib.metadata
import logging
import sys
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

logger = logging.getLogger(__name__)

SUPPORTED = {"transformers": SpecifierSet(">=4.57"), "torch": SpecifierSet(">=2.6")}

NEWEST_TESTED = Version("5.24.0")
"""The newest transformers that the tests have run on. What a newer one lacks is found by probes (`probes.py`)."""


def check_supported(package: str, version: str) -> Version:
    """The release of `version`, without development and local parts.

    Raises:
        ImportError: the release is older than the oldest supported one.
    """
    release = Version(Version(version).base_version)
    if release not in SUPPORTED[package]:
        raise ImportError(
            f"expected {package} {SUPPORTED[package]}, but saw {version}: install '{package}{SUPPORTED[package]}', "
            "or another version of kvlayers."
        )
    return release


def note_untested(transformers: Version) -> None:
    """Log one line if transformers is newer than any version that was tested."""
    if transformers > NEWEST_TESTED:
        logger.warning(
            "transformers %s is newer than %s, the newest version that kvlayers was tested with: it has all that "
            "kvlayers relies on, but compare what you generate.",
            transformers,
            NEWEST_TESTED,
        )


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
