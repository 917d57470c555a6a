"""States that the modules of a model keep from one forward pass to the next, where no cache can reach them.

They cannot be rolled back, copied or stored with a cache, and belong to the batch of the newest pass. Before the first
pass there is nothing to see of them, so it is read from the code of a module which attributes its forward pass assigns.
"""

import dis
import inspect
import types
from collections.abc import Iterator
from functools import cache

from torch import Tensor, nn

PASS_METHODS = ("forward", "prepare_inputs_for_generation")
"""Methods of a module that `generate()` calls for each pass."""


def kept_states(model: nn.Module) -> str | None:
    """Where a module of `model` keeps a tensor between forward passes: "layers.0.conv_state"; `None` for nowhere.

    Buffers and parameters are not meant, which modules assign when they move them to another device.
    """
    for path, module in model.named_modules():
        for name in _assigned_in_a_pass(module.__class__):
            if not _is_registered(module, name) and isinstance(vars(module).get(name), Tensor | None):
                return f"{path}.{name}" if path else name
    return None


def _is_registered(module: nn.Module, name: str) -> bool:
    return (
        name in module._buffers
        or name in module._parameters
        or name in module._modules
        or isinstance(inspect.getattr_static(type(module), name, None), property)
    )


@cache
def _assigned_in_a_pass(module_class: type[nn.Module]) -> tuple[str, ...]:
    """Attributes of `self` that a pass assigns, in `PASS_METHODS` or in methods of `self` that they use."""
    assigned: set[str] = set()
    seen: set[str] = set()
    waiting = set(PASS_METHODS)
    while waiting:
        name = waiting.pop()
        seen.add(name)
        for code in _codes(module_class, name):
            read, stored = _attributes_of_self(code)
            assigned |= stored
            waiting |= read - seen
    return tuple(sorted(assigned))


def _codes(module_class: type, name: str) -> Iterator[types.CodeType]:
    """The code of a method in each class that defines it, apart from torch and the bases of transformers' models."""
    for owner in module_class.__mro__:
        package = f"{owner.__module__}."
        is_base = package.startswith("torch.") or (
            package.startswith("transformers.") and not package.startswith("transformers.models.")
        )
        method = None if is_base else vars(owner).get(name)
        if isinstance(method, types.FunctionType):
            unwrapped = inspect.unwrap(method)
            if isinstance(unwrapped, types.FunctionType):
                yield unwrapped.__code__


def _attributes_of_self(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Attributes of its first argument: the names that code reads, and the names that it assigns."""
    if not code.co_varnames:
        return set(), set()
    own_name, loaded = code.co_varnames[0], None
    read: set[str] = set()
    stored: set[str] = set()
    for instruction in dis.get_instructions(code):
        if loaded == own_name and instruction.opname == "STORE_ATTR":
            stored.add(instruction.argval)
        elif loaded == own_name and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            read.add(instruction.argval)
        # From Python 3.13 on, one instruction may load two variables.
        is_load = instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "STORE_FAST_LOAD_FAST"))
        found = instruction.argval if is_load else None
        loaded = found[-1] if isinstance(found, tuple) else found
    return read, stored
