"""A radix tree over token ids: what is held that begins as a prompt does, compared token by token."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]
"""Token ids, `[tokens]`."""

T = TypeVar("T")


class _Node(Generic[T]):
    """The end of an edge. Every node but the root has a value, or children that lead to one."""

    def __init__(self, edge: Tokens, parent: "_Node[T] | None", value: T | None = None) -> None:
        self.edge = edge
        self.parent = parent
        self.value = value
        self.children: dict[int, _Node[T]] = {}

    def values(self) -> Iterator[T]:
        # Not by recursion: a chat of a thousand turns is a thousand nodes deep.
        pending = [self]
        while pending:
            node = pending.pop()
            if node.value is not None:
                yield node.value
            pending.extend(node.children.values())


@dataclass(frozen=True)
class SharedRun(Generic[T]):
    """A value in the tree, and how many of its first tokens are those that were asked for."""

    value: T
    tokens: int


class RadixTree(Generic[T]):
    """Values by sequences of token ids, which share the tokens that they begin with.

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
        """The value of exactly these tokens, `None` where there is none."""
        node, matched, inside = self._descend(ids)
        return node.value if matched == len(ids) and not inside else None

    def insert(self, ids: Tokens, value: T) -> None:
        """Give these tokens a value, in the place of the one that they had."""
        node, matched, inside = self._descend(ids)
        if inside:
            node = self._split(node, inside)
        if matched < len(ids):
            # A copy, since the caller may write to what it was made from.
            leaf: _Node[T] = _Node(ids[matched:].copy(), node)
            node.children[int(ids[matched])] = leaf
            node = leaf
        self._count += node.value is None
        node.value = value

    def remove(self, ids: Tokens) -> None:
        """Take the value of these tokens away, where there is one."""
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

    def on_the_way(self, ids: Tokens) -> list[SharedRun[T]]:
        """The values of `ids` and of all that they begin with, the shortest first."""
        node, depth, inside = self._descend(ids)
        found = []
        up: _Node[T] | None = node
        if inside:
            up, depth = node.parent, depth - inside
        while up is not None:
            if up.value is not None:
                found.append(SharedRun(up.value, depth))
            depth -= len(up.edge)
            up = up.parent
        return found[::-1]

    def nearest(self, ids: Tokens) -> Iterator[SharedRun[T]]:
        """All values, those first whose tokens share most with `ids`: take as many as are needed.

        At equal numbers the value of those tokens alone comes before those of longer ones.
        """
        node, matched, inside = self._descend(ids)
        if inside:
            for value in node.values():
                yield SharedRun(value, matched)
            came_from, node = node, node.parent or node
            matched -= inside
        else:
            came_from = node
            for value in node.values():
                yield SharedRun(value, matched)
            if node.parent is None:
                return
            matched -= len(node.edge)
            node = node.parent
        while True:
            if node.value is not None:
                yield SharedRun(node.value, matched)
            for child in list(node.children.values()):
                if child is not came_from:
                    for value in child.values():
                        yield SharedRun(value, matched)
            if node.parent is None:
                return
            matched -= len(node.edge)
            came_from, node = node, node.parent

    def values(self) -> Iterator[T]:
        """All values, in no order."""
        return self._root.values()

    def _descend(self, ids: Tokens) -> tuple[_Node[T], int, int]:
        """The node that is reached, tokens matched, and how many of its edge where that did not match to its end."""
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
    """How many tokens two sequences begin with alike."""
    least = min(len(one), len(other))
    differing = np.flatnonzero(one[:least] != other[:least])
    return int(differing[0]) if len(differing) else least
