"""Packages that some backends need."""

import importlib
from types import ModuleType

from kvlayers.errors import OptionError


def required(module: str, package: str, backend: str, extra: str) -> ModuleType:
    """Import a module.

    Args:
        module: its name.
        package: what pip calls the package that has it.
        backend: the backend that needs it.
        extra: the extra of kvlayers that brings it.

    Raises:
        OptionError: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise OptionError(
            f"expected the package {package} to be installed, as the {backend} backend computes with it, but importing "
            f'{module} failed ({error}): run `pip install {package}`, or `pip install "kvlayers[{extra}]"`.'
        ) from error
