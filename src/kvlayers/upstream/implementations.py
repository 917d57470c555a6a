"""The functions that a model's modules call by a name in their configs: of attention, of its masks, and of experts."""

import sys
from functools import partial
from typing import Any

from torch import nn
from transformers import PretrainedConfig, masking_utils, modeling_utils

FIELD = "_implementation_internal"
"""The end of the fields of configs that name functions, behind what these compute."""

KNOWN = ("transformers", "kvlayers")
"""Packages whose functions are what their names say."""


def of(model: nn.Module) -> tuple[list[str], str | None]:
    """The implementations that the modules of a model go by. Each part of a model may have its own.

    Returns:
        The names of the functions, as the configs have them, without repeats; and one that may be any function, as the
        caller's own, `None` for none.
    """
    # Modules share a few configs.
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    names = {
        (field[1:].removesuffix(FIELD), str(name)): None
        for config in configs.values()
        if isinstance(config, PretrainedConfig)
        for field, name in vars(config).items()
        if field.endswith(FIELD) and name is not None
    }
    own = (
        f"{part}_implementation={name!r}"
        for part, name in names
        for table in _TABLES.get(part, ())
        if not _is_known(table.get(name))
    )
    return [f"{part}={name}" for part, name in names], next(own, None)


def _is_known(function: Any) -> bool:
    while isinstance(function, partial):
        function = function.func
    # Without a function, a module has its own, "eager".
    return function is None or function.__module__.partition(".")[0] in KNOWN


_TABLES: dict[str, tuple[Any, ...]] = {
    "attn": (modeling_utils.ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS),
    # Before transformers 5, there are none.
    "experts": (vars(sys.modules.get("transformers.integrations.moe", object)).get("ALL_EXPERTS_FUNCTIONS", {}),),
}
"""Where functions are found, by what they compute."""
