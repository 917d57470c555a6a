"""What `kvlayers bench` has measured, and whether it is well."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvlayers.tools.measuring.contenders import Key
from kvlayers.tools.measuring.decoding import Row
from kvlayers.tools.names import KVLAYERS


@dataclass(frozen=True)
class BenchResults:
    """All that was measured.

    Attributes:
        model: its name.
        dtype: what it computes in.
        device: where.
        batch: sequences side by side.
        steps: decode steps behind each prompt.
        trials: of each cache.
        states: what each cache does to states, by library and name, the reference first.
        left_out: why there is no such cache for the model, by the name.
        environment: hardware, versions and date.
        lengths: rows of the caches by the tokens of the prompt; a single one where the reference failed.
    """

    model: str
    dtype: torch.dtype
    device: torch.device
    batch: int
    steps: int
    trials: int
    states: Mapping[Key, str]
    left_out: Mapping[str, str]
    environment: Mapping[str, Any]
    lengths: dict[int, list[Row]] = field(default_factory=dict)

    def is_exact(self, row: Row) -> bool:
        """Whether a cache keeps what the model attends to as it is."""
        return self.states[row.contender.library, row.contender.cache] == "exact"

    def is_well(self, row: Row) -> bool:
        """Whether a cache did what it should; of those of transformers, only the reference must."""
        if row.contender.library != KVLAYERS:
            return row is not self.lengths_of(row)[0] or row.failure is None
        return row.failure is None and (not self.is_exact(row) or row.same_tokens)

    @property
    def are_well(self) -> bool:
        """Whether all caches did what they should."""
        return all(self.is_well(row) for rows in self.lengths.values() for row in rows)

    def speed(self, row: Row) -> float:
        """How many times as fast a step is as with the reference."""
        return self.lengths_of(row)[0].step_seconds / row.step_seconds

    def is_within_noise(self, row: Row) -> bool:
        """Whether the steps of a cache cannot be told from those of the reference."""
        reference = self.lengths_of(row)[0]
        return row is not reference and row.is_as_fast_as(reference)

    def lengths_of(self, row: Row) -> list[Row]:
        """The rows beside one, itself included."""
        return next(rows for rows in self.lengths.values() if any(each is row for each in rows))

    def plain(self) -> dict[str, Any]:
        """All of it in words of JSON."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "device": str(self.device),
            "batch": self.batch,
            "steps": self.steps,
            "trials": self.trials,
            **self.environment,
            "left_out": self.left_out,
            "results": [
                {"length": length, "caches": [self._plain_row(row) for row in rows]}
                for length, rows in self.lengths.items()
            ],
            "well": self.are_well,
        }

    def _plain_row(self, row: Row) -> dict[str, Any]:
        library, cache = row.contender.library, row.contender.cache
        named = {"library": library, "cache": cache, "states": self.states[library, cache], "well": self.is_well(row)}
        if row.failure is not None:
            return {**named, "failure": row.failure}
        return {
            **named,
            "prefill_seconds": row.prefill_seconds,
            "step_seconds": row.step_seconds,
            "step_seconds_range": row.step_range,
            "times_as_fast": self.speed(row),
            "within_noise": self.is_within_noise(row),
            "nbytes": row.nbytes,
            "agreement": row.agreement,
            "same_tokens": row.same_tokens,
            "ties": row.ties,
        }
