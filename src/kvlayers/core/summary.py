"""Reports of a cache for people: a table of its contents, and why its last calls were not faster."""

import html
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvlayers.core.cache_layer import CacheLayer
from kvlayers.utils.units import html_table, plain_table, readable_bytes

if TYPE_CHECKING:
    import rich.table

TIERS = ("device", "host", "disk")
"""Where states are between updates: on the device that computes, in the host's memory, or in files."""


@dataclass(frozen=True)
class LayerSummary:
    """What one layer holds, or several layers that follow one another and hold the same.

    Attributes:
        layers: indices of the layers in the cache.
        kind: name of the class; of both parts for a hybrid layer.
        tokens: tokens that the layer has seen, `None` for a layer that does not count them.
        held: tokens of which it holds keys and values, fewer than seen in a window; `None` for a recurrent state.
        bits: bits of a number of a key and of a value if they are rounded, such as `(4, 4)`; else `None`.
        bytes: for each tier, bytes of all of the layers.
    """

    layers: range
    kind: str
    tokens: int | None
    held: int | None
    bits: tuple[int, int] | None
    bytes: dict[str, int]

    @property
    def shown_bits(self) -> str:
        """Bits of a key and of a value: one number if they are the same, and "" in full precision."""
        return "" if self.bits is None else "/".join(map(str, dict.fromkeys(self.bits)))

    def cells(self) -> tuple[str, ...]:
        """The summary as a row."""
        first, last = self.layers[0], self.layers[-1]
        return (
            str(first) if first == last else f"{first} to {last}",
            self.kind,
            "" if self.tokens is None else str(self.tokens),
            "" if self.held is None else str(self.held),
            self.shown_bits,
            *(readable_bytes(self.bytes[tier]) if self.bytes[tier] else "" for tier in TIERS),
        )


@dataclass(frozen=True, repr=False)
class CacheSummary:
    """What a cache holds. Printed, it is a table, also by rich and in a notebook.

    Attributes:
        kind: name of the cache's class.
        tokens: tokens that the cache has seen.
        batch_size: sequences side by side, -1 before the first states.
        nbytes: bytes of all memory held. Only here does memory that layers or caches share count once.
        bytes: for each tier, bytes of all layers.
        layers: what each layer holds. Layers that follow one another and hold the same are one entry.
    """

    kind: str
    tokens: int
    batch_size: int
    nbytes: int
    bytes: dict[str, int]
    layers: tuple[LayerSummary, ...]

    @property
    def line(self) -> str:
        """The `repr` of the cache: its layers, tokens and bytes."""
        kinds = itertools.groupby(
            (
                (layer.kind + (f" of {layer.shown_bits} bits" if layer.bits else ""), len(layer.layers))
                for layer in self.layers
            ),
            key=lambda kind: kind[0],
        )
        made_of = [f"{sum(count for _, count in same)} x {kind}" for kind, same in kinds]
        batch = [f"batch {self.batch_size}"] if self.batch_size >= 0 else []
        return f"{self.kind}({', '.join([*made_of, f'{self.tokens} tokens', *batch, readable_bytes(self.nbytes)])})"

    @property
    def title(self) -> str:
        """The whole cache in one line."""
        batch = f", batch {self.batch_size}" if self.batch_size >= 0 else ""
        return f"{self.kind}: {self.tokens} tokens{batch}, {readable_bytes(self.nbytes)}"

    def __repr__(self) -> str:
        head, *rows = self._rows()
        return f"{self.title}\n{plain_table([head, *rows])}"

    def __rich__(self) -> "rich.table.Table":
        # Late: rich itself asks for this.
        from rich import box
        from rich.table import Table

        head, *rows = self._rows()
        drawn = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in head:
            drawn.add_column(name, justify="left" if name in ("layers", "kind") else "right")
        for row in rows:
            drawn.add_row(*row)
        return drawn

    def _repr_html_(self) -> str:
        return html_table(self.title, self._rows())

    def _rows(self) -> list[tuple[str, ...]]:
        """A head and a row for each group of layers, without empty columns."""
        table = [("layers", "kind", "seen", "held", "bits", *TIERS), *(layer.cells() for layer in self.layers)]
        columns = [column for column in zip(*table, strict=True) if any(column[1:]) or column[0] == "kind"]
        return list(zip(*columns, strict=True))


