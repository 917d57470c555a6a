"""Which model made the states: the fields of its config that states depend on, and an id of its weights."""

import contextlib
import copy
import functools
import hashlib
import math
import os
import pkgutil
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Transformers 5 spells it PreTrainedConfig, and keeps this name as well.
from transformers import PretrainedConfig, PreTrainedModel

from kvlayers.errors import ConfigError, ModelMismatchError, OptionError
from kvlayers.persistence.format import Description, ModelRecord
from kvlayers.rope.from_config import config_fields
from kvlayers.upstream.model_types import assigned_in_a_pass, config_of, decoder_config

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

BLOCK = 4096
"""Words of 8 bytes in a block. Each block has one sum."""

BLOCKS_AT_ONCE = 64
"""Blocks that are summed at once, so that intermediate results, 2 MiB, stay in a processor's cache."""

PROBED = 3
"""Elements that are probed in each dimension of a weight, to detect a change."""

SIMPLE = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
"""Types of attributes that are compared as they are."""

TENSORS = frozenset((Tensor, nn.Parameter, nn.Buffer))
"""Types of tensors that hold nothing but their elements."""

HOUSEKEEPING = (
    frozenset(vars(nn.Module()))
    # How models are loaded, saved and divided.
    | frozenset(name for name, value in vars(PreTrainedModel).items() if not callable(value))
    | frozenset((
        "_old_forward",
        # accelerate puts functions that warn in the place of these.
        "to", "cuda", "npu", "xpu", "mlu", "musa", "sdaa",
        "all_tied_weights_keys", "config", "forward", "generate", "generation_config", "gradient_checkpointing",
        "hf_device_map", "hf_quantizer", "kernel_config", "loss_type", "name_or_path", "prepare_inputs_for_generation",
        "warnings_issued",
    ))
)  # fmt: skip
"""Attributes of modules that no state depends on, or that are compared elsewhere, as parameters and configs are."""

OF_LOADING = re.compile(r"_(is_)?hf_\w+|_\w+_(plan|installed|conversions)|_(compiled_call|last_compile)\w*")
"""Further ones, by their names: what loading, dividing, compiling and watching a model note in it."""

CHANGES_WITH_LENGTH = ("dynamic", "longrope")
"""Types of RoPE whose frequencies a pass replaces."""

_OF_THE_LENGTH = ("max_seq_len_cached", "long_inv_freq")


class _Plain:
    """An object that has attributes, and nothing else."""


Facts = list[tuple[str, str, object]]
"""Path of a module, and name and value of an attribute."""

T = TypeVar("T")


class Remembered(Generic[T]):
    """What was found for objects, until what is read of them has changed. Threads may share it."""

    def __init__(self) -> None:
        # By number, since configs cannot be hashed. With what was read, and what was found for it.
        self._known: dict[int, tuple[weakref.ref[object], object, T]] = {}
        self._lock = threading.RLock()

    def of(self, owner: object, read: object, find: Callable[[], T]) -> T:
        """What `find` returns for an object of which this was read. It is not called twice at the same time."""
        number = id(owner)
        with self._lock:
            known = self._known.get(number)
            if known is None or known[0]() is not owner or known[1] != read:
                living = weakref.ref(owner, lambda _: self._known.pop(number, None))
                known = self._known[number] = living, copy.deepcopy(read), find()
            return known[2]


_fields = Remembered[dict[str, Any]]()
_weights = Remembered[str]()

_ABSENT = object()

_IRRELEVANT_ENDS = ("dropout", "dropout_prob", "drop_rate", "pdrop", "layerdrop")


