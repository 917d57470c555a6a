"""The command `kvlayers plan`."""

from typing import TYPE_CHECKING, Annotated

import typer

from kvlayers.tools.cli.dtypes import Dtype
from kvlayers.tools.cli.exit_codes import one_line_errors

if TYPE_CHECKING:
    from rich.table import Table

    from kvlayers.planning import Plan


def plan(
    model: Annotated[str, typer.Argument(help="Directory of a model, its config.json, or its name on the hub.")],
    context: Annotated[str, typer.Option(help="Tokens of a sequence, prompt and continuation: 32768, or 32k.")],
    batch: Annotated[int, typer.Option(help="Sequences side by side, beams included.")] = 1,
    memory: Annotated[
        str | None, typer.Option(help="What the cache may take of the device, beside the weights: 24GiB, 80GB.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the model; auto: as its config says.")] = Dtype.auto,
    encoder_length: Annotated[
        str | None, typer.Option(help="Tokens of the encoder's output, for a model with an encoder.")
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="A cache to plan; may come several times. Default: all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What each kind of cache would cost, by arithmetic from a model's config, and which to use.

    Exits with 2 where there is nothing to plan, or nothing is within the memory.
    """
    # Late, as torch takes seconds to import, which `--help` need not wait for.
    from kvlayers.planning import plan as plan_caches
    from kvlayers.tools.cli.files import config_of
    from kvlayers.tools.cli.output import print_json, quiet_libraries
    from kvlayers.utils.units import amount_of_bytes, tokens

    with one_line_errors("plan"), quiet_libraries():
        # What needs no config before what may ask the hub for one.
        length = tokens(context, "--context")
        budget = None if memory is None else amount_of_bytes(memory, "--memory")
        encoded = None if encoder_length is None else tokens(encoder_length, "--encoder-length")
        planned = plan_caches(
            config_of(model), length, batch, dtype.name_or_none, budget, names=name, encoder_length=encoded
        )
    if as_json:
        print_json(planned)
    else:
        _show(planned)


def _show(planned: "Plan") -> None:
    from rich.console import Console

    console = Console()
    console.print(_table(planned))
    use, *others = planned.notes
    console.print(use, highlight=False, markup=False)
    for note in others:
        console.print(note, style="yellow" if note.startswith("Careful") else "dim", highlight=False, markup=False)
    if planned.left_out:
        console.print(f"Not for this model (--json says why): {', '.join(planned.left_out)}", style="dim")


def _table(planned: "Plan") -> "Table":
    from rich import box
    from rich.table import Table

    head, *rows = planned.rows()
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=planned.title, title_justify="left")
    for name in head:
        drawn.add_column(name.capitalize(), justify="left" if name in ("cache", "states") else "right")
    for row, group in zip(rows, planned.groups(), strict=True):
        style = "bold" if planned.recommended in group else "" if group[0].fits else "dim"
        drawn.add_row(*row, style=style)
    return drawn
