"""How many bytes a store takes for tokens of which each head holds its own number: an estimate.

How many tokens each head holds depends on the states, so the bytes of tables, of blocks that are not full, and of the
tokens that every head holds can only be guessed. They are a few percent of all.
"""

from kvlayers.attention.segment_kinds import DENSE_PIECE_TOKENS
from kvlayers.stores.buffer import StateForm, nbytes_of
from kvlayers.stores.contract import TokenStore
from kvlayers.stores.dense import SMALL_STEP
from kvlayers.stores.flat_tokens import tables_nbytes
from kvlayers.stores.packed_blocks import SIDES, block_nbytes
from kvlayers.stores.quantization import block_tokens
from kvlayers.stores.quantized import QuantizedStore
from kvlayers.stores.quantized_checks import checked_quantizers

LONGEST_HEAD = 1.5
"""Tokens of the longest head, for which all tables have room, over those of an average head."""

SHORTEST_HEAD = 0.25
"""Tokens of the shortest head, over those of an average head. `AdaptiveHeads` leaves it a fifth at least, and some head
often has no more. If all heads are alike, the plan is a few percent too high."""

UNUSED_BLOCKS = 0.25
"""Parts of a block that are not used for each head but the first. The number of tokens in full precision is chosen so
that they are few."""


def planned_nbytes(tail: TokenStore, key_form: StateForm, value_form: StateForm, tokens: int) -> int:
    """The bytes for `tokens` tokens of an average head.

    Args:
        tail: an empty store of the kind that holds the tokens of every head.
        key_form: form of the keys.
        value_form: form of the values.
        tokens: tokens of an average head, at least 1.
    """
    longest = tables_nbytes(key_form, round(LONGEST_HEAD * tokens), DENSE_PIECE_TOKENS)
    if isinstance(tail, QuantizedStore):
        return longest + _packed_nbytes(tail, key_form, value_form, tokens)
    return longest + nbytes_of(key_form, tokens + SMALL_STEP) + nbytes_of(value_form, tokens + SMALL_STEP)


def _packed_nbytes(tail: QuantizedStore, key_form: StateForm, value_form: StateForm, tokens: int) -> int:
    forms, quantization = (key_form, value_form), tail.quantization
    quantizers = checked_quantizers(quantization, *forms)
    size = block_tokens(quantizers)
    # The tail holds up to a block more than the residual, whatever fills the blocks best.
    in_tail = quantization.sink_tokens + quantization.residual_length + size // 2
    in_tail = min(in_tail, round(SHORTEST_HEAD * tokens))
    heads = key_form.batch_size * key_form.kv_heads
    blocks = heads * (tokens - in_tail) / size + UNUSED_BLOCKS * (heads - 1)
    of_a_head = [form._replace(batch_size=1, kv_heads=1) for form in forms]
    block = sum(
        block_nbytes(quantizers[side].format, side, form, size) for side, form in zip(SIDES, of_a_head, strict=True)
    )
    return tail.planned_nbytes(*forms, in_tail, None) + round(blocks) * block
