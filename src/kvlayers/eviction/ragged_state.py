"""The state of a ragged store: its tensors, and their checks."""

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.core.arguments import check_dense_state
from kvlayers.core.buffer import COUNT_DTYPE, form_of
from kvlayers.core.token_store import TokenStore
from kvlayers.errors import StateMismatchError
from kvlayers.eviction.flat_tokens import (
    TABLE_NAMES,
    DenseFlatTokens,
    FlatTokens,
    PackedFlatTokens,
    PieceTables,
    check_tables,
    flat_form,
)
from kvlayers.kernels.attention.segment_kinds import DENSE_PIECE_TOKENS
from kvlayers.quantized.checks import checked_quantizers
from kvlayers.quantized.packed_blocks import PACKED_NAMES, PackedBlocks, check_packed_state
from kvlayers.quantized.quantization import block_tokens
from kvlayers.quantized.quantized_store import QuantizedStore

COLUMNS_NAME = "ragged_columns"
FLAT = "flat_"
"""What the names of the tensors of the flat part begin with."""


class RaggedColumns(NamedTuple):
    """How the columns of a ragged store are divided.

    Attributes:
        width: columns of the flat part.
        sinks: how many of the oldest tokens of the tail are older than those in the flat part.
        own: how many of the oldest tokens of the tail may be other tokens of the text for each head.
    """

    width: int = 0
    sinks: int = 0
    own: int = 0

    def first_common(self, in_tail: int) -> int:
        """The first column from which on all heads hold the same tokens of the text, at least number `in_tail` of the
        tail."""
        return self.width + max(self.own, in_tail)

    def state(self, device: torch.device) -> dict[str, Tensor]:
        """The numbers as a tensor, on the device of the other tensors, so that a state moves as a whole."""
        return {COLUMNS_NAME: torch.tensor(self, dtype=COUNT_DTYPE, device=device)}

    @classmethod
    def of_state(cls, tensors: dict[str, Tensor]) -> Self:
        """The numbers in a checked state."""
        return cls(*map(int, tensors[COLUMNS_NAME].tolist()))


def is_ragged(tensors: dict[str, Tensor]) -> bool:
    """Whether a state has a flat part."""
    return any(name.startswith(FLAT) or name in (*TABLE_NAMES, COLUMNS_NAME) for name in tensors)


def tail_state(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of the tail."""
    of_flat = (*TABLE_NAMES, COLUMNS_NAME)
    return {name: states for name, states in tensors.items() if not name.startswith(FLAT) and name not in of_flat}


def _flat_state(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(FLAT): states for name, states in tensors.items() if name.startswith(FLAT)}


def check_ragged_state(tensors: dict[str, Tensor], tail: TokenStore, tail_tokens: int) -> int:
    """Tokens in a state that has a flat part.

    Args:
        tensors: the state.
        tail: a tail of the kind whose state it is.
        tail_tokens: tokens of the tail, whose state has been checked.

    Raises:
        StateMismatchError: it is not the state of a ragged store with such a tail.
    """
    flat = _flat_state(tensors)
    packed = isinstance(tail, QuantizedStore)
    names = {name for name in PACKED_NAMES if name != "block_ends"} if packed else {"keys", "values"}
    missing = {"keys", "values", *TABLE_NAMES, COLUMNS_NAME} - set(tensors)
    if set(flat) != names or missing:
        raise StateMismatchError(
            f"The tensors {sorted(tensors)} are not the state of a RaggedStore with a {type(tail).__name__} as its "
            "tail: take the state again."
        )
    numbers = tensors[COLUMNS_NAME]
    if numbers.dtype != COUNT_DTYPE or numbers.shape != (len(RaggedColumns()),):
        raise StateMismatchError(
            f"`{COLUMNS_NAME}` of a state must be three numbers of {COUNT_DTYPE}, got {list(numbers.shape)} of "
            f"{numbers.dtype}: take the state again."
        )
    columns = RaggedColumns.of_state(tensors)
    if not 0 <= columns.sinks <= columns.own <= tail_tokens:
        raise StateMismatchError(
            f"The {tail_tokens} tokens of a tail must include its sinks and its own tokens, got {columns}: take the "
            "state again."
        )
    forms = form_of(tensors["keys"]), form_of(tensors["values"])
    if forms[0].kv_heads != forms[1].kv_heads:
        raise StateMismatchError(
            f"Keys and values of a ragged state must have the same kv_heads, got {forms}: take the state again."
        )
    flat_forms = flat_form(forms[0]), flat_form(forms[1])
    if isinstance(tail, QuantizedStore):
        quantizers = checked_quantizers(tail.quantization, *forms)
        most, room = block_tokens(quantizers), int(flat["keys_codes"].dim() == 4 and flat["keys_codes"].shape[2])
        ends = torch.tensor([0] + [most] * room)
        check_packed_state({**flat, "block_ends": ends}, quantizers, flat_forms, most)
    else:
        most, room = DENSE_PIECE_TOKENS, check_dense_state(flat)
        if (form_of(flat["keys"]), form_of(flat["values"])) != flat_forms:
            raise StateMismatchError("The flat part of a state must have the form of its other tokens: take it again.")
    check_tables(tensors, forms[0], columns.width, most, room, step=0 if packed else 1)
    return columns.width + tail_tokens


def flat_tokens_of(tensors: dict[str, Tensor], tail: TokenStore) -> FlatTokens:
    """The flat part of a state, which has been checked."""
    flat, forms = _flat_state(tensors), (form_of(tensors["keys"]), form_of(tensors["values"]))
    starts, counts = (tensors[name].clone() for name in TABLE_NAMES)
    tables = PieceTables.of_pieces(starts, counts, RaggedColumns.of_state(tensors).width)
    if not isinstance(tail, QuantizedStore):
        return DenseFlatTokens.of(flat["keys"], flat["values"], tables)
    quantizers = checked_quantizers(tail.quantization, *forms)
    size, room = block_tokens(quantizers), flat["keys_codes"].shape[2]
    blocks = PackedBlocks(quantizers, (flat_form(forms[0]), flat_form(forms[1])), size, room)
    blocks.load_state({**flat, "block_ends": torch.tensor([0] + [size] * room)})
    return PackedFlatTokens(blocks, tables)
