"""The errors of kvlayers: one base class, a few named ones.

Each is raised before anything is changed, and its message says what was expected, what was seen and what to do.
Each also inherits the built-in exception that transformers or Python would have raised, so that existing handlers
go on working.
"""


class KVLayersError(Exception):
    """Base class of every error that kvlayers raises on purpose."""


class StateMismatchError(KVLayersError, ValueError):
    """States do not fit those that are held: another batch size, kv_heads, head_dim, dtype, device or rank."""


class PromptMismatchError(StateMismatchError):
    """A prompt begins with other tokens than those that the cache has seen, under `install(strict_prompts=True)`."""


class LayerIndexError(KVLayersError, IndexError):
    """The cache has no layer at that index."""


class BatchIndexError(KVLayersError, IndexError):
    """Batch indices are empty, out of range, or not whole numbers."""


class CapacityError(KVLayersError, ValueError, IndexError):
    """More tokens than a fixed reservation can hold, or more bytes than a budget has."""


class RollbackError(KVLayersError, ValueError):
    """The cache cannot be put back to the length that was asked for."""


class OptionError(KVLayersError, TypeError, ValueError):
    """An option that does not exist, is missing, or has a value of the wrong kind."""


class ConfigError(KVLayersError, ValueError):
    """A model config lacks what the cache needs to know."""


class RegistryError(KVLayersError, ValueError):
    """A cache name is unknown, empty or taken."""


class LegacyFormatError(KVLayersError, ValueError):
    """Legacy tuples are nested in a way that no cache can take, or a cache has no faithful tuple form."""


class UnsupportedLayerError(KVLayersError, TypeError):
    """A layer class of transformers cannot do what was asked of it."""


class InterruptedPassError(KVLayersError, RuntimeError):
    """A forward pass was interrupted, and left layers that have seen different tokens: crop or reset the cache."""


class StaleStatesError(KVLayersError, RuntimeError):
    """States that a cache returned are read after it has changed."""


class ReadOnlyStatesError(KVLayersError, RuntimeError):
    """States of a cache, as attention reads them, are written to."""


class CacheFileError(KVLayersError, ValueError):
    """A file is damaged, or no file of a cache, or holds what cannot be loaded as it was asked for."""


class CachePathError(KVLayersError, OSError):
    """A file cannot be read from or written to the path that was given."""


class ModelMismatchError(KVLayersError, ValueError):
    """The states in a file are another model's."""


class PrefixError(KVLayersError, LookupError):
    """A prefix store holds nothing, or nothing pinned, for the tokens that were given."""
