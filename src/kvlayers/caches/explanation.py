"""What happened to a cache that its answers do not show: prefixes, ways of attention, compilations."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlayers.caches.from_config import attention_part, held_layer
from kvlayers.layers import TokenLayer


@dataclass(frozen=True, repr=False)
class Explanation:
    """Why a call was not as fast as it might have been; printed, it is a line for each thing.

    Attributes:
        prefixes: for each prompt of the call of `generate()` that made the cache, what a store of prefixes had of it,
            and why not more; or why the call could not go by the store. Empty where there was none.
        attention: how often attention on states that are packed, or shared by sequences, went which way, and why not a
            faster one: once for each layer and forward pass, or for each of the two products that it is written as.
            Empty where all states are held in full precision.
        traces: how often torch.compile, or torch.export, has traced code that updates the cache: 1 is the first
            compilation, and each further one another shape, or another mode, such as `no_grad`.
    """

    prefixes: tuple[str, ...]
    attention: Mapping[str, int]
    traces: int

    def __repr__(self) -> str:
        ways = sorted(self.attention.items(), key=lambda way: -way[1])
        lines = [
            *(f"prefix: {note}" for note in self.prefixes or ("no store was asked",)),
            *(f"attention, {count} times: {way}" for way, count in ways),
            *([] if ways else ["attention: states are held in full precision, as torch reads them"]),
            f"compiled: {_times(self.traces)}",
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def _times(traces: int) -> str:
    if not traces:
        return "no code that updates this cache"
    again = "" if traces == 1 else f", of which {traces - 1} again (TORCH_LOGS=recompiles says why)"
    return f"{traces} times{again}" if traces > 1 else "once"


def explanation_of(prefixes: Sequence[str], layers: Sequence[Any], traces: int) -> Explanation:
    """The explanation of a cache with these layers; see `Explanation`."""
    counts: dict[str, int] = {}
    for layer in layers:
        held = held_layer(attention_part(layer))
        if isinstance(held, TokenLayer):
            for path, count in held.store.attention_paths.items():
                counts[path] = counts.get(path, 0) + count
    return Explanation(tuple(prefixes), counts, traces)
