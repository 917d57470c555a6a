"""Checks decode attention over packed states on a CUDA device against its definition, and times it beside SDPA.

    python benchmarks/cuda_quantized.py --output results

One query token of a model with the heads of Llama 3.1 8B, with all earlier tokens packed. The time is for one layer, by
CUDA events, over enough layers to exceed the caches of the device; SDPA has the same tokens in bfloat16. It needs only
kvlayers, torch and triton.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvlayers.attention.cuda.launch import DEFAULT_LAUNCH, Launch, attend_packed
from kvlayers.attention.cuda.support import supports
from kvlayers.quantizers.contract import CodeFormat, Side
from kvlayers.quantizers.packed_side import PackedSide, side_bytes

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 32, 8, 128, 64
DTYPE = torch.bfloat16
FORMATS = {
    "2 bits": (CodeFormat(2, 64, 1), CodeFormat(2, 1, 64)),
    "4 bits": (CodeFormat(4, 64, 1), CodeFormat(4, 1, 64)),
    "8 bits": (CodeFormat(8, 64, 1), CodeFormat(8, 1, 64)),
    "float8": (CodeFormat(8, 64, 1, floating=True), CodeFormat(8, 1, 64, floating=True)),
}
PER_TOKEN = {
    "4 bits, scales of each token": (CodeFormat(4, 1, 64), CodeFormat(4, 1, 64)),
    "8 bits, scales of each token": (CodeFormat(8, 1, 64), CodeFormat(8, 1, 64)),
}
CACHES_BYTES = 256 * 2**20
"""Larger than a device's second-level cache: this many bytes are read before the same bytes are read again."""


def packed_side(code_format: CodeFormat, side: Side, batch: int, blocks: int, dtype: torch.dtype = DTYPE) -> PackedSide:
    """Random codes with scales that give states of about unit size."""
    code_bytes = side_bytes(code_format, side, HEAD_DIM, BLOCK_TOKENS, 0)
    numbers = (side_bytes(code_format, side, HEAD_DIM, BLOCK_TOKENS, 1) - code_bytes) // code_format.parameters
    codes = torch.randint(0, 256, (batch, KV_HEADS, blocks, code_bytes), dtype=torch.uint8, device="cuda")
    scale = torch.rand((batch, KV_HEADS, blocks, numbers), device="cuda") + 0.5
    if code_format.floating:
        # No code is nan, and the largest state is about one.
        codes = torch.where(codes & 0x7F == 0x7F, codes & 0xF0, codes)
        parameters = scale / 100
    else:
        scale = scale * 4 / 2**code_format.bits
        parameters = torch.cat([scale, torch.randn_like(scale) * 0.3 - 2], -1)
    return PackedSide(codes, parameters.to(dtype), code_format, side, HEAD_DIM, BLOCK_TOKENS)


