"""The command `kvlayers bench`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlayers.tools.cli.dtypes import Dtype
from kvlayers.tools.cli.exit_codes import NOT_WELL, one_line_errors
from kvlayers.tools.names import HUB_NAME, TRANSFORMERS_CACHES

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from kvlayers.tools.cli.bench_results import BenchResults
    from kvlayers.tools.demo.model import LoadedModel
    from kvlayers.tools.measuring.contenders import Contender

REPORT = Path("kvlayers-bench.html")


def bench(
    model: Annotated[
        str | None,
        typer.Argument(help=f"Model directory, or name on the hub. Default: {HUB_NAME}, wherever it is found."),
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Tokens of the prompts, separated by commas; cut to what the model has positions for.")
    ] = "128,1k,4k",
    steps: Annotated[int, typer.Option(min=1, help="Decode steps behind each prompt.")] = 32,
    trials: Annotated[int, typer.Option(min=1, help="Runs of each cache; the tables show medians.")] = 3,
    batch: Annotated[int, typer.Option(min=1, help="Sequences side by side.")] = 1,
    text: Annotated[Path | None, typer.Option(help="File that the model reads. Default: Python's help.")] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="A cache of kvlayers; may come several times. Default: the exact ones, int8 and int4."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A cache of transformers ({', '.join(TRANSFORMERS_CACHES)}). May be given several times. Its dynamic "
            "cache always runs. Default: every one whose package is installed."
        ),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="auto: bfloat16, or float32 on a CPU slow at it.")] = Dtype.auto,
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="CPU threads. Default: as torch chooses.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help=f"HTML file to write. Default: {REPORT}.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; all else goes to stderr.")] = False,
) -> None:
    """Speed and memory of each cache on this machine, beside those of transformers, as tables and an HTML report.

    Exits with 1 where an exact cache of kvlayers gives other tokens than transformers' DynamicCache, ties aside, or a
    cache of kvlayers fails, and with 2 where it cannot begin.
    """
    # Late, as torch takes seconds to import, which `--help` need not wait for.
    import torch
    from rich.console import Console

    from kvlayers.tools.cli.bench_choice import choice, fitting_lengths, transformers_names
    from kvlayers.tools.cli.bench_results import BenchResults
    from kvlayers.tools.cli.bench_view import bench_report, show
    from kvlayers.tools.cli.files import text_in
    from kvlayers.tools.cli.output import print_json, quiet_libraries
    from kvlayers.tools.cli.reports import command_line, destination, publish
    from kvlayers.tools.demo.loading import find, load
    from kvlayers.tools.demo.model import find_device
    from kvlayers.tools.measuring.environment import environment
    from kvlayers.tools.measuring.text import check_known, rows
    from kvlayers.utils.units import tokens

    # With JSON on stdout, what is for people goes elsewhere.
    console = Console(stderr=as_json)
    if threads is not None:
        torch.set_num_threads(threads)
    with one_line_errors("bench"), quiet_libraries():
        asked = [tokens(each, "--lengths") for each in lengths.split(",")]
        theirs = transformers_names(against)
        path = destination(console, report, REPORT)
        content = text_in(text)
        target = find_device(device)
        found = find(console, model, "MODEL")
        fitting = fitting_lengths(found.config, asked, steps)
        prompt = rows(found.tokenizer, content, batch, fitting[-1])
        check_known(found.config, prompt)
        chosen = choice(found.config, name, theirs, fitting[-1] + steps)
        loaded = load(console, found, dtype.on(target), target)
        results = BenchResults(
            loaded.name,
            loaded.model.dtype,
            loaded.model.device,
            batch,
            steps,
            trials,
            chosen.states,
            chosen.left_out,
            environment(),
        )
        _measure(console, loaded, prompt, fitting, results)
        show(console, results)
        if path is not None:
            publish(console, bench_report(results, command_line()), path)
    if as_json:
        print_json(results.plain())
    if not results.are_well:
        raise typer.Exit(NOT_WELL)


def _measure(
    console: "Console", loaded: "LoadedModel", prompt: "Tensor", lengths: list[int], results: "BenchResults"
) -> None:
    from kvlayers.tools.cli.progress import bar_between_runs
    from kvlayers.tools.measuring.contenders import contender
    from kvlayers.tools.measuring.decoding import measure, warm_up

    def at(length: int) -> "list[Contender]":
        return [contender(*key, loaded.model, length + results.steps) for key in results.states]

    runs = len(lengths) * results.trials * len(results.states)
    with bar_between_runs(console, runs, "Every cache at every length") as begin:
        warm_up(loaded.model, prompt, at(prompt.shape[1]))
        for length in lengths:
            results.lengths[length] = measure(
                loaded.model,
                prompt[:, :length],
                results.steps,
                results.trials,
                at(length),
                lambda rival, trial, length=length: begin(  # type: ignore[misc]
                    f"{length} tokens, {rival.library} {rival.cache}, trial {trial + 1}"
                ),
            )
