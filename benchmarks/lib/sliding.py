"""Measures whether decode steps with sliding-window layers stay equally fast, however long the sequence."""

import gc
import time
from typing import Any

import torch
from torch import Tensor

from kvlayers.tools.measuring.interleave import interleaved, quiet_clock
from lib.contenders import FLOOR, REFERENCE, Maker, random_states
from lib.timing import Disagreements, Tick, Trials, greedy_reference, step
from lib.workload import RandomModel


def measure_sliding(
    workload: RandomModel,
    makers: dict[str, Maker],
    stations: list[int],
    steps: int,
    trials: int,
    disagreements: Disagreements,
    tick: Tick,
) -> dict[str, Any]:
    """Time decode steps at several token counts along one sequence.

    Between these stations, every token goes through every layer's update one by one, as in decoding; only the rest of
    the model is left out. These updates are timed too, as the mean over the layers.

    Returns:
        For each contender `stations`, the seconds of each step by station and trial, and `updates` by trial.
    """
    model, shape = workload.model, workload.shape
    names = [name for name in makers if name != FLOOR]
    longest = stations[-1] + steps
    first = workload.prepare(stations[0])
    news = random_states(shape.layers, shape.kv_heads, shape.head_dim, 1, torch.bfloat16, seed=1)
    stepped: dict[str, dict[int, list[list[float]]]] = {name: {at: [] for at in stations} for name in names}
    updated: Trials = {name: [] for name in names}

    expected: dict[int, tuple[list[int], list[Tensor]]] = {}
    reference = makers[REFERENCE](model.config, longest)
    with quiet_clock():
        workload.fill(reference)
        for station in stations:
            _travel(reference, news, station)
            expected[station] = greedy_reference(model, reference, first, steps)

    for trial in range(trials):
        gc.collect()
        caches = {name: makers[name](model.config, longest) for name in names}
        with quiet_clock():
            for name in names:
                workload.fill(caches[name])
                updated[name].append([])
            for turn, station in enumerate(stations):
                tokens, logits_of = expected[station]
                for name in interleaved(names, trial + turn):
                    updated[name][trial] += _travel(caches[name], news, station)
                    took = []
                    for index in range(steps):
                        seconds, logits = step(model, caches[name], tokens[index])
                        took.append(seconds)
                        where = {"model": workload.name, "cache": name, "tokens": station + index, "trial": trial}
                        disagreements.compare_step(where, logits_of[index], logits)
                    stepped[name][station].append(took)
        tick()
    return {name: {"stations": stepped[name], "updates": updated[name]} for name in names}


def _travel(cache: Any, news: list[tuple[Tensor, Tensor]], station: int) -> list[float]:
    """Bring a cache to `station` tokens, one at a time; return the mean seconds of each token's updates."""
    seconds = []
    for _ in range(int(cache.get_seq_length()), station):
        begin = time.perf_counter()
        for layer_idx, (keys, values) in enumerate(news):
            cache.update(keys, values, layer_idx)
        seconds.append((time.perf_counter() - begin) / len(news))
    return seconds
