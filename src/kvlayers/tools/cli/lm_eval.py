"""The command `kvlayers lm-eval`."""

import importlib.util
import sys

import typer

from kvlayers.tools.cli.exit_codes import INPUT_ERROR, one_line_errors

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
