"""Which sequence of a shared segment each sequence of a batch reads."""

import functools
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

MAXIMUM_UNREAD_SEQUENCES = 64
"""Sequences up to which indices on an accelerator are not read. The queries of all sequences attend to each sequence of
a shared segment then, which costs little while the kernel is bound by reading keys. With more, waiting costs less."""


class SegmentRows:
    """For each sequence of a batch, the sequence of a shared segment that it reads.

    Args:
        sequences: how many sequences the segment has.
        rows: int64 `[batch]` on an accelerator, where nobody reads it, or a tuple if the host knows them.
    """

    def __init__(self, sequences: int, rows: tuple[int, ...] | Tensor) -> None:
        self.sequences = sequences
        self._rows = rows
        self._on_devices: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @functools.cached_property
    def known(self) -> tuple[int, ...] | None:
        """The rows, `None` if only an accelerator knows them."""
        return None if isinstance(self._rows, Tensor) else self._rows

    @functools.cached_property
    def are_even(self) -> bool:
        """Whether as many sequences of the batch read each sequence of the segment, next to each other and in order."""
        return bool(self.sequences) and self.known == of_repeats(self.sequences, len(self) // self.sequences)

    @functools.cached_property
    def most_readers(self) -> int:
        """Most sequences of the batch that read the same sequence, or all of them if only an accelerator knows."""
        return max(Counter(self.known).values()) if self.known else len(self)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows, and the positions in the batch, both int64 `[batch]`. They are copied once for a device."""
        if torch.compiler.is_compiling():
            return self._copies(device)
        if device not in self._on_devices:
            # Autograd could not follow an index that was made in inference mode, and they are used outside of it too.
            with torch.inference_mode(False):
                self._on_devices[device] = self._copies(device)
        return self._on_devices[device]

    def select(self, states: Tensor) -> Tensor:
        """The states `[sequences, ...]` that each sequence of the batch reads, a copy `[batch, ...]`."""
        return states.index_select(0, self.on(states.device)[0])

    def _copies(self, device: torch.device) -> tuple[Tensor, Tensor]:
        positions = torch.arange(len(self), device=device)
        if self.are_even:
            # Computed there, because the host would wait for a copy.
            return positions // (len(self) // self.sequences), positions
        return torch.as_tensor(self._rows, device=device), positions

    def held_tensors(self) -> Iterator[Tensor]:
        """Tensors that hold the rows."""
        if isinstance(self._rows, Tensor):
            yield self._rows
        for copies in self._on_devices.values():
            yield from copies

    def selected(self, indices: Tensor) -> "SegmentRows":
        """The rows of the sequences at `indices`, int64 `[new_batch]`."""
        count = indices.shape[0]
        if self.sequences == 1:
            return SegmentRows(1, (0,) * count)
        if not reading_waits(indices) or count > MAXIMUM_UNREAD_SEQUENCES:
            known = self._rows.tolist() if isinstance(self._rows, Tensor) else self._rows
            return SegmentRows(self.sequences, tuple(known[row] for row in indices.tolist()))
        return SegmentRows(self.sequences, self.on(indices.device)[0].index_select(0, indices))


def reading_waits(indices: Tensor) -> bool:
    """Whether the host would have to wait for an accelerator to read a tensor."""
    return indices.device.type != "cpu"


def of_repeats(sequences: int, repeats: int) -> tuple[int, ...]:
    """The rows if `repeats` sequences next to each other read each sequence of a segment."""
    return tuple(row for row in range(sequences) for _ in range(repeats))
