"""Runs the test suite on several versions of transformers: `nox -s matrix`. See CONTRIBUTING.md."""

import hashlib
import os
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints-shared.txt"
MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"
SCRIPTS = ROOT / "scripts"
LAB = "./lab[demo,report]"
WHOLE, NARROWED = (ROOT / ".nox" / "results" / name for name in ("whole", "narrowed"))

VERSIONS = ("4.57.6", "5.0.0", "5.6.2", "5.12.1", "5.17.0", "5.23.0", "5.24.0")
"""The oldest and the newest supported version of transformers, and versions between them with large changes."""

CORE = (
    *("caches/test_bad_input", "caches/test_legacy", "caches/test_old_documents", "generation/test_families"),
    *("generation/test_generate", "generation/test_install", "generation/test_legacy_names"),
    *("generation/test_legacy_tuples", "generation/test_registry", "sinks/test_sink", "persistence/test_persistence"),
    *("rope/test_rotary", "upstream/test_cache_argument", "upstream/test_compat"),
)
"""Files with tests of what versions of transformers differ in, which `oldest` runs without the slow tests."""

LLAMA_CPP = "llama-cpp-python==0.3.36"
"""The Python binding of llama.cpp that `peers` compiles."""

ON_NEWEST_TORCH = ("tests/attention", "tests/quantizers", "tests/stores", "tests/caches")
"""Folders with tests of what versions of torch and triton differ in, which `newest_torch` runs beside the core."""

IMPORTING_EVAL = ("lab/src/kvlayers_lab/evaluation/harness.py", "lab/src/kvlayers_lab/tasks/harness")
"""Modules that cannot be searched for doctests without lm-eval."""

CLIENTS = {
    "5.24.0": (
        "accelerate==1.15.0",
        "dspy==3.4.1",
        "inspect_ai==0.3.285",
        "langchain-huggingface==1.2.3",
        "lm_eval==0.4.13",
        "llama-index-llms-huggingface==0.8.0",
        "outlines==1.3.3",
        "peft==0.21.2",
        "transformers-haystack==2.0.0",
        "trl==1.16.0",
        "txtai==9.14.0",
    ),
    "5.12.1": ("guidance==0.3.1", "mellea==0.8.0", "peft==0.21.2"),
    "5.2.0": ("kvpress==0.5.5",),
}
"""The clients of docs/ecosystem.md, by the newest version of transformers that they run on."""

nox.options.sessions = ["matrix"]
# pip, as in the Makefile, so that its settings (such as the index for torch) apply here too. uv does not read them.
nox.options.default_venv_backend = "venv"

versions_run: list[str] = []


@nox.session(reuse_venv=True)
@nox.parametrize("transformers", VERSIONS)
def matrix(session: nox.Session, transformers: str) -> None:
    """The whole suite on each version; `-- ARGUMENTS` goes to pytest."""
    versions_run.append(transformers)
    session.notify("matrix_table", posargs=session.posargs)
    session.log(f"transformers {transformers}: {VERSIONS.index(transformers) + 1} of {len(VERSIONS)}")
    result = results(session) / f"{transformers}.json"
    result.unlink(missing_ok=True)
    # Before the long installation. Only make exports the model, once for all versions.
    if "KVLAYERS_DEMO_MODEL" not in os.environ and not MODEL.exists():
        session.run("make", str(MODEL.relative_to(ROOT) / "config.json"), external=True)
    # The datasets of lm-eval need a newer huggingface_hub than transformers 4 takes.
    has_eval = not transformers.startswith("4.")
    install(session, transformers, extras="test,triton", lab="demo,eval,report" if has_eval else "demo,report")
    ignored = () if has_eval else tuple(f"--ignore={path}" for path in IMPORTING_EVAL)
    run_tests(session, "-p", "matrix_result", "--result", str(result), *ignored, *session.posargs)


@nox.session(reuse_venv=True)
def oldest(session: nox.Session) -> None:
    """The core of the suite on the oldest version, as CI runs it; `-- ARGUMENTS` goes to pytest."""
    # triton is a gigabyte, and what is tested of it is the same on every version.
    install(session, VERSIONS[0], extras="test", lab="demo,report")
    run_tests(session, "-m", "not slow", *(f"tests/{name}.py" for name in CORE), *session.posargs)


@nox.session(reuse_venv=True, default=False)
def main(session: nox.Session) -> None:
    """The core of the suite on transformers' main branch, as it is today; `-- ARGUMENTS` goes to pytest."""
    session.install("-c", str(CONSTRAINTS), "-e", ".[test]", "-e", LAB)
    session.install("--upgrade", "git+https://github.com/huggingface/transformers")
    run_tests(session, "-m", "not slow", *(f"tests/{name}.py" for name in CORE), *session.posargs)