def model_fields(config: object, is_pair: bool) -> dict[str, Any]:
    """The fields of a config that states depend on, as JSON types.

    Args:
        config: config of the model.
        is_pair: whether the cache is an `EncoderDecoderCache`, whose states depend on the encoder as well.

    Raises:
        ConfigError: `config` is not a model config.
    """
    # The result is remembered, so nobody changes it.
    decoder = decoder_config(config)
    content: Any = config_of(config) if is_pair else decoder
    return _fields.of(content, vars(content), lambda: _plain(config_fields(content)))


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
            f"`weights_id` must be a text, got {weights_id!r:.60}: pass kvlayers.weights_id(model), or your own name "
            "for the weights."
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
    if config is not None and model.fields is not None:
        own = dict(_flat(model_fields(config, bool(description.cache.parts))))
        saved = dict(_flat(model.fields))
        # Another version of transformers may have fields that this one does not have.
        is_same_version = description.versions.get("transformers") == INSTALLED
        names = own.keys() | saved.keys() if is_same_version else own.keys() & saved.keys()
        differing = [name for name in sorted(names) if own.get(name, _ABSENT) != saved.get(name, _ABSENT)]
        # The dimensions of the model tell the most, if they differ.
        telling = [name for name in differing if name in DIMENSIONS] or differing
        listed = [f"{name} {saved.get(name, 'none')} rather than {own.get(name, 'none')}" for name in telling[:3]]
        if listed:
            raise ModelMismatchError(
                f"{path} was saved for another model{made_by}, with {', '.join(listed)} in `config`: load it for the "
                "model that made it."
            )
    if weights_id is not None and weights_id != model.weights_id:
        raise ModelMismatchError(
            f"`weights_id` is {weights_id!r}, but {path} has the weights_id {model.weights_id!r}{made_by}: "
            "load it for the weights that made it."
        )


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
        return {
            name: _plain(named[name])
            for name in sorted(named)
            if name not in IRRELEVANT and not name.startswith("_") and not name.endswith(_IRRELEVANT_ENDS)
        }
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


# Weights


@torch.no_grad()
def weights_id(model: torch.nn.Module) -> str:
    """An id of a model's weights: equal for equal weights, different if a single element differs.

    Two models with equal configs may have different weights, and one cannot use the states of the other. The id is made
    of every byte of every weight, computed on the weight's device, once for a model, and of the attributes of its
    modules, such as a scale. Buffers that are not saved and tensors that are not registered are weights too. A second
    call only compares the attributes, the addresses of the weights, torch's counts of writes to them, and a few
    elements of each. (It may miss a write through `.data` to single elements.) The id depends on the dtype that the
    model is loaded in, as states do. It may be another one on a version of transformers whose modules have other
    attributes.

    Args:
        model: the model, with its weights in memory.

    Raises:
        ConfigError: a weight is not in memory (a meta tensor, such as a weight that accelerate has offloaded), or a
            module has something that cannot be compared, such as the packed weights of `torch.ao`.
        OptionError: `model` is no module.

    Example:
        >>> import torch, kvlayers
        >>> one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> kvlayers.weights_id(one) == kvlayers.weights_id(other)
        False
    """
    if not isinstance(model, torch.nn.Module):
        raise OptionError(
            f"`model` must be a model, got a {type(model).__name__}: pass the model itself, not its config or class."
        )
    weights, facts = _weights_and_facts(model)
    # Nearly every change of a weight changes its address, its count of writes, its shape or its dtype.
    marks = [
        (name, weight.data_ptr(), None if weight.is_inference() else weight._version, weight.shape, weight.dtype)
        for name, weight in weights
    ]
    return _weights.of(model, (facts, marks, _probe(weights)), lambda: f"all:{_digest(weights, facts)}")


