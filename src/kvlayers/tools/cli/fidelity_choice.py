"""Which settings `kvlayers fidelity` measures, and over how many tokens."""

from pathlib import Path
from typing import Any

from kvlayers.errors import KVLayersError, OptionError
from kvlayers.tools.calibration import Calibration
from kvlayers.tools.cli.defaults import FIDELITY_CONTEXT, FIDELITY_SCORED
from kvlayers.tools.cli.files import home_expanded
from kvlayers.tools.measuring.fidelity import bytes_of
from kvlayers.tools.measuring.settings import QuantizationSetting
from kvlayers.upstream.model_types import most_positions

CALIBRATED = "calibrated"


def lengths(config: Any, context: int | None, scored: int | None, chunk: int) -> tuple[int, int]:
    """Tokens of context and tokens scored: as given, or as many as usual, or as the model has positions for.

    Raises:
        OptionError: they are no whole chunks, none is scored, or the model has no positions for them.
    """
    most = most_positions(config)
    if context is None and scored is None and most is not None and most <= FIDELITY_CONTEXT + FIDELITY_SCORED:
        whole = (most - 1) // chunk
        context, scored = (whole - whole // 3) * chunk, whole // 3 * chunk
    # Without a number of their own, whole chunks.
    context = FIDELITY_CONTEXT // chunk * chunk if context is None else context
    scored = max(FIDELITY_SCORED // chunk, 1) * chunk if scored is None else scored
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


def calibrated(path: Path) -> QuantizationSetting:
    """What a calibration has found. Raises `OptionError` where there is none."""
    return QuantizationSetting(CALIBRATED, Calibration.load(home_expanded(path)).cache_config)


def possible_settings(
    asked: list[QuantizationSetting], config: Any, tokens: int, required: list[QuantizationSetting]
) -> tuple[list[QuantizationSetting], dict[str, str]]:
    """The settings that there can be for a model, and why not the others.

    Raises:
        KVLayersError: one of those that are required cannot be, or none of all can.
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
        raise OptionError(f"expected a model that some setting suits, but saw none: {next(iter(left_out.values()))}")
    return [each for each in asked if each.name not in left_out], left_out
