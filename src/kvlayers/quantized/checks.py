"""States that are to be quantized, and saved states of a quantized store: checks, and what a plan asks for."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvlayers.core.arguments import check_dense_state, check_one_batch
from kvlayers.core.buffer import StateForm, form_of
from kvlayers.errors import StateMismatchError
from kvlayers.kernels.codes.quantizer_contract import Quantizer, Side, fits_heads
from kvlayers.kernels.codes.smoothing import MOST_RUNS, STARTS_NAME, VECTOR_NAMES, KeySmoothing
from kvlayers.kernels.codes.smoothing import NAMES as SMOOTHING_NAMES
from kvlayers.quantized.packed_blocks import PACKED_NAMES, SIDES, block_nbytes, check_packed_state
from kvlayers.quantized.quantization import Quantization, block_tokens

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of states that can be quantized. The arithmetic is in float32."""


def in_one_dtype(key_form: StateForm, value_form: StateForm) -> tuple[StateForm, StateForm]:
    """The forms in which states are held: if autocast gave keys and values two dtypes, in the wider one."""
    if key_form.dtype == value_form.dtype:
        return key_form, value_form
    dtype = torch.promote_types(key_form.dtype, value_form.dtype)
    return key_form._replace(dtype=dtype), value_form._replace(dtype=dtype)


def checked_quantizers(quantization: Quantization, key_form: StateForm, value_form: StateForm) -> dict[Side, Quantizer]:
    """Quantizers for states of these forms.

    Raises:
        StateMismatchError: keys and values do not match each other, or the scales of the quantization.
    """
    check_one_batch(key_form, value_form)
    if (
        key_form.kv_heads != value_form.kv_heads
        or key_form[3:] != value_form[3:]
        or not (key_form.head_dim and value_form.head_dim)
    ):
        raise StateMismatchError(
            f"Keys and values must have the same kv_heads, dtype and device, and a head_dim of at least 1, got "
            f"{key_form} and {value_form}: pass the states of one forward pass together."
        )
    if key_form.dtype not in DTYPES:
        raise StateMismatchError(
            f"The dtype of states must be one of {', '.join(map(str, DTYPES))}, got {key_form.dtype}: convert the "
            "states first, or use a DynamicCache."
        )
    for side in (quantization.keys, quantization.values):
        if side.scales and not fits_heads(len(side.scales), key_form.kv_heads):
            raise StateMismatchError(
                f"The scales of the {side.side} must be one number, or one for each of {key_form.kv_heads} KV heads, "
                f"got {len(side.scales)}: pass those of the model's checkpoint."
            )
    return quantization.quantizers(key_form.head_dim, value_form.head_dim)


def check_quantized_state(tensors: dict[str, Tensor], quantization: Quantization) -> int:
    """Tokens in the state of a quantized store.

    Raises:
        StateMismatchError: it is not the state of a store with this quantization.
    """
    packed = [name for name in PACKED_NAMES if name in tensors]
    unknown = set(tensors) - {"keys", "values", "sink_keys", "sink_values", *PACKED_NAMES, *SMOOTHING_NAMES}
    if unknown or (tensors and "keys" not in tensors) or len(packed) not in (0, len(PACKED_NAMES)):
        raise StateMismatchError(
            f"A state must have the tensors of a quantized store, got {sorted(tensors)}: take the state again."
        )
    tokens = check_dense_state({name: tensors[name] for name in ("keys", "values") if name in tensors})
    if not tensors:
        return 0
    forms = form_of(tensors["keys"]), form_of(tensors["values"])
    quantizers = checked_quantizers(quantization, *forms)
    sinks = {name: tensors[f"sink_{name}"] for name in ("keys", "values") if f"sink_{name}" in tensors}
    sink_tokens, of_sinks = check_dense_state(sinks), tuple(map(form_of, sinks.values()))
    if sink_tokens > quantization.sink_tokens or (sinks and of_sinks != forms):
        raise StateMismatchError(
            f"A state must have at most {quantization.sink_tokens} sinks, of the form {forms} of its other tokens, got "
            f"{sink_tokens} of the form {of_sinks}: take the state again."
        )
    check_smoothing(tensors, forms[0])
    in_blocks = check_packed_state(tensors, quantizers, forms, block_tokens(quantizers)) if packed else 0
    return tokens + sink_tokens + in_blocks


def check_smoothing(tensors: dict[str, Tensor], form: StateForm) -> None:
    """Raise `StateMismatchError` if the vectors of a state cannot be those of keys of this form."""
    held = tensors.get(STARTS_NAME, torch.zeros(1, dtype=torch.int64))
    # A forged file may have any number of them.
    starts: list[Any] = held.flatten()[: MOST_RUNS + 1].tolist()
    if (
        held.dtype != torch.int64
        or held.dim() != 1
        or starts[:1] != [0]
        or len(starts) > MOST_RUNS
        or any(start > later for start, later in pairwise(starts))
    ):
        raise StateMismatchError(
            f"`{STARTS_NAME}` of a state must be the first blocks of 1 to {MOST_RUNS} runs, from 0 on, got {starts}: "
            "take the state again."
        )
    shape = (form.batch_size, form.kv_heads, len(starts), form.head_dim)
    for name, vectors in KeySmoothing.of_state(tensors).state().items():
        if vectors.shape != shape or vectors.dtype != form.dtype:
            raise StateMismatchError(
                f"`{name}` of a state must be {list(shape)} of {form.dtype}, got {list(vectors.shape)} of "
                f"{vectors.dtype}: take the state again."
            )
        if not bool(vectors.isfinite().all()) or (name == VECTOR_NAMES[0] and not bool((vectors >= 1).all())):
            raise StateMismatchError(
                f"`{name}` of a state must be finite numbers, and factors at least 1, got some that are not: take the "
                "state again."
            )


def block_of(quantization: Quantization, key_form: StateForm, value_form: StateForm) -> tuple[int, int]:
    """Tokens of a block of keys and values, and bytes of it.

    Nothing is kept: a backend may be registered again under its name, with other blocks.

    Raises:
        StateMismatchError: as `checked_quantizers`.
    """
    quantizers = checked_quantizers(quantization, key_form, value_form)
    size = block_tokens(quantizers)
    of_sides = zip(SIDES, (key_form, value_form), strict=True)
    return size, sum(block_nbytes(quantizers[side].format, side, form, size) for side, form in of_sides)
