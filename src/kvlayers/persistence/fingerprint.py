"""Which model made the states: the fields of its config that states depend on, and an id of its weights."""

import functools
import hashlib
import math
import os
import re
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvlayers.errors import ConfigError, ModelMismatchError, OptionError
from kvlayers.persistence.format import Description, ModelRecord
from kvlayers.rope.from_config import config_fields
from kvlayers.upstream.model_types import config_of, decoder_config

INSTALLED = transformers.__version__
"""The version of transformers whose configs are compared with those in files."""

# fmt: off
IRRELEVANT = frozenset((
    "architectures", "attn_implementation", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_decoder_ids", "forced_eos_token_id", "gradient_checkpointing", "id2label",
    "init_std", "initializer_factor", "initializer_range", "keys_to_ignore_at_inference", "label2id",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_labels", "num_return_sequences", "output_attentions", "output_hidden_states", "output_router_logits",
    "output_scores", "pad_token_id", "prefix", "problem_type", "remove_invalid_values", "repetition_penalty",
    "return_dict", "return_dict_in_generate", "router_aux_loss_coef", "router_z_loss_coef", "sep_token_id",
    "suppress_tokens", "task_specific_params", "temperature", "tie_encoder_decoder", "tie_word_embeddings",
    "tokenizer_class", "top_k", "top_p", "torchscript", "transformers_version", "typical_p", "unk_token_id",
    "use_cache",
))
# fmt: on
"""Fields of a config that no state depends on. All other fields are compared, so a field of a new model counts from its
first day. If it turns out to be irrelevant, the worst result is a refusal that names it."""

DIMENSIONS = ("head_dim", "hidden_size", "model_type", "num_hidden_layers", "num_key_value_heads", "vocab_size")
"""Fields by which people tell models apart."""

SCHEME = "all:"
"""Prefix of ids that are made of all bytes. Ids of earlier versions, made of a few elements, have no prefix."""

BLOCK = 4096
"""Words of 8 bytes in a block. Each block has one sum."""

BLOCKS_AT_ONCE = 64
"""Blocks that are summed at once, so that intermediate results, 2 MiB, stay in a processor's cache."""

PROBED = 3
"""Elements that are probed in each dimension of a weight, to detect a change."""

Mark = tuple[str, int, int | None, torch.Size, torch.dtype]
"""Name, address, count of writes, shape and dtype of a weight. Nearly every change of a weight changes one of them."""

_IRRELEVANT_ENDS = ("dropout", "dropout_prob", "drop_rate", "pdrop", "layerdrop")


def model_fields(config: object, is_pair: bool) -> dict[str, Any]:
    """The fields of a config that states depend on, as JSON types.

    Args:
        config: config of the model.
        is_pair: whether the cache is an `EncoderDecoderCache`, whose states depend on the encoder as well.

    Raises:
        ConfigError: `config` is not a model config.
    """
    decoder = decoder_config(config)
    content: Any = config_of(config) if is_pair else decoder
    fields: dict[str, Any] = _plain(config_fields(content))
    return fields


def model_record(config: object | None, is_pair: bool, weights_id: str | None) -> ModelRecord:
    """The record of a model for a file.

    Raises:
        ConfigError: `config` is not a model config.
        OptionError: `weights_id` is not a text.
    """
    check_weights_id(weights_id)
    if config is None:
        return ModelRecord(weights_id=weights_id)
    fields = model_fields(config, is_pair)
    said = config_of(config)
    name, commit = said.name_or_path, vars(said).get("_commit_hash")
    known = isinstance(name, str) and name != "" and not os.path.exists(name) and not os.path.isabs(name)
    return ModelRecord(fields, name if known else None, commit if isinstance(commit, str) else None, weights_id)


def check_weights_id(weights_id: object) -> None:
    """Raise `OptionError` if `weights_id` is neither a text nor `None`."""
    if weights_id is not None and (not isinstance(weights_id, str) or not weights_id):
        raise OptionError(
            f"`weights_id` must be a text, got {weights_id!r}: pass kvlayers.weights_id(model), or your own name for "
            "the weights."
        )


