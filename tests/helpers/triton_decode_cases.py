"""Cases of the packed decode kernel, run by `test_triton_decode` in a process of its own.

Triton decides when a kernel is defined whether it is compiled or interpreted, so `TRITON_INTERPRET` is to be set
before anything imports triton: not in the process of other tests.
"""

import json
import sys
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kvlayers.attention.cuda import launch
from kvlayers.attention.cuda.launch import Launch, attend_packed
from kvlayers.attention.cuda.support import supports
from kvlayers.attention.reference import merge
from kvlayers.errors import KVLayersError
from kvlayers.quantizers.contract import CodeFormat, QuantizedGroups, Side
from kvlayers.quantizers.packed_side import PackedSide, pack_side
from kvlayers.utils import triton_support


@dataclass
class Case:
    """States and queries of a case."""

    keys: CodeFormat
    values: CodeFormat
    key_dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.float32
    batch: int = 1
    kv_heads: int = 1
    blocks: int = 2
    block_tokens: int = 64
    groups: int = 2
    q_tokens: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    mask_shape: tuple[int, int, int] | None = None
    mask_dtype: torch.dtype = torch.bool


def native(bits: int) -> dict[str, CodeFormat]:
    return {"keys": CodeFormat(bits, 64, 1), "values": CodeFormat(bits, 1, 64)}


def per_token(bits: int, group: int = 64) -> dict[str, CodeFormat]:
    return {"keys": CodeFormat(bits, 1, group), "values": CodeFormat(bits, 1, group)}


FLOAT8 = CodeFormat(8, 64, 1, floating=True), CodeFormat(8, 1, 64, floating=True)
ENDS = torch.tensor([64, 0, 41], dtype=torch.int32)
CUT = {"ends": torch.tensor([64, 0, 23], dtype=torch.int32), "first": 35}
"""Blocks of which whole groups of 16 and 32 tokens are not part of the history, at both ends."""

