"""Which caches, tokens, tasks and lengths `kvlayers fidelity` measures."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvlayers.errors import KVLayersError, OptionError
from kvlayers.tools.calibration import Calibration
from kvlayers.tools.cli.console import home_expanded
from kvlayers.tools.measuring.contenders import (
    Contender,
    QuantizationSetting,
    against_contenders,
    named_contender,
    settings,
)
from kvlayers.tools.measuring.nbytes import bytes_of
from kvlayers.tools.names import FIDELITY_CONTEXT, FIDELITY_SCORED, KVLAYERS, TASK_LENGTHS
from kvlayers.tools.tasks.contract import TaskSample, task_names
from kvlayers.upstream.model_types import most_positions
from kvlayers.utils.units import tokens

CALIBRATED = "calibrated"

OPTIONS = {
    "path": "--calibration",
    "name": "--name",
    "against": "--against",
    "results": "--results",
    "backend": "--bits",
    "nbits": "--bits",
    "key_nbits": "--bits",
    "value_nbits": "--bits",
    "max_kl": "--max-kl",
    "max_perplexity_increase": "--max-perplexity-increase",
    "max_bytes": "--max-bytes",
    "text": "--text",
    "lengths": "--lengths",
    "length": "--lengths",
    "depths": "--depths",
}
"""For arguments that errors name, the options that they come from."""


@dataclass(frozen=True)
class ChosenCaches:
    """The caches that are measured.

    Attributes:
        contenders: the caches.
        uses: arguments of `generate()` that ask for such a cache, by its short name, if there are such arguments.
        left_out: for each default setting that the model does not support, why.
    """

    contenders: Sequence[Contender]
    uses: Mapping[str, Mapping[str, Any]]
    left_out: Mapping[str, str]

    @property
    def makers(self) -> Mapping[str, Callable[[], Any]]:
        """Makers of empty caches, by their short names."""
        return {each.short_name: each.make for each in self.contenders}


def choose_caches(
    bits: str | None,
    calibration: Path | None,
    names: Sequence[str],
    against: Sequence[str],
    default_bits: str,
    config: Any,
    tokens: int,
) -> ChosenCaches:
    """The caches that the user named; the default settings if the user named neither settings nor caches.

    Args:
        bits: what the user named with `--bits`.
        calibration: what the user named with `--calibration`.
        names: what the user named with `--name`.
        against: what the user named with `--against`.
        default_bits: the default settings, as text.
        config: config of the model.
        tokens: the most tokens that a cache will hold.

    Raises:
        KVLayersError: the model does not support a cache that the user named, or no cache at all.
    """
    of_bits = settings(default_bits if bits is None else bits) if bits is not None or not names else []
    of_calibration = []
    if calibration is not None:
        found = Calibration.load(home_expanded(calibration))
        of_calibration.append(QuantizationSetting(CALIBRATED, found.cache_config))
    required = [*([] if bits is None else of_bits), *of_calibration]
    possible, left_out = _possible_settings([*of_bits, *of_calibration], config, tokens, required)
    contenders = [
        *(Contender(KVLAYERS, each.name, partial(each.make, config, tokens)) for each in possible),
        *(named_contender(name, config, tokens) for name in names),
        *against_contenders(against, config, tokens),
    ]
    for each in contenders:
        # So that a cache that the model does not support is refused before weights are loaded.
        each.make()
    if not contenders:
        raise OptionError(f"No setting of `--bits` suits the model: {next(iter(left_out.values()))}")
    return ChosenCaches(
        list({each.key: each for each in contenders}.values()),
        {each.cache: use for each in contenders if (use := each.generate_options) is not None}
        | {each.name: each.generate_options for each in possible},
        left_out,
    )


def _possible_settings(
    asked: Sequence[QuantizationSetting], config: Any, tokens: int, required: Sequence[QuantizationSetting]
) -> tuple[list[QuantizationSetting], dict[str, str]]:
    """The settings that a model supports, and for each other setting, why not.

    Raises:
        KVLayersError: the model does not support one of `required`.
    """
    left_out = {}
    for each in asked:
        try:
            bytes_of(each.make, config, tokens)
        except KVLayersError as error:
            if each in required:
                raise
            left_out[each.name] = str(error)
    return [each for each in asked if each.name not in left_out], left_out


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


ALL = "all"


def chosen_tasks(text: str) -> list[str]:
    """Names of tasks, without duplicates. Raises `OptionError` if a name is unknown."""
    known = task_names()
    asked = [each.strip() for each in text.split(",")]
    if asked == [ALL]:
        return known
    for name in asked:
        if name not in known:
            raise OptionError(f"`--tasks` must be {', '.join(known)}, separated by commas, or {ALL}, got {name!r}.")
    return list(dict.fromkeys(asked))


def chosen_depths(text: str) -> list[float]:
    """Depths from 0 to 1, ascending. Raises `OptionError` if one is not a percentage."""
    return sorted({_percentage(each) / 100 for each in text.split(",")})


def _percentage(text: str) -> float:
    try:
        percentage = float(text)
    except ValueError:
        percentage = math.nan
    if not 0 <= percentage <= 100:
        raise OptionError(f"`--depths` must be percentages from 0 to 100, separated by commas, got {text.strip()!r}.")
    return percentage


def chosen_lengths(text: str | None) -> list[int] | None:
    """Lengths in tokens, ascending, `None` if the user named none.

    Raises:
        OptionError: a length is not a positive number of tokens.
    """
    if text is None:
        return None
    found = sorted({tokens(each, "--lengths") for each in text.split(",")})
    if found[0] < 1:
        raise OptionError(f"`--lengths` must be at least 1 token each, got {found[0]}.")
    return found


def fitting_lengths(config: Any, asked: Sequence[int] | None) -> list[int]:
    """The lengths as asked, or the default lengths that the model has positions for.

    Raises:
        OptionError: the model has no positions for a length.
    """
    most = most_positions(config)
    if asked is None:
        default = [tokens(each, "--lengths") for each in TASK_LENGTHS.split(",")]
        # Some positions are left for the answer.
        return default if most is None else [each for each in default if each < most] or [most * 3 // 4]
    if most is not None and asked[-1] > most:
        raise OptionError(
            f"`--lengths` must be within the {most} positions of the model, got {asked[-1]}: pass shorter lengths."
        )
    return list(asked)


def needed_tokens(config: Any, samples: Sequence[TaskSample]) -> int:
    """The most tokens that a cache will hold: those of a sample and of its answer.

    Raises:
        OptionError: the model has no positions for an answer.
    """
    longest = max(samples, key=_tokens_with_answer)
    needed, most = _tokens_with_answer(longest), most_positions(config)
    if most is not None and needed > most:
        raise OptionError(
            f"`--lengths` must leave room for the answer within the {most} positions of the model, but {longest.task} "
            f"of {longest.length} tokens needs {needed}: pass shorter lengths."
        )
    return needed


def _tokens_with_answer(sample: TaskSample) -> int:
    asked = len(sample.context_ids) + len(sample.question_ids)
    return asked + max(sample.max_answer_tokens, len(sample.answer_ids))
