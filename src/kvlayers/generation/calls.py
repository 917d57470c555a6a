"""The arguments of a call of `generate()`."""

import inspect
from collections.abc import Mapping
from typing import Any

from transformers.generation.utils import GenerationMixin


def by_name(model: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments under the names that the model's generate() has for them, and those that have none.

    `arguments` is changed in place, so that nothing else holds what is dropped from it later.
    """
    signature = inspect.signature(model.generate)
    signature.bind(*args, **arguments)
    names = [
        name for name, parameter in signature.parameters.items() if parameter.kind == parameter.POSITIONAL_OR_KEYWORD
    ]
    arguments.update(zip(names, args, strict=False))
    return args[len(names) :], arguments


def whole_config(model: Any, arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The options of a call with those that the model and transformers have for it, and what is meant for the model."""
    of_generate = inspect.signature(GenerationMixin.generate).parameters
    options = {name: value for name, value in arguments.items() if name not in of_generate}
    config, model_kwargs = model._prepare_generation_config(arguments.get("generation_config"), **options)
    return config, model_kwargs


def generates_as_transformers(model: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether a call runs the generate() of transformers, and nobody else's."""
    return (
        isinstance(model, GenerationMixin)
        and type(model).generate is GenerationMixin.generate
        and "generate" not in vars(model)
        and arguments.get("custom_generate") is None
    )


def sequences_of_each_prompt(generation_config: Any) -> int:
    """How many sequences go on from each prompt side by side: its beams, or its samples."""
    return max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
