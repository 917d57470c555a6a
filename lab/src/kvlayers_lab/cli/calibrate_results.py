"""What `kvlayers calibrate` does: it checks all that it can, measures, and shows the result."""

from pathlib import Path

from kvlayers import Quantization, QuantizedCache
from kvlayers.commands.common import CHECK_FAILED, Dtype, one_line_errors
from kvlayers.commands.console import home_expanded, print_json
from kvlayers.errors import CapacityError, OptionError, StateMismatchError
from kvlayers.models import head_dims
from kvlayers.options import amount_of_bytes, readable_bytes
from kvlayers_lab.calibration import Budget, BytesBudget, Calibration, DivergenceBudget, calibrate
from kvlayers_lab.calibration.calibrator import file_of
from kvlayers_lab.calibration.checks import (
    check_context,
    check_ids,
    check_positions,
    checked_layers,
    checked_tokens,
    checked_widths,
)
from kvlayers_lab.cli.console import WRITTEN_PREFIX, check_creatable, measuring, read_text, usage_line
from kvlayers_lab.cli.report import Report, ReportTable
from kvlayers_lab.measuring.text import passages as passages_of
from kvlayers_lab.measuring.uneven_heads import UnevenHead, attended_states, uneven_head
from kvlayers_lab.models import RunFacts, find, load

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


def run(
    *,
    model: str | None,
    bytes_per_token: str | None,
    max_kl: float | None,
    text: Path | None,
    output: Path,
    bits: str | None,
    backend: str,
    context: str,
    scored: str,
    passages: int,
    dtype: Dtype,
    states: Dtype,
    device: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Calibrate, and show the result. The arguments are the options of the command."""
    with measuring("calibrate", OPTIONS, as_json, threads) as console:
        quantization = Quantization(backend=backend)
        budget = _budget(bytes_per_token, max_kl)
        widths = None if bits is None else checked_widths(_numbers(bits), quantization)
        before, after = checked_tokens(context, "context_length"), checked_tokens(scored, "scored_tokens")
        file = file_of(home_expanded(output))
        if file.exists():
            # Only another calibration may be replaced.
            Calibration.load(file)
        check_creatable(file, "--output")
        content = read_text(text)
        found = find(console, model, device, "MODEL")
        check_positions(found.config, before + after)
        checked_layers(found.config, quantization)
        if (dims := head_dims(found.config)) is not None:
            check_context(before, quantization, *dims)
        texts = passages_of(found.tokenizer, content, passages, before + after)
        check_ids(found.config, texts)
        loaded = load(console, found, dtype)
        # A failure that only the measurement can show is a result, not an input error.
        is_divergence = isinstance(budget, DivergenceBudget)
        failures = (StateMismatchError, CapacityError) if is_divergence else StateMismatchError
        with one_line_errors("calibrate", OPTIONS, failures, CHECK_FAILED):
            calibration = calibrate(
                loaded.model,
                texts,
                budget,
                quantization=quantization,
                widths=widths,
                passages=passages,
                context_length=before,
                scored_tokens=after,
                dtype=states.name_or_none,
            )
        cache = QuantizedCache(config=loaded.model.config, **calibration.cache_config)
        uneven = uneven_head(cache, attended_states(loaded.model, texts[0], READ_AT_ONCE))
        written = calibration.save(file)
        _report(calibration, written, uneven).show(console)
        if as_json:
            print_json(
                {
                    **RunFacts.of(loaded).plain(),
                    "text": "Python's help" if text is None else str(text),
                    "passages": passages,
                    "context": before,
                    "scored": after,
                    "budget": budget,
                    "chosen": calibration.chosen,
                    "uniform": calibration.uniform,
                    "file": str(written),
                    "uneven_head": uneven,
                    "use": {"cache_implementation": "quantized", "cache_config": calibration.cache_config},
                }
            )


def _budget(bytes_per_token: str | None, max_kl: float | None) -> Budget:
    if (bytes_per_token is None) == (max_kl is None):
        raise OptionError(
            "Pass one budget, `--bytes-per-token` (such as 5KiB) or `--max-kl` (such as 0.001): got "
            f"{'neither' if max_kl is None else 'both'}."
        )
    if bytes_per_token is not None:
        # Few enough for numbers without a unit.
        return BytesBudget(
            amount_of_bytes(f"{bytes_per_token}{'B' * bytes_per_token[-1:].isdigit()}", "--bytes-per-token")
        )
    return DivergenceBudget(max_kl or 0.0)


def _numbers(bits: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in bits.split(","))
    except ValueError:
        raise OptionError(f"`--bits` must be numbers separated by commas, such as 2,4,8, got {bits!r}.") from None


def _report(calibration: Calibration, file: Path, uneven: UnevenHead | None) -> Report:
    """The calibrated bits beside the best uniform ones, and where the file is."""
    named = {"calibrated": calibration.chosen, "uniform": calibration.uniform}
    rows = [
        (name, readable_bytes(setting.bytes_per_token), f"{setting.divergence:.3g} nats")
        for name, setting in named.items()
        if setting is not None
    ]
    findings = []
    for side, option in (("keys", "key_nbits"), ("values", "value_nbits")):
        # A dot for a layer that is not quantized.
        bits = ("." if nbits is None else str(nbits) for nbits in calibration.cache_config[option])
        findings.append(f"{side}: {' '.join(bits)}")
    options = f"kvlayers_lab.Calibration.load({str(file)!r}).cache_config"
    usage = usage_line({"cache_implementation": "quantized"}).removesuffix(")") + f", cache_config={options})"
    warning = () if uneven is None else (f"Warning: {uneven.sentence}.",)
    table = ReportTable("Bits of each layer", ("Bits", "A token", "KL"), rows, bold=(0,))
    return Report("Calibration", [table], [*findings, *warning, f"{WRITTEN_PREFIX}{file}", usage])