def _weights_and_facts(model: torch.nn.Module) -> tuple[list[tuple[str, Tensor]], Facts]:
    """All tensors of a model by name, and the attributes of its modules that are no tensors.

    What a pass assigns is left out: it follows from the tokens. Every call of `generate()` with a store comes here, so
    there is no call for a module, nor for an attribute or a weight of an ordinary type.
    """
    weights: list[tuple[str, Tensor]] = []
    facts: Facts = []
    waiting: list[tuple[str, Any]] = [("", model)]
    while waiting:
        path, module = waiting.pop()
        own, dot = vars(module), path and f"{path}."
        for name, child in reversed(own["_modules"].items()):
            if child is not None:
                waiting.append((dot + name, child))
        transient = own["_non_persistent_buffers_set"]
        # Frequencies that follow the length are those of the newest pass, as are attributes with these ends.
        left_out = transient if transient and _frequencies_change(own.get("rope_type")) else set()
        # Without a comprehension: a call for each module would be what a look-up costs.
        for is_registered, values in ((True, own["_parameters"]), (True, own["_buffers"]), (False, own)):
            for name, value in values.items():
                if is_registered and (value is None or name in left_out):
                    continue
                if not is_registered and (
                    _is_passing(module.__class__, name) or (left_out and name.endswith(_OF_THE_LENGTH))
                ):
                    continue
                kind = type(value)
                if kind in SIMPLE or (kind is tuple and SIMPLE.issuperset(map(type, value))):
                    facts.append((path, name, value))
                elif kind in TENSORS and not (value.is_meta or value.is_quantized or value.layout is not torch.strided):
                    weights.append((dot + name, value.detach()))
                else:
                    for end, leaf in _leaves(dot + name, "", value):
                        if isinstance(leaf, Tensor):
                            weights.append((dot + name + end, leaf.detach()))
                        else:
                            facts.append((dot + name, end, leaf))
    return weights, facts


@functools.cache
def _is_passing(module_class: Any, name: str) -> bool:
    """Whether no state depends on what this attribute of a module is when no pass runs."""
    return name in HOUSEKEEPING or OF_LOADING.fullmatch(name) is not None or name in assigned_in_a_pass(module_class)


def _frequencies_change(rope_type: object) -> bool:
    types = rope_type.values() if isinstance(rope_type, Mapping) else (rope_type,)
    return not set(types).isdisjoint(CHANGES_WITH_LENGTH)


def _leaves(path: str, name: str, value: object, within: frozenset[int] = frozenset()) -> Iterator[tuple[str, object]]:
    """The tensors and plain values that an attribute of a module consists of, of whatever type it is, by their names.

    Args:
        path: path of the attribute.
        name: name of the value within it, "" for the attribute itself.
        value: the value.
        within: identities of the objects that it is part of, which may hold one another.

    Raises:
        ConfigError: it cannot be compared.
    """
    kind = type(value)
    if kind in SIMPLE:
        yield name, value
    elif id(value) in within or isinstance(value, PretrainedConfig | nn.Module):
        # Configs are compared as configs, and modules of the model are read as such.
        if isinstance(value, nn.Module) and not within:
            raise _incomparable(path, value)
        yield name, kind.__qualname__
    else:
        yield name, f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value):
            if value.is_meta:
                raise ConfigError(
                    f"The weights must be in memory, but {path} is a meta tensor: pass your own `weights_id`."
                )
            if value.is_quantized or value.layout is not torch.strided:
                raise _incomparable(path, value)
            yield name, value
        for end, part in _parts(path, value):
            yield from _leaves(path, name + end, part, within | {id(value)})


def _parts(path: str, value: Any) -> list[tuple[str, object]]:
    """What an object is made of, with the ends of the names of its parts; of a plain tensor nothing else."""
    if isinstance(value, Tensor):
        if not is_traceable_wrapper_subclass(value):
            return [] if type(value) in TENSORS else [(":", dict(vars(value)))]
        # For example the codes and scales of a quantized weight.
        parts, context = value.__tensor_flatten__()
        return [(":", context), *((f".{part}", attrgetter(part)(value)) for part in parts)]
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return [("", _full_name(path, value))]
    if isinstance(value, Enum):
        return [(".value", value.value)]
    if isinstance(value, set | frozenset):
        return [("", tuple(sorted(map(repr, value))))]
    if isinstance(value, Mapping | list | tuple | deque):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        return [(f"[{key!r}]", each) for key, each in items]
    if isinstance(value, functools.partial):
        return [("", (value.func, value.args, value.keywords))]
    if type(value).__basicsize__ <= _Plain.__basicsize__:
        return [(f".{key}", each) for key, each in vars(value).items()]
    raise _incomparable(path, value)


