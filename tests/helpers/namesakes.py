"""Classes of kvlayers that stand in for classes of transformers."""


def members_left_to_transformers(ours: type, theirs: type) -> list[str]:
    """Public members of a class of transformers that a class of kvlayers inherits from transformers."""
    special = ("__init__", "__iter__", "__len__", "__getitem__", "__repr__", "__deepcopy__")
    names = {name for base in theirs.__mro__[:-1] for name in vars(base) if not name.startswith("_")} | set(special)
    # Nobody asks a layer for its `layer_type`, by which classes of transformers were listed.
    names -= {"register", "layer_type"}
    owners = {name: next((base for base in ours.__mro__ if name in vars(base)), object) for name in names}
    return [
        f"{owner.__name__}.{name}"
        for name, owner in owners.items()
        if not owner.__module__.startswith("kvlayers") and owner is not object
    ]
