"""Which caches `kvlayers bench` measures, and at which lengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlayers.errors import KVLayersError, OptionError
from kvlayers.stores.contract import Fidelity
from kvlayers.tools.measuring.contenders import Key, exact_names, is_installed, make_contender
from kvlayers.tools.names import KVLAYERS, TRANSFORMERS, TRANSFORMERS_CACHES
from kvlayers.upstream.model_types import most_positions

REFERENCE: Key = (TRANSFORMERS, TRANSFORMERS_CACHES[0])
QUANTIZED = ("int8", "int4")


@dataclass(frozen=True)
class BenchChoice:
    """The caches to measure.

    Attributes:
        fidelities: fidelity of each cache by library and name, the reference first.
        left_out: for each name that the model does not support, why.
    """

    fidelities: dict[Key, Fidelity]
    left_out: dict[str, str]


def transformers_names(asked: Sequence[str] | None) -> list[str]:
    """Names of transformers' caches beside the dynamic one: the names asked for, by default all that are installed.

    Raises:
        OptionError: a name is unknown, or its package is not installed.
    """
    if asked is None:
        return [name for name in TRANSFORMERS_CACHES[1:] if is_installed(name)]
    for name in asked:
        if name not in TRANSFORMERS_CACHES:
            raise OptionError(f"`--against` must be one of {', '.join(TRANSFORMERS_CACHES[1:])}, got {name!r}.")
        if not is_installed(name):
            raise OptionError(
                f'`--against {name}` needs a package that is not installed: pip install "kvlayers[{name}]"'
            )
    return [name for name in asked if name != REFERENCE[1]]


def choose_caches(
    config: Any, names: Sequence[str] | None, transformers_names: Sequence[str], length: int
) -> BenchChoice:
    """The caches that a model supports.

    Args:
        config: config of the model.
        names: names of kvlayers' caches, `None` for all default ones that suit the model.
        transformers_names: names of transformers' caches, beside its dynamic one.
        length: the most tokens that a cache will hold.

    Raises:
        KVLayersError: a cache in `names` cannot be made.
    """

    def fidelity(key: Key) -> Fidelity:
        return make_contender(*key, config, length).fidelity()

    fidelities = {REFERENCE: fidelity(REFERENCE)}
    left_out = {}
    for name in [*exact_names(config), *QUANTIZED] if names is None else names:
        try:
            fidelities[KVLAYERS, name] = fidelity((KVLAYERS, name))
        except KVLayersError as error:
            if names is not None:
                raise
            left_out[name] = str(error)
    fidelities |= {(TRANSFORMERS, name): fidelity((TRANSFORMERS, name)) for name in transformers_names}
    # Exact caches first, so that caches that round stand beside each other.
    ordered = sorted(fidelities.items(), key=lambda item: item[1] != fidelities[REFERENCE])
    return BenchChoice(dict(ordered), left_out)


def fitting_lengths(config: Any, asked: Sequence[int], steps: int) -> list[int]:
    """The prompt lengths, sorted, each cut so that the model has positions for the steps as well.

    Raises:
        OptionError: a length is not positive, or the model has no positions for the steps.
    """
    if min(asked) < 1:
        raise OptionError(f"`--lengths` must be at least 1 token each, got {min(asked)}.")
    most = most_positions(config)
    if most is None:
        return sorted(set(asked))
    if most <= steps:
        raise OptionError(f"`--steps` must be fewer than the {most} positions of the model, got {steps}.")
    return sorted({min(length, most - steps) for length in asked})