def check_model(path: str, description: Description, config: object | None, weights_id: str | None) -> None:
    """Raise `ModelMismatchError` if the states are of another model, as far as file and caller name their models.

    Raises:
        ConfigError: `config` is not a model config.
        OptionError: `weights_id` is not a text.
    """
    check_weights_id(weights_id)
    model = description.model
    made_by = f" ({model.name})" if model.name else ""
    if config is not None:
        own = model_fields(config, bool(description.cache.parts))
        same_version = description.versions.get("transformers") == INSTALLED
        if model.fields is not None:
            differences = list(_differences(own, model.fields, same_version))
            if differences:
                raise ModelMismatchError(
                    f"{path} was saved for another model{made_by}, with {_listed(differences)} in `config`: load it "
                    "for the model that made it."
                )
    if weights_id is not None and weights_id != model.weights_id:
        raise ModelMismatchError(
            f"`weights_id` is {weights_id!r}, but {path} was made with the weights {model.weights_id!r}{made_by}: "
            f"{_what_to_do(weights_id, model.weights_id)}."
        )


def _listed(differences: list[tuple[str, Any, Any]]) -> str:
    """Some of the differences between two configs: the dimensions of the model if they differ, else the first ones."""
    telling = [found for found in differences if found[0] in DIMENSIONS] or differences
    return ", ".join(f"{name} {saved} rather than {own}" for name, own, saved in telling[:3])


def _what_to_do(asked: str, saved: str | None) -> str:
    of_few = saved is not None and re.fullmatch("[0-9a-f]{64}", saved)
    if asked.startswith(SCHEME) and of_few:
        return (
            "the id in the file looks like one of an earlier kvlayers, made of a few elements of each weight, which is "
            f"not enough to identify weights: save the states again, or pass weights_id={saved!r} if you know that "
            "they are of this model"
        )
    return "load it for the weights that made it"


def _differences(
    own: Mapping[str, Any], saved: Mapping[str, Any], same_version: bool
) -> Iterator[tuple[str, Any, Any]]:
    """Names of the fields in which two configs differ, with both values.

    A field that one config lacks counts only if both are from the same version of transformers. Another version may
    have fields that this one does not have.
    """
    flat, flat_saved = dict(_flat(own)), dict(_flat(saved))
    for name in sorted({*flat, *flat_saved}):
        if name in flat and name in flat_saved:
            if flat[name] != flat_saved[name]:
                yield name, flat[name], flat_saved[name]
        elif same_version:
            yield name, flat.get(name, "not to be there"), flat_saved.get(name, "none")


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _plain(value: Any) -> Any:
    """A value as JSON types, without irrelevant fields; a float that is a whole number becomes an int."""
    if isinstance(value, Mapping):
        named = {str(name): own for name, own in value.items()}
        return {name: _plain(named[name]) for name in sorted(named) if not _is_irrelevant(name)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return int(value) if value == int(value) and abs(value) < 2**53 else value
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else str(value)
    return str(value) if isinstance(value, torch.dtype) else type(value).__name__


def _is_irrelevant(name: str) -> bool:
    return name in IRRELEVANT or name.startswith("_") or name.endswith(_IRRELEVANT_ENDS)


# Weights


@dataclass
class _Known:
    """The id of a living model, with the marks and the probe of its weights when it was made.

    Attributes:
        lock: held while the id is made, so that no id is made twice.
    """

    marks: tuple[Mark, ...] | None = None
    probe: bytes = b""
    text: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)


_known: weakref.WeakKeyDictionary[torch.nn.Module, _Known] = weakref.WeakKeyDictionary()
_entering = threading.Lock()
"""Held while `_known` is read or changed."""


