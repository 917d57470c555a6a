"""The clock of all benchmarks: contenders take turns, in an order that rotates, and figures are medians."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from lib.contenders import REFERENCE, Maker
from lib.internals import interleaved, quiet_clock
from lib.timing import Disagreements
from lib.workload import Workload


class Turns:
    """Seconds of contenders that take turns.

    Args:
        names: the contenders.
        first: the number of the first turn: it decides who begins.

    Attributes:
        seconds: of each contender, turn by turn.
        processor: seconds of the processor, of all threads together: other work on the machine hardly changes them.
    """

    def __init__(self, names: Iterable[str], first: int = 0) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.processor: dict[str, list[float]] = {name: [] for name in self.seconds}
        self.next = first

    def take(self, run: Callable[[str], Any], is_counted: bool = True) -> dict[str, Any]:
        """Run every contender once; return what each returned. What only warms up is not counted."""

        def timed(name: str) -> tuple[float, Any]:
            begin = time.perf_counter()
            found = run(name)
            return time.perf_counter() - begin, found

        return self.take_timed(timed, is_counted)

    def take_timed(self, run: Callable[[str], tuple[float, Any]], is_counted: bool = True) -> dict[str, Any]:
        """The same with a function that also returns the seconds of the part that is to be timed."""
        found = {}
        for name in interleaved(list(self.seconds), self.next):
            begin = time.process_time()
            took, found[name] = run(name)
            if is_counted:
                self.processor[name].append(time.process_time() - begin)
                self.seconds[name].append(took)
        self.next += 1
        return found

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, slow: str, fast: str) -> float:
        """How many times as long one takes as another in the same turn: the median."""
        return ratio(self.seconds, slow, fast)


def ratio(seconds: dict[str, list[float]], slow: str, fast: str) -> float:
    """How many times as long one takes as another in the same turn: the median over the turns."""
    return statistics.median(one / other for one, other in zip(seconds[slow], seconds[fast], strict=True))


class Comparison:
    """Forward passes of a batch with caches that take turns, and where their tokens differ.

    Args:
        makers: the caches, the reference among them.
        exact: names of the caches whose tokens are compared.
        case: batch and tokens of the prompts.
    """

    def __init__(
        self,
        workload: Workload,
        makers: dict[str, Maker],
        exact: Sequence[str],
        case: tuple[int, int],
        disagreements: Disagreements,
    ) -> None:
        self.model, self.makers, self.exact = workload.model, makers, exact
        self.batch, self.length = case
        self.name, self.disagreements = workload.name, disagreements
        self.prompts = workload.prompt(self.batch * self.length).reshape(case)
        self.turns = Turns(makers)

    def cache(self, name: str, more: int = 0) -> Any:
        return self.makers[name](self.model.config, self.length + more)

    def forward(self, ids: Tensor, cache: Any) -> Tensor:
        """The logits `[batch, vocab]` behind the last of the tokens `[batch, tokens]`."""
        output = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].float()  # type: ignore[no-any-return]

    def turn(self, run: Callable[[str], Tensor], tokens: int, trial: int, is_counted: bool) -> Tensor:
        """Run all caches once, and compare their tokens; return the logits with the reference."""
        seen = self.turns.take(run, is_counted)
        for name in self.exact:
            where = {"model": self.name, "cache": name, "tokens": tokens, "batch": self.batch, "trial": trial}
            for expected, row in zip(seen[REFERENCE], seen[name], strict=True):
                self.disagreements.compare_step(where, expected, row)
        return seen[REFERENCE]  # type: ignore[no-any-return]

    def decode(self, steps: int, trial: int = 0) -> None:
        """Decode greedily behind the prompts. The first step finds cold memory, and is not counted."""
        caches = {name: self.cache(name, steps + 1) for name in self.makers}
        self.turns.next = trial
        with quiet_clock():
            for cache in caches.values():
                logits = self.forward(self.prompts, cache)
            for index in range(steps):
                ids = logits.argmax(-1)[:, None]
                logits = self.turn(
                    lambda name, ids=ids: self.forward(ids, caches[name]), self.length + index, trial, index > 0
                )

    def prefill(self, turns: int) -> None:
        """Read the prompts into an empty cache of each kind in turn, once more than is counted."""
        with quiet_clock():
            for index in range(turns + 1):
                self.turn(lambda name: self.forward(self.prompts, self.cache(name)), self.length, index, index > 0)

    def ratios(self) -> dict[str, dict[str, float]]:
        """The median seconds of each cache, and the median of its times over the reference's in the same turn."""
        return {
            name: {"median": self.turns.median(name), "ratio": self.turns.ratio(name, REFERENCE)}
            for name in self.makers
        }
