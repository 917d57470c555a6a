"""The command `kvlayers calibrate`."""

from pathlib import Path
from typing import Annotated

import typer

from kvlayers.tools.cli.common import CHECK_FAILED, Dtype, one_line_errors
from kvlayers.tools.names import HUB_NAME

OPTIONS = {
    "bytes_per_token": "--bytes-per-token",
    "divergence": "--max-kl",
    "budget": "--bytes-per-token",
    "widths": "--bits",
    "backend": "--backend",
    "context_length": "--context",
    "scored_tokens": "--scored",
    "path": "--output",
}

READ_AT_ONCE = 512
"""Tokens of a forward pass that looks for a head that loses far more than the others."""


def calibrate(
    model: Annotated[
        str | None, typer.Argument(help=f"Model directory, or name on the hub. Default: {HUB_NAME}.")
    ] = None,
    bytes_per_token: Annotated[
        str | None,
        typer.Option(help="Budget: bytes that a packed token may take over all layers, such as 5040 or 5KiB."),
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(help="The other budget: mean KL divergence from full precision, in nats a token.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="File that the model reads. Default: Python's help.")] = None,
    output: Annotated[Path, typer.Option(help="Where to write the result: a .json file, or a directory.")] = Path(),
    bits: Annotated[
        str | None, typer.Option(help="Bits to choose from, separated by commas. Default: all of the backend.")
    ] = None,
    backend: Annotated[str, typer.Option(help="Quantization backend.")] = "native",
    context: Annotated[str, typer.Option(help="Tokens of each passage before the scored ones.")] = "1024",
    scored: Annotated[str, typer.Option(help="Tokens of each passage to score.")] = "64",
    passages: Annotated[int, typer.Option(min=1, help="Passages, spread over the text.")] = 4,
    dtype: Annotated[Dtype, typer.Option(help="Dtype that the model computes in.")] = Dtype.float32,
    states: Annotated[
        Dtype, typer.Option(help="Dtype of the states in use, for which bytes are counted; auto: as --dtype.")
    ] = Dtype.bfloat16,
    device: Annotated[str | None, typer.Option(help="Default: cuda if available, else cpu.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads. Default: torch's choice.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, everything else on stderr.")] = False,
) -> None:
    """Choose bits for the keys and values of each layer, within a budget of bytes or of KL divergence.

    It takes minutes, and writes the result as JSON. `kvlayers fidelity --calibration` measures it on another text.

    Exits with 1 if the KL divergence cannot be met or predictions are not finite, and with 2 if the input cannot be
    used.
    """
    # Imported late: torch takes seconds to import, and `--help` does not need it.
    import torch
    from rich.console import Console

    from kvlayers.caches.quantized import QuantizedCache
    from kvlayers.errors import CapacityError, StateMismatchError
    from kvlayers.tools.calibration import DivergenceBudget
    from kvlayers.tools.calibration import calibrate as calibrate_model
    from kvlayers.tools.calibration.checks import check_ids, check_positions
    from kvlayers.tools.cli.calibrate_results import CalibrationRequest, CalibrationResults
    from kvlayers.tools.cli.console import print_json, quiet_libraries, read_text
    from kvlayers.tools.measuring.text import passages as passages_of
    from kvlayers.tools.measuring.uneven_heads import attended_states, uneven_head
    from kvlayers.tools.models import RunFacts, find, find_device, load

    # If stdout has the JSON, people read stderr.
    console = Console(stderr=as_json)
    if threads is not None:
        torch.set_num_threads(threads)
    with one_line_errors("calibrate", OPTIONS), quiet_libraries():
        request = CalibrationRequest.of(bytes_per_token, max_kl, bits, backend, context, scored, output)
        content = read_text(text)
        target = find_device(device)
        found = find(console, model, "MODEL")
        check_positions(found.config, request.context + request.scored)
        request.check_layers(found.config)
        texts = passages_of(found.tokenizer, content, passages, request.context + request.scored)
        check_ids(found.config, texts)
        loaded = load(console, found, dtype.on(target), target)
        # A failure that only the measurement can show is a result, not an input error.
        is_divergence = isinstance(request.budget, DivergenceBudget)
        failures = (StateMismatchError, CapacityError) if is_divergence else StateMismatchError
        with one_line_errors("calibrate", OPTIONS, failures, CHECK_FAILED):
            calibration = calibrate_model(
                loaded.model,
                texts,
                request.budget,
                quantization=request.quantization,
                widths=request.widths,
                passages=passages,
                context_length=request.context,
                scored_tokens=request.scored,
                dtype=states.name_or_none,
            )
        cache = QuantizedCache(config=loaded.model.config, **calibration.cache_config)
        results = CalibrationResults(
            run=RunFacts.of(loaded),
            text="Python's help" if text is None else str(text),
            passages=passages,
            request=request,
            calibration=calibration,
            file=calibration.save(request.file),
            uneven_head=uneven_head(cache, attended_states(loaded.model, texts[0], READ_AT_ONCE)),
        )
        results.show(console)
    if as_json:
        print_json(results.plain())
