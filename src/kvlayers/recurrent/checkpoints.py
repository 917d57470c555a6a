"""The past of a recurrent layer: checkpoints and recorded columns, to which it can be put back."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.core.from_config import Checkpoints
from kvlayers.errors import InterruptedPassError, RollbackError
from kvlayers.recurrent.states import LinearStates, States, TokenCount, kept, rows

LEAST_WHILE_RECORDING = 2
"""Checkpoints that are kept at least while a past is recorded: at the end of a draft, and where the draft began."""


@dataclass
class Checkpoint:
    """Copies of the states of a layer after the same token. Nobody writes to their tensors.

    Attributes:
        seen: tokens that each convolution state has seen.
        held: the states.
        chosen: the sequences that were selected since, int64 `[batch]`. The tensors are not indexed at once, because a
            beam search selects at every step and never goes back.
    """

    seen: dict[int, int]
    held: States = field(default_factory=dict)
    chosen: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens that the layer had seen."""
        return self.seen[min(self.seen)]

    def select(self, indices: Tensor) -> "Checkpoint":
        """The checkpoint of the sequences at `indices`, int64 `[new_batch]`."""
        chosen = indices.clone() if self.chosen is None else rows(self.chosen, indices)
        selected = replace(self, chosen=chosen)
        held = max((states.shape[0] for states in self.held.values()), default=0)
        # If fewer sequences are left, the memory of the others is freed.
        return selected.resolved() if chosen.shape[0] < held else selected

    def resolved(self) -> "Checkpoint":
        """The same checkpoint, with tensors of the chosen sequences only."""
        chosen = self.chosen
        if chosen is None:
            return self
        return Checkpoint(self.seen, {key: rows(states, chosen) for key, states in self.held.items()})

    def tensors(self) -> list[Tensor]:
        """All tensors that keep memory alive."""
        return [*self.held.values(), *(() if self.chosen is None else (self.chosen,))]


