"""Imports of the packages that some backends need."""

import importlib
from types import ModuleType

from kvlayers.errors import OptionError


def required(module: str, package: str, backend: str, extra: str) -> ModuleType:
    """Import a module.

    Args:
        module: its name.
        package: name of its package for pip.
        backend: the backend that needs it.
        extra: the extra of kvlayers that installs it.

    Raises:
        OptionError: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise OptionError(
            f"The {backend} backend needs the package {package}, but importing {module} failed ({error}): run "
            f'`pip install {package}`, or `pip install "kvlayers[{extra}]"`.'
        ) from error
