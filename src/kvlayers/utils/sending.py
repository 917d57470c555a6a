"""How objects with states get into another process."""

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import TypeVar

Sent = TypeVar("Sent")


def sent_by_value(cls: type[Sent]) -> type[Sent]:
    """A decorator of classes: another process gets a copy that shares no memory with the object.

    torch sends a tensor by a file descriptor of its memory, which it moves for that. A cache writes to its memory, so
    that the other process would see it, and kernels know the address. The tensors that a pickle is made of may be
    copies, which are gone, with their descriptors, before another process asks for them.

    The decorator holds for the class alone, not for subclasses.
    """
    ForkingPickler.register(cls, lambda sent: (pickle.loads, (pickle.dumps(sent, pickle.HIGHEST_PROTOCOL),)))
    return cls
