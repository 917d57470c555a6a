"""What every test may count on: one thread, the same seeds, and transformers left as it was found."""

import gc
import math
import os
import sys
import types
from collections.abc import Iterator

# Before transformers is imported. No test needs the hub, and asking for what is not there takes many seconds.
os.environ["HF_HUB_OFFLINE"] = "1"
# Collecting garbage after each compilation takes a tenth of the compile time in a process with so many objects.
os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"
# What a test sees must not depend on when a compiler is done.
os.environ.setdefault("KVLAYERS_COMPILE", "wait")

import hypothesis
import pytest
import torch

# It executes transformers once more, as another module of that name: before any test, or kvlayers, has the first one.
import transformers.processing_utils  # noqa: F401

import kvlayers
import versions
from counted_graphs import counted as counted
from kvlayers.kernels.attention.cpu import kernel
from kvlayers.kernels.codes import smoothing
from rounds import NIGHTLY

# The gate looks at the same few examples in every run, so that it fails for what a change did; a night looks at others.
hypothesis.settings.register_profile(
    "gate", deadline=None, derandomize=True, print_blob=True, max_examples=25, stateful_step_count=25
)
hypothesis.settings.register_profile(
    "nightly", deadline=None, derandomize=False, print_blob=True, max_examples=250, stateful_step_count=50
)
hypothesis.settings.load_profile("nightly" if NIGHTLY else "gate")


# Tensors and caches go when the last name of them does: cycles are what compilers leave, and may wait for longer.
gc.set_threshold(20_000, 20, 50)

# They have no doctests, and as modules with doctests, the files of two folders would both be imported as `conftest`.
collect_ignore_glob = ["*/conftest.py"]

FIRST = (
    *("test_real_model.py", "test_tour.py", "test_distributed.py", "test_triton_decode.py"),
    *("test_benchmarks.py", "test_import.py", "test_static_compile.py"),
)
"""Files of long tests, or of tests that share what takes long, in the order in which they run."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for the night, and put long tests first.

    Of several processes, one that has nothing left takes over what is last with another: let that be short.
    """
    if not NIGHTLY:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("nightly")])
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    for item in items:
        if item.name == "kvlayers.interop.aliases.MambaCache":
            # A doctest, which has no place for a condition of its own.
            item.add_marker(versions.kvlayers_recurrent_layers)
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Said here as well, since pytest counts what is deselected only if it runs in one process."""
    if not NIGHTLY:
        terminalreporter.write_line("Without the tests that are marked nightly: `make nightly` runs them.")


def pytest_collection_finish() -> None:
    """What is there before the first test stays: collections, which many tests ask for, need not walk through it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def _let_go() -> Iterator[None]:
    """Exempt what earlier files left from garbage collection, as many tests and measurements collect."""
    gc.collect()
    gc.freeze()
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="session")
def _kernels_are_there() -> None:
    """Compile, or load, what the first cache would otherwise wait for, and say in the log of a test."""
    for library in kernel.LIBRARIES:
        library.get()


# Keys as even as those of tests have factors and means too, so that whatever reads packed keys is seen to use them.
THRESHOLDS = {name: getattr(smoothing, name) for name in ("LARGEST_ERROR", "LARGE_MEAN")}
smoothing.LARGEST_ERROR = math.inf
smoothing.LARGE_MEAN = 0.0


@pytest.fixture
def usual_smoothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let heads have factors and means as they have them in use: only if these are large."""
    for name, threshold in THRESHOLDS.items():
        monkeypatch.setattr(smoothing, name, threshold)


@pytest.fixture(autouse=True, scope="session")
def _quanto_in_python() -> None:
    """Let quanto unpack in Python, as it does where it has no C++, which it compiles for half a minute in each venv."""
    try:
        from optimum.quanto.library.extensions.cpp import ext
    except ImportError:
        return

    def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
        return torch.cat([packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)])

    ext._lib = types.SimpleNamespace(unpack=unpack)


@pytest.fixture(autouse=True)
def _reproducible() -> Iterator[None]:
    torch.set_num_threads(1)
    # torch.manual_seed formats a traceback for each kind of device that is not there: seconds, over all tests.
    torch.default_generator.manual_seed(0)
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    yield
    assert not kvlayers.is_installed(), "a test left kvlayers installed"


@pytest.fixture
def installed() -> Iterator[None]:
    """transformers' names resolve to kvlayers for the length of a test."""
    with kvlayers.installed():
        yield


@pytest.fixture(scope="module")
def quick_collections() -> Iterator[None]:
    """Everything that torch and transformers made is out of the way of the collections that follow a failure."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