@nox.session(reuse_venv=True, default=False)
def newest_torch(session: nox.Session) -> None:
    """The core of the suite on the newest torch and triton of PyPI, several GB, and a table in docs/matrix.md."""
    session.install("-e", ".[test,triton]", "-e", LAB, f"transformers=={VERSIONS[-1]}")
    session.install("--upgrade", "torch", "triton")
    result = ROOT / ".nox" / "results" / "torch" / f"{VERSIONS[-1]}.json"
    result.unlink(missing_ok=True)
    core = [f"tests/{name}.py" for name in CORE if f"tests/{Path(name).parent}" not in ON_NEWEST_TORCH]
    run_tests(session, "-p", "matrix_result", "--result", str(result), "-m", "not slow", *core, *ON_NEWEST_TORCH)
    make_table(session, result.parent, VERSIONS[-1], "--part", "torch", "--record", "docs/matrix.md")


@nox.session(reuse_venv=True, default=False)
@nox.parametrize("transformers", tuple(CLIENTS))
def clients(session: nox.Session, transformers: str) -> None:
    """The examples of docs/ecosystem.md with the clients themselves; `-- ARGUMENTS` goes to pytest."""
    if "KVLAYERS_DEMO_MODEL" not in os.environ and not MODEL.exists():
        session.run("make", str(MODEL.relative_to(ROOT) / "config.json"), external=True)
    # Of the constraints, torch alone: some clients want other builds of the rest.
    torch = [line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch==")]
    wanted = (f"transformers[serving]=={transformers}", *torch, *CLIENTS[transformers])
    session.install("-e", ".[test]", "-e", LAB, *wanted)
    session.env["KVLAYERS_NIGHTLY"] = "1"
    run_tests(session, "-rs", "tests/clients", *session.posargs)


@nox.session(reuse_venv=True, default=False)
def peers(session: nox.Session) -> None:
    """Prompts beside llama.cpp, which is compiled for it; `-- ARGUMENTS` goes to lab/benchmarks/peers.py."""
    # Its sources are compiled for this processor, some twenty minutes on two cores.
    session.install("--no-binary", LLAMA_CPP.partition("==")[0], LLAMA_CPP)
    python = Path(session.virtualenv.bin) / "python"
    environment = {"KVLAYERS_DEMO_MODEL": os.environ.get("KVLAYERS_DEMO_MODEL", str(MODEL))}
    script = str(ROOT / "lab" / "benchmarks" / "peers.py")
    # kvlayers is measured with the Python of nox, which has it.
    options = ("--peer-python", str(python), *session.posargs)
    session.run(sys.executable, script, *options, env=environment, external=True)


@nox.session(venv_backend="none", default=False)
def matrix_table(session: nox.Session) -> None:
    """A table of the results; `matrix` ends with it."""
    make_table(session, results(session), *(versions_run or VERSIONS))


@nox.session(venv_backend="none", default=False)
def matrix_record(session: nox.Session) -> None:
    """Write the last results of the whole suite to docs/matrix.md, or to `-- PAGE`."""
    make_table(session, WHOLE, *VERSIONS, "--record", *(session.posargs or ["docs/matrix.md"]))


def results(session: nox.Session) -> Path:
    """The directory of results. Runs of selected tests have their own, apart from runs of the whole suite."""
    return NARROWED if session.posargs else WHOLE


def make_table(session: nox.Session, *arguments: str | Path) -> None:
    """Run `scripts/matrix_table.py` with the Python of nox."""
    session.run(sys.executable, str(SCRIPTS / "matrix_table.py"), *map(str, arguments), external=True)


def install(session: nox.Session, transformers: str, extras: str, lab: str) -> None:
    """Install kvlayers and its lab, each with extras, with one version of transformers, unless that is done."""
    wanted = ("-e", f".[{extras}]", "-e", f"./lab[{lab}]", f"transformers=={transformers}")
    files = (ROOT / "pyproject.toml", ROOT / "lab" / "pyproject.toml", CONSTRAINTS)
    digest = hashlib.sha256(repr(wanted).encode() + b"".join(file.read_bytes() for file in files)).hexdigest()
    installed = Path(session.virtualenv.location) / "installed"
    if installed.exists() and installed.read_text() == digest:
        return
    session.log(f"installing {' '.join(wanted)}")
    # If Python writes no bytecode, each test process compiles torch again.
    options = ("--compile-bytecode",) if session.venv_backend == "uv" else ("--disable-pip-version-check",)
    session.install(*options, "-c", str(CONSTRAINTS), *wanted)
    installed.write_text(digest)


def run_tests(session: nox.Session, *arguments: str) -> None:
    """Run pytest as the Makefile does, with the plugins of `scripts/`."""
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SCRIPTS),
        "KVLAYERS_DEMO_MODEL": os.environ.get("KVLAYERS_DEMO_MODEL", str(MODEL)),
    }
    workers = os.environ.get("WORKERS", "2")
    session.run("pytest", "-n", workers, "--dist", "worksteal", *arguments, env=environment)