def summary_of(
    kind: str, tokens: int, batch_size: int, nbytes: int, layers: Mapping[str, Sequence[CacheLayer]]
) -> CacheSummary:
    """The summary of a cache.

    Args:
        kind: name of its class.
        tokens: tokens that it has seen.
        batch_size: sequences side by side.
        nbytes: bytes that it holds.
        layers: its layers by their use ("self", "cross"), or by "" if they have one use.
    """
    summaries = tuple(
        summary
        for use, of_use in layers.items()
        for summary in _grouped([_of_layer(use, index, layer) for index, layer in enumerate(of_use)])
    )
    total = {tier: sum(layer.bytes[tier] for layer in summaries) for tier in TIERS}
    return CacheSummary(kind, tokens, batch_size, nbytes, total, summaries)


def _of_layer(use: str, index: int, layer: CacheLayer) -> LayerSummary:
    amounts = dict.fromkeys(TIERS, 0)
    for part in layer.parts:
        amounts[part.memory_tier] += part.nbytes
    kinds = " and ".join(type(part.unwrapped.original).__name__ for part in layer.parts)
    return LayerSummary(
        range(index, index + 1), f"{use} {kinds}".strip(), layer.length, layer.held_tokens, layer.bits, amounts
    )


def _grouped(layers: Sequence[LayerSummary]) -> Iterator[LayerSummary]:
    def alike(layer: LayerSummary) -> tuple[Any, ...]:
        # Layers whose heads hold different numbers of tokens differ by a few bytes.
        return layer.kind, layer.tokens, layer.held, layer.bits, *map(readable_bytes, layer.bytes.values())

    for _, group in itertools.groupby(layers, key=alike):
        same = list(group)
        amounts = {tier: sum(layer.bytes[tier] for layer in same) for tier in TIERS}
        yield replace(same[0], layers=range(same[0].layers[0], same[-1].layers[-1] + 1), bytes=amounts)


@dataclass(frozen=True, repr=False)
class Explanation:
    """Why a call was not as fast as it might have been. Printed, it has one line for each finding.

    Attributes:
        prefixes: for each prompt of the call of `generate()` that made the cache, how much of it a prefix store had,
            and why not more; or why the call could not use the store. Empty if there was no store.
        attention: how often attention on packed states, or on states that sequences share, was computed in which way,
            and why not in a faster one. It is counted once for each layer and forward pass, or once for each of the two
            products if the model writes attention as two. Empty if all states are held in full precision.
        packing: how often an accelerator packed keys, or values, in which way, and why not in a faster one. It is
            counted once for each layer, side and forward pass that packs.
        traces: how often torch.compile or torch.export has traced code that updates the cache. 1 is the first
            compilation; each further one was for another shape, or another mode, such as `no_grad`.
        memory: what the cache has rounded, or moved, to stay within its `max_bytes`; empty without them.
    """

    prefixes: tuple[str, ...]
    attention: Mapping[str, int]
    packing: Mapping[str, int]
    traces: int
    memory: str = ""

    def __repr__(self) -> str:
        ways, packing = (sorted(counts.items(), key=lambda way: -way[1]) for counts in (self.attention, self.packing))
        lines = [
            *(f"prefix: {note}" for note in self.prefixes or ("no store was asked",)),
            *(f"attention, {count} times: {way}" for way, count in ways),
            *([] if ways else [f"attention: {FULL_PRECISION}"]),
            *(f"packing, {count} times: {way}" for way, count in packing),
            *([f"memory: {self.memory}"] if self.memory else []),
            f"compiled: {_times(self.traces)}",
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


FULL_PRECISION = "states are held in full precision, for torch or the compiled kernel to read"


def _times(traces: int) -> str:
    if not traces:
        return "no code that updates this cache"
    again = "" if traces == 1 else f", of which {traces - 1} again (TORCH_LOGS=recompiles says why)"
    return f"{traces} times{again}" if traces > 1 else "once"


def explanation_of(prefixes: Sequence[str], layers: Sequence[CacheLayer], traces: int, memory: str) -> Explanation:
    """The explanation of a cache with these layers; see `Explanation`."""
    attention: Counter[str] = sum((Counter(layer.attention_paths) for layer in layers), Counter())
    packing: Counter[str] = sum((Counter(layer.packing_paths) for layer in layers), Counter())
    return Explanation(tuple(prefixes), dict(attention), dict(packing), traces, memory)