class LinearPast:
    """Checkpoints of a recurrent layer, and the columns that it records if it has only convolutions.

    Compiled code does none of this: another graph would cost more than it brings.

    Args:
        checkpoints: when checkpoints are taken, and how many are kept.
        states: the tensors of the layer.
        count: its tokens.
        scans: whether the layer has a recurrent state beside its convolutions from the first pass on, as far as known.
    """

    def __init__(self, checkpoints: Checkpoints, states: LinearStates, count: TokenCount, scans: bool = False) -> None:
        self.checkpoints = checkpoints
        self.scans = scans
        self.history: list[Checkpoint] = []
        self.is_recording = False
        self._states = states
        self._count = count
        self._recorded: dict[int, Tensor] = {}
        # The forward pass under way: indices of the convolutions that it has updated, and the checkpoint of its end.
        self._given: set[int] = set()
        self._open: Checkpoint | None = None
        # The recurrent state and its version where a convolution was given columns, until the state is given, too.
        self._unscanned: dict[int, tuple[Tensor | None, int]] = {}
        self._scans_in_place = self._was_interrupted = False

    def __getstate__(self) -> dict[str, object]:
        # Copies of tensors have versions of their own.
        return {**vars(self), "_unscanned": {}, "_was_interrupted": self.is_interrupted}

    # While states are taken in

    def begin(self, state_idx: int) -> None:
        """Note that a convolution is about to be updated."""
        if self._given and state_idx not in self._given:
            self._given.add(state_idx)
            self._expect_scan(state_idx)
            return
        self.check_scanned()
        self._scans_in_place |= any(
            held is not None and held is self._states.recurrent[index] and held._version != version
            for index, (held, version) in self._unscanned.items()
        )
        # Models may write to the states until here. Only here are all states known to be after the same token.
        if len(self._given) != 1:
            self._given = {state_idx}
        self._open = None
        if self.checkpoints.every is not None and self.checkpoints.due_at(self._count.length or 0):
            self._take()
        self._unscanned = {}
        self._expect_scan(state_idx)

    def _expect_scan(self, state_idx: int) -> None:
        held = self._states.recurrent[state_idx]
        if held is None or not held.is_inference():
            self._unscanned[state_idx] = held, 0 if held is None else held._version

    @property
    def is_interrupted(self) -> bool:
        """Whether a forward pass ended between a convolution and the recurrent state behind it.

        Some models give the state, and others change it in place, which its version tells. Kernels for accelerators may
        change it without a new version: there this is known only once a version has changed in such a pass.
        """
        if self._was_interrupted or not self._unscanned:
            return self._was_interrupted
        if not any(self._states.has_recurrent.values()):
            return self.scans
        return any(
            held is not None
            and held is self._states.recurrent[index]
            and held._version == version
            and (held.is_cpu or self._scans_in_place)
            for index, (held, version) in self._unscanned.items()
        )

    def check_scanned(self) -> None:
        """Raise `InterruptedPassError` if a pass ended before the recurrent state of its tokens."""
        if self.is_interrupted:
            raise InterruptedPassError(
                "A forward pass must update the recurrent state of a layer behind its convolution, got one that an "
                "error or Ctrl-C interrupted between the two: truncate() the cache to where the pass began, which says "
                "how many tokens to pass again, or reset() it."
            )

    def note_columns(self, state_idx: int, columns: int, full: Tensor) -> None:
        """Note that a convolution was given columns, which are the newest of `full`, `[batch, channels, any]`."""
        if self.is_recording and not any(self._states.has_recurrent.values()):
            past, kernel = self._recorded.get(state_idx), self._states.kernel[state_idx] or 0
            if past is None:
                missing = max(kernel + columns - full.shape[-1], 0)
                self._recorded[state_idx] = torch.nn.functional.pad(full.detach(), (missing, 0))
            else:
                self._recorded[state_idx] = torch.cat([past, full[..., -columns:].detach()], dim=-1)
        held, most = self._states.conv[state_idx], self._most
        if columns == 1 or not most or held is None:
            return
        if self._open is None:
            self._open = Checkpoint(dict(self._count.seen()))
            self._hold(self._open)
        self._open.seen = dict(self._count.seen())
        self._open.held["conv", state_idx] = kept(held)

    def note_recurrent(self, state_idx: int, held: Tensor, alone: bool) -> None:
        """Note that a recurrent state was given: `alone`, without columns, or after them."""
        self._unscanned, self._recorded = {}, {}
        if alone:
            self._given, self._open = set(), None
            if self.checkpoints.due_at(self._count.length or 0):
                self._take()
        elif self._open is not None:
            self._open.held["recurrent", state_idx] = kept(held)

    def _take(self) -> None:
        """Take a checkpoint of all states, unless there is one at this length."""
        length = self._count.length
        if not length or not self._most or self.is_interrupted:
            return
        there_is = self._latest(length)
        if there_is is None or there_is.length != length:
            # Such a checkpoint is left of an interrupted update.
            self._drop_from(length)
            held = {key: kept(states) for key, states in self._states.live().items()}
            self._hold(Checkpoint(dict(self._count.seen()), held))

    def _hold(self, checkpoint: Checkpoint) -> None:
        """Hold one more checkpoint, and drop the oldest ones beyond the most that are kept."""
        self.history = [*self.history, checkpoint][-self._most :]

    def _latest(self, length: int) -> Checkpoint | None:
        """The latest checkpoint, at `length` tokens or before, that has all states."""
        whole = self._states.live().keys()
        if self.scans and not any(self._states.has_recurrent.values()):
            return None
        there = (held for held in reversed(self.history) if held.length <= length and held.held.keys() == whole)
        return next(there, None)

    def _drop_from(self, length: int) -> None:
        self.history = [checkpoint for checkpoint in self.history if checkpoint.length < length]

    @property
    def _most(self) -> int:
        most = self.checkpoints.most
        return max(most, LEAST_WHILE_RECORDING) if self.is_recording else most

    # Between forward passes

    def activate_past_recording(self) -> None:
        """From now on, be able to go back to the present length."""
        self.is_recording = True
        self.end_pass()
        self._keep_beginning()

    def deactivate_past_recording(self) -> None:
        """Hold no more columns than are needed. Checkpoints stay."""
        self.is_recording = False
        self._recorded = {}

    def end_pass(self) -> None:
        """Take the next update for the beginning of another forward pass."""
        self._given, self._open = set(), None

    def _keep_beginning(self) -> None:
        # Columns are recorded, but recurrent states are not.
        if any(self._states.has_recurrent.values()):
            self._take()

    def nearest_restorable(self, length: int) -> int:
        """The greatest length, `length` at most, that can be restored: 0 if there is no other.

        Raises:
            RollbackError: fewer tokens were seen, or it is not known how many were seen.
        """
        held = self._count.length
        if held is None:
            raise RollbackError(
                "The model must pass a column for each token, so that its recurrent layer counts its tokens, got other "
                "columns: fork() the cache before the tokens that may be taken back."
            )
        if not 0 <= length <= held:
            raise RollbackError(
                f"`length` must be from 0 to the {held} tokens that the recurrent layer has seen, got {length}: pass "
                "one of these."
            )
        if (length == held and not self._is_broken()) or 0 < held - length <= self._recorded_tokens():
            return length
        checkpoint = self._latest(length)
        return 0 if checkpoint is None else checkpoint.length

    def _is_broken(self) -> bool:
        """Whether an update of several tokens was interrupted before all states had been given."""
        if self.is_interrupted:
            return True
        last = self.history[-1] if self.history else None
        if last is None or last.length != self._count.length:
            return False
        return last.held.keys() != self._states.live().keys()

    def _recorded_tokens(self) -> int:
        """How many of the newest tokens the recorded columns can take back."""
        if {("conv", index) for index in self._recorded} != self._states.live().keys():
            return 0
        kernel = self._states.kernel
        return min((held.shape[-1] - (kernel[index] or 0) for index, held in self._recorded.items()), default=0)

    def put_back(self, target: int) -> None:
        """Restore the states of a length that `nearest_restorable` has returned, but not of length 0."""
        removed = (self._count.length or 0) - target
        if 0 < removed <= self._recorded_tokens():
            for index, columns in self._recorded.items():
                kernel = self._states.kernel[index] or 0
                rest = columns[..., : columns.shape[-1] - removed]
                self._states.put("conv", index, rest[..., -kernel:])
            self._count.set({index: seen - removed for index, seen in self._count.seen().items()})
        elif removed or self._is_broken():
            checkpoint = self._latest(target)
            if checkpoint is None or checkpoint.length != target:
                raise RollbackError(
                    f"`length` must be one that has a checkpoint, got {target}: ask nearest_restorable() for one."
                )
            for key, states in checkpoint.resolved().held.items():
                self._states.put(*key, states)
            self._count.set(checkpoint.seen)
        self.clear(target + 1)
        if self.is_recording:
            self._keep_beginning()

    # Operations

    def select(self, indices: Tensor) -> None:
        """Make sequence `i` what sequence `indices[i]` was, in checkpoints and recorded columns: before the states."""
        self._was_interrupted, self._unscanned = self.is_interrupted, {}
        self.history = [checkpoint.select(indices) for checkpoint in self.history]
        self._recorded = {index: rows(states, indices) for index, states in self._recorded.items()}
        self.end_pass()

    def clear(self, length: int = 0) -> None:
        """Forget recorded columns, and checkpoints of `length` tokens or more."""
        self._drop_from(length)
        self._recorded = {}
        self._unscanned, self._was_interrupted = {}, False
        self.end_pass()

    def fork(self, states: LinearStates, count: TokenCount) -> Self:
        """The same past for a copy of the states and the count. The tensors are shared, as nobody writes to them."""
        twin = type(self)(self.checkpoints, states, count, self.scans)
        twin._was_interrupted, twin._scans_in_place = self.is_interrupted, self._scans_in_place
        # The newest one may be of a pass under way, to which states are added.
        twin.history = [Checkpoint(dict(own.seen), dict(own.held), own.chosen) for own in self.history]
        twin.is_recording = self.is_recording
        twin._recorded = dict(self._recorded)
        return twin

    def tensors(self) -> list[Tensor]:
        """The tensors of checkpoints and recorded columns."""
        return [*(tensor for held in self.history for tensor in held.tensors()), *self._recorded.values()]
