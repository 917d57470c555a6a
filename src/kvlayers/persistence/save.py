"""Save a cache to a file."""

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from kvlayers.core.cache import Cache
from kvlayers.core.cache_layer import LayerState
from kvlayers.core.cache_operations import CacheState
from kvlayers.errors import OptionError, StateMismatchError
from kvlayers.persistence.atomic_file import replacing
from kvlayers.persistence.fingerprint import model_record
from kvlayers.persistence.format import (
    DESCRIPTION,
    DTYPE_NAMES,
    OWN_METADATA,
    CacheRecord,
    Description,
    LayerRecord,
    ModelRecord,
    canonical,
    layer_prefix,
    metadata_text,
    rotary_name,
)
from kvlayers.persistence.tensor_file import TOKEN_IDS, Header, TensorEntry, checked_path, file_header, write_file
from kvlayers.utils.options import checks_options
from kvlayers.version import __version__


@checks_options
def save_cache(
    cache: Cache,
    path: str | os.PathLike[str],
    *,
    token_ids: Tensor | None = None,
    config: object | None = None,
    weights_id: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a cache to a file, from which `load_cache` makes a cache that continues decoding in the same way.

    Only live tokens are written, and packed tokens stay packed. The file is a safetensors file. It replaces an older
    file once it is complete and on disk, so at any time either the old or the new file exists.

    Args:
        cache: a cache of kvlayers. It is not changed.
        path: the file. Its directory must exist.
        token_ids: ids of the tokens that the cache has seen, `[batch, tokens]`, for `CacheFile.token_ids()`. There may
            be more, because `generate()` returns a token that the cache has not seen. Default: `known_ids` of the
            cache, if it knows any.
        config: config of the model, or the model, so that `load_cache` can refuse the file for another model.
        weights_id: id of the model's weights, so that `load_cache` can refuse the file for others; see `weights_id()`.
        metadata: texts of your own by their names, for `CacheFile.metadata`.

    Raises:
        CachePathError: the directory is missing or cannot be written to, or `path` is not a file. An existing file is
            unchanged.
        OptionError: an argument is invalid, or `token_ids` are not those of the tokens in the cache.
        StateMismatchError: a layer holds states that a file cannot hold.

    Example:
        >>> import tempfile, torch, kvlayers
        >>> cache = kvlayers.DynamicCache()
        >>> _ = cache.update(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), layer_idx=0)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = f"{directory}/chat.safetensors"
        ...     kvlayers.save_cache(cache, path, token_ids=torch.tensor([[1, 2, 3, 4, 5]]))
        ...     kvlayers.load_cache(path), kvlayers.inspect_cache(path).token_ids()
        (DynamicCache(1 x DynamicLayer, 5 tokens, batch 1, 1.25 KiB), tensor([[1, 2, 3, 4, 5]]))
    """
    path = checked_path(path)
    if not isinstance(cache, Cache):
        raise OptionError(
            f"`cache` must be a cache of kvlayers, got a {type(cache).__module__}.{type(cache).__name__}: make one, "
            "such as kvlayers.DynamicCache(cache)."
        )
    own = None if metadata is None else metadata_text(metadata)
    with replacing(path) as temporary, torch.no_grad():
        # States are copied only after the path is known to be writable.
        model = model_record(config, cache.is_pair, weights_id)
        description, tensors = described(cache, cache.state(), model)
        tensors |= _ids(token_ids, cache.known_ids, description.cache)
        with open(temporary, "wb") as file:
            write_file(file, header_of(description, tensors, own), {name: [each] for name, each in tensors.items()})


def header_of(description: Description, tensors: Mapping[str, Tensor], own: str | None = None) -> Header:
    """The header of the file of a cache.

    Args:
        description: the cache.
        tensors: the tensors that are in the file.
        own: the caller's own texts, from `metadata_text`.
    """
    entries = {name: TensorEntry(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    metadata = {DESCRIPTION: canonical(description)}
    return file_header(entries, metadata if own is None else {**metadata, OWN_METADATA: own})


def described(cache: Cache, state: CacheState, model: ModelRecord) -> tuple[Description, dict[str, Tensor]]:
    """The description of a cache in this state for its file, and the tensors of the state on the host.

    Raises:
        StateMismatchError: a layer holds something that a file cannot.
    """
    rotaries = {rotary.fingerprint: rotary for rotary in cache.rotaries}
    record = _record(cache, state)
    tensors = {
        layer_prefix(part, index) + name: _storable(tensor, name, layer.kind)
        for part, own in enumerate(state.parts or (state,))
        for index, layer in enumerate(own.layers)
        for name, tensor in layer.tensors.items()
    }
    dtypes = sorted({states.dtype for states in tensors.values() if states.is_floating_point()}, key=str)
    tensors |= {rotary_name(fingerprint): rotary.inv_freq for fingerprint, rotary in rotaries.items()}
    description = Description(
        versions={"kvlayers": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        cache=record,
        model=model,
        rotaries={fingerprint: (rotary.layout, rotary.first) for fingerprint, rotary in rotaries.items()},
        dtypes=tuple(dtypes),
    )
    return description, tensors


def _record(cache: Any, state: CacheState) -> CacheRecord:
    parts = tuple(_record(part, own) for part, own in zip(cache.parts(), state.parts, strict=False))
    # The layers of a pair are those of its parts.
    layers = tuple(
        LayerRecord(layer_state.kind, _facts(layer_state), tuple(sorted(layer_state.tensors)), bool(layer.is_recording))
        for layer, layer_state in zip([] if parts else cache.adapted_layers(), state.layers, strict=True)
    )
    return CacheRecord(state.kind, cache.most_seen(), max(cache.batch_size, 0), cache.describe(), layers, parts)


def _facts(state: LayerState) -> dict[str, Any]:
    for name, fact in state.facts.items():
        plain = fact is None or isinstance(fact, bool | int | float | str)
        if not plain or (isinstance(fact, float) and not math.isfinite(fact)):
            raise StateMismatchError(
                f"The state of a {state.kind} must have plain facts (finite numbers, texts, True, False, None), got "
                f"{name} of {type(fact).__name__}: keep it in a tensor."
            )
    return dict(state.facts)


def _storable(tensor: Tensor, name: str, kind: str) -> Tensor:
    """`tensor` in the form that safetensors writes: on the host, contiguous, without gradients."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPE_NAMES:
        raise StateMismatchError(
            f"A file can hold dense tensors of {', '.join(sorted(map(str, DTYPE_NAMES)))}, got {name} of a {kind} of "
            f"{tensor.dtype}, {tensor.layout} on {tensor.device}: convert the states first."
        )
    return tensor.detach().to("cpu").contiguous()


