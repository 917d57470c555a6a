"""The command `kvlayers calibrate`."""

from pathlib import Path
from typing import Annotated

import typer

from kvlayers.tools.cli.dtypes import Dtype
from kvlayers.tools.cli.exit_codes import NOT_WELL, one_line_errors
from kvlayers.tools.names import HUB_NAME


def calibrate(
    model: Annotated[
        str | None,
        typer.Argument(help=f"Model directory, or name on the hub. Default: {HUB_NAME}, wherever it is found."),
    ] = None,
    bytes_per_token: Annotated[
        str | None,
        typer.Option(help="Budget: bytes that a packed token may take over all layers, such as 5040 or 5KiB."),
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(help="The other budget: mean divergence from full precision, in nats a token.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="File that the model reads. Default: Python's help.")] = None,
    output: Annotated[
        Path,
        typer.Option(help="Where the result is written: a file that ends in .json, or a directory for one."),
    ] = Path(),
    bits: Annotated[
        str | None, typer.Option(help="Bits to choose from, separated by commas. Default: all that the backend has.")
    ] = None,
    backend: Annotated[str, typer.Option(help="What quantizes.")] = "native",
    context: Annotated[str, typer.Option(help="Tokens of a passage before those that are scored.")] = "1024",
    scored: Annotated[str, typer.Option(help="Tokens of a passage that are scored.")] = "64",
    passages: Annotated[int, typer.Option(min=1, help="Passages, from places spread over the text.")] = 4,
    dtype: Annotated[Dtype, typer.Option(help="What the model computes in.")] = Dtype.float32,
    states: Annotated[
        Dtype, typer.Option(help="Dtype of the states in use, which bytes are counted for; auto: as --dtype.")
    ] = Dtype.bfloat16,
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="CPU threads. Default: as torch chooses.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; all else goes to stderr.")] = False,
) -> None:
    """Choose bits for the keys and values of each layer, within a budget of bytes or of divergence.

    What it finds is written as JSON, and measured on other text by `kvlayers fidelity --calibration`. It takes minutes.

    Exits with 1 where the divergence cannot be met, or predictions are no numbers, and with 2 where it cannot begin.
    """
    # Late, as torch takes seconds to import, which `--help` need not wait for.
    import torch
    from rich.console import Console

    from kvlayers.errors import CapacityError, StateMismatchError
    from kvlayers.tools.calibration import DivergenceBudget
    from kvlayers.tools.calibration import calibrate as calibrate_model
    from kvlayers.tools.calibration.checks import check_ids, check_positions
    from kvlayers.tools.cli.calibrate_results import CalibrationAsked, CalibrationResults, show
    from kvlayers.tools.cli.files import text_in
    from kvlayers.tools.cli.output import print_json, quiet_libraries
    from kvlayers.tools.demo.loading import find, load
    from kvlayers.tools.demo.model import find_device
    from kvlayers.tools.measuring.environment import environment
    from kvlayers.tools.measuring.text import passages as passages_of

    # With JSON on stdout, what is for people goes elsewhere.
    console = Console(stderr=as_json)
    if threads is not None:
        torch.set_num_threads(threads)
    with one_line_errors("calibrate"), quiet_libraries():
        asked = CalibrationAsked.of(bytes_per_token, max_kl, bits, backend, context, scored, output)
        content = text_in(text)
        target = find_device(device)
        found = find(console, model, "MODEL")
        check_positions(found.config, asked.context + asked.scored)
        asked.check_layers(found.config)
        texts = passages_of(found.tokenizer, content, passages, asked.context + asked.scored)
        check_ids(found.config, texts)
        loaded = load(console, found, dtype.on(target), target)
        # What only a measurement can show is a result, and not a beginning that failed.
        is_divergence = isinstance(asked.budget, DivergenceBudget)
        measured = (StateMismatchError, CapacityError) if is_divergence else StateMismatchError
        with one_line_errors("calibrate", measured, NOT_WELL):
            calibration = calibrate_model(
                loaded.model,
                texts,
                asked.budget,
                quantization=asked.quantization,
                widths=asked.widths,
                passages=passages,
                context_length=asked.context,
                scored_tokens=asked.scored,
                dtype=states.name_or_none,
            )
        results = CalibrationResults(
            loaded.name,
            "Python's help" if text is None else str(text),
            loaded.model.dtype,
            loaded.model.device,
            passages,
            asked,
            calibration,
            calibration.save(asked.file),
            environment(),
        )
        show(console, results)
    if as_json:
        print_json(results.plain())