def expected(query: Tensor, keys: PackedSide, values: PackedSide, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Attention by its definition, in float64; `hidden` tokens are masked for every query."""
    groups = HEADS // KV_HEADS
    states = [side.dequantized().double().repeat_interleave(groups, 1) for side in (keys, values)]
    scores = (query.double() @ states[0].transpose(2, 3) * HEAD_DIM**-0.5).masked_fill(hidden, -torch.inf)
    return torch.softmax(scores, -1) @ states[1], torch.logsumexp(scores, -1)


def check() -> list[dict[str, Any]]:
    """The kernel's largest error on each of its paths, on the device."""
    found = []
    blocks, first = 67, 17
    ends = torch.full((blocks,), BLOCK_TOKENS, dtype=torch.int32, device="cuda")
    ends[3], ends[-1] = 5, 33
    tokens = torch.arange(blocks * BLOCK_TOKENS, device="cuda")
    for name, (key_format, value_format) in {**FORMATS, **PER_TOKEN}.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for q_tokens in (1, 5, 16):
                for assembly in (True, False):
                    for masked in (False, True):
                        torch.manual_seed(0)
                        keys = packed_side(key_format, "keys", 2, blocks, dtype)
                        values = packed_side(value_format, "values", 2, blocks, dtype)
                        query = torch.randn(2, HEADS, q_tokens, HEAD_DIM, device="cuda", dtype=dtype)
                        hidden = torch.zeros(2, 1, 1, len(tokens), dtype=torch.bool, device="cuda")
                        options: dict[str, Any] = {}
                        if masked:
                            gone = (tokens < first) | (tokens % BLOCK_TOKENS >= ends[tokens // BLOCK_TOKENS])
                            hidden = (torch.rand(hidden.shape, device="cuda") > 0.7) | gone
                            options = {"first": first, "ends": ends, "mask": ~hidden[..., ~gone]}
                        launch = Launch(assembly=assembly)
                        out, lse = attend_packed(query, keys, values, **options, launch=launch)
                        right, right_lse = expected(query, keys, values, hidden)
                        # Relative to the norm: rounding of operands, averaged over tokens and channels.
                        error = float((out - right).norm() / right.norm())
                        lse_error = float((lse - right_lse).abs().amax())
                        eps = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
                        entry = {
                            "format": name,
                            "dtype": str(dtype).removeprefix("torch."),
                            "q_tokens": q_tokens,
                            "assembly": assembly,
                            "masked": masked,
                            "error": error,
                            "lse_error": lse_error,
                            "right": error < 4 * eps and lse_error < 8 * eps,
                        }
                        found.append(entry)
                        if not entry["right"]:
                            print("WRONG", entry, flush=True)
    return found


def microseconds(call: Callable[[int], Any], copies: int, repeats: int) -> dict[str, float]:
    """Time of a call on the device, by events around many calls, which use copies of the states in turns.

    The calls are a CUDA graph, so that the device is timed and not Python.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for copy in range(min(copies, 3)):
            call(copy)
    torch.cuda.current_stream().wait_stream(stream)
    calls = max(copies, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(calls):
            call(turn % copies)
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return {"median": statistics.median(times), "minimum": min(times), "maximum": max(times)}


def measure(batch: int, tokens: int, repeats: int, launches: list[Launch]) -> list[dict[str, Any]]:
    """Times of SDPA and of every format, for one number of earlier tokens."""
    blocks = tokens // BLOCK_TOKENS
    query = torch.randn(batch, HEADS, 1, HEAD_DIM, device="cuda", dtype=DTYPE)
    dense_bytes = 2 * batch * KV_HEADS * tokens * HEAD_DIM * 2
    copies = 1 + CACHES_BYTES // dense_bytes
    dense = [torch.randn(2, batch, KV_HEADS, tokens, HEAD_DIM, device="cuda", dtype=DTYPE) for _ in range(copies)]
    times = microseconds(
        lambda copy, dense=dense: scaled_dot_product_attention(query, *dense[copy], enable_gqa=True),
        copies,
        repeats,
    )
    del dense
    base = times["median"]
    where = {"batch": batch, "tokens": tokens}
    rows = [{**where, "states": "bfloat16, SDPA", "bytes": dense_bytes, **times, "speedup": 1.0}]
    for name, formats in {**FORMATS, **PER_TOKEN}.items():
        sizes = [
            side_bytes(code_format, side, HEAD_DIM, BLOCK_TOKENS, DTYPE.itemsize)
            for code_format, side in zip(formats, ("keys", "values"), strict=True)
        ]
        nbytes = batch * KV_HEADS * blocks * sum(sizes)
        copies = 1 + CACHES_BYTES // nbytes
        held = [
            (packed_side(formats[0], "keys", batch, blocks), packed_side(formats[1], "values", batch, blocks))
            for _ in range(copies)
        ]
        for launch in launches:
            times = microseconds(
                lambda copy, launch=launch, held=held: attend_packed(query, *held[copy], launch=launch),
                copies,
                repeats,
            )
            row = {**where, "states": name, "bytes": nbytes, **times, "speedup": base / times["median"]}
            rows.append({**row, "launch": vars(launch)})
        del held
    for row in rows:
        row["gigabytes_per_second"] = row["bytes"] / row["median"] / 1000
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    columns = f"{'batch':>5} {'tokens':>7} {'states':30} {'µs':>9} {'GB/s':>6} {'times SDPA':>10}  launch"
    print(columns)
    for row in rows:
        launch = row.get("launch")
        how = "" if launch is None else " ".join(f"{name}={value}" for name, value in launch.items())
        print(
            f"{row['batch']:5} {row['tokens']:7} {row['states']:30} {row['median']:9.1f} "
            f"{row['gigabytes_per_second']:6.0f} {row['speedup']:10.2f}  {how}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for cuda_quantized.json")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-check", action="store_true", help="only time")
    parser.add_argument("--tune", action="store_true", help="time other launches than the default also")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    kind: dict[str, Any] = {
        "key_head_dim": HEAD_DIM,
        "value_head_dim": HEAD_DIM,
        "block_tokens": BLOCK_TOKENS,
        "dtype": DTYPE,
    }
    if not all(supports(*formats, **kind, device=device) for formats in FORMATS.values()):
        parser.error("the kernel does not support this device, or triton is not installed")
    import triton

    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "checks": [],
        "times": [],
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "cuda_quantized.json"
    launches = [DEFAULT_LAUNCH]
    if arguments.tune:
        launches += [
            Launch(programs=programs, stages=stages, warps=warps)
            for warps, programs in ((1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (4, 2), (4, 4))
            for stages in (2, 3, 4)
        ]
        launches.append(Launch(assembly=False))
    with torch.no_grad():
        if not arguments.no_check:
            result["checks"] = check()
            wrong = sum(not entry["right"] for entry in result["checks"])
            worst = max(entry["error"] for entry in result["checks"])
            print(f"{len(result['checks'])} checks, {wrong} wrong, largest error {worst:.1e}", flush=True)
        for batch in arguments.batch:
            for tokens in arguments.tokens:
                rows = measure(batch, tokens, arguments.repeats, launches)
                show(rows)
                result["times"] += rows
                # After each one, so that an interrupted run leaves its results.
                path.write_text(json.dumps(result, indent=1))
    path.write_text(json.dumps(result, indent=1))
    return int(any(not entry["right"] for entry in result["checks"]))


if __name__ == "__main__":
    raise SystemExit(main())
