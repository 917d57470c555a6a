"""The step that runs the tests for CUDA."""

import functools
import os
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lib.gpu_stage import PROCESSES, STOPPED, Ended, Findings, Setup, Step, run_process

REPOSITORY = Path(__file__).parents[3]


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


TESTS = Step("tests for CUDA", 150, tests, least=60)
