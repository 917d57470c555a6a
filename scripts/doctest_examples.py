"""For the site: mkdocstrings shows as code what follows `Examples:`, and our docstrings have one `Example:`."""

import re
from typing import Any

import griffe


class DoctestExamples(griffe.Extension):
    """Reads `Example:` in a docstring as the section `Examples:`."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename the section in the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
