"""A radix tree over token ids, which finds sequences that share a prefix with a prompt, token by token."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

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

    def values(self) -> Iterator[T]:
        # Not recursive, since a chat of a thousand turns is a thousand nodes deep.
        pending = [self]
        while pending:
            node = pending.pop()
            if node.value is not None:
                yield node.value
            pending.extend(node.children.values())


@dataclass(frozen=True)
class PrefixMatch(Generic[T]):
    """A value in the tree, and the length of the prefix that its tokens share with the requested ones."""

    value: T
    tokens: int


@dataclass(frozen=True)
class TreeNode(Generic[T]):
    """A node of the tree.

    Attributes:
        parent: number of its parent in the order of `RadixTree.nodes`; `None` for the root.
        tokens: number of tokens behind those of its parent.
        value: the value of exactly the tokens that lead here, or `None`.
    """

    parent: int | None
    tokens: int
    value: T | None


class RadixTree(Generic[T]):
    """A mapping from sequences of token ids to values, which stores common prefixes once.

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
            node = parent
        if node.parent is not None and node.value is None and len(node.children) == 1:
            self._join(node)

    def prefixes_of(self, ids: Tokens) -> list[PrefixMatch[T]]:
        """The values of `ids` and of all of their prefixes, the shortest first."""
        node, depth, inside = self._descend(ids)
        found = []
        up: _Node[T] | None = node
        if inside:
            up, depth = node.parent, depth - inside
        while up is not None:
            if up.value is not None:
                found.append(PrefixMatch(up.value, depth))
            depth -= len(up.edge)
            up = up.parent
        return found[::-1]

    def nearest(self, ids: Tokens) -> Iterator[PrefixMatch[T]]:
        """All values, in descending order of the prefix that they share with `ids`. Take as many as needed.

        Among equally long shared prefixes, the value of exactly the prefix comes before those of longer sequences.
        """
        node, matched, inside = self._descend(ids)
        if inside:
            for value in node.values():
                yield PrefixMatch(value, matched)
            came_from, node = node, node.parent or node
            matched -= inside
        else:
            came_from = node
            for value in node.values():
                yield PrefixMatch(value, matched)
            if node.parent is None:
                return
            matched -= len(node.edge)
            node = node.parent
        while True:
            if node.value is not None:
                yield PrefixMatch(node.value, matched)
            for child in list(node.children.values()):
                if child is not came_from:
                    for value in child.values():
                        yield PrefixMatch(value, matched)
            if node.parent is None:
                return
            matched -= len(node.edge)
            came_from, node = node, node.parent

    def values(self) -> Iterator[T]:
        """All values, in no particular order."""
        return self._root.values()

    def nodes(self) -> Iterator[TreeNode[T]]:
        """All nodes, each behind its parent."""
        pending: list[tuple[int | None, _Node[T]]] = [(None, self._root)]
        number = -1
        while pending:
            parent, node = pending.pop()
            number += 1
            yield TreeNode(parent, len(node.edge), node.value)
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


def common_tokens(one: Tokens, other: Tokens) -> int:
    """Length of the common prefix of two sequences."""
    shorter = min(len(one), len(other))
    differing = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differing[0]) if len(differing) else shorter
