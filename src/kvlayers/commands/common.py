"""What the options of every command need, without torch: dtypes, exit codes and errors in one line."""

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import typer
from rich.console import Console

from kvlayers.errors import KVLayersError

__all__ = ["CHECK_FAILED", "FLAG", "INPUT_ERROR", "NO_OPTIONS", "Dtype", "one_line_errors"]


class Dtype(str, Enum):
    """Dtype of the weights and the states, also by its short name."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"

    @property
    def name_or_none(self) -> str | None:
        """The name, `None` for `auto`: the caller then takes the dtype of the config."""
        return None if self is Dtype.auto else self.value

    def on(self, device: "torch.device") -> "torch.dtype":
        """The dtype; `auto` is bfloat16, but float32 on a CPU without bfloat16 instructions."""
        # Imported late: torch takes seconds to import, and `--help` needs only the names.
        import torch

        from kvlayers.utils.options import checked_dtype

        if self is Dtype.auto:
            slow = device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported()
            return torch.float32 if slow else torch.bfloat16
        return checked_dtype(self.value)


CHECK_FAILED = 1
"""Exit code if the command ran and its result failed a check: wrong tokens, or no setting within the budget."""

INPUT_ERROR = 2
"""Exit code if the input cannot be used. Typer's own errors exit with it as well."""

FLAG = ""
"""The `metavar` of an option that takes no value: typer shows `<bool>` from 0.29 on if none is given."""

NO_OPTIONS: Mapping[str, str] = MappingProxyType({})


@contextmanager
def one_line_errors(
    command: str,
    options: Mapping[str, str] = NO_OPTIONS,
    errors: type[KVLayersError] | tuple[type[KVLayersError], ...] = KVLayersError,
    code: int = INPUT_ERROR,
) -> Iterator[None]:
    """Print an error of kvlayers as one line on stderr, and exit with `code`.

    Args:
        command: name of the command, which begins the line.
        options: the command's option for each argument of the library: `{"context_length": "--context"}`. Errors name
            arguments in backticks; the printed line names the option that the user typed instead.
        errors: the classes to catch.
        code: the exit code.
    """
    try:
        yield
    except errors as error:
        line = " ".join(str(error).split())
        for argument, option in options.items():
            line = line.replace(f"`{argument}`", f"`{option}`")
        Console(stderr=True).print(
            f"kvlayers {command}: {line}", style="red", markup=False, highlight=False, emoji=False, soft_wrap=True
        )
        raise typer.Exit(code) from None