def _ids(given: Tensor | None, known: Tensor | None, record: CacheRecord) -> dict[str, Tensor]:
    """The ids for a file: what is given, or else what the cache knows, maybe of its first tokens alone.

    Raises:
        OptionError: the given ids have another shape than the tokens of the cache, or differ from the known ones.
    """
    rows = record.batch_size
    known = torch.empty(rows, 0) if known is None or known.shape[0] != rows else known.cpu()
    ids = known if given is None else given
    whole = isinstance(ids, Tensor) and not (ids.is_floating_point() or ids.dtype == torch.bool)
    if given is not None and not (whole and ids.dim() == 2 and len(ids) == rows and ids.shape[1] >= record.length):
        seen = f"{list(ids.shape)} of {ids.dtype}" if isinstance(ids, Tensor) else repr(ids)
        raise OptionError(
            f"`token_ids` must be [{rows}, {record.length} or more], a whole number for each token that the cache has "
            f"seen, got {seen}: pass the ids that generate() returned, from the first one."
        )
    ids = ids.detach().to("cpu", torch.int64, copy=True).contiguous()
    for token, row in (ids[:, : known.shape[1]] != known[:, : ids.shape[1]]).T.nonzero().tolist():
        raise OptionError(
            f"`token_ids` must be those of the tokens in the cache, but token {token} of sequence {row} is "
            f"{int(ids[row, token])} in `token_ids`, and {int(known[row, token])} in the cache: pass the ids of its "
            "own text, or leave them out, as the cache knows them."
        )
    return {TOKEN_IDS: ids} if ids.numel() else {}
