"""From a cache to a file."""

import os

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvlayers.caches.base import Cache
from kvlayers.errors import CacheFileError, OptionError, StateMismatchError
from kvlayers.persistence.atomic_file import replacing
from kvlayers.persistence.checksums import checksum, digest_table
from kvlayers.persistence.fingerprint import model_record
from kvlayers.persistence.format import DIGESTS, FORMAT, FORMAT_VERSION
from kvlayers.persistence.records import described
from kvlayers.persistence.safetensors_header import TensorEntry, checked_path, read_header


def save_cache(
    cache: Cache,
    path: str | os.PathLike[str],
    *,
    token_ids: Tensor | None = None,
    config: object | None = None,
    weights_id: str | None = None,
) -> None:
    """Write a cache to a file, from which `load_cache` makes one that goes on decoding as this one does.

    Live tokens alone are written, and packed ones as they are packed. The file is a safetensors file, and is put in the
    place of an older one when it is complete and on disk: whatever happens meanwhile, the one or the other is there.

    Args:
        cache: a cache of kvlayers, which stays what it is.
        path: the file. Its directory must exist.
        token_ids: ids of the tokens that the cache has seen, `[batch, tokens]`, for `CacheFile.token_ids()`.
        config: config of the model, or the model, so that the file is refused for another one.
        weights_id: what the model's weights are called, so that the file can be refused for others; see `weights_id()`.

    Raises:
        CachePathError: the directory is missing or cannot be written to, or there is something at `path` that is no
            file. What was there is there still.
        OptionError: an argument that is nothing of the kind, or ids of other tokens.
        StateMismatchError: a layer holds what a file cannot.

    Example:
        >>> import tempfile, torch, kvlayers
        >>> cache = kvlayers.DynamicCache()
        >>> _ = cache.update(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), layer_idx=0)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = f"{directory}/chat.safetensors"
        ...     kvlayers.save_cache(cache, path, token_ids=torch.tensor([[1, 2, 3, 4, 5]]))
        ...     kvlayers.load_cache(path), kvlayers.inspect_cache(path).token_ids()
        (DynamicCache(1 x DynamicLayer, 5 tokens, batch 1, 16.6 KiB), tensor([[1, 2, 3, 4, 5]]))
    """
    path = checked_path(path)
    if not isinstance(cache, Cache):
        raise OptionError(
            f"expected a cache of kvlayers, but saw a {type(cache).__module__}.{type(cache).__name__}: make one, for "
            "example with kvlayers.DynamicCache.from_legacy_cache()."
        )
    with replacing(path) as temporary, torch.no_grad():
        # In here, as a path that cannot be written to should not cost a copy of all states.
        model = model_record(config, cache.is_pair, weights_id)
        description, tensors = described(cache, model, token_ids)
        text = description.to_json()
        entries = {name: TensorEntry(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        digests = digest_table(tensors)
        metadata = {
            "format": FORMAT,
            "format_version": str(FORMAT_VERSION),
            "description": text,
            "checksum": checksum(text, entries, digests),
        }
        save_file({**tensors, DIGESTS: digests}, temporary, metadata=metadata)
        _check_readable(temporary)


def _check_readable(path: str) -> None:
    """Raise `StateMismatchError` where a file that was written could not be read: it must not replace one that can."""
    try:
        read_header(path)
    except CacheFileError as error:
        raise StateMismatchError(f"expected a cache that a file can hold, but: {error}") from error
