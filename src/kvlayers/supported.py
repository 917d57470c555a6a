"""Which versions of transformers and torch kvlayers runs on: checked first, as others may lack what it imports."""

import contextlib
import importlib.metadata
import sys

import transformers
from packaging.specifiers import SpecifierSet
from packaging.version import Version

AS_FIRST_IMPORTED = transformers
"""The module that code has which imported it early: what models import may execute it once more, as another module."""

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
    """Check the versions that are there, without an import of torch. Raises as `check_supported`."""
    check_supported("transformers", transformers.__version__)
    loaded = sys.modules.get("torch")
    # A build of one's own may have no metadata: then `compat` finds out.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        check_supported("torch", loaded.__version__ if loaded else importlib.metadata.version("torch"))
