"""Attention and prefill of caches that evict, and of caches that recall."""

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lib.contenders import Maker, fill
from lib.internals import PackedStates, cache_nbytes, interleaved, quiet_clock, reference
from lib.timing import Tick
from lib.turns import Turns
from lib.workload import Shape

MOST_APART = 0.02
"""The largest difference between attention in bfloat16 and its reference, relative to the largest output."""

BLOCK = 16
"""Steps that a contender takes before the next one has its turn."""


def states_of(shape: Shape, tokens: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Random states of each layer in bfloat16. Heads differ in their norms, so that budgets that go by norms differ."""
    factors = torch.linspace(0.9, 1.1, shape.kv_heads)[:, None, None].to(torch.bfloat16)
    return [(keys * factors, values) for keys, values in shape.states(tokens, torch.bfloat16, seed)]


def module_of(shape: Shape) -> Any:
    """What transformers' function of attention asks of a module."""
    return SimpleNamespace(num_key_value_groups=shape.heads // shape.kv_heads, is_causal=True)


def attention_step(cache: Any, shape: Shape, states: Sequence[tuple[Tensor, Tensor]], query: Tensor) -> Tensor:
    """One token through the attention of every layer; the output of the last, `[1, 1, heads, head_dim]`.

    Transformers' own function is called, as a model calls it. What the cache chooses, it chooses in here.
    """
    module, output = module_of(shape), query
    for layer_idx, (keys, values) in enumerate(states):
        attended = cache.update(keys, values, layer_idx)
        output = sdpa_attention_forward(module, query, *attended, attention_mask=None)[0]
    return output


def reference_output(query: Tensor, attended: tuple[Tensor, Tensor]) -> Tensor:
    """The same attention in float32 and plain torch, `[1, 1, heads, head_dim]`."""
    keys, values = attended
    if isinstance(keys, PackedStates):
        segments = keys.snapshot.read_for(query)
        found = reference.attend(query.float(), segments, None, query.shape[3] ** -0.5)
    else:
        found = torch.nn.functional.scaled_dot_product_attention(
            query.float(), keys.float(), values.float(), enable_gqa=True
        )
    return found.transpose(1, 2)


def check_output(name: str, cache: Any, shape: Shape, query: Tensor, token: tuple[Tensor, Tensor]) -> list[str]:
    """What is wrong with the attention of one more token in the first layer."""
    attended = cache.update(*token, 0)
    output = sdpa_attention_forward(module_of(shape), query, *attended, attention_mask=None)[0].float()
    expected = reference_output(query, attended)
    apart = float((output - expected).abs().max() / expected.abs().max())
    return [f"{name}: attention is {apart:.3f} of its largest output from the reference"] if apart > MOST_APART else []


def measure_attention(
    shape: Shape,
    makers: Mapping[str, Maker],
    lengths: Sequence[int],
    steps: int,
    trials: int,
    tick: Tick,
) -> tuple[dict[str, Any], list[str]]:
    """Seconds of decode steps of attention alone, for each contender at each length, and what is wrong with outputs.

    Contenders of all lengths take turns of `BLOCK` steps, so that a ratio of two lengths is of one time as well. A
    trial's figure is the mean over all steps, so that evictions in steps of many tokens count.
    """
    config = shape.config()
    query = torch.randn(
        1, shape.heads, 1, shape.head_dim, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(3)
    )
    token = states_of(shape, 1, seed=1)
    entrants = [(name, length) for length in lengths for name in makers]
    seconds: dict[tuple[str, int], list[list[float]]] = {entrant: [] for entrant in entrants}
    held, wrong = {}, []
    filled = {length: states_of(shape, length) for length in lengths}
    for trial in range(trials):
        gc.collect()
        with quiet_clock():
            caches = {}
            for name, length in entrants:
                # With room for the first step, which is not counted: it may compile a kernel.
                cache = caches[name, length] = makers[name](config, length + steps + 1)
                fill(cache, filled[length], length)
                attention_step(cache, shape, token, query)
                seconds[name, length].append([])
            for start in range(0, steps, BLOCK):
                for entrant in interleaved(entrants, trial + start // BLOCK):
                    for _ in range(min(BLOCK, steps - start)):
                        begin = time.perf_counter()
                        attention_step(caches[entrant], shape, token, query)
                        seconds[entrant][trial].append(time.perf_counter() - begin)
            held = {entrant: cache_nbytes(cache) for entrant, cache in caches.items()}
            if trial == 0:
                for name, at in entrants:
                    wrong += check_output(f"{name} at {at}", caches[name, at], shape, query, token[0])
            caches.clear()
        tick()
    results: dict[str, Any] = {}
    for (name, length), taken in seconds.items():
        means = [statistics.fmean(trial) for trial in taken]
        results.setdefault(str(length), {})[name] = {
            "seconds": taken,
            "mean": statistics.median(means),
            "means": means,
            "median": statistics.median(map(statistics.median, taken)),
            "held": held[name, length],
        }
    return results, wrong


def time_ratio(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Time of one contender relative to another: the median of the trials' ratios."""
    return statistics.median(a / b for a, b in zip(one["means"], other["means"], strict=True))


def measure_prefill(
    model: Any, ids: Tensor, makers: Mapping[str, Maker], trials: int, tick: Tick
) -> tuple[dict[str, Any], list[str]]:
    """Seconds of a forward pass over a prompt, in turns, and the caches whose logits differ from those of the first.

    Attention to a prompt is exact, whatever is evicted behind it.
    """
    turns, first = Turns(makers), next(iter(makers))
    wrong: list[str] = []

    def prefill(name: str) -> Tensor:
        cache = makers[name](model.config, ids.shape[1])
        return model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[0, -1].float()  # type: ignore[no-any-return]

    for trial in range(trials + 1):
        gc.collect()
        with quiet_clock():
            # The first round warms up.
            logits = turns.take(prefill, is_counted=trial > 0)
        for name, seen in logits.items():
            if not torch.equal(seen, logits[first]):
                apart = float((seen - logits[first]).abs().max())
                wrong.append(f"{name}: logits of the prompt are {apart:.4f} apart")
        tick()
    results = {
        name: {"median": turns.median(name), "means": taken, "seconds": [[each] for each in taken]}
        for name, taken in turns.seconds.items()
    }
    return results, list(dict.fromkeys(wrong))
