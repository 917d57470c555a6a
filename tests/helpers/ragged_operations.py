"""What is done to a ragged store and to the lists that it must agree with."""

import copy

import torch

from kvlayers.eviction.ragged_store import RaggedStore
from ragged_reference import RaggedLists

OPERATIONS = ("fork", "select", "drop", "expand", "truncate", "state", "copy", "compact", "drop and trim", "offload")


def operated(operation: str, store: RaggedStore, lists: RaggedLists) -> tuple[RaggedStore, RaggedLists]:
    last = lists.batch - 1
    rows = {"select": [last, 0, last], "drop": [last], "drop and trim": [last]}
    if operation in rows:
        store.select(torch.tensor(rows[operation]))
        lists.select(rows[operation])
    if operation == "fork":
        return store.fork(), lists.copy()
    if operation == "state":
        return loaded(store), lists
    if operation == "copy":
        return copy.deepcopy(store), lists
    if operation == "expand":
        store.expand(2)
        lists.select([row for row in range(lists.batch) for _ in range(2)])
    elif operation == "truncate":
        store.truncate(store.length - 3)
        lists.crop(3)
    elif operation == "compact":
        store.compact()
    elif operation == "drop and trim":
        store.trim()
    elif operation == "offload":
        store.swap_buffers(lambda buffer, start, end: buffer.reallocated(0, end, buffer.capacity))
    return store, lists


def loaded(store: RaggedStore) -> RaggedStore:
    """A store with the same state, made of an empty one."""
    twin = store.fork()
    twin.clear()
    state = store.state()
    assert twin.check_state(state) == store.length
    twin.load_state(state)
    assert twin.length == store.length
    return twin
