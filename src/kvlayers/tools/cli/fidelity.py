"""The command `kvlayers fidelity`."""

from pathlib import Path
from typing import Annotated

import typer

from kvlayers.tools.cli.dtypes import Dtype
from kvlayers.tools.cli.exit_codes import CHECK_FAILED, one_line_errors
from kvlayers.tools.names import FIDELITY_BITS, FIDELITY_CONTEXT, FIDELITY_SCORED, HUB_NAME

OPTIONS = {
    "path": "--calibration",
    "max_kl": "--max-kl",
    "max_perplexity_increase": "--max-perplexity-increase",
    "backend": "--bits",
    "nbits": "--bits",
    "key_nbits": "--bits",
    "value_nbits": "--bits",
}


def fidelity(
    model: Annotated[
        str | None, typer.Argument(help=f"Model directory, or name on the hub. Default: {HUB_NAME}.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="File that the model reads. Default: Python's help.")] = None,
    bits: Annotated[
        str | None,
        typer.Option(
            help="Settings, separated by commas: bits (4), bits of keys and of values (k4v2), a backend (fp8), or a "
            f"backend with bits (hqq:4). Default: {FIDELITY_BITS}."
        ),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="A file from `kvlayers calibrate`, or its directory, to measure as well.")
    ] = None,
    context: Annotated[
        str | None, typer.Option(help=f"Tokens of each passage before the scored ones. Default: {FIDELITY_CONTEXT}.")
    ] = None,
    scored: Annotated[
        str | None, typer.Option(help=f"Tokens of each passage to score. Default: {FIDELITY_SCORED}.")
    ] = None,
    passages: Annotated[int, typer.Option(min=1, help="Passages, spread over the text.")] = 4,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a forward pass.")] = 32,
    max_kl: Annotated[float | None, typer.Option(min=0, help="Budget: mean KL divergence, in nats a token.")] = None,
    max_perplexity_increase: Annotated[
        float | None, typer.Option(min=0, help="Budget: increase of perplexity, in percent.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Dtype that the model computes in.")] = Dtype.float32,
    device: Annotated[str | None, typer.Option(help="Default: cuda if available, else cpu.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads. Default: torch's choice.")] = None,
    report: Annotated[Path | None, typer.Option(help="HTML file to write. Default: none.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, everything else on stderr.")] = False,
) -> None:
    """Measure what quantized caches change in a model's predictions on a text, and how many bytes they save.

    Exits with 1 if no setting is within the budget or a setting fails, and with 2 if the input cannot be used.
    """
    # Imported late: torch takes seconds to import, and `--help` does not need it.
    import torch
    from rich.console import Console

    from kvlayers.tools.cli.fidelity_choice import calibrated, lengths, possible_settings
    from kvlayers.tools.cli.fidelity_results import FidelityResults
    from kvlayers.tools.cli.fidelity_view import fidelity_report, show
    from kvlayers.tools.cli.files import read_text
    from kvlayers.tools.cli.output import print_json, quiet_libraries
    from kvlayers.tools.cli.progress import bar_between_runs
    from kvlayers.tools.cli.reports import command_line, publish, report_path
    from kvlayers.tools.cli.run_facts import RunFacts
    from kvlayers.tools.demo.loading import find, load
    from kvlayers.tools.demo.model import find_device
    from kvlayers.tools.measuring.fidelity import FidelityBudget, measure_fidelity
    from kvlayers.tools.measuring.settings import settings
    from kvlayers.tools.measuring.text import check_known
    from kvlayers.tools.measuring.text import passages as passages_of
    from kvlayers.upstream.model_types import tokens_at_once
    from kvlayers.utils.units import tokens

    # If stdout has the JSON, people read stderr.
    console = Console(stderr=as_json)
    if threads is not None:
        torch.set_num_threads(threads)
    with one_line_errors("fidelity", OPTIONS), quiet_libraries():
        budget = FidelityBudget(max_kl, max_perplexity_increase)
        named = settings(bits or FIDELITY_BITS)
        of_calibration = [] if calibration is None else [calibrated(calibration)]
        required = [*([] if bits is None else named), *of_calibration]
        asked_context = None if context is None else tokens(context, "--context")
        asked_scored = None if scored is None else tokens(scored, "--scored")
        path = report_path(console, report, None)
        content = read_text(text)
        target = find_device(device)
        found = find(console, model, "MODEL")
        chunk = min(chunk, tokens_at_once(found.config) or chunk)
        before, after = lengths(found.config, asked_context, asked_scored, chunk)
        texts = passages_of(found.tokenizer, content, passages, before + after + 1)
        for ids in texts:
            check_known(found.config, ids)
        possible, left_out = possible_settings([*named, *of_calibration], found.config, before + after, required)
        loaded = load(console, found, dtype.on(target), target)
        with bar_between_runs(console, passages * (before + after) // chunk, "Every setting on every passage") as begin:
            measured = measure_fidelity(loaded.model, texts, possible, before, chunk, budget, lambda: begin("Reading"))
        results = FidelityResults(
            run=RunFacts.of(loaded),
            text="Python's help" if text is None else str(text),
            passages=passages,
            context=before,
            scored=after,
            chunk=chunk,
            budget=budget,
            settings=measured,
            uses={each.name: each.generate_options for each in possible},
            left_out=left_out,
        )
        show(console, results)
        if path is not None:
            publish(console, fidelity_report(results, command_line()), path)
    if as_json:
        print_json(results.plain())
    if not results.passed:
        raise typer.Exit(CHECK_FAILED)