@torch.no_grad()
def weights_id(model: torch.nn.Module) -> str:
    """An id of a model's weights: equal for equal weights, different if a single element differs.

    Two models with equal configs may have different weights, and one cannot use the states of the other. The id is made
    of every byte of every weight, computed on the weight's device, once for a model. A second call only compares the
    addresses of the weights, torch's counts of writes to them, and a few elements of each. (It may miss a write through
    `.data` to single elements.) The id depends on the dtype that the model is loaded in, as states do.

    Args:
        model: the model, with its weights in memory.

    Raises:
        ConfigError: a weight is not in memory (a meta tensor, such as a weight that accelerate has offloaded).

    Example:
        >>> import torch, kvlayers
        >>> one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> kvlayers.weights_id(one) == kvlayers.weights_id(other)
        False
    """
    weights = list(_weights(model))
    marks, probe = tuple(_mark(name, weight) for name, weight in weights), _probe(weights)
    with _entering:
        known = _known.setdefault(model, _Known())
    with known.lock:
        if (known.marks, known.probe) != (marks, probe):
            known.marks, known.probe, known.text = marks, probe, SCHEME + _digest(weights)
        return known.text


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and weights. Non-persistent buffers are left out, since some buffers of RoPE change with the length."""
    for name, weight in model.state_dict().items():
        if isinstance(weight, Tensor):
            yield from _plain_tensors(name, weight.detach())


def _plain_tensors(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of a weight: for example the codes and scales of a quantized weight."""
    if is_traceable_wrapper_subclass(weight):
        for part in weight.__tensor_flatten__()[0]:
            yield from _plain_tensors(f"{name}.{part}", attrgetter(part)(weight))
    elif weight.is_meta:
        raise ConfigError(f"The weights must be in memory, but {name} is a meta tensor: pass your own `weights_id`.")
    else:
        yield name, weight


def _mark(name: str, weight: Tensor) -> Mark:
    writes = None if weight.is_inference() else weight._version
    return name, weight.data_ptr(), writes, weight.shape, weight.dtype


def _probe(weights: list[tuple[str, Tensor]]) -> bytes:
    """A few elements of each weight, with one transfer for each device and without copying a whole weight."""
    probes: dict[torch.device, list[Tensor]] = {}
    for _, weight in weights:
        places = tuple(slice(None, None, max(-(-size // PROBED), 1)) for size in weight.shape)
        probes.setdefault(weight.device, []).append(weight[places].reshape(-1).double())
    return b"".join(torch.cat(each).cpu().numpy().tobytes() for each in probes.values())


def _digest(weights: list[tuple[str, Tensor]]) -> str:
    total = hashlib.sha256()
    seen: dict[tuple[Any, ...], bytes] = {}
    for name, weight in weights:
        total.update(f"\n{name} {weight.dtype} {list(weight.shape)} ".encode())
        # Tied weights are read once.
        place = (weight.device, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)
        if place not in seen:
            seen[place] = _block_sums(weight).cpu().numpy().tobytes()
        total.update(seen[place])
    return total.hexdigest()


def _block_sums(weight: Tensor) -> Tensor:
    """A weighted sum for each 32 KiB of a weight, int64 `[blocks]`; each word has its own factor.

    Sums of integers are exact, so they are the same in any order, on any device, and for any number of threads. One
    changed word always changes its sum. Several changed words in one block leave it unchanged once in 2^64 times, or
    once in 2^33 times if only their highest bits changed.
    """
    words = _words(weight)
    factors = _factors().to(words.device)
    whole = words.numel() // BLOCK
    sums = []
    for begin in range(0, whole, BLOCKS_AT_ONCE):
        blocks = words[begin * BLOCK : min(begin + BLOCKS_AT_ONCE, whole) * BLOCK].view(-1, BLOCK)
        sums.append(_weighted(blocks, factors))
    rest = words[whole * BLOCK :]
    if rest.numel():
        sums.append(_weighted(rest[None], factors[: rest.numel()]))
    return torch.cat(sums) if sums else words


def _weighted(blocks: Tensor, factors: Tensor) -> Tensor:
    # Mixes the upper half into the lower half, since multiplication would shift the upper half out of the word.
    mixed = blocks >> 32
    mixed ^= blocks
    mixed *= factors
    return mixed.sum(1)


def _words(weight: Tensor) -> Tensor:
    """The bytes of a weight as int64, padded with zeros."""
    data = weight.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    missing = -data.numel() % 8
    if missing or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(missing)])
    return data.view(torch.int64)


@functools.cache
def _factors() -> Tensor:
    """Pseudorandom odd numbers from splitmix64, int64 `[BLOCK]`, the same on every machine."""
    factors, mask = [], 2**64 - 1
    for index in range(1, BLOCK + 1):
        mixed = index * 0x9E3779B97F4A7C15 & mask
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
        mixed = (mixed ^ mixed >> 31) | 1
        factors.append(mixed - 2**64 if mixed >= 2**63 else mixed)
    with torch.inference_mode(False):
        return torch.tensor(factors, dtype=torch.int64)
