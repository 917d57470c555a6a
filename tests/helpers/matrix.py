"""Which cases the gate runs: all combinations of parameters are for the night, and few have every pair of values."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from rounds import NIGHTLY

ParameterSet = type(pytest.param())


def product(*axes: Iterable[Any]) -> list[Any]:
    """Every combination of one value of each axis, for `parametrize`.

    The gate runs so many that every pair of values meets. A value that is a tuple stands for several parameters.
    """
    values = [list(axis) for axis in axes]
    return _marked(values, covering([len(axis) for axis in values]))


def once(*axes: Iterable[Any], times: int = 1) -> list[Any]:
    """As `product`, for axes that have little to do with each other.

    The gate runs so many that each value of the longest axis is in one combination, or in as many as `times`.
    """
    values = [list(axis) for axis in axes]
    most = max(map(len, values))
    turns = itertools.product(range(most), range(times))
    return _marked(
        values, {tuple((turn + more * place) % len(axis) for place, axis in enumerate(values)) for turn, more in turns}
    )


def _marked(axes: list[list[Any]], kept: set[tuple[int, ...]]) -> list[Any]:
    cases = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values, marks = [], [] if places in kept else [pytest.mark.nightly]
        for axis, place in zip(axes, places, strict=True):
            value = axis[place]
            if isinstance(value, ParameterSet):
                values += value.values
                marks += value.marks
            else:
                values += value if isinstance(value, tuple) else [value]
        cases.append(pytest.param(*values, marks=marks))
    return cases


def some(values: Iterable[Any], gate: Iterable[Any]) -> list[Any]:
    """Values, for `parametrize`, of which the gate runs those that are named."""
    kept, every = list(gate), list(values)
    assert all(value in every for value in kept), "the gate runs what is there"
    return [pytest.param(value, marks=() if value in kept else pytest.mark.nightly) for value in every]


def seeds(gate: int, night: int) -> list[Any]:
    """The numbers of random cases, for `parametrize`: so many in the gate, and so many in a night."""
    return [pytest.param(seed, marks=() if seed < gate else pytest.mark.nightly) for seed in range(night)]


def of_cases(cases: dict[str, Any]) -> list[Any]:
    """The names of cases, for `parametrize`. In the gate are so many that each value of each field is in one."""
    kept = telling(cases)
    return [pytest.param(name, marks=() if name in kept else pytest.mark.nightly) for name in cases]


def to_run(cases: dict[str, Any]) -> list[str]:
    """The names of the cases that tests by `of_cases` ask for, as far as they run, where one process runs them all."""
    kept = telling(cases)
    return [name for name in cases if NIGHTLY or name in kept]


def telling(cases: dict[str, Any]) -> set[str]:
    """Names of few cases, which are dataclasses, that have all values of their fields between them."""
    values = {name: set(_values(vars(case))) for name, case in cases.items()}
    kept, missing = set(), set.union(*values.values())
    while missing:
        most = max(cases, key=lambda name: len(values[name] & missing))
        kept.add(most)
        missing -= values[most]
    return kept


def _values(fields: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a case has in each field, and in each entry of a field that is a dictionary of options."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _values({f"{name} {option}": chosen for option, chosen in value.items()})
        else:
            yield name, repr(value)


def covering(sizes: Sequence[int]) -> set[tuple[int, ...]]:
    """Places of values such that each value of an axis meets each value of every other axis, and few of them.

    First come combinations of which every pair is new, then those with one pair less, and so on.
    """
    if len(sizes) == 1:
        return {(place,) for place in range(sizes[0])}
    kept: set[tuple[int, ...]] = set()
    met: set[tuple[tuple[int, int], ...]] = set()
    for least in range(len(sizes) * (len(sizes) - 1) // 2, 0, -1):
        for places in itertools.product(*map(range, sizes)):
            pairs = set(itertools.combinations(enumerate(places), 2))
            if len(pairs - met) >= least:
                kept.add(places)
                met |= pairs
    return kept
