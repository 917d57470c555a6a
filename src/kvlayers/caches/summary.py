"""What a cache holds, for people: a table for a terminal, for rich, and for a notebook."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvlayers.caches.from_config import held_layer
from kvlayers.layers import HybridLayer, OffloadedLayer, TokenLayer, TransformersLayer
from kvlayers.stores import QuantizedStore
from kvlayers.utils.units import html_table, plain_table, readable_bytes

if TYPE_CHECKING:
    import rich.table

DEVICE, HOST, DISK = TIERS = ("device", "host", "disk")
"""Where states are at home: on the device that computes, in the host's memory, or in files."""


@dataclass(frozen=True)
class LayerSummary:
    """What one layer holds, or several that follow one another and hold the same.

    Attributes:
        layers: their indices in the cache.
        kind: name of the class, of both parts for a hybrid layer.
        tokens: those that it has seen, `None` for a layer that does not count them.
        held: those of which it holds keys and values: fewer than it has seen in a window; `None` for a recurrent state.
        bits: of a key and of a value, where they are rounded: `(4, 4)`; else `None`.
        bytes: by tier, of each of the layers.
    """

    layers: range
    kind: str
    tokens: int | None
    held: int | None
    bits: tuple[int, int] | None
    bytes: dict[str, int]

    @property
    def shown_bits(self) -> str:
        """Bits of a key and of a value: once if they are the same, and nothing in full precision."""
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
            *(readable_bytes(self.bytes[tier] * len(self.layers)) if self.bytes[tier] else "" for tier in TIERS),
        )


@dataclass(frozen=True, repr=False)
class CacheSummary:
    """What a cache holds. Printed it is a table; so it is for rich, and in a notebook.

    Attributes:
        kind: name of the cache's class.
        tokens: those that it has seen.
        batch_size: sequences side by side, -1 before the first states.
        nbytes: bytes of all memory held. What several layers or caches share counts once, here alone.
        bytes: by tier, the sum of all layers.
        layers: what each holds, alike ones that follow one another together.
    """

    kind: str
    tokens: int
    batch_size: int
    nbytes: int
    bytes: dict[str, int]
    layers: tuple[LayerSummary, ...]

    @property
    def line(self) -> str:
        """What the cache is made of and holds, as its `repr`."""
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
        """The whole cache in a line."""
        batch = f", batch {self.batch_size}" if self.batch_size >= 0 else ""
        return f"{self.kind}: {self.tokens} tokens{batch}, {readable_bytes(self.nbytes)}"

    def __repr__(self) -> str:
        head, *rows = self._rows()
        return f"{self.title}\n{plain_table([head, *rows])}"

    def __rich__(self) -> "rich.table.Table":
        # Late, as it is rich that asks.
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
        """A head and a row for each group of layers, without the columns that nothing is in."""
        table = [("layers", "kind", "seen", "held", "bits", *TIERS), *(layer.cells() for layer in self.layers)]
        columns = [column for column in zip(*table, strict=True) if any(column[1:]) or column[0] == "kind"]
        return list(zip(*columns, strict=True))


def summary_of(
    kind: str, tokens: int, batch_size: int, nbytes: int, parts: Mapping[str, Sequence[Any]]
) -> CacheSummary:
    """The summary of a cache.

    Args:
        kind: name of its class.
        tokens: those that it has seen.
        batch_size: sequences side by side.
        nbytes: bytes that it holds.
        parts: its layers, with the operations of ours, by what they are for; "" where they are for one thing.
    """
    summaries = tuple(
        summary
        for use, layers in parts.items()
        for summary in _grouped([_of_layer(use, index, layer) for index, layer in enumerate(layers)])
    )
    total = {tier: sum(layer.bytes[tier] * len(layer.layers) for layer in summaries) for tier in TIERS}
    return CacheSummary(kind, tokens, batch_size, nbytes, total, summaries)


def _of_layer(use: str, index: int, layer: Any) -> LayerSummary:
    parts = [layer.attention, layer.linear] if isinstance(layer, HybridLayer) else [layer]
    amounts = dict.fromkeys(TIERS, 0)
    bits: tuple[int, int] | None = None
    for part in parts:
        amounts[_tier(part)] += part.nbytes
        held = held_layer(part)
        if isinstance(held, TokenLayer) and isinstance(held.store, QuantizedStore):
            quantization = held.store.quantization
            bits = quantization.keys.nbits, quantization.values.nbits
    kinds = " and ".join(map(_name, parts))
    return LayerSummary(range(index, index + 1), f"{use} {kinds}".strip(), layer.length, _held(parts[0]), bits, amounts)


def _held(part: Any) -> int | None:
    """Tokens of which a layer holds keys and values."""
    held = held_layer(part)
    if isinstance(held, TokenLayer):
        return held.held_tokens
    if part.attends:
        keys = part.keys
        return part.length if keys is None or keys.dim() != 4 else min(part.length or 0, int(keys.shape[2]))
    return None


def _name(part: Any) -> str:
    held = part.layer if isinstance(part, TransformersLayer) else held_layer(part)
    return type(held).__name__


def _tier(part: Any) -> str:
    if not isinstance(part, OffloadedLayer) or not part.prefetcher.offloads(part.device):
        return DEVICE
    return DISK if part.prefetcher.memory.holds_host_states else HOST


def _grouped(layers: Sequence[LayerSummary]) -> Iterator[LayerSummary]:
    def alike(layer: LayerSummary) -> tuple[Any, ...]:
        return layer.kind, layer.tokens, layer.held, layer.bits, tuple(layer.bytes.items())

    for _, same in itertools.groupby(layers, key=alike):
        first, *others = same
        yield replace(first, layers=range(first.layers[0], first.layers[0] + 1 + len(others)))
