"""Which caches `kvlayers bench` measures, at which lengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlayers.errors import KVLayersError, OptionError
from kvlayers.tools.measuring.contenders import Key, contender, exact_names, is_installed, states_in
from kvlayers.tools.names import KVLAYERS, TRANSFORMERS, TRANSFORMERS_CACHES
from kvlayers.upstream.model_types import most_positions

REFERENCE: Key = (TRANSFORMERS, TRANSFORMERS_CACHES[0])
QUANTIZED = ("int8", "int4")


@dataclass(frozen=True)
class BenchChoice:
    """The caches.

    Attributes:
        states: what each does to states, by library and name, the reference first.
        left_out: why there is no such cache for the model, by the name.
    """

    states: dict[Key, str]
    left_out: dict[str, str]


def transformers_names(asked: Sequence[str] | None) -> list[str]:
    """Names of transformers' caches: those asked for, or those that are installed.

    Raises:
        OptionError: one is not known, or not installed.
    """
    if asked is None:
        return [name for name in TRANSFORMERS_CACHES[1:] if is_installed(name)]
    for name in asked:
        if name not in TRANSFORMERS_CACHES:
            raise OptionError(
                f"expected --against to be one of {', '.join(TRANSFORMERS_CACHES[1:])}, but saw {name!r}."
            )
        if not is_installed(name):
            raise OptionError(
                f"expected the package that transformers' {name} cache needs, but it is not installed: "
                f'pip install "kvlayers[{name}]"'
            )
    return [name for name in asked if name != REFERENCE[1]]


def choice(config: Any, ours: Sequence[str] | None, theirs: Sequence[str], length: int) -> BenchChoice:
    """The caches that there can be for a model.

    Args:
        config: config of the model.
        ours: names of kvlayers' caches that were asked for, `None` for all that suit the model.
        theirs: names of transformers' caches, beside its dynamic one.
        length: the most tokens that a cache will hold.

    Raises:
        KVLayersError: one that was asked for cannot be made.
    """
    states = {REFERENCE: states_in(contender(*REFERENCE, config, length))}
    left_out = {}
    for name in [*exact_names(config), *QUANTIZED] if ours is None else ours:
        try:
            states[KVLAYERS, name] = states_in(contender(KVLAYERS, name, config, length))
        except KVLayersError as error:
            if ours is not None:
                raise
            left_out[name] = str(error)
    states |= {(TRANSFORMERS, name): states_in(contender(TRANSFORMERS, name, config, length)) for name in theirs}
    # The exact ones first, so that what rounds stands beside what rounds.
    return BenchChoice(dict(sorted(states.items(), key=lambda item: item[1] != states[REFERENCE])), left_out)


def fitting_lengths(config: Any, asked: Sequence[int], steps: int) -> list[int]:
    """Lengths of prompts, each no longer than what leaves room for the steps, in order.

    Raises:
        OptionError: one is not positive, or there is no room at all.
    """
    if min(asked) < 1:
        raise OptionError(f"expected --lengths of at least one token, but saw {min(asked)}.")
    most = most_positions(config)
    if most is None:
        return sorted(set(asked))
    if most <= steps:
        raise OptionError(
            f"expected fewer --steps than the {most} tokens that the model has positions for, but saw {steps}."
        )
    return sorted({min(length, most - steps) for length in asked})
