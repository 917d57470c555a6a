"""The module `transformers` as it was when kvlayers was imported."""

import transformers

AS_FIRST_IMPORTED = transformers
"""The module object that early importers have. Importing a model may execute the module again, as another object."""
