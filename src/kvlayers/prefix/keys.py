"""The key of a prefix: its tokens, its model and its namespace; and a mapping that finds what begins alike."""

import bisect
import functools
import hashlib
import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvlayers.core.cache import Cache
from kvlayers.errors import OptionError, StateMismatchError
from kvlayers.persistence.fingerprint import model_fields
from kvlayers.persistence.format import canonical

Tokens = npt.NDArray[np.int64]
"""Token ids, `[tokens]`."""

T = TypeVar("T")


class PrefixMap(Generic[T]):
    """A mapping from sequences of token ids to values, which finds those that begin alike. Labels are kept apart.

    The sequences are sorted as bytes, so that those which begin alike stand side by side.

    Example:
        >>> import numpy as np
        >>> known = PrefixMap()
        >>> known.insert("model", np.array([1, 2, 3]), "abc")
        >>> known.insert("model", np.array([1, 2, 9, 9]), "abzz")
        >>> list(known.nearest("model", np.array([1, 2, 9, 4])))
        [('abzz', 3), ('abc', 2)]
    """

    def __init__(self) -> None:
        self._keys: list[tuple[str, bytes]] = []
        self._values: dict[tuple[str, bytes], T] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[T]:
        """All values, those that begin alike together, each behind its prefixes."""
        return map(self._values.__getitem__, self._keys)

    def has(self, label: str) -> bool:
        """Whether there is any sequence of a label."""
        place = bisect.bisect_left(self._keys, (label, b""))
        return [own for own, _ in self._keys[place : place + 1]] == [label]

    def get(self, label: str, ids: Tokens) -> T | None:
        """The value of exactly these tokens, or `None`."""
        return self._values.get((label, ids.tobytes()))

    def insert(self, label: str, ids: Tokens, value: T) -> None:
        """Set the value of these tokens."""
        key = label, ids.tobytes()
        place = bisect.bisect_left(self._keys, key)
        # First, as an interrupt must leave no key without a value.
        self._values[key] = value
        if self._keys[place : place + 1] != [key]:
            self._keys.insert(place, key)

    def remove(self, label: str, ids: Tokens) -> None:
        """Remove the value of these tokens, if there is one."""
        key = label, ids.tobytes()
        if key in self._values:
            del self._keys[bisect.bisect_left(self._keys, key)], self._values[key]

    @property
    def tokens(self) -> int:
        """Tokens of all sequences. Those that several of a label begin with count once."""
        sequences = [(label, np.frombuffer(content, np.int64)) for label, content in self._keys]
        return sum(len(ids) - self._shared(place - 1, label, ids) for place, (label, ids) in enumerate(sequences))

    def _shared(self, place: int, label: str, ids: Tokens) -> int:
        """How many of these tokens the sequence at a place begins with; 0 if none of the label is there."""
        if not 0 <= place < len(self._keys) or self._keys[place][0] != label:
            return 0
        return common_tokens(np.frombuffer(self._keys[place][1], np.int64), ids)

    def prefixes_of(self, label: str, ids: Tokens) -> list[T]:
        """The values of `ids` and of all of their prefixes, the shortest first."""
        found, content = list[T](), ids.tobytes()
        place = bisect.bisect_right(self._keys, (label, content))
        while place and self._keys[place - 1][0] == label:
            place -= 1
            if content.startswith(self._keys[place][1]):
                found.append(self._values[self._keys[place]])
            else:
                # What lies between goes on otherwise than `ids` behind as many tokens.
                shared = self._shared(place, label, ids) * ids.itemsize
                place = bisect.bisect_right(self._keys, (label, content[:shared]), hi=place)
        return found[::-1]

    def nearest(self, label: str, ids: Tokens) -> Iterator[tuple[T, int]]:
        """The values whose tokens begin as `ids` do, and how many tokens they share with `ids`, in descending order.

        Among equally long shared prefixes, the value of exactly the prefix comes first. The values that are taken cost
        time, and the others do not. The mapping must not change meanwhile.
        """
        return ((value, tokens) for tokens, values in self.groups(label, ids) for value in values)

    def groups(self, label: str, ids: Tokens) -> Iterator[tuple[int, Iterator[T]]]:
        """The values as `nearest` has them, those together that share equally many tokens with `ids`."""
        content = ids.tobytes()
        first = last = bisect.bisect_left(self._keys, (label, content))
        while tokens := max(self._shared(first - 1, label, ids), self._shared(last, label, ids)):
            key = label, content[: tokens * ids.itemsize]
            inner = range(first, last)
            first = bisect.bisect_left(self._keys, key, hi=first)
            last = bisect.bisect_right(self._keys, key, lo=last, key=lambda each: (each[0], each[1][: len(key[1])]))
            places = itertools.chain(range(first, inner.start), range(inner.stop, last))
            yield tokens, map(self._values.__getitem__, map(self._keys.__getitem__, places))


def common_tokens(one: Tokens, other: Tokens) -> int:
    """Length of the common prefix of two sequences."""
    shorter = min(len(one), len(other))
    differing = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differing[0]) if len(differing) else shorter


