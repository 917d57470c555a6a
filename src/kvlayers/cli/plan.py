"""The command `kvlayers plan`."""

from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..amounts import readable_bytes
from ..planning import Plan, PlannedCache
from ..planning import plan as plan_caches
from .configs import config_of
from .dtypes import Dtype
from .failing import one_line_errors
from .output import print_json
from .quantities import amount_of_bytes, tokens
from .quietly import few_words


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
    with one_line_errors("plan"), few_words():
        planned = plan_caches(
            config_of(model),
            tokens(context),
            batch,
            None if dtype is Dtype.auto else dtype.of_torch,
            None if memory is None else amount_of_bytes(memory),
            names=name,
            encoder_length=None if encoder_length is None else tokens(encoder_length),
        )
    if as_json:
        print_json(planned)
    else:
        _show(planned)


def _show(planned: Plan) -> None:
    console = Console()
    console.print(_table(planned))
    best = planned.recommended
    console.print(f"Use [bold]{best.name}[/bold]: {best.reason}", highlight=False)
    if planned.left_out:
        console.print(f"Not for this model (--json says why): {', '.join(planned.left_out)}", style="dim")


def _table(planned: Plan) -> Table:
    budget = "" if planned.memory is None else f", {readable_bytes(planned.memory)} for the cache"
    dtype = _name_of(planned.dtype)
    drawn = Table(
        "Cache",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title=f"{planned.context_length} tokens, batch {planned.batch_size}, {dtype}{budget}",
        title_justify="left",
    )
    for column in ("Device", "Host", "A token", "Bits"):
        drawn.add_column(column, justify="right")
    drawn.add_column("States")
    if planned.memory is not None:
        drawn.add_column("Longest", justify="right")
    for cache in planned.caches:
        drawn.add_row(*_cells(planned, cache), style=_style(planned, cache))
    return drawn


def _cells(planned: Plan, cache: PlannedCache) -> list[str]:
    cells = [
        cache.name,
        readable_bytes(cache.device_bytes),
        readable_bytes(cache.host_bytes),
        readable_bytes(cache.bytes_per_token),
        f"{cache.bits:.4g}",
        cache.fidelity,
    ]
    if planned.memory is not None:
        cells.append("no end" if cache.longest_context is None else str(cache.longest_context))
    return cells


def _style(planned: Plan, cache: PlannedCache) -> str:
    if cache is planned.recommended:
        return "bold"
    return "" if cache.fits else "dim"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
