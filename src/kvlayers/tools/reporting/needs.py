"""What reports are made with, which is not installed with kvlayers itself."""

import importlib.util

PACKAGES = ("jinja2", "matplotlib")
REMEDY = 'pip install "kvlayers[report]"'


def missing_packages() -> list[str]:
    """Those of `PACKAGES` that are not there."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]
