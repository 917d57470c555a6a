"""The key of a prefix: its tokens, its model and its namespace; and the tree that finds tokens with a common prefix."""

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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


class _Node(Generic[T]):
    """The end of an edge. Every node except the root has a value, or a descendant with one."""

    def __init__(self, edge: Tokens, parent: "_Node[T] | None", value: T | None = None) -> None:
        self.edge = edge
        self.parent = parent
        self.value = value
        self.children: dict[int, _Node[T]] = {}

    def values(self, besides: "_Node[T] | None" = None) -> Iterator[T]:
        """The values of this node and of those below, each behind its prefixes, except for those of one child."""
        # Not recursive, since a chat of a thousand turns is a thousand nodes deep. By iterators, since a node may have
        # thousands of children, of which a caller needs one.
        pending = [iter((self,))]
        while pending:
            node = next(pending[-1], None)
            if node is None:
                pending.pop()
            elif node is not besides:
                if node.value is not None:
                    yield node.value
                pending.append(iter(reversed(node.children.values())))


@dataclass(frozen=True)
class PrefixMatch(Generic[T]):
    """A value in the tree, and the length of the prefix that its tokens share with the requested ones."""

    value: T
    tokens: int


class RadixTree(Generic[T]):
    """A mapping from sequences of token ids to values, which stores common prefixes once.

    Attributes:
        tokens: tokens of all sequences. Those that several of them begin with count once.

    Example:
        >>> import numpy as np
        >>> tree = RadixTree()
        >>> tree.insert(np.array([1, 2, 3]), "abc")
        >>> tree.insert(np.array([1, 2, 9, 9]), "abzz")
        >>> [(found.value, found.tokens) for found in tree.nearest(np.array([1, 2, 9, 4]))]
        [('abzz', 3), ('abc', 2)]
    """

    def __init__(self) -> None:
        self._root: _Node[T] = _Node(np.empty(0, np.int64), None)
        self._count = 0
        self.tokens = 0

    def __len__(self) -> int:
        return self._count

    def get(self, ids: Tokens) -> T | None:
        """The value of exactly these tokens, or `None`."""
        node, matched, inside = self._descend(ids)
        return node.value if matched == len(ids) and not inside else None

    def insert(self, ids: Tokens, value: T) -> None:
        """Set the value of these tokens."""
        node, matched, inside = self._descend(ids)
        if inside:
            node = self._split(node, inside)
        if matched < len(ids):
            # A copy, since the caller may write to its array.
            leaf: _Node[T] = _Node(ids[matched:].copy(), node)
            node.children[int(ids[matched])] = leaf
            node = leaf
            self.tokens += len(leaf.edge)
        self._count += node.value is None
        node.value = value

    def remove(self, ids: Tokens) -> None:
        """Remove the value of these tokens, if there is one."""
        node, matched, inside = self._descend(ids)
        if matched < len(ids) or inside or node.value is None:
            return
        node.value = None
        self._count -= 1
        while node.parent is not None and node.value is None and not node.children:
            parent = node.parent
            del parent.children[int(node.edge[0])]
            self.tokens -= len(node.edge)
            node = parent
        if node.parent is not None and node.value is None and len(node.children) == 1:
            self._join(node)

    def prefixes_of(self, ids: Tokens) -> list[T]:
        """The values of `ids` and of all of their prefixes, the shortest first."""
        return [node.value for node, _, is_whole in self._path(ids) if is_whole and node.value is not None][::-1]

    def nearest(self, ids: Tokens) -> Iterator[PrefixMatch[T]]:
        """All values, in descending order of the prefix that they share with `ids`. Take as many as needed.

        Among equally long shared prefixes, the value of exactly the prefix comes before those of longer sequences. The
        values that are taken cost time, and the others do not. The tree must not change meanwhile.
        """
        for matched, values in self.groups(ids):
            for value in values:
                yield PrefixMatch(value, matched)

    def groups(self, ids: Tokens) -> list[tuple[int, Iterator[T]]]:
        """The values as `nearest` has them, those together that share equally many tokens with `ids`."""
        groups, came_from = [], None
        for node, matched, _ in self._path(ids):
            groups.append((matched, node.values(besides=came_from)))
            came_from = node
        return groups

    def _path(self, ids: Tokens) -> list[tuple[_Node[T], int, bool]]:
        """The nodes that `ids` lead to, the last one first, how many tokens match, and whether its whole edge does."""
        node: _Node[T] | None
        node, matched, inside = self._descend(ids)
        path = []
        while node is not None:
            path.append((node, matched, not inside))
            matched -= inside or len(node.edge)
            node, inside = node.parent, 0
        return path

    def values(self) -> Iterator[T]:
        """All values, in no particular order."""
        return self._root.values()

    def nodes(self) -> Iterator[tuple[int | None, int, T | None]]:
        """All nodes, each behind its parent: the parent's number, the tokens behind the parent's, and the value."""
        pending: list[tuple[int | None, _Node[T]]] = [(None, self._root)]
        number = -1
        while pending:
            parent, node = pending.pop()
            number += 1
            yield parent, len(node.edge), node.value
            pending.extend((number, child) for child in reversed(node.children.values()))

    def _descend(self, ids: Tokens) -> tuple[_Node[T], int, int]:
        """The node that `ids` leads to, the number of matched tokens, and how many of them end inside its edge."""
        node, matched = self._root, 0
        while matched < len(ids):
            child = node.children.get(int(ids[matched]))
            if child is None:
                break
            common = common_tokens(child.edge, ids[matched:])
            matched += common
            if common < len(child.edge):
                return child, matched, common
            node = child
        return node, matched, 0

    def _split(self, node: _Node[T], tokens: int) -> _Node[T]:
        parent: Any = node.parent
        upper: _Node[T] = _Node(node.edge[:tokens].copy(), parent)
        parent.children[int(upper.edge[0])] = upper
        node.edge, node.parent = node.edge[tokens:].copy(), upper
        upper.children[int(node.edge[0])] = node
        return upper

    def _join(self, node: _Node[T]) -> None:
        parent: Any = node.parent
        (child,) = node.children.values()
        child.edge, child.parent = np.concatenate([node.edge, child.edge]), parent
        parent.children[int(child.edge[0])] = child


