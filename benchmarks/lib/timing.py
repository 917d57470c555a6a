"""Times decode steps of a model, with windows too, and updates of one layer."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lib.contenders import FLOOR, REFERENCE, Maker, fill, roundings
from lib.internals import cache_nbytes, interleaved, is_tie, quiet_clock
from lib.workload import FILL_CHUNK, RandomModel, Shape, Workload

Seconds = dict[str, list[list[float]]]
"""The seconds of each step, for each contender and trial."""

Tick = Callable[[], None]

Ticking = Callable[[str, int], Tick]
"""Shows a new bar with a description and its number of ticks."""

Forward = Callable[..., Any]
"""A model's forward pass, compiled or not."""


class Disagreements:
    """Records where contenders differ from the reference: in tokens, or in the states that an update returns.

    A different token is a tie, and no failure, if the contender rounds differently by design and the difference of the
    two logits is explained by that. All other contenders compute exactly the same sums, and must give exactly the same
    tokens.

    Args:
        dtype: the models' dtype.
        roundings_of: by how many roundings a logit may differ with a cache of some name.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, roundings_of: Callable[[str], int] = roundings) -> None:
        self.dtype, self.roundings_of = dtype, roundings_of
        self.found: list[dict[str, Any]] = []

    @property
    def failures(self) -> int:
        return sum(not entry["tie"] for entry in self.found)

    def compare_step(self, where: dict[str, Any], expected: Tensor, logits: Tensor) -> float:
        """Compare the greedy token of `logits` `[vocab]` with that of `expected`; return their largest difference."""
        self.compare_token(where, expected, int(logits.argmax()))
        return float((logits - expected).abs().max())

    def compare_token(self, where: dict[str, Any], expected: Tensor, seen: int) -> None:
        """Compare a token with the greedy one of the logits `expected` `[vocab]`."""
        greedy = int(expected.argmax())
        if seen == greedy:
            return
        gap = float(expected[greedy] - expected[seen])
        allowed = self.roundings_of(where["cache"])
        tie = allowed > 0 and is_tie(expected, greedy, seen, self.dtype, allowed)
        self.found.append({**where, "expected": greedy, "seen": seen, "logit_gap": gap, "tie": tie})

    def compare_states(self, where: dict[str, Any], expected: Tensor, states: Tensor) -> None:
        """Compare the first tokens of `states` `[batch, kv_heads, tokens, head_dim]` with those of `expected`."""
        if not torch.equal(states[:, :, : expected.shape[2]], expected):
            self.found.append({**where, "expected": "the states that went in", "seen": "others", "tie": False})


@dataclass
class Trials:
    """How often steps are timed, and where it is recorded if they differ from the reference's.

    Attributes:
        steps: steps in each trial.
        count: the number of trials.
        ticking: shows a bar.
        block: steps before the next contender's turn.
        disagreements: where differences are recorded.
    """

    steps: int
    count: int
    ticking: Ticking
    block: int = 4
    disagreements: Disagreements = field(default_factory=Disagreements)


def step(forward: Forward, cache: Any, token: int, device: torch.device | str | None = None) -> tuple[float, Tensor]:
    """One forward pass of one token: its seconds, and its logits `[vocab]` in float32."""
    ids = torch.tensor([[token]], device=device)
    begin = time.perf_counter()
    logits = forward(input_ids=ids, past_key_values=cache, use_cache=True).logits
    seconds = time.perf_counter() - begin
    return seconds, logits[0, -1].float()


def greedy_reference(model: Any, cache: Any, token: int, steps: int) -> tuple[list[int], list[Tensor]]:
    """The input tokens of `steps` greedy steps, and the logits that come out."""
    tokens, logits = [token], []
    for _ in range(steps):
        logits.append(step(model, cache, tokens[-1])[1])
        tokens.append(int(logits[-1].argmax()))
    return tokens[:-1], logits


def measure_decode(
    workload: Workload,
    makers: dict[str, Maker],
    length: int,
    trials: Trials,
    forwards: Mapping[str, Forward] | None = None,
) -> dict[str, Any]:
    """Time decode steps from `length` tokens on.

    The reference decodes greedily once, which also warms up. In the trials, every contender is fed those tokens. So all
    decode one sequence, each step is compared by itself, and a contender that always agrees would have decoded the same
    tokens alone. Contenders take turns of a block of steps, in an order that rotates. Contenders in `forwards` decode
    with that function, the others with the model itself.
    """
    forwards, steps, names = forwards or {}, trials.steps, list(makers)
    model, config = workload.model, workload.model.config
    first = workload.prepare(length)
    tick = trials.ticking(f"{workload.name}, {len(names)} caches at {length:,} tokens", trials.count)
    found: dict[str, Any] = {name: {"seconds": [], "held": 0, "logit_distance": 0.0} for name in names}
    reference = makers[REFERENCE](config, length + steps)
    workload.fill(reference)
    with quiet_clock():
        tokens, expected = greedy_reference(model, reference, first, steps)
    del reference
    for trial in range(trials.count):
        gc.collect()
        caches = {name: make(config, length + steps) for name, make in makers.items()}
        with quiet_clock():
            for name in names:
                workload.fill(caches[name])
                found[name]["seconds"].append([])
            for start in range(0, steps, trials.block):
                for name in interleaved(names, trial + start // trials.block):
                    for index in range(start, min(start + trials.block, steps)):
                        took, logits = step(forwards.get(name, model), caches[name], tokens[index])
                        found[name]["seconds"][trial].append(took)
                        where = {"model": workload.name, "cache": name, "tokens": length + index, "trial": trial}
                        apart = trials.disagreements.compare_step(where, expected[index], logits)
                        found[name]["logit_distance"] = max(found[name]["logit_distance"], apart)
        for name, cache in caches.items():
            found[name]["held"] = cache_nbytes(cache)
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


def measure_update(
    config: Any, shape: Shape, makers: dict[str, Maker], length: int, trials: Trials
) -> dict[str, dict[str, Any]]:
    """Time one layer's update of one token, from `length` tokens on, Python included."""
    names, steps = list(makers), trials.steps
    seconds: Seconds = {name: [] for name in names}
    shape = replace(shape, layers=1)
    prompt, (keys, values) = shape.states(length, torch.bfloat16), shape.states(1, torch.bfloat16, seed=1)[0]
    expected = torch.cat([prompt[0][0], keys.expand(-1, -1, steps, -1)], dim=2)
    # Short updates are all Python, and one in a thousand is interrupted: repeats stabilise the mean.
    repeats = max(1, min(16, 4096 // length))
    tick = trials.ticking(f"updates at {length:,} tokens", trials.count)
    for trial in range(trials.count):
        gc.collect()
        for name in names:
            seconds[name].append([])
        for repeat in range(repeats):
            for name in interleaved(names, trial + repeat):
                cache = makers[name](config, length + steps)
                with quiet_clock():
                    fill(cache, prompt, FILL_CHUNK)
                    took, attended = time_updates(cache, keys, values, steps)
                seconds[name][trial] += took
                where = {"model": "one layer", "cache": name, "tokens": length, "trial": trial}
                trials.disagreements.compare_states(where, expected, attended)
                del cache, attended
        tick()
    return {name: {"seconds": seconds[name]} for name in names}


def measure_growth(config: Any, shape: Shape, make: Maker, length: int) -> dict[str, float]:
    """Time every update of one layer from one growth of its memory to the next, including the second growth.

    This is the long-run cost of growing: a mean over fewer updates contains either no growth or too much of it.
    """
    shape = replace(shape, layers=1)
    keys, values = shape.states(1, torch.bfloat16, seed=1)[0]
    cache = make(config, 2 * length)
    growths: list[int] = []
    seconds: list[float] = []
    with quiet_clock():
        fill(cache, shape.states(length, torch.bfloat16), FILL_CHUNK)
        before = cache.nbytes
        while len(growths) < 2 and len(seconds) < length + 1024:
            seconds += time_updates(cache, keys, values, 1)[0]
            if cache.nbytes != before:
                before = cache.nbytes
                growths.append(len(seconds))
    if len(growths) < 2:
        return {}
    cycle = seconds[growths[0] : growths[1]]
    return {
        "updates": len(cycle),
        "growth_update": cycle[-1],
        "mean": statistics.fmean(cycle),
        "median": statistics.median(cycle),
    }


def measure_sliding(
    workload: RandomModel, makers: dict[str, Maker], stations: list[int], trials: Trials
) -> dict[str, Any]:
    """Time decode steps at several token counts along one sequence.

    Between these stations, every token goes through every layer's update one by one, as in decoding; only the rest of
    the model is left out. These updates are timed too, as the mean over the layers.

    Returns:
        For each contender `stations`, the seconds of each step by station and trial, and `updates` by trial.
    """
    model = workload.model
    names = [name for name in makers if name != FLOOR]
    longest = stations[-1] + trials.steps
    first = workload.prepare(stations[0])
    news = workload.shape.states(1, torch.bfloat16, seed=1)
    found: dict[str, Any] = {name: {"stations": {at: [] for at in stations}, "updates": []} for name in names}
    tick = trials.ticking(workload.name, trials.count)

    expected: dict[int, tuple[list[int], list[Tensor]]] = {}
    reference = makers[REFERENCE](model.config, longest)
    with quiet_clock():
        workload.fill(reference)
        for station in stations:
            _travel(reference, news, station)
            expected[station] = greedy_reference(model, reference, first, trials.steps)

    for trial in range(trials.count):
        gc.collect()
        caches = {name: makers[name](model.config, longest) for name in names}
        with quiet_clock():
            for name in names:
                workload.fill(caches[name])
                found[name]["updates"].append([])
            for turn, station in enumerate(stations):
                tokens, logits_of = expected[station]
                for name in interleaved(names, trial + turn):
                    found[name]["updates"][trial] += _travel(caches[name], news, station)
                    took = []
                    for index, token in enumerate(tokens):
                        seconds, logits = step(model, caches[name], token)
                        took.append(seconds)
                        where = {"model": workload.name, "cache": name, "tokens": station + index, "trial": trial}
                        trials.disagreements.compare_step(where, logits_of[index], logits)
                    found[name]["stations"][station].append(took)
        tick()
    return found


def _travel(cache: Any, news: list[tuple[Tensor, Tensor]], station: int) -> list[float]:
    """Bring a cache to `station` tokens, one at a time; return the mean seconds of each token's updates."""
    seconds = []
    for _ in range(int(cache.get_seq_length()), station):
        begin = time.perf_counter()
        for layer_idx, (keys, values) in enumerate(news):
            cache.update(keys, values, layer_idx)
        seconds.append((time.perf_counter() - begin) / len(news))
    return seconds
