"""What is done to every layer of a cache at once: all of them, or none."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, overload

from torch import Tensor
from typing_extensions import Self

from kvlayers.caches.from_config import share_mask_extents
from kvlayers.caches.legacy_api import crop_argument
from kvlayers.errors import BatchIndexError, OptionError, RollbackError, StateMismatchError
from kvlayers.layers import LayerOperations, LayerState, TransformersLayer
from kvlayers.layers.batch_indices import BatchIndices, as_batch_indices, is_identity, repeated_rows
from kvlayers.layers.contract import crop_target, whole_number
from kvlayers.utils.registry import DescribesItself
from kvlayers.utils.tensor_memory import Storages, storages_of


@dataclass(frozen=True)
class CacheState:
    """All that a cache must keep to go on decoding elsewhere.

    Attributes:
        kind: name of the cache's class.
        layers: a state for each layer.
        parts: states of the caches that it is made of, for one that has no layers of its own.
    """

    kind: str
    layers: tuple[LayerState, ...] = ()
    parts: tuple["CacheState", ...] = ()


Operable = LayerOperations | TransformersLayer
"""A layer with the operations of ours."""


def _operable(layer: Any) -> Operable:
    return layer if isinstance(layer, LayerOperations) else TransformersLayer(layer)


class LayerwiseOperations(DescribesItself, ABC):
    """The part of a cache's interface that changes, copies or measures all of its layers.

    Each operation asks every layer first whether it can, so that an error leaves none of them changed.
    """

    layers: list[Any]
    known_ids: Tensor | None = None
    """Ids of the first tokens that the cache has seen, int64 `[batch, tokens]`, as far as they are known. Under
    `install()` they are those of prompts, and of sequences that `generate()` has returned. Forks share the tensor."""
    warned_of_prompt: bool = False
    """Whether a `PromptMismatchWarning` was given, which comes once."""

    @abstractmethod
    def layers_for(self, count: int) -> list[Any]:
        """The layers, and as many new ones as make `count`, where layers are made as they are needed."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name of the kind of cache, by which saved states are known."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Sequences side by side, -1 before the first states."""

    @abstractmethod
    def forget_pass(self) -> None:
        """Take the next update for the beginning of a forward pass, as all layers have changed."""

    def adapted_layers(self) -> Iterator[Operable]:
        """The layers, those of transformers behind an adapter that gives them the operations of ours."""
        for layer in self.layers:
            yield _operable(layer)

    @property
    def keeps_every_token(self) -> bool:
        """Whether it can be put back to any number of tokens, whatever it has seen since."""
        return all(layer.keeps_every_token for layer in self.adapted_layers())

    def crop(self, tokens_to_remove: int | None = None, *, max_length: int | None = None) -> None:
        """Roll back, exactly: a positive number is the length to keep, zero or a negative one removes newest tokens.

        Zero removes no token, but lets go of what was recorded for a rollback.

        Args:
            tokens_to_remove: the number.
            max_length: the same number, by the name that it had until transformers 5.15.

        Raises:
            OptionError: both or neither is given.
            RollbackError: fewer tokens are held, tokens that would be needed again are gone, or a recurrent state can
                only be put back to an earlier length (see `truncate`); nothing is changed.
        """
        number = crop_argument(tokens_to_remove, max_length)
        length = self._token_count()
        target = crop_target(number, length)
        if number > 0:
            self._remove(self._removals(target))
        else:
            self._remove([(layer, length - target) for layer in self.adapted_layers()])

    def truncate(self, length: int) -> int:
        """Roll back to when the cache had seen `length` tokens (0 is one), or as near before that as its layers can go.

        Layers of tokens go back to any length that they hold. A recurrent state goes back to a checkpoint, and all
        layers with it. What `get_seq_length()` says afterwards is how many tokens the cache has seen: pass it those
        from there on again.

        Returns:
            How many tokens must be passed again to be at `length`: 0 where no layer has a recurrent state.

        Raises:
            RollbackError: fewer tokens are held, or tokens that would be needed again are gone; nothing is changed.
        """
        target = self.nearest_restorable(length)
        self._remove(self._removals(target))
        return length - target

    def nearest_restorable(self, length: int) -> int:
        """The greatest length, `length` at most, that all layers can be put back to.

        Raises:
            RollbackError: as `truncate`.
        """
        held, length = self._token_count(), whole_number(length, "a length")
        if not 0 <= length <= held:
            raise RollbackError(
                f"expected to roll back to between 0 and the {held} tokens that are held, but was asked for {length}."
            )
        counting = [layer for layer in self.adapted_layers() if isinstance(layer, LayerOperations) and layer.length]
        while True:
            nearest = min((layer.nearest_restorable(length) for layer in counting), default=length)
            if nearest == length:
                return length
            length = nearest

    def _removals(self, length: int) -> list[tuple[Operable, int]]:
        """By how many tokens each layer must go back. A pass that broke off leaves some layers ahead of others."""
        held = self._token_count()
        return [(layer, (layer.length or held) - length) for layer in self.adapted_layers()]

    def _remove(self, removals: list[tuple[Operable, int]]) -> None:
        held = self._token_count()
        for layer, tokens in removals:
            if 0 < tokens < held and layer.is_recurrent and not layer.attends and layer.length == 0:
                raise RollbackError(
                    "expected recurrent layers that have seen what the others have, but one has seen nothing: the "
                    "model keeps its states elsewhere, or a forward pass broke off; reset() the cache."
                )
        for layer, tokens in removals:
            layer.check_removal(tokens)
        for layer, tokens in removals:
            layer.remove_newest(tokens)
        if self.known_ids is not None:
            self.known_ids = self.known_ids[:, : self._token_count()]
        self.forget_pass()

    def _token_count(self) -> int:
        return max((layer.length or 0 for layer in self.adapted_layers()), default=0)

    def reorder_cache(self, beam_idx: BatchIndices) -> None:
        """As `batch_select_indices`, under the name that beam search uses."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: BatchIndices) -> None:
        """Keep the sequences at `indices`, in that order; an index may come more than once.

        Raises:
            BatchIndexError: an index that no sequence has; nothing is changed.
        """
        batch_size = self.batch_size
        if batch_size >= 0:
            self._select(as_batch_indices(indices, batch_size))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times, copies side by side."""
        batch_size = self.batch_size
        if batch_size >= 0:
            self._select(repeated_rows(repeats, batch_size))

    def batch_split(self, full_batch_size: int, split_size: int) -> list[Self]:
        """Caches of `split_size` sequences each, the last one of what is left, that go on apart from this one.

        Args:
            full_batch_size: sequences of this cache.
            split_size: sequences of each part.

        Raises:
            OptionError: `full_batch_size` is not that of the cache, or a count that is not at least 1.
        """
        full, each = whole_number(full_batch_size, "full_batch_size"), whole_number(split_size, "split_size")
        if full != self.batch_size or each < 1:
            raise OptionError(
                f"expected a cache of full_batch_size sequences to be split into parts of at least one, but saw {full} "
                f"for {self.batch_size} and parts of {each}: pass cache.batch_size and the size of a part."
            )
        parts = []
        for begin in range(0, full, each):
            part = self._fork()
            part.batch_select_indices(range(begin, min(begin + each, full)))
            parts.append(part)
        return parts

    def expand(self, repeats: int) -> None:
        """Let `repeats` sequences go on from each one, side by side.

        As `batch_repeat_interleave`, but what they have in common is held once for all of them, where full attention
        holds it in full precision on its device: attention reads it once, and what each has of its own beside it.

        Raises:
            OptionError: a count that is not at least 1.
            CapacityError: a static cache has no room for so many; nothing is changed.
        """
        batch_size = self.batch_size
        if batch_size >= 0:
            rows = repeated_rows(repeats, batch_size)
            if repeats > 1:
                self.check_select(rows.shape[0])
                for layer in self.adapted_layers():
                    layer.expand(repeats)
                self._select_known_ids(rows)

    def _select(self, rows: Tensor) -> None:
        if is_identity(rows, self.batch_size):
            return
        self.check_select(rows.shape[0])
        for layer in self.adapted_layers():
            layer.select(rows)
        self._select_known_ids(rows)

    def _select_known_ids(self, rows: Tensor) -> None:
        # Where the rows are: nobody waits for an accelerator.
        if self.known_ids is not None:
            self.known_ids = self.known_ids.to(rows.device).index_select(0, rows)

    def check_select(self, batch_size: int) -> None:
        """Raise what selecting `batch_size` sequences would raise, whatever the indices."""
        filled = [layer for layer in self.adapted_layers() if layer.length]
        sizes = {layer.batch_size for layer in filled if layer.batch_size is not None}
        if len(sizes) > 1:
            raise BatchIndexError(
                f"expected layers of one batch size, but saw {sorted(sizes)}: crop the cache to before the forward "
                "pass that broke off, or reset it."
            )
        for layer in self.adapted_layers():
            layer.check_select(batch_size)

    def reset(self) -> None:
        """Forget all tokens; the memory is kept for the next ones."""
        for layer in self.adapted_layers():
            layer.reset()
        self.known_ids = None
        self.forget_pass()

    def activate_past_recording(self) -> None:
        """From now on, let windows hold all that comes between one crop and the next, which may take it back."""
        for layer in self.adapted_layers():
            layer.activate_past_recording()

    def deactivate_past_recording(self) -> None:
        """Let go of what was recorded, and record no more."""
        for layer in self.adapted_layers():
            layer.deactivate_past_recording()

    @overload
    def fork(self, n: None = None) -> Self: ...

    @overload
    def fork(self, n: int) -> list[Self]: ...

    def fork(self, n: int | None = None) -> Self | list[Self]:
        """An independent continuation: what happens to the one never shows in the other.

        Forks share memory until they write; see docs/forks.md for the kinds whose live tokens are copied at once.

        Args:
            n: how many; one that is no list where not given.

        Raises:
            OptionError: `n` is no whole number, or less than 1.
        """
        if n is None:
            return self._fork()
        count = whole_number(n, "the number of forks")
        if count < 1:
            raise OptionError(f"expected a number of forks, at least 1, but saw {count}: pass 1 or more.")
        return [self._fork() for _ in range(count)]

    def _fork(self) -> Self:
        twin = copy.copy(self)
        twin.layers = [layer.fork() for layer in self.adapted_layers()]
        share_mask_extents(twin.layers)
        return twin

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        twin = self.fork()
        memo[id(self)] = twin
        return twin

    def storages(self) -> Storages:
        """Bytes of each piece of memory that is held, by its address. Forks may hold the same ones."""
        return storages_of(tensor for layer in self.adapted_layers() for tensor in layer.held_tensors())

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""
        return sum(self.storages().values())

    def state(self) -> CacheState:
        """Copies of the live tensors of all layers, and the facts beside them."""
        return CacheState(self.kind, tuple(layer.state() for layer in self.adapted_layers()))

    def load_state(self, state: CacheState) -> None:
        """Become what the cache was when `state` was taken.

        Raises:
            StateMismatchError: the state is of a cache with other layers; nothing is changed.
        """
        check_is_state(state)
        layers = self.layers_for(len(state.layers))
        if state.parts or len(state.layers) != len(layers):
            raise StateMismatchError(
                f"expected the states of {len(self.layers)} layers, but saw {len(state.layers)}: load the state into a "
                "cache that was made for the same model config."
            )
        pairs = [(_operable(layer), layer_state) for layer, layer_state in zip(layers, state.layers, strict=True)]
        for layer, layer_state in pairs:
            layer.check_state(layer_state)
        batch_sizes = {batch for s in state.layers if s.facts.get("length") and (batch := _batch_of(s)) is not None}
        if len(batch_sizes) > 1:
            raise StateMismatchError(f"expected states of one batch size, but saw {sorted(batch_sizes)}.")
        self.layers, self.known_ids = layers, None
        for layer, layer_state in pairs:
            layer.load_state(layer_state)
        self.forget_pass()


def _batch_of(state: LayerState) -> int | None:
    names = ("keys", *(name for name in state.tensors if "conv_states." in name))
    return next((state.tensors[name].shape[0] for name in names if name in state.tensors), None)


def check_is_state(state: object) -> None:
    """Raise `StateMismatchError` where `state` is nothing that a cache's `state()` returns."""
    if not isinstance(state, CacheState):
        raise StateMismatchError(
            f"expected what the state() of a cache returned, but saw a {type(state).__name__}: take one with state()."
        )