class PrefixTrees(Generic[T]):
    """A tree for each model and namespace that has values."""

    def __init__(self) -> None:
        self._trees: dict[str, RadixTree[T]] = {}

    def __iter__(self) -> Iterator[RadixTree[T]]:
        return iter(self._trees.values())

    def of(self, label: str) -> RadixTree[T]:
        """The tree of a label, for reading only."""
        tree = self._trees.get(label)
        return RadixTree() if tree is None else tree

    def insert(self, label: str, ids: Tokens, value: T) -> None:
        """Set the value of these tokens."""
        self._trees.setdefault(label, RadixTree()).insert(ids, value)

    def remove(self, label: str, ids: Tokens) -> None:
        """Remove the value of these tokens, if there is one."""
        tree = self.of(label)
        tree.remove(ids)
        if not len(tree):
            self._trees.pop(label, None)


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
            f"`model` must be a string that is not empty, got {model!r}: pass kvlayers.weights_id(model), or a name."
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
    """A copy of token ids as an array for the radix tree, int64 `[tokens]`.

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
    length = cache.get_seq_length()
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
    states = {(layer.length or length, layer.is_interrupted) for layer in cache.adapted_layers()}
    if states != {(length, False)}:
        lengths = {each for each, _ in states}
        # If all have seen as many, a pass has ended between the convolution of a layer and its recurrent state.
        raise StateMismatchError(
            f"the layers of `cache` must have seen the same tokens, got lengths {sorted(lengths)} after a forward pass "
            f"that was interrupted: {'truncate' if len(lengths) == 1 else 'crop'} the cache to "
            f"{'where that pass began' if len(lengths) == 1 else min(lengths)}, or reset() it."
        )
    return cache, length
