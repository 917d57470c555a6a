"""The command `kvlayers demo`."""

from typing import Annotated

import typer

from kvlayers.tools.cli.common import Dtype
from kvlayers.tools.names import HUB_NAME

PROMPT = "Once upon a time, a programmer"
DEFAULT_CONTEXT = 4096


def demo(
    prompt: Annotated[
        str | None,
        typer.Argument(help=f"Text to continue. Default: '{PROMPT}', after {DEFAULT_CONTEXT} tokens of context."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help=f"Model directory, or name on the hub. Default: {HUB_NAME}."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens of Python's documentation before the prompt. "
            f"Default: 0 with a prompt, {DEFAULT_CONTEXT} without.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 32,
    trials: Annotated[int, typer.Option(min=1, help="Runs of each cache; the table shows medians.")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads. Default: torch's choice.")] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="auto: bfloat16, or float32 on a CPU without bfloat16 instructions.")
    ] = Dtype.auto,
    device: Annotated[str | None, typer.Option(help="Default: cuda if available, else cpu.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, everything else on stderr.")] = False,
) -> None:
    """Continue a text with a language model through every cache, sample continuations, and answer a second turn.

    Exits with 1 if an exact cache of kvlayers gives other tokens than transformers' DynamicCache (ties aside), and with
    2 if the input cannot be used.
    """
    # Imported late: torch takes seconds to import, and `--help` does not need it.
    from kvlayers.tools.cli.demo_run import run_demo

    if context is None:
        context = DEFAULT_CONTEXT if prompt is None else 0
    run_demo(PROMPT if prompt is None else prompt, model, context, tokens, trials, threads, dtype, device, as_json)
