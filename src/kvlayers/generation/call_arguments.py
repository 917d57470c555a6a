"""The arguments of a call of `generate()`."""

import inspect
from collections.abc import Mapping
from typing import Any

from transformers.generation.utils import GenerationMixin


def bind_arguments(
    model: Any, args: tuple[Any, ...], arguments: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move positional arguments into `arguments`, under the names that the model's `generate()` gives them.

    `arguments` is changed in place, so that nothing else keeps alive what is later removed from it.

    Returns:
        The positional arguments that have no name, and `arguments`.
    """
    signature = inspect.signature(model.generate)
    signature.bind(*args, **arguments)
    names = [
        name for name, parameter in signature.parameters.items() if parameter.kind == parameter.POSITIONAL_OR_KEYWORD
    ]
    arguments.update(zip(names, args, strict=False))
    return args[len(names) :], arguments


def full_generation_config(model: Any, arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The `GenerationConfig` of a call, with all defaults filled in, and the arguments that are for the model."""
    of_generate = inspect.signature(GenerationMixin.generate).parameters
    options = {name: value for name, value in arguments.items() if name not in of_generate}
    config, model_kwargs = model._prepare_generation_config(arguments.get("generation_config"), **options)
    return config, model_kwargs


def uses_transformers_generate(model: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether a call runs the `generate()` of transformers, rather than one of the model or of the caller."""
    return (
        isinstance(model, GenerationMixin)
        and type(model).generate is GenerationMixin.generate
        and "generate" not in vars(model)
        and arguments.get("custom_generate") is None
    )


def sequences_per_prompt(generation_config: Any) -> int:
    """How many sequences are generated side by side from each prompt: its beams, or its samples."""
    return max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