def _full_name(path: str, value: Any) -> str:
    """A function or a class of a package is what its name says; that of a program may be another one each time."""
    full_name, is_named = f"{value.__module__}:{value.__qualname__}", False
    if isinstance(value, BuiltinFunctionType):
        is_named = isinstance(value.__self__, type | ModuleType | None)
    else:
        with contextlib.suppress(AttributeError, ImportError, ValueError):
            is_named = value.__module__ != "__main__" and pkgutil.resolve_name(full_name) is value
    if not is_named:
        raise _incomparable(path, value)
    return full_name


def _incomparable(path: str, value: object) -> ConfigError:
    return ConfigError(
        f"The weights must be comparable, but {path} is or holds a {type(value).__name__}: pass your own `weights_id`."
    )


@functools.cache
def _places(shape: torch.Size) -> tuple[slice, ...]:
    """Where a weight is probed."""
    return tuple(slice(None, None, max(-(-size // PROBED), 1)) for size in shape)


def _probe(weights: list[tuple[str, Tensor]]) -> bytes:
    """A few elements of each weight, with one transfer for each device and without copying a whole weight."""
    probes: dict[torch.device, list[Tensor]] = {}
    for _, weight in weights:
        probes.setdefault(weight.device, []).append(weight[_places(weight.shape)].reshape(-1).double())
    return b"".join([torch.cat(each).cpu().numpy().tobytes() for each in probes.values()])


def _digest(weights: list[tuple[str, Tensor]], facts: Facts) -> str:
    total = hashlib.sha256()
    seen: dict[tuple[Any, ...], bytes] = {}
    for name, weight in weights:
        total.update(f"\n{name} {weight.dtype} {list(weight.shape)} ".encode())
        # Tied weights are read once.
        place = (weight.device, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)
        if place not in seen:
            seen[place] = _block_sums(weight).cpu().numpy().tobytes()
        total.update(seen[place])
    for path, name, value in facts:
        total.update(f"\n{path} {name} = {value!r}".encode())
    return total.hexdigest()


def _block_sums(weight: Tensor) -> Tensor:
    """A weighted sum for each 32 KiB of a weight, int64 `[blocks]`; each word has its own factor.

    Sums of integers are exact, so they are the same in any order, on any device, and for any number of threads. One
    changed word always changes its sum. Several changed words in one block leave it unchanged once in 2^64 times, or
    once in 2^33 times if only their highest bits changed.
    """
    words = _words(weight)
    whole = words.numel() // BLOCK * BLOCK
    last = words[whole:].view(-1, max(words.numel() - whole, 1))
    factors, sums = _factors().to(words.device), []
    for blocks in (*torch.split(words[:whole].view(-1, BLOCK), BLOCKS_AT_ONCE), last):
        # Mixes the upper half into the lower half, since multiplication would shift the upper half out of the word.
        mixed = blocks >> 32
        mixed ^= blocks
        mixed *= factors[: blocks.shape[1]]
        sums.append(mixed.sum(1))
    return torch.cat(sums)


def _words(weight: Tensor) -> Tensor:
    """The bytes of a weight as int64, padded with zeros."""
    data = weight.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    missing = -data.numel() % 8
    if missing or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(missing)])
    return data.view(torch.int64)


@functools.cache
def _factors() -> Tensor:
    """Pseudorandom odd numbers, int64 `[BLOCK]`, the same on every machine: numpy never changes what PCG64 yields."""
    with torch.inference_mode(False):
        return torch.from_numpy(np.random.PCG64(0).random_raw(BLOCK).astype(np.uint64).view(np.int64) | 1)
