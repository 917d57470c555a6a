"""Random packed states, what they stand for in float64, and how far from it sums in float32 may be."""

import torch
from torch import Tensor

from kvlayers.kernels.codes.groups import BlockLayout
from kvlayers.kernels.codes.packed_side import PackedSide, pack_side
from kvlayers.kernels.codes.quantizer_contract import CodeFormat, QuantizedGroups, Side

Rule = tuple[int, int]
"""Tokens and channels of a group."""

NOTHING = torch.tensor(False)


def hadamard(head_dim: int) -> Tensor:
    """Matrix that mixes runs of the largest power of two that divides head_dim; it undoes itself."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while head_dim % (2 * len(matrix)) == 0:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return torch.kron(torch.eye(head_dim // len(matrix), dtype=torch.float64), matrix / len(matrix) ** 0.5)


def code_format(width: int | str, group: Rule, rotated: bool) -> CodeFormat:
    """The format of a number of bits, of "fp8", of "heads" (fp8 with fixed scales of two heads), or of "codebook 4"."""
    if str(width).startswith("codebook"):
        bits = int(str(width).split()[1])
        # In no order, and none is the number of another code.
        levels = tuple(float((7 * code + 3) % (1 << bits)) + code / 64 for code in range(1 << bits))
        return CodeFormat(bits, *group, rotated=rotated, levels=levels)
    if width in ("fp8", "heads"):
        fixed = (0.75, 1.25) if width == "heads" else ()
        return CodeFormat(8, *group, floating=True, rotated=rotated, fixed_scales=fixed)
    return CodeFormat(int(width), *group, rotated=rotated)


def packed_states(
    form: CodeFormat,
    side: Side,
    shape: tuple[int, int, int, int],
    block_tokens: int,
    dtype: torch.dtype,
    forgotten: Tensor = NOTHING,
) -> tuple[PackedSide, Tensor]:
    """Random codes with random scales, whose states are about as large as 1, and those states in float64.

    Groups are nan where tokens are forgotten, bool `[groups of tokens, 1]`.
    """
    batch, kv_heads, tokens, head_dim = shape
    codes = torch.randint(0, 2**form.bits, shape, dtype=torch.uint8)
    if form.floating:
        # Numbers up to 8 of both signs, as larger ones would leave nothing of the others.
        codes = (codes & 0x80) | (codes & 0x7F).clamp(max=0x50)
    groups = (batch, kv_heads, tokens // form.group_tokens, head_dim // form.group_channels)
    scale = ((0.5 + torch.rand(groups)) * (0.25 if form.floating else 2 / 2**form.bits)).to(dtype)
    zero = None if form.floating or form.levels else (torch.randn(groups) * 0.3 - 1).to(dtype)
    scale, zero = (None if part is None else part.masked_fill(forgotten, torch.nan) for part in (scale, zero))
    layout = BlockLayout(form, side, head_dim, block_tokens)
    packed = PackedSide(*pack_side(QuantizedGroups(codes, scale, zero), layout), layout)
    exact = codes.view(torch.float8_e4m3fn).double() if form.floating else codes.double()
    if form.levels:
        exact = torch.tensor(form.levels, dtype=torch.float64)[codes.long()]
    if form.fixed_scales:
        exact = exact * torch.tensor(form.fixed_scales, dtype=torch.float64)[:, None, None]
    exact = exact * of_each_state(scale, form)
    exact = exact if zero is None else exact + of_each_state(zero, form)
    return packed, exact @ hadamard(head_dim) if form.rotated else exact


def of_each_state(parameters: Tensor, form: CodeFormat) -> Tensor:
    return parameters.double().repeat_interleave(form.group_tokens, 2).repeat_interleave(form.group_channels, 3)


SUMS = 2e-6
"""Error of sums in float32, as a part of the sum of magnitudes: some 16 roundings, that of a score included, which goes
into its exponential. The largest that was seen in any case of these is 0.5e-6."""

HALF_PRECISION_SUMS = 4e-5
"""As `SUMS`, for states in half precision: CPUs with AVX512-VNNI multiply packed codes by weights of 15 bits, each with
an error of up to 2^-16 of the largest, and codes are all positive. The largest that was seen is 2.5e-5. One rounding
of a result to float16 is 50e-5."""


def check(seen: Tensor, exact: Tensor, magnitude: Tensor, sums: float | None = None) -> None:
    """No state is further off than `sums`, those of its dtype by default, and the one rounding to that dtype."""
    assert seen.shape == exact.shape
    rounding = 0 if seen.dtype == torch.float32 else torch.finfo(seen.dtype).eps / 2
    if sums is None:
        sums = SUMS if seen.dtype == torch.float32 else HALF_PRECISION_SUMS
    # The rounding is that of the number with its error, hence a little more.
    excess = (seen.double() - exact).abs() - rounding * 1.01 * exact.abs() - sums * magnitude
    assert excess.max() <= 0, f"{(seen.double() - exact).abs().max()} off, of {magnitude.max()}"
