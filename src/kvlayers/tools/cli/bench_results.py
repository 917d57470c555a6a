"""The measurements of `kvlayers bench`, and whether they passed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlayers.stores.contract import Fidelity
from kvlayers.tools.cli.run_facts import RunFacts
from kvlayers.tools.measuring.contenders import Key
from kvlayers.tools.measuring.decoding import ContenderResult
from kvlayers.tools.names import KVLAYERS


@dataclass(frozen=True)
class BenchResults:
    """All measurements.

    Attributes:
        run: the model and the machine.
        batch: sequences in the batch.
        steps: decode steps after each prompt.
        trials: runs of each cache.
        fidelities: fidelity of each cache by library and name, the reference first.
        left_out: for each name that the model does not support, why.
        by_length: results of the caches by the tokens of the prompt, the reference first. If the reference failed, it
            is the only one.
    """

    run: RunFacts
    batch: int
    steps: int
    trials: int
    fidelities: Mapping[Key, Fidelity]
    left_out: Mapping[str, str]
    by_length: dict[int, list[ContenderResult]] = field(default_factory=dict)

    def is_exact(self, result: ContenderResult) -> bool:
        """Whether the cache keeps the states that the model attends to as they came."""
        return self.fidelities[result.contender.key] == "exact"

    def passes(self, result: ContenderResult) -> bool:
        """Whether a cache did what it must. Of transformers' caches, only the reference must not fail."""
        if result.contender.library != KVLAYERS:
            return result is not self.reference_of(result) or result.failure is None
        return result.failure is None and (not self.is_exact(result) or result.same_tokens)

    @property
    def passed(self) -> bool:
        """Whether every cache passes at every length."""
        return all(self.passes(result) for results in self.by_length.values() for result in results)

    def speed(self, result: ContenderResult) -> float:
        """How many times as fast a step is as with the reference."""
        return self.reference_of(result).step_seconds / result.step_seconds

    def is_within_noise(self, result: ContenderResult) -> bool:
        """Whether the step times of the cache and of the reference overlap."""
        reference = self.reference_of(result)
        return result is not reference and result.is_as_fast_as(reference)

    def reference_of(self, result: ContenderResult) -> ContenderResult:
        """The reference's result at the same length."""
        return next(results[0] for results in self.by_length.values() if any(each is result for each in results))

    def plain(self) -> dict[str, Any]:
        """All measurements as JSON types."""
        return {
            **self.run.plain(),
            "batch": self.batch,
            "steps": self.steps,
            "trials": self.trials,
            "left_out": self.left_out,
            "results": [
                {"length": length, "caches": [self._plain_result(result) for result in results]}
                for length, results in self.by_length.items()
            ],
            "passed": self.passed,
        }

    def _plain_result(self, result: ContenderResult) -> dict[str, Any]:
        library, cache = result.contender.key
        named = {
            "library": library,
            "cache": cache,
            "fidelity": self.fidelities[library, cache],
            "passed": self.passes(result),
        }
        if result.failure is not None:
            return {**named, "failure": result.failure}
        return {
            **named,
            "prefill_seconds": result.prefill_seconds,
            "step_seconds": result.step_seconds,
            "step_seconds_range": result.step_range,
            "times_as_fast": self.speed(result),
            "within_noise": self.is_within_noise(result),
            "nbytes": result.nbytes,
            "agreement": result.agreement,
            "same_tokens": result.same_tokens,
            "ties": result.ties,
        }
