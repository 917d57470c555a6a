"""Measures caches that evict, and caches that recall: bytes, attention in decode steps, prefill, and traffic."""

import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvlayers
import kvlayers.offload.offloading
from kvlayers.kernels.attention import reference
from kvlayers.kernels.attention.packed_tensor import PackedStates
from kvlayers.tools.measuring.interleave import interleaved, quiet_clock
from kvlayers.tools.measuring.nbytes import cache_nbytes
from lib.contenders import Maker, random_states
from lib.timing import Tick
from lib.workload import RandomModel

# The tests' double of transfers, which runs on the host and counts bytes.
sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
from recording_transfers import RecordingTransfers

MOST_APART = 0.02
"""The largest difference between attention in bfloat16 and its reference, relative to the largest output."""

BLOCK = 16
"""Steps that a contender takes before the next one has its turn."""


@dataclass(frozen=True)
class AttentionShape:
    """The attention of a model whose decode steps are timed without the rest of the model."""

    layers: int = 4
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def states(self, tokens: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Keys and values `[1, kv_heads, tokens, head_dim]` of each layer, bfloat16; heads differ in their norms.

        Budgets of heads that go by norms then differ as well.
        """
        factors = torch.linspace(0.9, 1.1, self.kv_heads)[:, None, None].to(torch.bfloat16)
        plain = random_states(self.layers, self.kv_heads, self.head_dim, tokens, torch.bfloat16, seed)
        return [(keys * factors, values) for keys, values in plain]

    def config(self) -> Any:
        """Config of a llama with this attention."""
        from transformers import LlamaConfig

        return LlamaConfig(
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.heads * self.head_dim,
            max_position_embeddings=65536,
        )


def attention_step(cache: Any, shape: AttentionShape, states: Sequence[tuple[Tensor, Tensor]], query: Tensor) -> Tensor:
    """One token through the attention of every layer; the output of the last, `[1, 1, heads, head_dim]`.

    Transformers' own function is called, as a model calls it. What the cache chooses, it chooses in here.
    """
    module = SimpleNamespace(num_key_value_groups=shape.heads // shape.kv_heads, is_causal=True)
    output = query
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


def check_output(
    name: str, cache: Any, shape: AttentionShape, query: Tensor, token: tuple[Tensor, Tensor]
) -> str | None:
    """What is wrong with the attention of one more token in the first layer, `None` if nothing is."""
    module = SimpleNamespace(num_key_value_groups=shape.heads // shape.kv_heads, is_causal=True)
    attended = cache.update(*token, 0)
    output = sdpa_attention_forward(module, query, *attended, attention_mask=None)[0].float()
    expected = reference_output(query, attended)
    apart = float((output - expected).abs().max() / expected.abs().max())
    return None if apart <= MOST_APART else f"{name}: attention is {apart:.3f} of its largest output from the reference"


def measure_attention(
    shape: AttentionShape,
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
    token = shape.states(1, seed=1)
    entrants = [(name, length) for length in lengths for name in makers]
    seconds: dict[tuple[str, int], list[list[float]]] = {entrant: [] for entrant in entrants}
    held, wrong = {}, []
    filled = {length: shape.states(length) for length in lengths}
    for trial in range(trials):
        gc.collect()
        with quiet_clock():
            caches = {}
            for name, length in entrants:
                # With room for the first step, which is not counted.
                caches[name, length] = makers[name](config, length + steps + 1)
                for layer_idx, (keys, values) in enumerate(filled[length]):
                    caches[name, length].update(keys, values, layer_idx)
                # The first step may compile a kernel.
                attention_step(caches[name, length], shape, token, query)
                seconds[name, length].append([])
            for start in range(0, steps, BLOCK):
                for entrant in interleaved(entrants, trial + start // BLOCK):
                    for _ in range(min(BLOCK, steps - start)):
                        begin = time.perf_counter()
                        attention_step(caches[entrant], shape, token, query)
                        seconds[entrant][trial].append(time.perf_counter() - begin)
            held = {entrant: cache_nbytes(cache) for entrant, cache in caches.items()}
            if trial == 0:
                found = (
                    check_output(f"{name} at {at}", caches[name, at], shape, query, token[0]) for name, at in entrants
                )
                wrong += [each for each in found if each is not None]
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


def measure_bytes(shape: AttentionShape, tokens: int, makers: Mapping[str, Maker], tick: Tick) -> dict[str, Any]:
    """Bytes that each cache holds after a prompt of so many tokens."""
    found, config, states = {}, shape.config(), shape.states(tokens)
    with torch.no_grad():
        for name, make in makers.items():
            cache = make(config, tokens)
            for layer_idx, (keys, values) in enumerate(states):
                cache.update(keys, values, layer_idx)
            found[name] = {"held": cache_nbytes(cache), "length": cache.get_seq_length()}
            tick()
    return found


def measure_prefill(
    model: Any, ids: Tensor, makers: Mapping[str, Maker], trials: int, tick: Tick
) -> tuple[dict[str, Any], list[str]]:
    """Seconds of a forward pass over a prompt, in turns, and the caches whose logits differ from those of the first.

    Attention to a prompt is exact, whatever is evicted behind it.
    """
    names = list(makers)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    wrong: list[str] = []
    expected: Tensor | None = None
    for trial in range(trials + 1):
        for name in interleaved(names, max(trial - 1, 0)):
            gc.collect()
            cache = makers[name](model.config, ids.shape[1])
            with quiet_clock():
                begin = time.perf_counter()
                logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[0, -1].float()
                took = time.perf_counter() - begin
            # The first round warms up.
            if trial:
                seconds[name].append(took)
            expected = logits if expected is None else expected
            if not torch.equal(logits, expected):
                wrong.append(f"{name}: logits of the prompt are {float((logits - expected).abs().max()):.4f} apart")
            del cache
            tick()
    results = {
        name: {"median": statistics.median(taken), "means": taken, "seconds": [[each] for each in taken]}
        for name, taken in seconds.items()
    }
    return results, list(dict.fromkeys(wrong))


def decode(model: Any, cache: Any, ids: Tensor, new: int) -> tuple[list[int], Tensor]:
    """Decode greedily; return the tokens and the last logits `[vocab]`."""
    found = []
    with torch.no_grad():
        for _ in range(new):
            logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(-1)
            found.append(int(ids))
    return found, logits[0, -1]


def measure_traffic(
    workload: RandomModel, make: Callable[[Any, bool], Any], lengths: Sequence[int], new: int, tick: Tick
) -> tuple[dict[str, Any], list[str]]:
    """Bytes that a step moves when a cache is offloaded, between two pools of host memory.

    Args:
        workload: the model.
        make: makes a cache from a config, offloaded or not.
        lengths: tokens of the prompts.
        new: steps.
        tick: called for each length.

    Returns:
        Bytes for each length, and the lengths at which tokens differ from those of the cache that is not offloaded.
    """
    found, wrong = {}, []
    for length in lengths:
        prompt = workload.prompt(length)
        transfers = RecordingTransfers(lambda waiting: waiting)
        prefetcher = functools.partial(
            kvlayers.offload.Prefetcher, transfers=lambda device, transfers=transfers: transfers
        )
        with mock.patch.object(kvlayers.offload.offloading, "Prefetcher", prefetcher):
            cache = make(workload.model.config, True)
        tokens, _ = decode(workload.model, cache, prompt, new)
        if tokens != decode(workload.model, make(workload.model.config, False), prompt, new)[0]:
            wrong.append(f"offloaded recall at {length}: other tokens than without offloading")
        steps = [cache.traffic.of_step(step) for step in range(-new + 1, 0)]
        found[str(length)] = {
            "to_device": statistics.median(step.to_device for step in steps),
            "to_host": statistics.median(step.to_host for step in steps),
            "peak_on_device": transfers.peak_bytes,
            "held": cache.nbytes,
        }
        tick()
    return found, wrong


def is_bit_equal(workload: RandomModel, one: Maker, other: Maker, length: int, new: int) -> bool:
    """Whether two caches give the same tokens, and the same logits at the end."""
    prompt = workload.prompt(length)
    (tokens, logits), (others, other_logits) = (
        decode(workload.model, make(workload.model.config, length + new), prompt, new) for make in (one, other)
    )
    return tokens == others and torch.equal(logits, other_logits)
