"""Steps that check kvlayers on a device: caches and codes beside the CPU's, kernels beside float64, tests for CUDA."""

import functools
import itertools
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import cuda_device
import grouped_backend
from cuda_caches import KINDS, Kind, on_device
from lib.gpu_stage import PROCESSES, STOPPED, Ended, Findings, Setup, Step, run_process
from lib.internals import CUDA, Quantization, QuantizedStore, name_for, triton_support
from models import prompt
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


TELLING = [
    Case("bfloat16", 1, None, False),
    Case("bfloat16", 5, "bool", True),
    Case("bfloat16", 16, "added", False),
    Case("float32", 1, None, True),
]
"""The cases that are worth most."""

CASES = [
    *TELLING,
    *itertools.starmap(Case, itertools.product(["bfloat16"], (1, 5, 16), (None, "bool", "added"), (False, True))),
    Case("float16", 1, None, False),
    Case("float16", 16, "bool", True),
    Case("float32", 1, None, False),
    Case("float32", 5, "added", True),
]
QUICK_CASES = [Case("bfloat16", 1, None, False), Case("float32", 5, "bool", True)]
CACHES_AT_ONCE = 7
CACHES = {
    f"caches, {part + 1} of {CACHES_AT_ONCE}": list(KINDS)[part::CACHES_AT_ONCE] for part in range(CACHES_AT_ONCE)
}
"""Kinds of caches by the part of the step in which they decode."""


def rounding(dtype: torch.dtype) -> float:
    """Relative rounding of products in a dtype. Triton may multiply float32 in several parts."""
    return 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps


def quantization_of(setup: Setup) -> Quantization:
    return Quantization(**QUANTIZATIONS[setup.part], residual_length=32, sink_tokens=16)


def numerics(setup: Setup, cases: Sequence[Case] = CASES) -> Findings:
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
        for case in setup.in_time(found, setup.choose(dict.fromkeys(cases), QUICK_CASES)):
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
    store = QuantizedStore(quantization_of(setup))
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


def caches(setup: Setup) -> Findings:
    """Logits of a prompt, of steps behind it and of a second turn, with caches of each kind, beside the CPU's."""
    found = Findings()

    def check(name: str) -> None:
        kind = KINDS[name]
        begin = time.monotonic()
        error = _error_of_cache(setup, kind)
        found.add(name, error, "")
        found.details[name] = {"allowed": kind.tolerance, "seconds": time.monotonic() - begin}
        found.expect(error < kind.tolerance, f"{name}: logits differ from the CPU's by {error:.1e} of their norm")

    with cuda_device.exact_products():
        for name in setup.in_time(found, CACHES[setup.part][: setup.choose(None, 1)]):
            found.guarded(name, functools.partial(check, name))
    return found


def _error_of_cache(setup: Setup, kind: Kind) -> float:
    model = kind.model()
    models = model, on_device(model, setup.device)
    held = [kind.make(model.config) for _ in models]
    # The prompt fills a block of packed codes, and the turn another one.
    ids, (first, step, last) = prompt(2, 170, seed=3), (100, 106, 160)
    bounds = [0, *range(first, step + 1), *(range(step + 1, last) if kind.one_by_one else ()), last]
    worst = 0.0
    for start, end in itertools.pairwise(bounds):
        expected, seen = (
            model(input_ids=ids[:, start:end].to(model.device), use_cache=True, **{name_for(model): cache}).logits
            for model, cache in zip(models, held, strict=True)
        )
        worst = max(worst, relative_error(seen.cpu(), expected))
    return worst


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


def results(setup: Setup) -> Findings:
    """The telling cases of attention in each format, and caches of each kind."""
    return caches(setup) if setup.part in CACHES else numerics(setup, TELLING)


RESULTS = Step("results", 40, results, isolated=True, parts=(*QUANTIZATIONS, *CACHES))
NUMERICS = Step("attention over packed states", 80, numerics, isolated=True, parts=tuple(QUANTIZATIONS), least=30)
CODES = Step("codes", 40, codes, isolated=True, parts=tuple(QUANTIZATIONS))
TESTS = Step("tests for CUDA", 150, tests, least=60)

STEPS = (NUMERICS, CODES, Step("caches", 40, caches, isolated=True, parts=tuple(CACHES)), TESTS)
