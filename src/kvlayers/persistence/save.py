"""Saves a cache to a file."""

import os

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvlayers.caches.base import Cache
from kvlayers.caches.encoder_decoder import EncoderDecoderCache
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
    """Write a cache to a file, from which `load_cache` makes a cache that continues decoding in the same way.

    Only live tokens are written, and packed tokens stay packed. The file is a safetensors file. It replaces an older
    file once it is complete and on disk, so at any time either the old or the new file exists.

    Args:
        cache: a cache of kvlayers. It is not changed.
        path: the file. Its directory must exist.
        token_ids: ids of the tokens that the cache has seen, `[batch, tokens]`, for `CacheFile.token_ids()`.
        config: config of the model, or the model, so that `load_cache` can refuse the file for another model.
        weights_id: id of the model's weights, so that `load_cache` can refuse the file for others; see `weights_id()`.

    Raises:
        CachePathError: the directory is missing or cannot be written to, or `path` is not a file. An existing file is
            unchanged.
        OptionError: an argument is invalid, or `token_ids` does not match the tokens of the cache.
        StateMismatchError: a layer holds states that a file cannot hold.

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
            f"`cache` must be a cache of kvlayers, got a {type(cache).__module__}.{type(cache).__name__}: make one, "
            "for example with kvlayers.DynamicCache.from_legacy_cache()."
        )
    with replacing(path) as temporary, torch.no_grad():
        # States are copied only after the path is known to be writable.
        model = model_record(config, isinstance(cache, EncoderDecoderCache), weights_id)
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
    """Raise `StateMismatchError` if the written file could not be read. It must not replace a readable file."""
    try:
        read_header(path)
    except CacheFileError as error:
        raise StateMismatchError(f"The cache has more than a file can hold: {error}") from error
