"""Which settings `kvlayers fidelity` measures, and over how many tokens."""

from pathlib import Path
from typing import Any

from kvlayers.errors import KVLayersError, OptionError
from kvlayers.tools.calibration import Calibration
from kvlayers.tools.cli.files import home_expanded
from kvlayers.tools.measuring.fidelity import bytes_of
from kvlayers.tools.measuring.settings import QuantizationSetting
from kvlayers.tools.names import FIDELITY_CONTEXT, FIDELITY_SCORED
from kvlayers.upstream.model_types import most_positions

CALIBRATED = "calibrated"


def lengths(config: Any, context: int | None, scored: int | None, chunk: int) -> tuple[int, int]:
    """Tokens of context and scored tokens: as asked, or the defaults, or as many as the model has positions for.

    Raises:
        OptionError: they are not whole chunks, no token is scored, or the model has no positions for them.
    """
    most = most_positions(config)
    if context is None and scored is None and most is not None and most <= FIDELITY_CONTEXT + FIDELITY_SCORED:
        chunks = (most - 1) // chunk
        context, scored = (chunks - chunks // 3) * chunk, chunks // 3 * chunk
    # Defaults are cut to whole chunks.
    context = FIDELITY_CONTEXT // chunk * chunk if context is None else context
    scored = max(FIDELITY_SCORED // chunk, 1) * chunk if scored is None else scored
    if scored < 1 or context % chunk or scored % chunk:
        raise OptionError(
            f"`--context` and `--scored` must be multiples of `--chunk`, {chunk}, and at least one token must be "
            f"scored, got {context} and {scored}."
        )
    if most is not None and context + scored + 1 > most:
        raise OptionError(
            f"`--context` and `--scored` and the token after them must be within the {most} positions of the model, "
            f"got {context} + {scored} + 1: pass fewer tokens."
        )
    return context, scored


def calibrated(path: Path) -> QuantizationSetting:
    """The setting in the file of a calibration. Raises `OptionError` if there is no such file."""
    return QuantizationSetting(CALIBRATED, Calibration.load(home_expanded(path)).cache_config)


def possible_settings(
    asked: list[QuantizationSetting], config: Any, tokens: int, required: list[QuantizationSetting]
) -> tuple[list[QuantizationSetting], dict[str, str]]:
    """The settings that a model supports, and for each other setting, why not.

    Raises:
        KVLayersError: the model does not support one of `required`, or no setting at all.
    """
    left_out = {}
    for each in asked:
        try:
            bytes_of(each.make, config, tokens)
        except KVLayersError as error:
            if each in required:
                raise
            left_out[each.name] = str(error)
    if len(left_out) == len(asked):
        raise OptionError(f"No setting of `--bits` suits the model: {next(iter(left_out.values()))}")
    return [each for each in asked if each.name not in left_out], left_out
