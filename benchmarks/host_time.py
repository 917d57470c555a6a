"""Times the host's part of attention to packed states on a GPU, on a machine without one.

    python benchmarks/host_time.py [--nbits 4] [--json]

While a GPU decodes one token, the host must queue the kernels of every layer in less time than they run, or the GPU
waits for it. triton's launcher runs here against a stub of the CUDA driver (`lib/stub_cuda.c`, compiled with `cc`),
which accepts every launch and computes nothing. Tensors are on the CPU. The shape is one layer of Llama 3.1 8B.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention

from lib.internals import (
    DenseSegment,
    KVSegments,
    PackedSegment,
    PackedStates,
    Quantization,
    QuantizedStore,
    Segment,
    cuda_kernel,
    dispatch,
)
from lib.offline_gpu import OfflineDriver, as_gpu

STUB = Path(__file__).parent / "lib" / "stub_cuda.c"
KV_HEADS, HEADS, HEAD_DIM, PROMPT = 8, 32, 128, 8192
CALLS, TRIALS = 20, 500


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nbits", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def stub_driver(directory: Path) -> ctypes.CDLL:
    """The stub in place of the driver that triton loads."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        sys.exit("host_time.py needs triton: pip install triton")
    headers = Path(found.origin).parent / "backends" / "nvidia" / "include"
    library = directory / "libcuda.so.1"
    options = ["-shared", "-fPIC", "-O2", "-w", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *options, f"-I{headers}", str(STUB), "-o", str(library)], check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(directory)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def use_stub() -> None:
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    stub: Any = OfflineDriver(90)
    stub.utils, stub.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher
    driver.set_active(stub)


def microseconds(call: Callable[[], Any]) -> float:
    """The least of several means: other work on the machine only ever adds to a time."""
    call()
    means = []
    for _ in range(TRIALS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        means.append((time.perf_counter() - begin) / CALLS * 1e6)
    return min(means)


def states(tokens: int) -> list[torch.Tensor]:
    return [torch.randn(1, KV_HEADS, tokens, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2)]


def behind_a_prefix(segments: KVSegments) -> KVSegments:
    """The segments of a fork, whose own tokens come behind those of the prompt: packed ones and a residual."""
    packed = next(segment for segment in segments.in_order if isinstance(segment, PackedSegment))
    return KVSegments(
        (*segments.in_order, next(packed.pieces(4 * packed.keys.block_tokens)), DenseSegment(*states(100)))
    )


def measure(nbits: int, launches: ctypes.c_long) -> list[dict[str, Any]]:
    """Microseconds of the host a call, and the launches of one, without and with a shared segment."""
    # Packed by the CPU: only attention is of interest here.
    store = QuantizedStore(Quantization(nbits=nbits))
    for tokens in (PROMPT, 1):
        new = states(tokens)
        store.validate(*new)
        keys, values = store.extend(*new)
    if not isinstance(keys, PackedStates):
        sys.exit("host_time.py needs a prompt that is longer than the residual")
    use_stub()
    query = torch.randn(1, HEADS, 1, HEAD_DIM, dtype=torch.bfloat16)
    snapshot = keys.snapshot

    def attention(*segments: Segment) -> torch.Tensor:
        # At each step, the last segment is another one.
        tail = DenseSegment(segments[-1].keys, segments[-1].values)
        return dispatch.attend(query, KVSegments((*segments[:-1], tail)), None, None, snapshot.paths)

    found = []
    # kvlayers compares a kernel's first result with torch's, and would leave a kernel that computes nothing.
    uncompared = mock.patch.object(cuda_kernel, "variants_to_compare", return_value=[])
    with as_gpu(device=query.device), uncompared:
        for name, segments in (
            ("contiguous", snapshot.segments),
            ("a shared segment and a tail", behind_a_prefix(snapshot.segments)),
        ):
            attention(*segments.in_order)
            before = launches.value
            attention(*segments.in_order)
            found.append(
                {
                    "states": name,
                    "launches": launches.value - before,
                    "path": list(snapshot.paths.counts)[-1],
                    "attention": microseconds(lambda segments=segments: attention(*segments.in_order)),
                }
            )
        found[0]["scaled_dot_product_attention"] = microseconds(
            lambda: scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        )
    return found


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    with tempfile.TemporaryDirectory() as directory:
        stub = stub_driver(Path(directory))
        import triton

        torch.set_num_threads(1)
        with torch.no_grad():
            found = measure(given.nbits, ctypes.c_long.in_dll(stub, "stub_launches"))
    if given.json:
        print(json.dumps({"measured": found, "torch": torch.__version__, "triton": triton.__version__}))
        return 0
    for row in found:
        print(f"{row['states']}: {row['launches']} launches, {row['path']}")
        print(f"  attention: {row['attention']:.0f} us of the host")
        if "scaled_dot_product_attention" in row:
            print(f"  scaled_dot_product_attention: {row['scaled_dot_product_attention']:.0f} us of the host")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
