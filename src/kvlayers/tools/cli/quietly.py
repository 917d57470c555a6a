"""Other libraries' advice kept out of what commands print."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as transformers_logging


@contextmanager
def few_words() -> Iterator[None]:
    """Keep transformers' advice, and the hub's account of its attempts, out of what a command shows."""
    before = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before[0])
        hub_logging.set_verbosity(before[1])
