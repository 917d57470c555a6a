"""The command `kvlayers bench`."""

from pathlib import Path
from typing import Annotated

import typer

from kvlayers.tools.cli.common import CHECK_FAILED, Dtype, one_line_errors
from kvlayers.tools.names import HUB_NAME, TRANSFORMERS_CACHES

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

    from kvlayers.tools.cli.bench_results import BenchResults, choose_caches, fitting_lengths, transformers_names
    from kvlayers.tools.cli.console import print_json, quiet_libraries, read_text
    from kvlayers.tools.measuring.text import check_known, rows
    from kvlayers.tools.models import RunFacts, find, find_device, load
    from kvlayers.tools.reporting.page import command_line, publish, report_path
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
        fidelities, left_out = choose_caches(found.config, name, against_names, fitting[-1] + steps)
        loaded = load(console, found, dtype.on(target), target)
        results = BenchResults(RunFacts.of(loaded), batch, steps, trials, fidelities, left_out)
        results.measure(console, loaded, prompt, fitting)
        results.show(console)
        if path is not None:
            publish(console, results.report(command_line()), path)
    if as_json:
        print_json(results.plain())
    if not results.passed:
        raise typer.Exit(CHECK_FAILED)
