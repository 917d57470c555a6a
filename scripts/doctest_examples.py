"""An extension for the site: mkdocstrings shows `Examples:` as code, and the docstrings here have `Example:`."""

import re
from typing import Any

import griffe


class DoctestExamples(griffe.Extension):
    """Renames the section `Example:` of docstrings to `Examples:`."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename the section in the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
