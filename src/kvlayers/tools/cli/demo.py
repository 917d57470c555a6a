"""The command `kvlayers demo`."""

from typing import Annotated

import typer

from kvlayers.tools.cli.dtypes import Dtype
from kvlayers.tools.names import HUB_NAME

PROMPT = "Once upon a time, a programmer"
CONTEXT_OF_PROMPT = 4096


def demo(
    prompt: Annotated[
        str | None,
        typer.Argument(help=f"Text to continue. Default: '{PROMPT}', after {CONTEXT_OF_PROMPT} tokens of context."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help=f"Model directory, or name on the hub. Default: {HUB_NAME}, wherever it is found."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens of real text (Python's documentation) before the prompt. "
            f"Default: 0 with a prompt, {CONTEXT_OF_PROMPT} without.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 32,
    trials: Annotated[int, typer.Option(min=1, help="Runs of each cache; the table shows medians.")] = 1,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="CPU threads. Default: as torch chooses.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="auto: bfloat16, or float32 on a CPU slow at it.")] = Dtype.auto,
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON; all else goes to stderr.")] = False,
) -> None:
    """A language model continues a text through every cache, draws samples of it, and answers a second turn.

    Exits with 1 if an exact cache of kvlayers gives other tokens than transformers' DynamicCache, ties aside, and with
    2 if there is no such model, or device.
    """
    # Late, as torch takes seconds to import, which `--help` need not wait for.
    from kvlayers.tools.demo.app import run_demo

    if context is None:
        context = CONTEXT_OF_PROMPT if prompt is None else 0
    run_demo(PROMPT if prompt is None else prompt, model, context, tokens, trials, threads, dtype, device, as_json)
