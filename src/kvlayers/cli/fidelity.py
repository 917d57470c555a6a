"""The command `kvlayers fidelity`."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..calibration import Calibration
from ..demo.loading import load
from ..demo.model import HUB_NAME, find_device
from ..errors import KVLayersError, OptionError
from ..measuring.fidelity import Budget, bytes_of, measure_fidelity
from ..measuring.settings import Setting, settings
from ..measuring.surroundings import surroundings
from ..measuring.texts import passages as passages_of
from ..model_types import most_positions, tokens_at_once
from .dtypes import Dtype
from .failing import NOT_WELL, one_line_errors
from .fidelity_results import FidelityResults
from .fidelity_view import fidelity_report, show
from .files import text_in
from .output import print_json
from .progress import bar_between_runs
from .quantities import tokens
from .quietly import few_words
from .reports import command_line, destination, publish

CALIBRATED = "calibrated"
BITS = "8,fp8,k8v4,4,k4v2,3,2"
CONTEXT, SCORED = 1024, 512


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
            f"with bits (hqq:4). Default: {BITS}."
        ),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="What Calibration.save() wrote, or its directory: measured as well.")
    ] = None,
    context: Annotated[
        str | None, typer.Option(help=f"Tokens of a passage read before scoring begins. Default: {CONTEXT}.")
    ] = None,
    scored: Annotated[str | None, typer.Option(help=f"Tokens that are scored. Default: {SCORED}.")] = None,
    passages: Annotated[int, typer.Option(min=1, help="Passages, from places spread over the text.")] = 4,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens read at once.")] = 32,
    max_kl: Annotated[float | None, typer.Option(min=0, help="Budget: mean divergence, in nats a token.")] = None,
    max_perplexity_increase: Annotated[
        float | None, typer.Option(min=0, help="Budget: how much higher perplexity may be, in percent.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="What the model computes in.")] = Dtype.float32,
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: as torch chooses.")] = None,
    report: Annotated[Path | None, typer.Option(help="HTML file to write. Default: none.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; all else goes to stderr.")] = False,
) -> None:
    """What rounding keys and values to fewer bits does to a model's predictions on a text, and what it saves.

    Exits with 1 where no setting is within the budget, or one fails, and with 2 where it cannot begin.
    """
    # With JSON on stdout, what is for people goes elsewhere.
    console = Console(stderr=as_json)
    if threads is not None:
        torch.set_num_threads(threads)
    with one_line_errors("fidelity"), few_words():
        named = settings(bits or BITS)
        found = [] if calibration is None else [_calibrated(calibration)]
        required = [*([] if bits is None else named), *found]
        path = destination(console, report, None)
        content = text_in(text)
        target = find_device(device)
        loaded = load(console, model, dtype.on(target), target, "MODEL")
        config = loaded.model.config
        chunk = min(chunk, tokens_at_once(config) or chunk)
        before, after = _lengths(config, context, scored, chunk)
        texts = passages_of(loaded.tokenizer, content, passages, before + after + 1)
        possible, left_out = _possible([*named, *found], config, before + after, required)
        budget = Budget(max_kl, max_perplexity_increase)
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
            left_out,
            surroundings(),
        )
        show(console, results)
        if path is not None:
            publish(console, fidelity_report(results, command_line()), path)
    if as_json:
        print_json(results.plain())
    if not results.are_well:
        raise typer.Exit(NOT_WELL)


def _lengths(config: Any, given_context: str | None, given_scored: str | None, chunk: int) -> tuple[int, int]:
    """Tokens of context and tokens scored: as given, or as many as usual, or as the model has positions for."""
    most = most_positions(config)
    context, scored = (None if given is None else tokens(given) for given in (given_context, given_scored))
    if context is None and scored is None and most is not None and most <= CONTEXT + SCORED:
        whole = (most - 1) // chunk
        context, scored = (whole - whole // 3) * chunk, whole // 3 * chunk
    # Without a number of their own, whole chunks.
    context = CONTEXT // chunk * chunk if context is None else context
    scored = max(SCORED // chunk, 1) * chunk if scored is None else scored
    if scored < 1 or context % chunk or scored % chunk:
        raise OptionError(
            f"expected --context and --scored to be multiples of --chunk, {chunk}, with something to score, but saw "
            f"{context} and {scored}."
        )
    if most is not None and context + scored + 1 > most:
        raise OptionError(
            f"expected at most {most} tokens, as the model has positions for, but saw {context} of context, {scored} "
            "to score and the one after them: pass less."
        )
    return context, scored


def _calibrated(path: Path) -> Setting:
    return Setting(CALIBRATED, Calibration.load(path.expanduser()).cache_config)


def _possible(
    asked: list[Setting], config: Any, tokens: int, required: list[Setting]
) -> tuple[list[Setting], dict[str, str]]:
    """The settings that there can be for a model, and why not the others, none of which may be required."""
    left_out = {}
    for each in asked:
        try:
            bytes_of(each.make, config, tokens)
        except KVLayersError as error:
            if each in required:
                raise
            left_out[each.name] = str(error)
    if len(left_out) == len(asked):
        raise OptionError(f"expected a model that some setting suits, but saw none: {next(iter(left_out.values()))}")
    return [each for each in asked if each.name not in left_out], left_out
