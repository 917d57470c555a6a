"""The command `kvlayers plan`."""

from typing import Annotated

import typer

from kvlayers.tools.cli.common import Dtype, one_line_errors

OPTIONS = {
    "context_length": "--context",
    "batch_size": "--batch",
    "memory": "--memory",
    "encoder_length": "--encoder-length",
    "names": "--name",
}


def plan(
    model: Annotated[str, typer.Argument(help="Directory of a model, its config.json, or its name on the hub.")],
    context: Annotated[str, typer.Option(help="Tokens of a sequence, prompt and continuation: 32768 or 32k.")],
    batch: Annotated[int, typer.Option(help="Sequences in the batch, beams included.")] = 1,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Device memory for the cache, weights not included: 24GiB, 80GB, or 50% of what full precision takes."
        ),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the model; auto: that of its config.")] = Dtype.auto,
    encoder_length: Annotated[
        str | None, typer.Option(help="Tokens of the encoder's output, if the model has an encoder.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="A cache to plan, also with options (sink:window_length=512); repeat for several. Default: all."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what each kind of cache would cost for a model, from its config alone, and which one to use.

    Exits with 2 if the input cannot be used, or if no cache is within the memory.
    """
    # Imported late: torch takes seconds to import, and `--help` does not need it.
    from rich.console import Console

    from kvlayers.planning import plan as plan_caches
    from kvlayers.tools.cli.console import config_of, print_json, quiet_libraries, table
    from kvlayers.utils.units import bytes_or_share, tokens

    with one_line_errors("plan", OPTIONS), quiet_libraries():
        # Checked before the config, which may come from the hub.
        length = tokens(context, "--context")
        if memory is not None:
            bytes_or_share(memory, "--memory")
        encoded = None if encoder_length is None else tokens(encoder_length, "--encoder-length")
        planned = plan_caches(
            config_of(model),
            length,
            batch,
            dtype.name_or_none,
            memory,
            names=name,
            encoder_length=encoded,
        )
    if as_json:
        print_json(planned)
        return
    console = Console()
    use, *others = planned.notes
    console.print(use, highlight=False, markup=False)
    head, *rows = planned.rows()
    styles = ["bold" if planned.recommended in group else "" if group[0].fits else "dim" for group in planned.groups()]
    texts = [head.index("cache"), head.index("states")]
    console.print(table([name.capitalize() for name in head], rows, planned.title, styles, texts))
    for note in others:
        console.print(note, style="yellow" if note.startswith("Careful") else "dim", highlight=False, markup=False)
    if planned.left_out:
        console.print(f"Not for this model (--json gives the reasons): {', '.join(planned.left_out)}", style="dim")
