"""The commands `kvlayers compile` and `kvlayers lm-eval`."""

import importlib.util
import sys
import time

import typer
from rich.console import Console

from kvlayers.tools.cli.common import CHECK_FAILED, INPUT_ERROR, one_line_errors


def compile_command() -> None:
    """Compile the kernels for this CPU now, so that no script waits for them. It takes about half a minute, once.

    Nothing is compiled if the kernels are in the wheel, or were compiled before. Exits with 1 if the compiler fails.
    """
    # Imported late: torch takes seconds to import, and `--help` does not need it.
    from kvlayers.errors import KernelError
    from kvlayers.tools.kernels import LIBRARIES

    console = Console()
    with one_line_errors("compile", errors=KernelError, code=CHECK_FAILED):
        for library in LIBRARIES:
            began = time.monotonic()
            with console.status(f"compiling the kernel for {library.purpose}"):
                path = library.compile()
            seconds = time.monotonic() - began
            console.print(f"{library.purpose}: {path} ({seconds:.1f} s)", highlight=False, soft_wrap=True)


FOR_THE_HARNESS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
"""Settings under which typer leaves all arguments to the harness, from the first that is not `--help`."""


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with the additional model `kvlayers`: `kvlayers lm-eval run --model kvlayers ...`.

    All arguments go to the command of the harness: `kvlayers lm-eval run --help` lists them.

    The model takes the model arguments of `hf`, and cache, cache_config, chunk and prefix_store.
    """
    if importlib.util.find_spec("lm_eval") is None:
        print('kvlayers lm-eval: lm-evaluation-harness is not installed: pip install "kvlayers[eval]"', file=sys.stderr)
        raise typer.Exit(INPUT_ERROR)
    # Imported late: torch takes seconds to import, and `--help` does not need it.
    from lm_eval.__main__ import cli_evaluate

    import kvlayers.evaluation.harness  # noqa: F401

    sys.argv = ["lm-eval", *context.args]
    with one_line_errors("lm-eval"):
        cli_evaluate()
