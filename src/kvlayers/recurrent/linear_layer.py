"""A layer with a state of fixed size instead of tokens: linear attention, state spaces, short convolutions."""

import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.arguments import as_batch_indices, whole_number
from kvlayers.core.buffer import StateForm
from kvlayers.core.cache_layer import (
    CacheLayer,
    LayerState,
    LayerTraits,
    check_kind_of_state,
    forwarded,
    register_layer,
    rows_of,
)
from kvlayers.core.description import Fact, OptionsArgument
from kvlayers.core.from_config import Checkpoints
from kvlayers.core.token_store import Fidelity
from kvlayers.errors import RollbackError, StateMismatchError, UnsupportedLayerError
from kvlayers.recurrent.checkpoints import Checkpoint, LinearPast
from kvlayers.recurrent.states import (
    FAMILIES,
    MOST_STATES,
    LinearStates,
    States,
    StatesByIndex,
    TokenCount,
    check_columns,
    check_first_columns,
    check_recurrent,
    kept,
    no_state,
)
from kvlayers.upstream import compat
from kvlayers.utils import late
from kvlayers.utils.options import check_whole_number, checks_options


@register_layer
class LinearAttentionLayer(CacheLayer, compat.LINEAR_LAYER):  # type: ignore[misc]
    """Convolution states and recurrent states, at a fixed address, and the count of tokens that they have seen.

    A convolution state holds the newest `conv_kernel_size` columns that a causal convolution reads. A recurrent state
    is what the model computes from all tokens. Neither can be computed backwards, so the layer takes checkpoints:
    `truncate` goes back to the latest checkpoint at or before a length, and says how many tokens must be passed again.
    While a past is recorded, a layer that has only convolutions holds all columns, and goes back to any of them.

    Args:
        number_of_states: convolution states (and recurrent states) that the model's layer has.
        checkpoints: when checkpoints are taken and how many are kept, `Checkpoints` or a mapping of its arguments.
        tokens_at_once: the most tokens that the model's layer can take in at once after other tokens, `None` for any
            number. It is 1 for layers whose scan over several tokens begins from zero.
        scans: whether the model's layer has a recurrent state beside its convolutions. A first forward pass that was
            interrupted between the two is then noticed.

    Raises:
        OptionError: an argument has a wrong value, or an option does not exist.

    Example:
        >>> import torch, kvlayers
        >>> layer = kvlayers.LinearAttentionLayer()
        >>> layer.update_conv_state(torch.randn(1, 8, 6), conv_kernel_size=4).shape, layer.length
        (torch.Size([1, 8, 6]), 6)
        >>> layer.update_conv_state(torch.randn(1, 8, 1), conv_kernel_size=4).shape, layer.length
        (torch.Size([1, 8, 5]), 7)
        >>> layer.truncate(6)
        0
    """

    described = ("number_of_states", "tokens_at_once", "scans")
    made_with = (OptionsArgument("checkpoints", options=Checkpoints),)
    reservation_facts = frozenset({"checkpoint_every", "most_checkpoints", "scans"})
    # Every shape is static.
    is_compileable = True
    supports_early_init = False
    traits = LayerTraits(attends=False, is_recurrent=True, counts_columns=True, can_be_stacked=True)
    fidelity: Fidelity = "exact"
    capacity: int | None = None

    checkpoints = forwarded("_past")
    """When checkpoints are taken, and how many are kept."""

    is_recording = forwarded("_past")
    is_interrupted = forwarded("_past")
    scans = forwarded("_past")
    nearest_restorable = forwarded("_past")
    activate_past_recording = forwarded("_past")
    deactivate_past_recording = forwarded("_past")
    length = forwarded("_count")
    """Tokens seen and not rolled back, `None` if the model does not pass one column for each token."""

    @checks_options
    def __init__(
        self,
        number_of_states: int = 1,
        checkpoints: Checkpoints | Mapping[str, int | None] | None = None,
        tokens_at_once: int | None = None,
        scans: bool = False,
    ) -> None:
        # Not the initialiser of transformers: it would assign attributes that are properties here.
        check_whole_number(number_of_states, "`number_of_states`", 1, MOST_STATES)
        self.number_of_states = number_of_states
        self.tokens_at_once = None if tokens_at_once is None else whole_number(tokens_at_once, "tokens_at_once")
        self._states = LinearStates(number_of_states)
        self._count = TokenCount(number_of_states)
        self._past = LinearPast(Checkpoints.of(checkpoints), self._states, self._count, scans)

    def conv_state(self, state_idx: int) -> Tensor | None:
        """The convolution state itself, `[batch, channels, conv_kernel_size]`, `None` before the first tokens."""
        return self._states.conv[state_idx]

    def recurrent_state(self, state_idx: int) -> Tensor | None:
        """The recurrent state itself, which begins with the batch, `None` before the first tokens."""
        return self._states.recurrent[state_idx]

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        """By state index, `[batch, channels, conv_kernel_size]`, `None` before the first tokens.

        States that are assigned to an index are copied. The layer then does not know any more how many tokens it has
        seen, so it cannot be rolled back until it is reset.
        """
        return StatesByIndex(self._states.conv, functools.partial(self._assign, "conv"))

    @conv_states.setter
    def conv_states(self, states: Mapping[int, Tensor | None]) -> None:
        for index, assigned in states.items():
            self._assign("conv", index, assigned)

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        """By state index, states whose first axis is the batch, `None` before the first tokens.

        States can be assigned as to `conv_states`.
        """
        return StatesByIndex(self._states.recurrent, functools.partial(self._assign, "recurrent"))

    @recurrent_states.setter
    def recurrent_states(self, states: Mapping[int, Tensor | None]) -> None:
        for index, assigned in states.items():
            self._assign("recurrent", index, assigned)

    def _assign(self, family: str, state_idx: int, states: Tensor | None) -> None:
        """Hold an assigned state. Forget the count of tokens and the checkpoints, which do not belong to it."""
        if state_idx not in self._states.conv:
            raise no_state(state_idx, self.number_of_states)
        self._count.stop_counting()
        self._past.clear()
        if states is None:
            self._states.forget(family, state_idx)
        else:
            kernel = self._states.kernel[state_idx] if family == "conv" else None
            self._states.put(family, state_idx, states if kernel is None else states[..., -kernel:])

    @property
    def conv_kernel_size(self) -> dict[int, int | None]:
        """By state index, the number of columns held, `None` before the first tokens."""
        return self._states.kernel

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """By state index, whether tokens have been seen."""
        return self._states.has_conv

    @property
    def is_conv_states_initialized(self) -> dict[int, bool]:
        """By state index, whether there is memory for a convolution state."""
        return {index: states is not None for index, states in self._states.conv.items()}

    @property
    def is_recurrent_states_initialized(self) -> dict[int, bool]:
        """By state index, whether there is memory for a recurrent state."""
        return {index: states is not None for index, states in self._states.recurrent.items()}

    # A layer that does not attend

    keys = None
    values = None
    held_tokens = None

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        raise self._does_not_attend()

    @override
    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise self._does_not_attend()

    @override
    def reserve_form(self, key_form: StateForm, value_form: StateForm) -> None:
        raise self._does_not_attend()

    # Taking in states

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None) -> Tensor:
        """Take in the inputs of a convolution for new tokens, and return the columns that it reads.

        Args:
            conv_states: `[batch, channels, new]`, one column for each token.
            state_idx: index of the convolution within the layer.
            conv_kernel_size: columns to keep. If it is not given, columns need not be tokens: as many are kept as came
                first, and tokens are not counted.

        Returns:
            The columns held before and the new columns, `[batch, channels, conv_kernel_size + new]`. The first time,
            only the new columns, after zeros if they are fewer than `conv_kernel_size`.

        Raises:
            LayerIndexError: the layer has no state of that index.
            StateMismatchError: the batch size, channels, dtype, device or kernel size differ from those held.
            UnsupportedLayerError: more tokens than the model can take in at once after other tokens.
        """
        states = self._states
        if state_idx not in states.conv:
            raise no_state(state_idx, self.number_of_states)
        columns = conv_states.shape[-1] if isinstance(conv_states, Tensor) and conv_states.dim() else 0
        held = states.conv[state_idx] if states.has_conv[state_idx] else None
        kernel = columns if conv_kernel_size is None else conv_kernel_size
        if held is None:
            check_first_columns(conv_states, kernel, states.live_batch)
        else:
            kernel = held.shape[-1]
            check_columns(conv_states, held, conv_kernel_size, kernel)
            if self.tokens_at_once is not None and columns > self.tokens_at_once:
                raise UnsupportedLayerError(
                    f"A pass after the first tokens must have at most {self.tokens_at_once} token, since this model's "
                    f"scan over several tokens begins from zero and forgets the earlier ones, got {columns}: pass them "
                    "one by one, as generate() does under kvlayers.install()."
                )
        counted, eager = conv_kernel_size is not None, not torch.compiler.is_compiling()
        if counted and eager:
            self._past.begin(state_idx)
        if held is None:
            full = torch.nn.functional.pad(conv_states, (kernel - columns, 0)) if columns < kernel else conv_states
        else:
            full = torch.cat((held, conv_states), -1)
        newest = full.narrow(-1, full.shape[-1] - kernel, kernel)
        if held is None or newest.requires_grad or held.requires_grad:
            states.put("conv", state_idx, newest)
        else:
            held.copy_(newest)
        if counted:
            self._count.add(state_idx, columns, conv_states, eager)
            if eager and (columns > 1 or self._past.is_recording):
                self._past.note_columns(state_idx, columns, full)
        else:
            self._count.stop_counting()
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0) -> Tensor:
        """Replace a recurrent state, and return the new one.

        Args:
            recurrent_states: the state after the newest token. Its first axis is the batch.
            state_idx: index of the state within the layer.

        Raises:
            LayerIndexError: the layer has no state of that index.
            StateMismatchError: the shape, dtype or device differ from those held.
        """
        states = self._states
        if state_idx not in states.recurrent:
            raise no_state(state_idx, self.number_of_states)
        held = states.recurrent[state_idx] if states.has_recurrent[state_idx] else None
        check_recurrent(recurrent_states, held, None if held is not None else states.live_batch)
        # A model that writes the column of a single token by itself passes only the recurrent state.
        alone = self._count.add_token_without_columns(state_idx)
        if held is None or recurrent_states.requires_grad or held.requires_grad:
            held = states.put("recurrent", state_idx, recurrent_states)
        else:
            held.copy_(recurrent_states)
        if not torch.compiler.is_compiling():
            self._past.note_recurrent(state_idx, held, alone)
        return held

    # Rolling back

    @property
    def record_past(self) -> bool:
        """Always true: models must pass the states of each token, since tokens are counted here."""
        return True

    @record_past.setter
    def record_past(self, record_past: bool) -> None:
        # transformers ends a recording by assigning this.
        if not record_past:
            self.deactivate_past_recording()

    @override
    def check_truncate(self, length: int) -> None:
        latest = self.nearest_restorable(length)
        if latest != length:
            raise RollbackError(
                f"`length` must be one that has a checkpoint, got {length} where the latest one before is at {latest}: "
                f"use truncate() of the cache, which goes back to {latest}, and pass the next {length - latest} tokens "
                "again; or fork() the cache before the tokens that may be taken back."
            )

    @override
    def truncate(self, length: int) -> int:
        """Roll back to the latest length at or before `length` that can be restored, exactly.

        Returns:
            How many tokens must be passed again to be at `length`.

        Raises:
            RollbackError: as `nearest_restorable`; nothing is changed.
        """
        length = whole_number(length, "`length`")
        target: int = self.nearest_restorable(length)
        if target == 0:
            self.reset()
        else:
            self._past.put_back(target)
        return length - target

    # Operations

    @override
    def side_by_side(self, layers: Sequence[CacheLayer]) -> CacheLayer:
        joined: CacheLayer = late.function("recurrent rows")(rows_of(layers))
        return joined

    @override
    def select(self, indices: Tensor) -> None:
        indices = indices if self.batch_size is None else as_batch_indices(indices, self.batch_size)
        self._past.select(indices)
        self._states.select(indices)

    @override
    def reset(self) -> None:
        self._states.clear()
        self._count.clear()
        self._past.clear()

    @override
    def fork(self) -> Self:
        twin = self._twin()
        twin._states, twin._count = self._states.fork(), self._count.fork()
        twin._past = self._past.fork(twin._states, twin._count)
        return twin

    @override
    def held_tensors(self) -> Iterator[Tensor]:
        """Every tensor that keeps memory alive, checkpoints and recorded columns included."""
        yield from self._states.tensors()
        yield from self._past.tensors()
        yield from self._count.tensors()

    @override
    def state(self) -> LayerState:
        """Copies of all states and checkpoints. Their names say which of them each tensor is."""
        self._past.check_scanned()
        live, history = self._states.live(), self._past.history
        facts: dict[str, Fact] = {**self.describe(), "checkpoints": len(history), **self._count.facts()}
        for (family, index), states in live.items():
            if family == "conv":
                facts[f"conv_kernel_size.{index}"] = states.shape[-1]
            else:
                facts[f"has_recurrent_state.{index}"] = True
        facts["length"] = self.length
        tensors = _named("", live)
        for number, checkpoint in enumerate(checkpoint.resolved() for checkpoint in history):
            tensors |= _named(f"checkpoint.{number}.", checkpoint.held)
            facts |= {f"checkpoint.{number}.tokens.{index}": seen for index, seen in checkpoint.seen.items()}
        return LayerState(self.kind, {name: kept(held) for name, held in tensors.items()}, facts)

    @override
    def check_state(self, state: LayerState) -> None:
        check_kind_of_state(state, self.kind)
        facts, number = state.facts, state.facts.get("number_of_states")
        if number != self.number_of_states:
            raise StateMismatchError(
                f"`state` must be that of a layer with {self.number_of_states} states, got that of one with {number}: "
                "load it into a cache that was made for the same model config."
            )
        needed = {name.replace("conv_kernel_size", "conv_states") for name in facts if name.startswith("conv_kernel")}
        needed |= {name.replace("has_recurrent_state", "recurrent_states") for name in facts if "has_rec" in name}
        present = {name for name in state.tensors if not name.startswith("checkpoint.")}
        if needed != present:
            raise StateMismatchError(
                f"`state` must have the tensors {sorted(needed)}, got {sorted(present)}: take the state again."
            )
        tensors = state.tensors.values()
        sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
        if len(sizes) > 1 or any(tensor.layout != torch.strided or not tensor.dim() for tensor in tensors):
            raise StateMismatchError(
                f"`state` must have dense tensors of one batch size, got batch sizes {sorted(sizes)}: take the state "
                "again."
            )

    @override
    def load_state(self, state: LayerState) -> None:
        self.check_state(state)
        self.reset()
        for key, tensor in _by_key("", state.tensors).items():
            self._states.put(*key, tensor)
        self._count.read(state.facts)
        number = state.facts.get("checkpoints")
        for prefix in (f"checkpoint.{index}." for index in range(number if isinstance(number, int) else 0)):
            tokens = {
                int(name.rpartition(".")[2]): seen
                for name, seen in state.facts.items()
                if name.startswith(f"{prefix}tokens.") and isinstance(seen, int)
            }
            if tokens:
                held = {key: kept(states) for key, states in _by_key(prefix, state.tensors).items()}
                self._past.history.append(Checkpoint(tokens, held))

    # What it is

    @property
    @override
    def batch_size(self) -> int | None:
        return next((states.shape[0] for states in self._states.tensors()), None)

    @property
    def dtype(self) -> torch.dtype | None:
        """dtype of the first state, `None` before there is one."""
        return next((states.dtype for states in self._states.tensors()), None)

    @property
    def device(self) -> torch.device | None:
        """Device of the first state, `None` before there is one."""
        return next((states.device for states in self._states.tensors()), None)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether `crop` can go back to any recorded length: if the layer has only convolutions."""
        conv, recurrent = self.is_conv_states_initialized, self.is_recurrent_states_initialized
        return any(conv.values()) and not any(recurrent.values())

    def lazy_initialization(
        self,
        conv_states: Tensor | None = None,
        recurrent_states: Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        """Reserve memory for states of these shapes. The states themselves are not taken in.

        Args:
            conv_states: an example of the convolution's inputs, `[batch, channels, any]`.
            recurrent_states: an example of the recurrent state.
            state_idx: index of the state within the layer.
            conv_kernel_size: columns to keep; as many as `conv_states` has if it is not given.
        """
        if state_idx not in self._states.conv:
            raise no_state(state_idx, self.number_of_states)
        columns = 0 if conv_states is None else conv_states.shape[-1]
        kernel = columns if conv_kernel_size is None else conv_kernel_size
        self._states.reserve(state_idx, conv_states, recurrent_states, kernel)


def _named(prefix: str, held: States) -> dict[str, Tensor]:
    """States by their names in a state of the layer."""
    return {f"{prefix}{family}_states.{index}": states for (family, index), states in held.items()}


def _by_key(prefix: str, tensors: Mapping[str, Tensor]) -> States:
    """The states that `_named` has named so."""
    return {
        (family, int(index)): states
        for name, states in tensors.items()
        for family, found, index in (name.removeprefix(prefix).partition("_states."),)
        if name.startswith(prefix) and found and family in FAMILIES
    }
