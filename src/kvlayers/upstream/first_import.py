"""The module `transformers` as it is when kvlayers is imported."""

import transformers

AS_FIRST_IMPORTED = transformers
"""The module that code has which imported it early: what models import may execute it once more, as another module."""
