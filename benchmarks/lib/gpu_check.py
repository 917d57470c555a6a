"""Steps that check kvlayers on a device: kernels against float64, codes against the CPU's, and the tests for CUDA."""

import functools
import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import grouped_backend
from kvlayers import Quantization, QuantizedStore
from kvlayers.attention.dispatch import CUDA
from kvlayers.utils.triton_support import runs_triton
from lib.gpu_environment import ceilings
from lib.gpu_stage import PROCESSES, Findings, Setup, Step
from packed_reference import (
    attention,
    counted_launches,
    dense_states,
    equal_codes,
    extended,
    on_cpu,
    random_pair,
    relative_error,
)

REPOSITORY = Path(__file__).parents[2]

QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "int4": {"nbits": 4},
    "int8": {"nbits": 8},
    "fp8": {"backend": "fp8"},
    "int2": {"nbits": 2},
    "int4, a scale for each token": {"backend": grouped_backend.NAME, "nbits": 4},
}
BITS = {"int4": 4, "int8": 8, "fp8": 8, "int2": 2, "int4, a scale for each token": 4}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One kind of attention to a packed store.

    Attributes:
        dtype: name of the dtype of the states.
        queries: query tokens.
        mask: kind of mask, `None` for none.
        is_cut: whether tokens were dropped in front, and tokens within a block rolled back.
    """

    dtype: str
    queries: int
    mask: str | None
    is_cut: bool

    def __str__(self) -> str:
        return f"{self.dtype}, {self.queries} queries, mask {self.mask}, {'cut' if self.is_cut else 'whole'}"


CASES = [
    *itertools.starmap(Case, itertools.product(["bfloat16"], (1, 5, 16), (None, "bool", "added"), (False, True))),
    Case("float16", 1, None, False),
    Case("float16", 16, "bool", True),
    Case("float32", 1, None, False),
    Case("float32", 5, "added", True),
]
QUICK_CASES = [Case("bfloat16", 1, None, False), Case("float32", 5, "bool", True)]


def rounding(dtype: torch.dtype) -> float:
    """Relative rounding of products in a dtype. Triton may multiply float32 in several parts."""
    return 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps


def quantization_of(setup: Setup) -> Quantization:
    """The quantization of the part of the step that runs."""
    return Quantization(**QUANTIZATIONS[setup.part], residual_length=32, sink_tokens=16)


def numerics(setup: Setup) -> Findings:
    """Errors of attention to packed states, relative to the norm of what float64 gives."""
    found, worst, paths = Findings(), dict.fromkeys(DTYPES, 0.0), set()
    with grouped_backend.registered():
        for case in setup.choose(CASES, QUICK_CASES):
            try:
                error, path = _error(setup, case)
            except Exception as raised:
                found.wrong.append(f"{case}: {type(raised).__name__}: {raised}")
                setup.synchronize()
                continue
            allowed = 4 * rounding(DTYPES[case.dtype])
            found.details[str(case)] = {"error": error, "allowed": allowed, "path": path}
            found.expect(error < allowed, f"{case}: the error is {error:.1e}, and {allowed:.1e} is allowed")
            found.expect(
                path == CUDA or not runs_triton(setup.device) or case.dtype == "float32",
                f"{case}: attention went another way: {path}",
            )
            worst[case.dtype] = max(worst[case.dtype], error)
            paths.add(path)
    for dtype, error in worst.items():
        if error:
            found.add(f"largest error, {dtype}", error, "")
    found.details["paths"] = sorted(paths)
    return found


def _error(setup: Setup, case: Case) -> tuple[float, str]:
    """The error of one case, and the path that attention took."""
    batch, heads, kv_heads, head_dim, blocks = setup.choose((2, 32, 8, 128, 67), (1, 4, 2, 32, 2))
    dtype = DTYPES[case.dtype]
    shape = {"batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype, "device": setup.device}
    store = QuantizedStore(quantization_of(setup))
    extended(store, random_pair(**shape, tokens=48 + 64 * blocks))
    if case.is_cut:
        store.truncate(store.length - 64 - 25)
        extended(store, random_pair(**shape, tokens=90, seed=1))
        store.drop_oldest(16 + 64 + 17)
    held = dense_states(on_cpu(store))
    new = random_pair(**shape, tokens=case.queries, seed=2)
    query = torch.randn(batch, case.queries, heads, head_dim, device=setup.device, dtype=dtype).transpose(1, 2)
    tokens = store.length + case.queries
    mask: Tensor | None = None
    if case.mask is not None:
        seen = torch.rand(batch, 1, case.queries, tokens, device=setup.device) > 0.3
        seen[..., -1] = True
        mask = seen if case.mask == "bool" else torch.where(seen, 0.0, -torch.inf).to(dtype)
    before = Counter(store.attention_paths)
    keys, values = extended(store, new)
    out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    path = ", ".join(Counter(store.attention_paths) - before) or "torch's attention"
    expected = attention(
        query.cpu(),
        *(torch.cat([before, after.cpu()], 2) for before, after in zip(held, new, strict=True)),
        None if mask is None else mask.cpu(),
    )
    return relative_error(out.cpu(), expected), path


def codes(setup: Setup) -> Findings:
    """Codes that the device computes beside those of the CPU, and what dequantizing gives on both."""
    found = Findings()
    batch, kv_heads, head_dim, tokens = setup.choose((1, 8, 128, 4096 + 48), (1, 2, 32, 128 + 48))
    with grouped_backend.registered():
        for name in setup.choose(("bfloat16", "float32"), ("bfloat16",)):
            dtype = DTYPES[name]
            states = random_pair(batch, kv_heads, tokens, head_dim, dtype, setup.device)
            on_device, reference = QuantizedStore(quantization_of(setup)), QuantizedStore(quantization_of(setup))
            with counted_launches() as launches:
                extended(on_device, states)
            extended(reference, (states[0].cpu(), states[1].cpu()))
            same = equal_codes(on_device.state(), reference.state(), BITS[setup.part])
            # Both are dequantized on the CPU, so that only the codes and scales differ.
            pairs = zip(dense_states(on_cpu(on_device)), dense_states(reference), states, strict=True)
            errors = [
                tuple(relative_error(states, exact.cpu()) for states in (device, cpu)) for device, cpu, exact in pairs
            ]
            found.add(f"equal codes, {name}", 100 * same, "%")
            for side, (device_error, cpu_error) in zip(("keys", "values"), errors, strict=True):
                ratio = (device_error / cpu_error) ** 2
                found.add(f"squared error of {side} relative to the CPU's, {name}", ratio, "")
                found.expect(
                    ratio < 1.01, f"{name}: the codes of {side} have {ratio:.3f} times the CPU's squared error"
                )
            here, there = dense_states(on_device), dense_states(on_cpu(on_device))
            apart = max(relative_error(one.cpu(), other) for one, other in zip(here, there, strict=True))
            found.add(f"dequantized states, difference from the CPU's, {name}", apart, "")
            found.expect(apart < rounding(dtype), f"{name}: dequantized states differ from the CPU's by {apart:.1e}")
            found.details[name] = {"launches": launches, "errors": errors}
    return found


def tests(setup: Setup) -> Findings:
    """The tests with the marker `cuda`, a process for each file, as compiling takes most of their time."""
    found = Findings()
    files = sorted((REPOSITORY / "tests" / "cuda").glob("test_*.py"))
    with ThreadPoolExecutor(PROCESSES if setup.on_cuda else 1) as threads:
        outcomes = list(threads.map(functools.partial(_run_tests, setup), files[: setup.choose(None, 1)]))
    totals = Counter[str]()
    for file, (code, output) in zip(files, outcomes, strict=False):
        found.details[file.name] = {"exit code": code, "output": output[-8000:]}
        for count, name in re.findall(r"(\d+) (passed|failed|skipped|error|tests? collected)", output):
            totals[name] += int(count)
        failed = re.findall(r"^(?:FAILED|ERROR) .*", output, re.MULTILINE)
        found.wrong += failed
        found.expect(code == 0 or bool(failed), f"{file.name}: pytest ended with {code}: {output[-1000:]}")
    for name, count in totals.items():
        found.add(name, count, "tests")
    return found


def _run_tests(setup: Setup, file: Path) -> tuple[int, str]:
    """Exit code and output of pytest for a file. Where shapes are tiny, tests are only collected."""
    command = [sys.executable, "-m", "pytest", str(file), "-m", "cuda", "-q", "-rfE", "--durations=8", "--tb=short"]
    # The options in pyproject.toml need plugins that may not be there.
    command += ["-o", "addopts=", "-p", "no:cacheprovider", *(["--collect-only"] if setup.quick else [])]
    path = os.pathsep.join([str(REPOSITORY / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        ran = subprocess.run(
            command,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(setup.seconds_left, 30),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return 124, f"it did not end in time: {error.stdout!r}"
    return ran.returncode, ran.stdout


STEPS = (
    Step("ceilings", 15, ceilings),
    Step("attention over packed states", 150, numerics, isolated=True, parts=tuple(QUANTIZATIONS)),
    Step("codes", 60, codes, isolated=True, parts=tuple(QUANTIZATIONS)),
    Step("tests for CUDA", 150, tests),
)
