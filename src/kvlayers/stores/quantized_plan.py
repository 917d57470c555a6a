"""How many blocks and bytes a quantized store takes for a number of tokens."""

from kvlayers.stores.buffer import StateForm, nbytes_of
from kvlayers.stores.packed_blocks import SIDES, block_nbytes
from kvlayers.stores.quantization import Quantization, block_tokens, blocks_beyond
from kvlayers.stores.quantized_checks import checked_quantizers


def most_blocks(quantization: Quantization, size: int, length_hint: int | None) -> int | None:
    """The most blocks of `size` tokens that are expected, if known."""
    return None if length_hint is None else blocks_beyond(length_hint, _unpacked_room(quantization, size), size)


def _unpacked_room(quantization: Quantization, size: int) -> int:
    """The most tokens that stay in full precision, beside blocks of `size` tokens."""
    return quantization.sink_tokens + quantization.residual_length + size


def planned_bits(quantization: Quantization, forms: tuple[StateForm, StateForm]) -> float:
    """See `TokenStore.planned_bits`."""
    quantizers = checked_quantizers(quantization, *forms)
    size = block_tokens(quantizers)
    packed = sum(
        block_nbytes(quantizers[side].format, side, form, size) for side, form in zip(SIDES, forms, strict=True)
    )
    return 8 * packed * forms[0].dtype.itemsize / sum(nbytes_of(form, size) for form in forms)
