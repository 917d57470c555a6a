"""The argument in which models take their cache, and the field in which they return it. Only this file names them.

From transformers 5.24 on, every model calls it `cache`. Before, models call it `past_key_values`, and mamba
`cache_params`; models that were written then keep these names.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from transformers.utils import ModelOutput

from kvlayers.errors import OptionError
from kvlayers.upstream import model_types

SPELLINGS = ("cache", "past_key_values", "cache_params")
"""All names of the argument, the newest first."""


def name_for(model: Any) -> str:
    """Name of the argument in which the forward pass of a model takes its cache, or the usual one if it names none."""
    return _name_in_forward(type(model))  # type: ignore[no-any-return]


def name_in_generate(model: Any) -> str:
    """Name by which `generate()` hands the cache to its loops and to `prepare_inputs_for_generation` of a model."""
    return SPELLINGS[0] if SPELLINGS[0] in _spellings_here() else name_for(model)


# While code is traced for compilation, it is asked once.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def usual_name() -> str:
    """Name by which the installed transformers passes caches to its own models."""
    return _spellings_here()[0]


def read_tokens(model: Any, ids: torch.Tensor, cache: Any, **arguments: Any) -> None:
    """Pass tokens `[batch, tokens]` to a model for the states alone, which it puts into a cache."""
    model(ids, **{name_for(model): cache, "use_cache": True, **model_types.newest_logits_only(model, 0), **arguments})


def is_taken_by(model: Any) -> bool:
    """Whether the forward pass of a model names an argument for a cache."""
    return bool(_has_parameter(type(model), name_for(model)))


def respelled(model: Any, arguments: dict[str, Any], name: str | None = None) -> dict[str, Any]:
    """Arguments with the cache by one name, whichever name it was passed by.

    Args:
        model: the model.
        arguments: arguments by name, which are not changed.
        name: the name to use. Default: the one that the model's forward pass takes.

    Returns:
        `arguments` itself if the cache has the right name, or if no cache is passed.

    Raises:
        OptionError: two names have different caches.
    """
    name = name_for(model) if name is None else name
    for other in SPELLINGS:
        # Some models take another thing by a name that is not that of their cache.
        if other != name and other in arguments and not _has_parameter(type(model), other):
            past, present = arguments[other], arguments.get(name)
            if past is not None and present is not None and present is not past:
                raise OptionError(
                    f"`{other}` and `{name}` must be the same cache, got a {type(past).__name__} and a "
                    f"{type(present).__name__}: pass one cache, as `{name}`."
                )
            arguments = {key: value for key, value in arguments.items() if key != other}
            if past is not None:
                arguments[name] = past
    return arguments


OF_PAGES = "PagedAttentionCache"
"""Name of the class of transformers' cache in continuous batching, which is for attention alone. A pass has it as
`cache` on every version. Importing the class takes long."""


def passed_in(arguments: Mapping[str, Any]) -> Any:
    """What was passed in the place of a cache, by any of its names; `None` if nothing was."""
    return next((arguments[name] for name in SPELLINGS if arguments.get(name) is not None), None)


@functools.cache
def _spellings_here() -> tuple[str, ...]:
    """The names by which the installed transformers passes caches. A model may use the word `cache` for a dict."""
    # Imported late, since generate() takes long to import, and not every use of a cache needs it.
    from transformers.generation.utils import ALL_CACHE_NAMES

    return tuple(name for name in SPELLINGS if name in ALL_CACHE_NAMES)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _name_in_forward(model_class: Any) -> str:
    # By the function, as a class may get another one.
    return _accepted_name(model_class.forward)


@functools.lru_cache(maxsize=1024)
def _accepted_name(forward: Any) -> str:
    # A model that was written for older versions keeps their names, which newer versions do not list.
    accepted = (*_spellings_here(), *SPELLINGS[1:])
    return next((name for name in accepted if name in _parameters(forward)), accepted[0])


@functools.lru_cache(maxsize=1024)
def _parameters(forward: Any) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_parameter(model_class: Any, name: str) -> bool:
    return name in _parameters(model_class.forward)


def is_generator(module: object) -> bool:
    """Whether a module is a model that `generate()` can run."""
    from transformers.generation.utils import GenerationMixin

    return isinstance(module, GenerationMixin)


def in_output(output: Any) -> Any:
    """The cache in what a forward pass or `generate()` returned, found by its type; `None` without a cache."""
    values = output.values() if isinstance(output, ModelOutput) else output if type(output) is tuple else ()
    return next((value for value in values if isinstance(value, transformers.Cache)), None)


def replace_in_output(output: Any, make: Callable[[Any], Any]) -> Any:
    """What a forward pass or `generate()` returned, with what `make` returns for a cache in the place of that cache."""
    if type(output) is tuple:
        return tuple(make(value) if isinstance(value, transformers.Cache) else value for value in output)
    for name, value in list(output.items()) if isinstance(output, ModelOutput) else ():
        if isinstance(value, transformers.Cache):
            output[name] = make(value)
    return output
