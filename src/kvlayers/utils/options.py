"""Checks of options: a misspelt or wrong option raises `OptionError`, which names the right ones."""

import difflib
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

import torch

from kvlayers.errors import OptionError
from kvlayers.utils import late

P = ParamSpec("P")
Result = TypeVar("Result")


def checks_options(function: Callable[P, Result]) -> Callable[P, Result]:
    """Decorator for an initialiser, a method or a function: a call that does not fit raises `OptionError`.

    The error names the option that was meant, if one is near, and the known ones. A function may take others as well.
    """
    parameters = inspect.signature(function).parameters
    is_method = "." in function.__qualname__
    accepted = [name for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD][is_method:]
    for option in accepted:
        _takers[option].append(function.__qualname__)

    def advice(unknown: str, name: str) -> str:
        late.load_rooms()
        for option in accepted:
            if option in _classes and unknown in inspect.signature(_classes[option]).parameters:
                return f"it is part of the option `{option}`, as in {option}={{'{unknown}': ...}}."
        # Caches for a cache, and layers for a layer.
        takers = ", ".join(
            dict.fromkeys(
                taker.partition(".")[0] for taker in _takers.get(unknown, ()) if taker.endswith(f"{name[-5:]}.__init__")
            )
        )
        return (
            next((f"write {each}." for each in _MEANT.get(unknown, ()) if each.partition("=")[0] in accepted), "")
            or suggestion(unknown, accepted)
            or (f"it is one of {takers}." if takers else "remove it.")
        )

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> Result:
        try:
            return function(*args, **options)
        except TypeError as error:
            try:
                inspect.signature(function).bind(*args, **options)
            except TypeError as mismatch:
                name = type(args[0]).__name__ if function.__name__ == "__init__" else f"{function.__qualname__}()"
                # A function with `**options` has fewer names than parameters, and takes any.
                unknown = len(accepted) + is_method == len(parameters) and next(
                    (each for each in options if each not in accepted), None
                )
                wrong = (
                    f"`{unknown}` is no option of {name}: {advice(unknown, name)}"
                    if unknown
                    else f"This call of {name} is wrong: {mismatch}. Pass options by name, as in "
                    f"{', '.join(f'{option}=...' for option in accepted[:2])}."
                )
                # What only old code passes comes last.
                listed = ", ".join(sorted(accepted, key="ddp_cache_data".__eq__)) or "(none)"
                raise OptionError(f"{wrong} {name} takes the options {listed}.") from error
            raise

    return checked


def suggestion(unknown: object, known: Iterable[str]) -> str:
    """A question for the name that was meant, "" if none is near."""
    near = [
        # A name that was cut off is meant before one that looks more alike.
        *(name for name in known if unknown and name.startswith(str(unknown))),
        *difflib.get_close_matches(str(unknown), known, n=1),
    ]
    return f"did you mean {near[0]!r}?" if near else ""


_takers: defaultdict[str, list[str]] = defaultdict(list)
"""The functions that take an option, by its name."""

# How an option is written here, by a name that other functions have for it.
_MEANT = {
    "cache": ("names=['int4']", "cache_implementation='int4'"),
    "cache_implementation": ("names=['int4']",),
    "model": ("config=model.config",),
}

_classes: dict[str, type] = {}
"""The class of each option that `mapping_option` knows."""


def mapping_option(option: str) -> Callable[[type[Result]], type[Result]]:
    """Decorator for the class of an option of caches that is given as an object, or as a mapping of its arguments."""

    def known(cls: type[Result]) -> type[Result]:
        cls.__init__ = checks_options(cls.__init__)  # type: ignore[method-assign]
        _classes[option] = cls
        return cls

    return known


def as_options(cls: type[Result], given: object, example: str) -> Result:
    """The object that an option of a cache is given as: the object itself, or a mapping of its arguments.

    Args:
        cls: a public class of kvlayers, decorated with `mapping_option`.
        given: its value.
        example: a mapping that is right, as code, for the error.

    Raises:
        OptionError: it is neither of the two, or names an argument that does not exist.
    """
    if isinstance(given, cls):
        return given
    option = next(name for name, known in _classes.items() if known is cls)
    if not isinstance(given, Mapping):
        raise OptionError(
            f"`{option}` must be a {cls.__name__} or a mapping of its arguments "
            f"({', '.join(inspect.signature(cls).parameters)}), got {given!r}: pass, for example, {option}={example}."
        )
    # By text, so that a name of another type is refused as others are.
    return cls(**{str(name): value for name, value in given.items()})


def check_whole_number(
    number: object, name: str, least: int, most: int | None = None, of: str = "", advice: str = ": pass one"
) -> None:
    """Raise `OptionError` if an option is not a whole number, or too small or too large.

    Args:
        number: its value.
        name: the option, as the error calls it: "`pages` of recall".
        least: the smallest number that it can be.
        most: the largest one, if there is one.
        of: what it counts, such as "tokens".
        advice: what to do, for the end of the error: ": pass fewer tokens".
    """
    if (
        isinstance(number, int)
        and not isinstance(number, bool)
        and least <= number
        and (most is None or number <= most)
    ):
        return
    within = f", at least {least}" if most is None else f" from {least} to {most}"
    raise OptionError(f"{name} must be a whole number{f' of {of}' if of else ''}{within}, got {number!r:.60}{advice}.")


def checked_device(device: object) -> torch.device:
    """The device that an option names, if it can hold states.

    Raises:
        OptionError: no such device exists, or it holds no data.
    """
    try:
        found = torch.empty(0, device=device).device  # type: ignore[call-overload]
    except (RuntimeError, AssertionError, TypeError) as error:
        # Torch may list all devices that it knows, of which this machine has few.
        raise OptionError(
            f"`device` must be a device of this machine, got "
            f"{repr(device) if isinstance(device, str | int) else f'a {type(device).__name__}':.30} "
            f"({error!s:.90}): pass 'cpu', for example, or leave it out"
            f"{'.' if isinstance(device, str | int) else '; a model goes by name, as in config=model.config.'}"
        ) from error
    if found.type == "meta":
        raise OptionError("`device` must hold data, got 'meta': pass 'cpu', or leave it out.")
    return torch.device(found)


_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def checked_dtype(given: object) -> torch.dtype:
    """The floating-point dtype that is given as itself or by its name: `torch.bfloat16`, "bfloat16" or "bf16".

    Raises:
        OptionError: it is not a floating-point dtype.
    """
    found = (
        getattr(torch, _SHORT_DTYPES.get(given, given.removeprefix("torch.")), None)
        if isinstance(given, str)
        else given
    )
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise OptionError(
            f"`dtype` must be a floating-point torch.dtype or its name, got {given!r}: pass, for example, "
            "torch.bfloat16 or 'bfloat16'."
        )
    return found


def check_accepted(dtype: object, device: object) -> None:
    """Raise `OptionError` if a dtype or device is wrong. Old code passes them to caches, which ignore them.

    A device that this machine lacks is nevertheless one of torch.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        checked_dtype(dtype)
    is_index = isinstance(device, int) and not isinstance(device, bool) and device >= 0
    if device is not None and not is_index:
        try:
            torch.device(device)  # type: ignore[call-overload]
        except (RuntimeError, TypeError) as error:
            raise OptionError(
                f"`device` must be a device of torch, got {device!r}: pass for example 'cpu' or 'cuda:0', or leave it "
                "out."
            ) from error
