"""The device and the packages that a run on a GPU measures, and the device's ceilings."""

import importlib.util
import platform
import subprocess
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import transformers

import kvlayers
from lib.gpu_stage import Findings, Setup
from lib.internals import triton_support

OPTIONAL = ("numpy", "psutil", "accelerate", "rich", "hqq", "optimum", "pytest", "pytest_timeout", "hypothesis")
DRIVER = ("nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader")
PREDICTED = {"copy": "4,300 (H200)", "matmul": "770 to 800 (H200)"}
"""What was read on such a device before."""


def facts(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": str(triton_support.triton_version()),
            "transformers": transformers.__version__,
            "kvlayers": kvlayers.__version__,
        },
        "installed": [name for name in OPTIONAL if importlib.util.find_spec(name) is not None],
        "triton_obstacle": triton_support.device_facts(device).obstacle,
        "interpreted": triton_support.is_interpreted(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }
    if device.type == "cuda":
        found |= {"cuda": torch.version.cuda, **_properties(device), "driver, clocks, power": _driver()}
    return found


def _properties(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    names = (
        "total_memory",
        "multi_processor_count",
        "L2_cache_size",
        "shared_memory_per_block_optin",
        "major",
        "minor",
    )
    return {name: getattr(properties, name, None) for name in names}


def _driver() -> str:
    try:
        return subprocess.run(DRIVER, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"


def ceilings(setup: Setup) -> Findings:
    """Bandwidths of the device and of its bus, and the rate of a product in bfloat16."""
    found = Findings()
    nbytes, side = setup.choose(4 << 30, 1 << 20), setup.choose(8192, 128)
    # Numbers that are not zero: a device may be faster on zeros.
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    seconds = seconds_of(setup, lambda: target.copy_(source))
    found.add("copy on the device, bytes read and written", 2 * nbytes / seconds / 1e9, "GB/s", PREDICTED["copy"])
    host = torch.empty(nbytes // 4, dtype=torch.uint8, pin_memory=setup.on_cuda)
    part = source[: len(host)]
    for what, into, out_of in (("to the device", part, host), ("to the host", host, part)):
        seconds = seconds_of(setup, lambda into=into, out_of=out_of: into.copy_(out_of, non_blocking=True))
        found.add(f"pinned memory {what}", len(host) / seconds / 1e9, "GB/s")
    left, right = (torch.randn(side, side, device=setup.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = seconds_of(setup, lambda: left @ right)
    found.add("product of bfloat16 matrices", 2 * side**3 / seconds / 1e12, "TFLOP/s", PREDICTED["matmul"])
    return found


def seconds_of(setup: Setup, call: Callable[[], Any], repeats: int = 5, trials: int = 5) -> float:
    """Seconds of a call, the median over the trials, each of several calls in a row."""
    call()
    times = []
    for _ in range(trials):
        setup.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        setup.synchronize()
        times.append((time.perf_counter() - begin) / repeats)
    return median(times)