CASES: dict[str, Case] = {
    "2 bits": Case(**native(2), batch=2, kv_heads=2),
    "4 bits": Case(**native(4), key_dim=128, value_dim=128, kv_heads=2),
    "8 bits": Case(**native(8), value_dim=128, kv_heads=2),
    "float8": Case(*FLOAT8, value_dim=128, kv_heads=2),
    "other widths of keys and values": Case(native(4)["keys"], native(2)["values"]),
    "bfloat16": Case(**native(4), dtype=torch.bfloat16),
    "float16": Case(**native(8), dtype=torch.float16),
    "float8 in bfloat16": Case(*FLOAT8, dtype=torch.bfloat16),
    "other head_dims of keys and values": Case(**native(4), key_dim=128, value_dim=64),
    "head_dim 256": Case(**native(8), key_dim=256, value_dim=256, blocks=1),
    "head_dim 80": Case(CodeFormat(4, 64, 1), CodeFormat(4, 1, 40), key_dim=80, value_dim=80),
    "head_dim 80 by chunks": Case(CodeFormat(2, 64, 1), CodeFormat(8, 1, 40), key_dim=80, value_dim=80),
    "head_dim 96": Case(CodeFormat(8, 64, 1), CodeFormat(4, 1, 48), key_dim=96, value_dim=96),
    "head_dim that is padded": Case(CodeFormat(2, 64, 1), CodeFormat(2, 1, 25), key_dim=100, value_dim=100),
    "scales of each token": Case(**per_token(4), kv_heads=2),
    "scales of each token, 2 bits": Case(**per_token(2, 32)),
    "scales of each token, float8": Case(FLOAT8[1], replace(FLOAT8[1], group_channels=16)),
    "scales of each channel": Case(CodeFormat(4, 64, 1), CodeFormat(4, 64, 1), kv_heads=2),
    "scales of half blocks": Case(CodeFormat(4, 32, 1), CodeFormat(4, 32, 1)),
    "longer blocks": Case(**native(4), block_tokens=128),
    "shorter blocks": Case(CodeFormat(4, 32, 1), CodeFormat(4, 1, 64), block_tokens=32),
    # Rows of few channels are padded, and slots of a byte that no channel has are beyond the last scale.
    "head_dim 4": Case(CodeFormat(4, 64, 1), CodeFormat(4, 1, 4), key_dim=4, value_dim=4),
    "head_dim 4, 2 bits": Case(CodeFormat(2, 64, 1), CodeFormat(2, 1, 4), key_dim=4, value_dim=4),
    "head_dim 12": Case(CodeFormat(4, 64, 1), CodeFormat(4, 1, 4), key_dim=12, value_dim=12),
    "head_dim 12, 2 bits": Case(CodeFormat(2, 64, 1), CodeFormat(2, 1, 12), key_dim=12, value_dim=12),
    "one query head a kv head": Case(**native(4), groups=1, kv_heads=2),
    "rows that do not fill a tile": Case(**native(4), groups=7, q_tokens=3, kv_heads=2),
    "rows of several programs": Case(**native(4), groups=5, q_tokens=16, blocks=1),
    "one block": Case(**native(4), blocks=1),
    "no block": Case(**native(4), blocks=0),
    "tokens dropped in front": Case(**native(4), options={"first": 17}),
    "blocks that are not full": Case(**native(4), blocks=3, options={"ends": ENDS}),
    "both": Case(**native(2), blocks=3, options={"ends": ENDS, "first": 63}),
    "both, 8 bits in float16": Case(**native(8), blocks=3, options=CUT, dtype=torch.float16),
    "both, float8": Case(*FLOAT8, blocks=3, options=CUT),
    "both, shorter blocks": Case(
        CodeFormat(4, 32, 1),
        CodeFormat(4, 1, 64),
        block_tokens=32,
        blocks=3,
        options={"ends": torch.tensor([32, 32, 3], dtype=torch.int32), "first": 30},
    ),
    "both, scales of each token": Case(
        CodeFormat(4, 1, 32), CodeFormat(4, 1, 8), blocks=3, options=CUT, dtype=torch.bfloat16
    ),
    "both, scales of each channel": Case(CodeFormat(4, 32, 1), CodeFormat(4, 32, 1), blocks=3, options=CUT),
    "both, scales of each channel, float8": Case(FLOAT8[0], CodeFormat(8, 16, 1, floating=True), blocks=3, options=CUT),
    "scale": Case(**native(4), options={"scale": 0.3}),
    "negative scale": Case(**native(4), options={"scale": -0.1}),
    "no scale": Case(**native(4), options={"scale": 0.0}),
    "mask": Case(**native(4), batch=2, mask_shape=(2, 4, 2), q_tokens=2, kv_heads=2),
    "mask of sequences": Case(**native(4), batch=2, mask_shape=(2, 1, 1), q_tokens=2, options={"first": 5}),
    "mask and ends": Case(**native(4), batch=2, mask_shape=(2, 1, 1), blocks=3, options={"ends": ENDS, "first": 5}),
    "added mask": Case(
        **native(2),
        mask_shape=(1, 4, 1),
        mask_dtype=torch.float32,
        options={"ends": ENDS, "first": 2},
        blocks=3,
        kv_heads=2,
    ),
    "added mask in bfloat16": Case(
        **native(4),
        batch=2,
        mask_shape=(2, 1, 2),
        q_tokens=2,
        mask_dtype=torch.bfloat16,
        dtype=torch.bfloat16,
    ),
}


