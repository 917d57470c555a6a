"""Hardware, versions and date of a measurement."""

import contextlib
import datetime
import importlib.metadata
import os
import pathlib
import platform
from typing import Any

import torch
import transformers

from kvlayers import __version__

QUANTIZATION_PACKAGES = ("optimum-quanto", "hqq")
"""Packages that transformers' quantized caches, and backends of kvlayers, need."""


def environment() -> dict[str, Any]:
    """Hardware, versions and date."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hardware": {
            "cpu": _cpu_name(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
            "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
            "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {
            "python": platform.python_version(),
            **package_versions(),
            "platform": platform.platform(),
        },
    }


def package_versions() -> dict[str, str]:
    """Versions of kvlayers and of the packages that results depend on; of quantization packages if installed."""
    versions = {"kvlayers": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    for package in QUANTIZATION_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _cpu_name() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
