"""The command `kvlayers fidelity`."""

from pathlib import Path
from typing import Annotated

import typer

from kvlayers.tools.cli.defaults import FIDELITY_BITS, FIDELITY_CONTEXT, FIDELITY_SCORED
from kvlayers.tools.cli.dtypes import Dtype
from kvlayers.tools.cli.exit_codes import NOT_WELL, one_line_errors
from kvlayers.tools.names import HUB_NAME


def fidelity(
    model: Annotated[
        str | None,
        typer.Argument(help=f"Model directory, or name on the hub. Default: {HUB_NAME}, wherever it is found."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="File that the model reads. Default: Python's help.")] = None,
    bits: Annotated[
        str | None,
        typer.Option(
            help="Settings, separated by commas: bits (4), those of keys and values (k4v2), a backend (fp8), or one "
            f"with bits (hqq:4). Default: {FIDELITY_BITS}."
        ),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="What Calibration.save() wrote, or its directory: measured as well.")
    ] = None,
    context: Annotated[
        str | None, typer.Option(help=f"Tokens of a passage read before scoring begins. Default: {FIDELITY_CONTEXT}.")
    ] = None,
    scored: Annotated[str | None, typer.Option(help=f"Tokens that are scored. Default: {FIDELITY_SCORED}.")] = None,
    passages: Annotated[int, typer.Option(min=1, help="Passages, from places spread over the text.")] = 4,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens read at once.")] = 32,
    max_kl: Annotated[float | None, typer.Option(min=0, help="Budget: mean divergence, in nats a token.")] = None,
    max_perplexity_increase: Annotated[
        float | None, typer.Option(min=0, help="Budget: how much higher perplexity may be, in percent.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="What the model computes in.")] = Dtype.float32,
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="CPU threads. Default: as torch chooses.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="HTML file to write. Default: none.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; all else goes to stderr.")] = False,
) -> None:
    """What rounding keys and values to fewer bits does to a model's predictions on a text, and what it saves.

    Exits with 1 where no setting is within the budget, or one fails, and with 2 where it cannot begin.
    """
    # Late, as torch takes seconds to import, which `--help` need not wait for.
    import torch
    from rich.console import Console

    from kvlayers.tools.cli.fidelity_choice import calibrated, lengths, possible_settings
    from kvlayers.tools.cli.fidelity_results import FidelityResults
    from kvlayers.tools.cli.fidelity_view import fidelity_report, show
    from kvlayers.tools.cli.files import text_in
    from kvlayers.tools.cli.output import print_json, quiet_libraries
    from kvlayers.tools.cli.progress import bar_between_runs
    from kvlayers.tools.cli.reports import command_line, destination, publish
    from kvlayers.tools.demo.loading import find, load
    from kvlayers.tools.demo.model import find_device
    from kvlayers.tools.measuring.environment import environment
    from kvlayers.tools.measuring.fidelity import Budget, measure_fidelity
    from kvlayers.tools.measuring.settings import settings
    from kvlayers.tools.measuring.text import check_known
    from kvlayers.tools.measuring.text import passages as passages_of
    from kvlayers.upstream.model_types import tokens_at_once
    from kvlayers.utils.units import tokens

    # With JSON on stdout, what is for people goes elsewhere.
    console = Console(stderr=as_json)
    if threads is not None:
        torch.set_num_threads(threads)
    with one_line_errors("fidelity"), quiet_libraries():
        budget = Budget(max_kl, max_perplexity_increase)
        named = settings(bits or FIDELITY_BITS)
        of_calibration = [] if calibration is None else [calibrated(calibration)]
        required = [*([] if bits is None else named), *of_calibration]
        given_context = None if context is None else tokens(context, "--context")
        given_scored = None if scored is None else tokens(scored, "--scored")
        path = destination(console, report, None)
        content = text_in(text)
        target = find_device(device)
        found = find(console, model, "MODEL")
        chunk = min(chunk, tokens_at_once(found.config) or chunk)
        before, after = lengths(found.config, given_context, given_scored, chunk)
        texts = passages_of(found.tokenizer, content, passages, before + after + 1)
        for ids in texts:
            check_known(found.config, ids)
        possible, left_out = possible_settings([*named, *of_calibration], found.config, before + after, required)
        loaded = load(console, found, dtype.on(target), target)
        with bar_between_runs(
            console, passages * (before + after) // chunk, "Every setting, on every passage"
        ) as begin:
            measured = measure_fidelity(loaded.model, texts, possible, before, chunk, budget, lambda: begin("Reading"))
        results = FidelityResults(
            loaded.name,
            "Python's help" if text is None else str(text),
            loaded.model.dtype,
            loaded.model.device,
            passages,
            before,
            after,
            chunk,
            budget,
            measured,
            {each.name: each.generate_options for each in possible},
            left_out,
            environment(),
        )
        show(console, results)
        if path is not None:
            publish(console, fidelity_report(results, command_line()), path)
    if as_json:
        print_json(results.plain())
    if not results.are_well:
        raise typer.Exit(NOT_WELL)