def counted(blocks: int, block_tokens: int, options: dict[str, Any]) -> Tensor:
    """Which tokens of a run of blocks are part of the history."""
    tokens = torch.arange(blocks * block_tokens)
    held = tokens >= options.get("first", 0)
    if options.get("ends") is not None:
        held &= tokens % block_tokens < options["ends"][tokens // block_tokens]
    return held


def quantized(code_format: CodeFormat, side: Side, head_dim: int, case: Case) -> PackedSide:
    """A random side within larger buffers, whose other blocks hold nan, as do groups of tokens that were forgotten."""
    shape = (case.batch, case.kv_heads, case.blocks * case.block_tokens, head_dim)
    grid = (*shape[:2], shape[2] // code_format.group_tokens, head_dim // code_format.group_channels)
    if code_format.floating:
        codes = torch.randn(shape).to(torch.float8_e4m3fn).view(torch.uint8)
        numbers = torch.rand(grid).add(0.5), None
    else:
        codes = torch.randint(0, 2**code_format.bits, shape, dtype=torch.uint8)
        # States of about unit size around a mean that is not zero.
        scale = torch.rand(grid).add(0.5) * 4 / 2**code_format.bits
        numbers = scale, torch.randn(grid) - 1.5
    held = torch.unflatten(counted(case.blocks, case.block_tokens, case.options), 0, (-1, code_format.group_tokens))
    forgotten = ~held.any(1, keepdim=True)
    scale, zero = (None if part is None else part.to(case.dtype).masked_fill(forgotten, torch.nan) for part in numbers)
    packed, parameters = pack_side(QuantizedGroups(codes, scale, zero), code_format, side, case.block_tokens)
    spare_codes = torch.full((case.batch, case.kv_heads + 1, case.blocks + 3, packed.shape[3]), 0x7F, dtype=torch.uint8)
    spare_parameters = torch.full((case.batch, case.kv_heads + 1, case.blocks + 3, parameters.shape[3]), torch.nan).to(
        case.dtype
    )
    where = (slice(None), slice(1, None), slice(2, 2 + case.blocks))
    spare_codes[where], spare_parameters[where] = packed, parameters
    return PackedSide(spare_codes[where], spare_parameters[where], code_format, side, head_dim, case.block_tokens)


def reference(
    query: Tensor, keys: PackedSide, values: PackedSide, mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Attention by its definition, in float64."""
    held = counted(keys.blocks, keys.block_tokens, options)
    groups = query.shape[1] // keys.codes.shape[1]
    key_states, value_states = (
        side.dequantized()[:, :, held].double().repeat_interleave(groups, 1) for side in (keys, values)
    )
    scores = query.double() @ key_states.transpose(2, 3) * options.get("scale", query.shape[3] ** -0.5)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    # Where all are hidden, softmax gives nan.
    return torch.softmax(scores, -1).nan_to_num(0) @ value_states, torch.logsumexp(scores, -1)


def mask_of(case: Case) -> Tensor | None:
    """A random mask, that of one row hiding all."""
    if case.mask_shape is None:
        return None
    first, ends = case.options.get("first", 0), case.options.get("ends")
    tokens = (case.blocks * case.block_tokens if ends is None else int(ends.sum())) - first
    shown = torch.rand(*case.mask_shape, tokens) > 0.4
    shown[-1, -1, -1] = False
    if case.mask_dtype == torch.bool:
        return shown
    return torch.randn(shown.shape).masked_fill(~shown, -torch.inf).to(case.mask_dtype)


def errors(case: Case, launch: Launch) -> dict[str, float]:
    """Errors of a case against the reference, each as a share of what it may be."""
    torch.manual_seed(0)
    keys = quantized(case.keys, "keys", case.key_dim, case)
    values = quantized(case.values, "values", case.value_dim, case)
    # A view of what projections give: `[batch, q_tokens, heads, head_dim]`.
    query = (
        torch.randn(case.batch, case.q_tokens, case.kv_heads * case.groups, case.key_dim).transpose(1, 2).to(case.dtype)
    )
    mask = mask_of(case)
    out, lse = attend_packed(query, keys, values, mask=mask, **case.options, launch=launch)
    expected, expected_lse = reference(query, keys, values, mask, case.options)
    assert out.dtype == lse.dtype == torch.float32
    assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
    assert not out[lse == -torch.inf].any()
    # Operands of products are rounded to the dtype of the states: the queries after scaling, whose errors add up over
    # head_dim in a score, and the weights, of which each output is a mean. With float32 the sums round, and exp2.
    rounding = torch.finfo(case.dtype).eps if case.dtype != torch.float32 else 8 * torch.finfo(torch.float32).eps
    spread = query.double().norm(dim=-1).amax() * case.options.get("scale", case.key_dim**-0.5)
    score_limit = rounding * (1 + 2 * abs(float(spread)))
    size = values.dequantized().abs().nan_to_num(0).amax() if values.blocks else torch.tensor(1.0)
    seen = lse != -torch.inf
    return {
        "out": float((out - expected).abs().amax() / (size * (score_limit + rounding))) if out.numel() else 0.0,
        "lse": float((lse - expected_lse)[seen].abs().amax() / score_limit) if seen.any() else 0.0,
    }


def check_cases() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            # As many splits as blocks: merging is part of every case.
            found[name] = errors(case, Launch(programs=10**6, minimum_blocks=1))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    found["several blocks a split"] = errors(replace(CASES["both"], blocks=3), Launch(minimum_blocks=3))
    return found


def check_merge() -> dict[str, Any]:
    """Packed and dense tokens, merged, against attention to all of them."""
    case = Case(**native(4), groups=3, kv_heads=2)
    torch.manual_seed(0)
    keys, values = quantized(case.keys, "keys", 64, case), quantized(case.values, "values", 64, case)
    query, new_keys, new_values = torch.randn(1, 6, 1, 64), torch.randn(1, 2, 9, 64), torch.randn(1, 2, 9, 64)
    packed = attend_packed(query, keys, values)
    spread_keys, spread_values = (new.repeat_interleave(3, 1) for new in (new_keys, new_values))
    scores = query @ spread_keys.transpose(2, 3) * 64**-0.5
    dense = torch.softmax(scores, -1) @ spread_values, torch.logsumexp(scores, -1)
    out, lse = merge(*zip(packed, dense, strict=True))
    all_keys, all_values = (
        torch.cat([side.dequantized(), new], 2).double().repeat_interleave(3, 1)
        for side, new in ((keys, new_keys), (values, new_values))
    )
    scores = query.double() @ all_keys.transpose(2, 3) * 64**-0.5
    expected = torch.softmax(scores, -1) @ all_values
    return {
        "out": float((out - expected).abs().amax()),
        "lse": float((lse - torch.logsumexp(scores, -1)).abs().amax()),
    }


def check_nan() -> dict[str, Any]:
    """Whether queries get nan: of a token that is not finite, as long as it is part of the history."""
    case = Case(**native(4))
    keys, values = quantized(case.keys, "keys", 64, case), quantized(case.values, "values", 64, case)
    parameters = torch.unflatten(values.parameters, -1, (2, values.block_tokens, -1))
    parameters[:, :, 0, :, 9] = torch.nan
    parameters[:, :, 1, :, 40] = torch.nan
    query = torch.randn(1, 2, 1, 64)
    cuts: dict[str, tuple[int, int]] = {"neither": (10, 40), "first": (9, 40), "last": (10, 41), "both": (0, 64)}
    found = {}
    for name, (first, end) in cuts.items():
        ends = torch.tensor([64, end], dtype=torch.int32)
        out, lse = attend_packed(query, keys, values, first=first, ends=ends)
        found[name] = [bool(out.isnan().any()), bool(lse.isfinite().all())]
    return found


def check_device() -> dict[str, Any]:
    """Devices that are current as the kernels are launched, and those that are made current for a device."""
    case = CASES["4 bits"]
    keys, values = quantized(case.keys, "keys", 128, case), quantized(case.values, "values", 128, case)
    current: list[str] = []
    launched: list[list[str]] = []

    class Current:
        """Stands for the context of a device."""

        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            current.append(str(self.device))

        def __exit__(self, *error: object) -> None:
            current.pop()

    class Kernel:
        """Launches nothing."""

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: launched.append([*current])

    with (
        mock.patch.object(launch.ATTEND_SPLIT, "function", Kernel()),
        mock.patch.object(launch.MERGE_SPLITS, "function", Kernel()),
        mock.patch.object(triton_support, "launching_on", Current),
    ):
        attend_packed(torch.randn(1, 4, 1, 128), keys, values)
    with mock.patch.object(torch.cuda, "device", lambda device: f"current {device}"):
        contexts = [str(triton_support.launching_on(torch.device(name))) for name in ("cuda:1", "cpu")]
    return {"launched": launched, "contexts": contexts}


def check_refusals() -> dict[str, Any]:
    """What `attend_packed` raises for states that do not belong together or are not supported."""
    case = CASES["4 bits"]
    keys, values = quantized(case.keys, "keys", 128, case), quantized(case.values, "values", 128, case)
    query = torch.randn(1, 4, 1, 128)
    fewer = replace(values, codes=values.codes[:, :, 1:], parameters=values.parameters[:, :, 1:])
    calls: dict[str, Any] = {
        "head_dim": lambda: attend_packed(query[..., :64], keys, values),
        "heads": lambda: attend_packed(query[:, :3], keys, values),
        "blocks": lambda: attend_packed(query, keys, fewer),
        "dtype": lambda: attend_packed(query.bfloat16(), keys, values),
        "first": lambda: attend_packed(query, keys, values, first=64),
        "ends": lambda: attend_packed(query, keys, values, ends=ENDS),
        "mask": lambda: attend_packed(query, keys, values, mask=torch.ones(1, 1, 1, 500, dtype=torch.bool)),
        "3 bits": lambda: attend_packed(query, replace(keys, format=replace(keys.format, bits=3)), values),
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "nothing"
        except KVLayersError as error:
            found[name] = str(error)
    kind: dict[str, Any] = {
        "key_head_dim": 128,
        "value_head_dim": 128,
        "block_tokens": 64,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    supported = supports(keys.format, values.format, **kind)
    others = [
        supports(replace(keys.format, bits=1), values.format, **kind),
        supports(keys.format, values.format, **{**kind, "dtype": torch.float64}),
        supports(keys.format, values.format, **{**kind, "block_tokens": 48}),
        supports(keys.format, values.format, **{**kind, "value_head_dim": 512}),
    ]
    return {"raised": found, "supports": [supported, *others]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {
        "cases": check_cases(),
        "merge": check_merge(),
        "nan": check_nan(),
        "device": check_device(),
        "refusals": check_refusals(),
    }
    json.dump(found, sys.stdout)
