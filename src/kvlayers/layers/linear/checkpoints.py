"""Earlier states of a recurrent layer, to which it can be put back."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor
from typing_extensions import Self

from kvlayers.errors import OptionError
from kvlayers.utils.options import as_options, mapping_option

States = dict[int, Tensor]
"""Convolution states, or recurrent states, by their index within the layer."""

LEAST_WHILE_RECORDING = 2
"""Checkpoints that are kept at least while a past is recorded: at the end of a draft, and where the draft began."""


@mapping_option("checkpoints")
@dataclass(frozen=True)
class Checkpoints:
    """When a recurrent layer takes checkpoints, and how many it keeps.

    A checkpoint is taken at the end of each update of several tokens (so at the end of the prompt), every `every`
    tokens, and where a past that may be taken back begins (`activate_past_recording`, and each rollback while
    recording). Compiled code takes no checkpoints. A checkpoint takes as much memory as the states of the layer,
    whatever the number of tokens.

    Args:
        every: take a checkpoint every `every` tokens as well; `None` to leave that out.
        most: the most checkpoints to keep; the oldest is dropped first. While a past is recorded, at least two are
            kept.

    Raises:
        OptionError: a value that is not a whole number, or too small.

    Example:
        >>> import kvlayers
        >>> kvlayers.layers.Checkpoints(every=256, most=8)
        Checkpoints(every=256, most=8)
    """

    every: int | None = None
    most: int = 2

    def __post_init__(self) -> None:
        if self.every is not None:
            _check_count(self.every, "every", 1)
        _check_count(self.most, "most", 0)

    @classmethod
    def of(cls, given: "Checkpoints | Mapping[str, int | None] | None") -> "Checkpoints":
        """The `Checkpoints` for the option `checkpoints` of a cache: a `Checkpoints`, or a mapping of its arguments.

        Raises:
            OptionError: the option is something else, or names an argument that does not exist.
        """
        if given is None:
            return cls()
        return as_options(cls, given, "{'every': 64}")

    def due_at(self, length: int) -> bool:
        """Whether a checkpoint is due at this number of tokens."""
        return self.most > 0 and self.every is not None and length > 0 and length % self.every == 0


def _check_count(number: object, name: str, least: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise OptionError(
            f"expected {name} of the checkpoints to be a whole number, at least {least}, but saw {number!r}."
        )


@dataclass
class Checkpoint:
    """Copies of the states of a layer after the same token. Nobody writes to their tensors.

    Attributes:
        seen: tokens that each convolution state has seen.
        conv: convolution states.
        recurrent: recurrent states.
        chosen: the sequences that were selected since, int64 `[batch]`. The tensors are not indexed at once, because a
            beam search selects at every step and never goes back.
    """

    seen: dict[int, int]
    conv: States = field(default_factory=dict)
    recurrent: States = field(default_factory=dict)
    chosen: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens that the layer had seen."""
        return self.seen[min(self.seen)]

    def select(self, indices: Tensor) -> "Checkpoint":
        """The checkpoint of the sequences at `indices`, int64 `[new_batch]`."""
        chosen = indices.clone() if self.chosen is None else rows(self.chosen, indices)
        selected = replace(self, chosen=chosen)
        held = max((states.shape[0] for states in self.states()), default=0)
        # If fewer sequences are left, the memory of the others is freed.
        return selected.resolved() if chosen.shape[0] < held else selected

    def resolved(self) -> "Checkpoint":
        """The same checkpoint, with tensors of the chosen sequences only."""
        chosen = self.chosen
        if chosen is None:
            return self
        conv, recurrent = (
            {index: rows(states, chosen) for index, states in held.items()} for held in (self.conv, self.recurrent)
        )
        return Checkpoint(self.seen, conv, recurrent)

    def copy(self) -> "Checkpoint":
        """Another checkpoint over the same tensors, to which states may be added."""
        return Checkpoint(dict(self.seen), dict(self.conv), dict(self.recurrent), self.chosen)

    def states(self) -> list[Tensor]:
        """All states."""
        return [*self.conv.values(), *self.recurrent.values()]

    def tensors(self) -> list[Tensor]:
        """All tensors that keep memory alive."""
        return [*self.states(), *(() if self.chosen is None else (self.chosen,))]


def rows(states: Tensor, indices: Tensor) -> Tensor:
    """The sequences at `indices` of states whose first axis is the batch."""
    return states.index_select(0, indices.to(states.device))


class StateHistory:
    """The checkpoints that a layer holds, from the oldest to the newest.

    An update gives its states one after another, so the newest checkpoint may be incomplete until the update ends.
    """

    def __init__(self, checkpoints: Iterable[Checkpoint] = ()) -> None:
        self._held = list(checkpoints)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def newest(self) -> Checkpoint | None:
        """The newest checkpoint."""
        return self._held[-1] if self._held else None

    def add(self, checkpoint: Checkpoint, most: int) -> None:
        """Hold one more checkpoint, and drop the oldest ones beyond `most`."""
        self._held.append(checkpoint)
        del self._held[: max(len(self._held) - most, 0)]

    def latest(self, length: int, conv: Iterable[int], recurrent: Iterable[int]) -> Checkpoint | None:
        """The latest checkpoint, at `length` tokens or before, that has all states of these indices."""
        whole = set(conv), set(recurrent)
        return next(
            (
                checkpoint
                for checkpoint in reversed(self._held)
                if checkpoint.length <= length and (set(checkpoint.conv), set(checkpoint.recurrent)) == whole
            ),
            None,
        )

    def drop_from(self, length: int) -> None:
        """Drop the checkpoints of `length` tokens or more."""
        self._held = [checkpoint for checkpoint in self._held if checkpoint.length < length]

    def drop_beyond(self, length: int) -> None:
        """Drop the checkpoints of more than `length` tokens."""
        self.drop_from(length + 1)

    def clear(self) -> None:
        """Drop all checkpoints."""
        self._held = []

    def select(self, indices: Tensor) -> None:
        """Make sequence `i` of each checkpoint what sequence `indices[i]` was."""
        self._held = [checkpoint.select(indices) for checkpoint in self._held]

    def fork(self) -> Self:
        """An independent history. The tensors are shared, as nobody writes to them."""
        return type(self)(checkpoint.copy() for checkpoint in self._held)

    def tensors(self) -> list[Tensor]:
        """The tensors of all checkpoints."""
        return [tensor for checkpoint in self._held for tensor in checkpoint.tensors()]

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._held)
