"""The errors of kvlayers.

An error is raised before anything is changed. Its message says what was wrong, what was given, and what to do. Each
class also inherits from the built-in exception that transformers or Python would have raised, so that existing handlers
continue to work.
"""


class KVLayersError(Exception):
    """Base class of all errors of kvlayers."""


class StateMismatchError(KVLayersError, ValueError):
    """States differ from the held states in batch size, kv_heads, head_dim, dtype, device or rank."""


class PromptMismatchError(StateMismatchError):
    """A prompt starts with other tokens than the cache has seen, under `install(strict_prompts=True)`."""


class LayerIndexError(KVLayersError, IndexError):
    """The cache has no layer with this index."""


class BatchIndexError(KVLayersError, IndexError):
    """Batch indices are empty, out of range, or not integers."""


class CapacityError(KVLayersError, ValueError, IndexError):
    """More tokens than fit into a reservation, or more bytes than a budget allows."""


class RollbackError(KVLayersError, ValueError):
    """The cache cannot be rolled back to the requested length."""


class OptionError(KVLayersError, TypeError, ValueError):
    """An option does not exist, is missing, or has a wrong value."""


class ConfigError(KVLayersError, ValueError):
    """A model config lacks information that the cache needs, or the model does not fit the cache."""


class RegistryError(KVLayersError, ValueError):
    """A name is unknown, empty, or registered already, or a class does not say what it must."""


class LegacyFormatError(KVLayersError, ValueError):
    """Legacy tuples have an invalid structure, or a cache cannot be represented as tuples."""


class UnsupportedLayerError(KVLayersError, TypeError):
    """A layer does not support the requested operation."""


class InterruptedPassError(KVLayersError, RuntimeError):
    """An interrupted forward pass has left layers that have seen different tokens: crop or reset the cache."""


class KernelError(KVLayersError, RuntimeError):
    """A kernel cannot be compiled for this machine."""


class UnusedCacheError(KVLayersError, RuntimeError):
    """A cache was passed to `generate()`, but the model never updated it."""


class StaleStatesError(KVLayersError, RuntimeError):
    """States that a cache has returned are read after the cache has changed."""


class ReadOnlyStatesError(KVLayersError, RuntimeError):
    """States that a cache has returned for attention are written to."""


class CacheFileError(KVLayersError, ValueError):
    """A file is damaged, is not a cache file, or cannot be loaded in the requested way."""


class CachePathError(KVLayersError, OSError):
    """A file cannot be read from, or written to, the given path."""


class ModelMismatchError(KVLayersError, ValueError):
    """The states in a file belong to another model."""


class PrefixError(KVLayersError, LookupError):
    """A prefix store has no entry, or no pinned entry, for the given tokens."""
