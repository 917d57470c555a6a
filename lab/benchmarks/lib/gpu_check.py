"""Steps that check kvlayers on a device: kernels beside float64 in many cases, and the tests for CUDA."""

import functools
import itertools
import os
import re
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import grouped_backend
from lib.gpu_stage import PROCESSES, STOPPED, Ended, Findings, Setup, Step, run_process
from lib.internals import CUDA, Quantization, QuantizedStore, triton_support
from packed_reference import (
    attention,
    dense_states,
    extended,
    on_cpu,
    random_pair,
    relative_error,
)

REPOSITORY = Path(__file__).parents[3]

QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "int4": {"nbits": 4},
    "int8": {"nbits": 8},
    "fp8": {"backend": "fp8"},
    "int2": {"nbits": 2},
    "int4, a scale for each token": {"backend": grouped_backend.NAME, "nbits": 4},
}
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
    # The most telling ones come first.
    Case("bfloat16", 1, None, False),
    Case("bfloat16", 5, "bool", True),
    Case("bfloat16", 16, "added", False),
    Case("float32", 1, None, True),
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


def numerics(setup: Setup) -> Findings:
    """Errors of attention to packed states, relative to the norm of what float64 gives."""
    found, worst, paths = Findings(), dict.fromkeys(DTYPES, 0.0), set()

    def check(case: Case) -> None:
        begin = time.monotonic()
        error, path = _error(setup, case)
        allowed = 4 * rounding(DTYPES[case.dtype])
        seconds = time.monotonic() - begin
        found.details[str(case)] = {"error": error, "allowed": allowed, "path": path, "seconds": seconds}
        found.expect(error < allowed, f"{case}: the error is {error:.1e}, and {allowed:.1e} is allowed")
        found.expect(
            path == CUDA or not triton_support.runs_triton(setup.device) or case.dtype == "float32",
            f"{case}: attention went another way: {path}",
        )
        worst[case.dtype] = max(worst[case.dtype], error)
        paths.add(path)

    with grouped_backend.registered():
        for case in setup.in_time(found, setup.choose(dict.fromkeys(CASES), QUICK_CASES)):
            found.guarded(str(case), functools.partial(check, case))
    for dtype, error in worst.items():
        if error:
            found.add(f"largest error, {dtype}", error, "")
    found.details["paths"] = sorted(paths)
    return found


def _error(setup: Setup, case: Case) -> tuple[float, str]:
    batch, heads, kv_heads, head_dim, blocks = setup.choose((2, 32, 8, 128, 67), (1, 4, 2, 32, 2))
    dtype = DTYPES[case.dtype]
    shape = {"batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype, "device": setup.device}
    store = QuantizedStore(Quantization(**QUANTIZATIONS[setup.part], residual_length=32, sink_tokens=16))
    extended(store, random_pair(**shape, tokens=48 + 64 * blocks))
    if case.is_cut:
        store.truncate(store.length - 64 - 25)
        extended(store, random_pair(**shape, tokens=90, seed=1))
        store.drop_oldest(16 + 64 + 17)
    # Plain torch dequantizes on the CPU, and no kernel of kvlayers takes float64.
    held = [states.to(setup.device) for states in dense_states(on_cpu(store))]
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
    expected = attention(query, *(torch.cat(both, 2) for both in zip(held, new, strict=True)), mask)
    return relative_error(out, expected), path


def tests(setup: Setup) -> Findings:
    """The tests with the marker `cuda`, a process for each file, as compiling takes most of their time."""
    found, totals = Findings(), Counter[str]()
    files = sorted((REPOSITORY / "tests" / "cuda").glob("test_*.py"))
    with ThreadPoolExecutor(PROCESSES if setup.on_cuda else 1) as threads:
        outcomes = threads.map(functools.partial(_run_tests, setup), files[: setup.choose(None, 1)])
        for file, ended in zip(files, outcomes, strict=False):
            found.details[file.name] = {"exit code": ended.code, "output": ended.output[-8000:]}
            totals.update(word.lower() for word in re.findall(r"::.* (PASSED|FAILED|SKIPPED|ERROR)\b", ended.output))
            if setup.quick:
                totals["collected"] += len(re.findall(r"^\S+::\S", ended.output, re.MULTILINE))
            failures = re.findall(r"^\S+::.* (?:FAILED|ERROR)\b|^(?:FAILED|ERROR) .*", ended.output, re.MULTILINE)
            found.wrong += sorted({line.strip() for line in failures})
            if ended.code == STOPPED:
                found.cut.append(f"the rest of {file.name}")
            else:
                found.expect(ended.code == 0 or bool(failures), f"{file.name}: {ended.code}: {ended.output[-1000:]}")
            setup.save(found)
    for name, count in totals.items():
        found.add(name, count, "tests")
    return found


def _run_tests(setup: Setup, file: Path) -> Ended:
    """How pytest ended for a file. Where shapes are tiny, tests are only collected."""
    command = [sys.executable, "-m", "pytest", str(file), "-m", "cuda", "-rfE", "--durations=8", "--tb=short"]
    # What tests log is longer than all that is kept of the output.
    command += ["--show-capture=no"]
    # The options in pyproject.toml need plugins that may not be there.
    command += ["-o", "addopts=", "-p", "no:cacheprovider", *(["--collect-only", "-q"] if setup.quick else ["-v"])]
    path = os.pathsep.join([str(REPOSITORY / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return run_process(command, setup.seconds_left, {"PYTHONPATH": path}, REPOSITORY)


NUMERICS = Step("attention over packed states", 80, numerics, isolated=True, parts=tuple(QUANTIZATIONS), least=30)
TESTS = Step("tests for CUDA", 150, tests, least=60)
