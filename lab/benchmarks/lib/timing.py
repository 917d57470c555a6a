"""The clock of all benchmarks: contenders take turns, in an order that rotates, and figures are medians."""

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lib.contenders import Maker, fill, roundings
from lib.internals import cache_nbytes, is_tie, quiet_clock
from lib.workload import FILL_CHUNK, Shape

Tick = Callable[[], None]

Ticking = Callable[[str, int], Tick]
"""Shows a new bar with a description and its number of ticks."""

Forward = Callable[..., Any]
"""A model's forward pass, compiled or not."""


def interleaved(names: Sequence[str], turn: int) -> list[str]:
    """The names, rotated so that each turn begins with the next one."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


class Turns:
    """Seconds of contenders that take turns.

    Attributes:
        seconds: of each contender, turn by turn.
        next: the number of the next turn: it decides who begins.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.next = 0

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
            took, found[name] = run(name)
            if is_counted:
                self.seconds[name].append(took)
        self.next += 1
        return found

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, slow: str, fast: str) -> float:
        """How many times as long one takes as another in the same turn: the median."""
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        return statistics.median(one / other for one, other in pairs)


class Disagreements:
    """Records where contenders differ from the reference: in tokens, or in the states that an update returns.

    A different token is a tie, and no failure, if the contender rounds differently by design and the difference of the
    two logits is explained by that. All other contenders compute exactly the same sums, and must give exactly the same
    tokens.

    Args:
        dtype: the models' dtype.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype
        self.found: list[dict[str, Any]] = []

    def compare_step(self, where: dict[str, Any], expected: Tensor, logits: Tensor) -> float:
        """Compare greedy tokens of logits `[batch, vocab]` with those expected; return the largest difference."""
        for row, token in zip(expected, logits.argmax(-1).tolist(), strict=True):
            self.compare_token(where, row, token)
        return float((logits - expected).abs().max())

    def compare_token(self, where: dict[str, Any], expected: Tensor, seen: int) -> None:
        """Compare a token with the greedy one of the logits `expected` `[vocab]`."""
        greedy = int(expected.argmax())
        if seen == greedy:
            return
        gap = float(expected[greedy] - expected[seen])
        allowed = roundings(where["cache"])
        tie = allowed > 0 and is_tie(expected, greedy, seen, self.dtype, allowed)
        self.found.append({**where, "expected": greedy, "seen": seen, "logit_gap": gap, "tie": tie})

    def compare_states(self, where: dict[str, Any], expected: Tensor, states: Tensor) -> None:
        """Compare the first tokens of `states` `[batch, kv_heads, tokens, head_dim]` with those of `expected`."""
        if not torch.equal(states[:, :, : expected.shape[2]], expected):
            self.found.append({**where, "expected": "the states that went in", "seen": "others", "tie": False})


class Decoded(NamedTuple):
    """What was measured of contenders that decode.

    Attributes:
        turns: a turn is a trial, and its seconds are those of the median step.
        held: bytes that each holds at the end.
        logit_distance: the largest difference of a logit from the reference's.
    """

    turns: Turns
    held: dict[str, int]
    logit_distance: dict[str, float]


@dataclass
class Trials:
    """How often steps are timed, and where it is recorded if they differ from the reference's.

    Attributes:
        steps: steps in each trial.
        count: the number of trials.
        block: steps before the next contender's turn.
    """

    steps: int
    count: int
    ticking: Ticking
    block: int = 4
    disagreements: Disagreements = field(default_factory=Disagreements)


def step(forward: Forward, cache: Any, ids: Tensor) -> tuple[float, Tensor]:
    """One forward pass of one token `[batch, 1]`: its seconds, and its logits `[batch, vocab]` in float32."""
    begin = time.perf_counter()
    logits = forward(input_ids=ids, past_key_values=cache, use_cache=True).logits
    seconds = time.perf_counter() - begin
    return seconds, logits[:, -1].float()


def greedy_reference(model: Any, cache: Any, ids: Tensor, steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """The input tokens of `steps` greedy steps, and the logits that come out."""
    tokens, logits = [ids], []
    for _ in range(steps):
        logits.append(step(model, cache, tokens[-1])[1])
        tokens.append(logits[-1].argmax(-1)[:, None])
    return tokens[:-1], logits


def measure_decode(
    workload: Any,
    makers: Mapping[str, Maker],
    length: int,
    trials: Trials,
    forwards: Mapping[str, Forward] | None = None,
    batch: int = 1,
) -> Decoded:
    """Time decode steps from `length` tokens on.

    The reference decodes greedily once, which also warms up. In the trials, every contender is fed those tokens. So all
    decode one sequence, each step is compared by itself, and a contender that always agrees would have decoded the same
    tokens alone. Contenders take turns of a block of steps, in an order that rotates. Contenders in `forwards` decode
    with that function, the others with the model itself.

    Args:
        workload: the model, and what fills caches: `lib.workload`.
        makers: the caches; the first one is the reference.
        length: tokens in the caches.
        trials: how often.
        forwards: forward passes by contender.
        batch: sequences.
    """
    forwards, steps, names = forwards or {}, trials.steps, list(makers)
    model, config = workload.model, workload.model.config
    first = workload.prepare(length, batch)
    tick = trials.ticking(f"{workload.name}, {len(names)} caches at {batch} x {length:,} tokens", trials.count)
    found = Decoded(Turns(names), dict.fromkeys(names, 0), dict.fromkeys(names, 0.0))
    reference = makers[names[0]](config, length + steps)
    with quiet_clock():
        workload.fill(reference)
        tokens, expected = greedy_reference(model, reference, first, steps)
    del reference
    for trial in range(trials.count):
        gc.collect()
        caches = {name: make(config, length + steps) for name, make in makers.items()}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        with quiet_clock():
            for name in names:
                workload.fill(caches[name])
            for start in range(0, steps, trials.block):
                for name in interleaved(names, trial + start // trials.block):
                    for index in range(start, min(start + trials.block, steps)):
                        took, logits = step(forwards.get(name, model), caches[name], tokens[index])
                        seconds[name].append(took)
                        where = {"model": workload.name, "cache": name, "tokens": length + index, "trial": trial}
                        apart = trials.disagreements.compare_step(where, expected[index], logits)
                        found.logit_distance[name] = max(found.logit_distance[name], apart)
        for name, cache in caches.items():
            found.held[name] = cache_nbytes(cache)
            found.turns.seconds[name].append(statistics.median(seconds[name]))
        del caches
        tick()
    return found


def time_updates(cache: Any, keys: Tensor, values: Tensor, count: int) -> tuple[list[float], Tensor]:
    """Seconds of each of `count` updates of the first layer, and the keys that the last one returned."""
    clock = time.perf_counter
    seconds = []
    attended = keys
    for _ in range(count):
        begin = clock()
        attended, _ = cache.update(keys, values, 0)
        seconds.append(clock() - begin)
    return seconds, attended


def measure_update(config: Any, shape: Shape, makers: Mapping[str, Maker], length: int, trials: Trials) -> Turns:
    """Time one layer's update of one token, from `length` tokens on, Python included: the median in each turn."""
    turns, steps, shape = Turns(makers), trials.steps, replace(shape, layers=1)
    prompt, (keys, values) = shape.states(length, torch.bfloat16), shape.states(1, torch.bfloat16, seed=1)[0]
    expected = torch.cat([prompt[0][0], keys.expand(-1, -1, steps, -1)], dim=2)

    def update(name: str) -> tuple[float, None]:
        cache = makers[name](config, length + steps)
        with quiet_clock():
            fill(cache, prompt, FILL_CHUNK)
            took, attended = time_updates(cache, keys, values, steps)
        where = {"model": "one layer", "cache": name, "tokens": length, "trial": turns.next}
        trials.disagreements.compare_states(where, expected, attended)
        return statistics.median(took), None

    tick = trials.ticking(f"updates at {length:,} tokens", trials.count)
    for _ in range(trials.count):
        gc.collect()
        # Short updates are all Python, and one in a thousand is interrupted: repeats stabilise the figure.
        for _ in range(max(1, min(16, 4096 // length))):
            turns.take_timed(update)
        tick()
    return turns