LABEL_PREFIX = "kvlayers.prefix:"
"""What every label starts with, so that the files of a store can be recognized."""


def label_of(config: object | None, model: str | None, namespace: str) -> str:
    """A text that is the same for the same model and namespace, and differs for any others. It ends with a mark of the
    namespace.

    Args:
        config: config of the model.
        model: the caller's name for the model, or an id of its weights.
        namespace: the namespace.

    Raises:
        OptionError: neither `config` nor `model` is given, or `model` or `namespace` is not a string.
        ConfigError: `config` is not a model config.
    """
    if not isinstance(namespace, str):
        raise OptionError(
            f"`namespace` must be a string, got a {type(namespace).__name__}: pass for example str(user_id)."
        )
    if model is not None and (not isinstance(model, str) or not model):
        raise OptionError(
            f"`model` must be a string that is not empty, got a {type(model).__name__}: pass "
            "kvlayers.weights_id(model), or a name."
        )
    if config is None and model is None:
        raise OptionError(
            "`config` or `model` is needed, since states of one model are useless to another, got neither: pass "
            "config=model.config."
        )
    fields = None if config is None else model_fields(config, is_pair=False)
    whole = hashlib.sha256(canonical([fields, model, namespace]).encode()).hexdigest()
    return f"{LABEL_PREFIX}{whole}:{namespace_mark(namespace)}"


@functools.lru_cache(maxsize=1024)
def namespace_mark(namespace: str) -> str:
    """A text that is the same for the same namespace, which nobody can read in it."""
    return hashlib.sha256(namespace.encode()).hexdigest()[:32]


def tokens_of(input_ids: object) -> Tokens:
    """A copy of token ids as an array as a store compares them, int64 `[tokens]`.

    Raises:
        OptionError: `input_ids` is not an int64 tensor `[tokens]` or `[1, tokens]`, or is empty.
    """
    if not isinstance(input_ids, torch.Tensor):
        raise OptionError(
            f"`input_ids` must be a tensor, got a {type(input_ids).__name__}: pass "
            "tokenizer(text, return_tensors='pt').input_ids."
        )
    if input_ids.dtype != torch.int64:
        raise OptionError(f"`input_ids` must be int64, got {input_ids.dtype}: pass what the tokenizer returned.")
    if input_ids.dim() not in (1, 2) or (input_ids.dim() == 2 and input_ids.shape[0] != 1):
        raise OptionError(
            f"`input_ids` must have shape [tokens] or [1, tokens], got {list(input_ids.shape)}: pass one sequence, as "
            "input_ids[:1] is one."
        )
    if input_ids.device.type == "meta":
        raise OptionError(
            "`input_ids` must hold data, got a tensor on the meta device: pass what the tokenizer returned."
        )
    if not input_ids.numel():
        raise OptionError("`input_ids` must have at least one token, got none: pass the tokens of the prompt.")
    return np.array(input_ids.detach().reshape(-1).cpu().numpy(), dtype=np.int64)


def checked_cache(cache: object, ids: Tokens) -> tuple[Cache, int]:
    """Check that `cache` can be stored for `ids`, and return it with the number of tokens that it has seen.

    Raises:
        OptionError: it is not a cache of kvlayers, or it is for a model with an encoder, whose input is not in `ids`.
        StateMismatchError: it has several sequences, is empty, has seen more tokens than `ids` has, has states that are
            not those of its text, or its layers have seen different numbers of tokens.
    """
    if not isinstance(cache, Cache) or cache.is_pair:
        raise OptionError(
            f"`cache` must be a cache of kvlayers for a model without an encoder, got a {type(cache).__name__}: make "
            "one, for example with kvlayers.DynamicCache(config=model.config)."
        )
    length = cache.length
    if not length:
        raise StateMismatchError("`cache` must have seen tokens, got an empty one: run the model with it first.")
    if cache.batch_size != 1:
        raise StateMismatchError(
            f"`cache` must have one sequence, got {cache.batch_size}: insert a fork() in which batch_select_indices() "
            "has selected one."
        )
    if cache.exact_tokens is not None:
        raise StateMismatchError(
            f"`cache` must have the states that the model computes for its tokens, got one in which only the first "
            f"{cache.exact_tokens} have them, as it was concatenated, changed or moved: insert its documents instead."
        )
    if length > len(ids):
        raise StateMismatchError(
            f"`input_ids` must cover the {length} tokens that the cache has seen, got {len(ids)}: pass the ids of the "
            "whole sequence."
        )
    lengths = {layer.length or length for layer in cache.adapted_layers()}
    if lengths != {length} or any(part.is_interrupted for part in cache.recurrent_parts()):
        # If all have seen as many, a pass has ended between the convolution of a layer and its recurrent state.
        raise StateMismatchError(
            f"the layers of `cache` must have seen the same tokens, got lengths {sorted(lengths)} after a forward pass "
            f"that was interrupted: {'truncate' if len(lengths) == 1 else 'crop'} the cache to "
            f"{'where that pass began' if len(lengths) == 1 else min(lengths)}, or reset() it."
        )
    return cache, length
