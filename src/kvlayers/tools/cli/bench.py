"""The command `kvlayers bench`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlayers.tools.cli.dtypes import Dtype
from kvlayers.tools.cli.exit_codes import CHECK_FAILED, one_line_errors
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
        str | None, typer.Argument(help=f"Model directory, or name on the hub. Default: {HUB_NAME}.")
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, separated by commas, cut to the model's positions.")
    ] = "128,1k,4k",
    steps: Annotated[int, typer.Option(min=1, help="Decode steps after each prompt.")] = 32,
    trials: Annotated[int, typer.Option(min=1, help="Runs of each cache; the tables show medians.")] = 3,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in the batch.")] = 1,
    text: Annotated[Path | None, typer.Option(help="File with the prompt text. Default: Python's help.")] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="A cache of kvlayers, also with options (sink:window_length=512); repeat for several. Default: the "
            "exact ones, int8 and int4."
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A cache of transformers ({', '.join(TRANSFORMERS_CACHES)}); repeat for several. The dynamic one "
            "always runs. Default: all whose packages are installed."
        ),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="auto: bfloat16, or float32 on a CPU without bfloat16 instructions.")
    ] = Dtype.auto,
    device: Annotated[str | None, typer.Option(help="Default: cuda if available, else cpu.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads. Default: torch's choice.")] = None,
    report: Annotated[Path | None, typer.Option(help=f"HTML file to write. Default: {REPORT}.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, everything else on stderr.")] = False,
) -> None:
    """Measure the speed and memory of kvlayers' and transformers' caches on this machine, with an HTML report.

    Exits with 1 if an exact cache of kvlayers gives other tokens than transformers' DynamicCache (ties aside) or any
    cache of kvlayers fails, and with 2 if the input cannot be used.
    """
    # Imported late: torch takes seconds to import, and `--help` does not need it.
    import torch
    from rich.console import Console

    from kvlayers.tools.cli.bench_choice import choose_caches, fitting_lengths, transformers_names
    from kvlayers.tools.cli.bench_results import BenchResults
    from kvlayers.tools.cli.bench_view import bench_report, show
    from kvlayers.tools.cli.files import read_text
    from kvlayers.tools.cli.output import print_json, quiet_libraries
    from kvlayers.tools.cli.reports import command_line, publish, report_path
    from kvlayers.tools.cli.run_facts import RunFacts
    from kvlayers.tools.demo.loading import find, load
    from kvlayers.tools.demo.model import find_device
    from kvlayers.tools.measuring.text import check_known, rows
    from kvlayers.utils.units import tokens

    # If stdout has the JSON, people read stderr.
    console = Console(stderr=as_json)
    if threads is not None:
        torch.set_num_threads(threads)
    with one_line_errors("bench"), quiet_libraries():
        asked_lengths = [tokens(each, "--lengths") for each in lengths.split(",")]
        against_names = transformers_names(against)
        path = report_path(console, report, REPORT)
        content = read_text(text)
        target = find_device(device)
        found = find(console, model, "MODEL")
        fitting = fitting_lengths(found.config, asked_lengths, steps)
        prompt = rows(found.tokenizer, content, batch, fitting[-1])
        check_known(found.config, prompt)
        choice = choose_caches(found.config, name, against_names, fitting[-1] + steps)
        loaded = load(console, found, dtype.on(target), target)
        results = BenchResults(RunFacts.of(loaded), batch, steps, trials, choice.fidelities, choice.left_out)
        _measure(console, loaded, prompt, fitting, results)
        show(console, results)
        if path is not None:
            publish(console, bench_report(results, command_line()), path)
    if as_json:
        print_json(results.plain())
    if not results.passed:
        raise typer.Exit(CHECK_FAILED)


def _measure(
    console: "Console", loaded: "LoadedModel", prompt: "Tensor", lengths: list[int], results: "BenchResults"
) -> None:
    from kvlayers.tools.cli.progress import bar_between_runs
    from kvlayers.tools.measuring.contenders import make_contender
    from kvlayers.tools.measuring.decoding import measure, warm_up

    def contenders(length: int) -> "list[Contender]":
        return [make_contender(*key, loaded.model, length + results.steps) for key in results.fidelities]

    runs = len(lengths) * results.trials * len(results.fidelities)
    with bar_between_runs(console, runs, "Every cache at every length") as begin:
        warm_up(loaded.model, prompt, contenders(prompt.shape[1]))
        for length in lengths:
            results.by_length[length] = measure(
                loaded.model,
                prompt[:, :length],
                results.steps,
                results.trials,
                contenders(length),
                lambda contender, trial, length=length: begin(  # type: ignore[misc]
                    f"{length} tokens, {contender.name}, trial {trial + 1}"
                ),
            )
