"""Measures every claim in README.md and docs/choosing.md again, and says whether it holds.

    python benchmarks/claims.py                     # all of them, about ten minutes on two idle cores
    python benchmarks/claims.py --only step,update  # some of the measurements
    python benchmarks/claims.py --record            # record them in benchmarks/recorded/claims-<date>.json
    python benchmarks/claims.py --write             # write the record into the pages, and measure nothing
    python benchmarks/claims.py --quick             # a small random model, to see that it runs

The pages give bounds, which `claimed.py` lists. A claim holds if its measurement is within the bound. The bounds are
ratios, bytes and counts, set for an AMD EPYC with two cores; on other machines, ratios of time may be outside them.

The measurements are independent: if one raises, the others continue, and its claims count as not measured. `--record`
keeps the earlier record of measurements that did not run or that raised. The exit code is 1 if a claim does not hold or
was not measured.
"""

import contextlib
import datetime
import functools
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

import claimed
import fidelity
import offload
import ordinary
import plots
import prefix
import sinks
from claimed import GROUPS, Cells
from lib import report, static
from lib.compiling import INDUCTOR, nothing_in_memory
from lib.contenders import (
    CONTENDERS,
    FLOOR,
    KVLAYERS,
    KVLAYERS_4_BITS,
    KVLAYERS_STATIC,
    QUANTIZED,
    REFERENCE,
    TRANSFORMERS_4_BITS,
    TRANSFORMERS_STATIC,
    compiled,
    fill,
    transformers_packed,
)
from lib.generation import GENERATORS, Job, measure_generate
from lib.internals import CacheMaker, cache_nbytes, default_text
from lib.quantized import FULL, QUICK_SHAPE, RANDOM, Contender
from lib.quantized import REFERENCE as IN_FULL
from lib.timing import Disagreements, Trials, measure_decode, measure_update
from lib.workload import RandomModel, RealModel, Shape, Workload, default_model

FINE = 16
"""Numbers of a group with which quanto holds more bytes than kvlayers' native backend with its groups of 64. A longer
residual would take as many bytes, and leave quanto with more divergence."""


class OtherTokensError(Exception):
    """A cache that is exact gave other tokens than transformers' DynamicCache: its times mean nothing."""


class Run:
    """What measurements share.

    Attributes:
        quick: whether to take a small random model in the place of every model, and few tokens and trials.
    """

    def __init__(self, session: report.Session) -> None:
        self.session, self.model, self.quick = session, session.given.model, session.given.quick
        self.ticking = session.ticking

    @functools.cached_property
    def random(self) -> RandomModel:
        """The random llama, in bfloat16.

        Caches are filled at once: transformers' quantized ones would quantize all that they hold with every chunk.
        """
        return RandomModel(QUICK_SHAPE if self.quick else Shape(), chunk=1 << 16)

    def real(self, dtype: torch.dtype) -> Workload:
        if self.quick:
            return RandomModel(QUICK_SHAPE, dtype=dtype)
        if self.model is None:
            raise FileNotFoundError("there is no model: set KVLAYERS_DEMO_MODEL, run `make demo`, or pass --model")
        return RealModel(self.model, default_text(), dtype)


def check_tokens(disagreements: Disagreements, exact: Iterable[str]) -> None:
    """Raise if a cache that computes the reference's sums predicted other tokens."""
    failures = [entry for entry in disagreements.found if not entry["tie"] and entry["cache"] in exact]
    if failures:
        raise OtherTokensError(f"{len(failures)} other tokens, the first: {failures[0]}")


def without_shared(disagreements: Disagreements, cache: str) -> Disagreements:
    """The tokens in which another cache than `cache` differs, and `cache` does not.

    A random model in bfloat16 decides some tokens by how sums are rounded, which differs where a cache keeps its states
    elsewhere than transformers' does, whatever it is.
    """
    shared = {(entry["tokens"], entry["trial"]) for entry in disagreements.found if entry["cache"] == cache}
    left = Disagreements()
    left.found = [entry for entry in disagreements.found if (entry["tokens"], entry["trial"]) not in shared]
    return left


def measure_steps(run: Run) -> Mapping[str, Cells]:
    """Decode steps of caches in full precision and of quantized ones, all of them at the greatest length."""
    steps, trials = (4, 1) if run.quick else (16, 3)
    names = {
        claimed.DYNAMIC: KVLAYERS,
        claimed.INT4: KVLAYERS_4_BITS,
        claimed.INT8: "kvlayers 8 bits",
        claimed.FP8: "kvlayers fp8",
        claimed.INT2: "kvlayers 2 bits",
        claimed.QUANTO_4: TRANSFORMERS_4_BITS[0],
    }
    by_length = {claimed.TRANSFORMERS: REFERENCE, claimed.DYNAMIC: KVLAYERS, claimed.INT4: KVLAYERS_4_BITS}
    cells: dict[str, dict[str, float]] = {}
    for length in claimed.LENGTHS:
        held = length // 64 if run.quick else length
        makers = {REFERENCE: QUANTIZED[REFERENCE], FLOOR: CONTENDERS[FLOOR]}
        of_length = names if length == claimed.LENGTHS[-1] else by_length
        makers |= {name: QUANTIZED[name] for name in of_length.values()}
        asked = Trials(steps, trials, run.ticking)
        measured = measure_decode(run.random, makers, held, asked)
        check_tokens(without_shared(asked.disagreements, FLOOR), (KVLAYERS,))
        dense = measured[REFERENCE]["held"]
        report.summarise(measured)
        for row, name in by_length.items():
            cells[claimed.length_row(row, length)] = {
                claimed.MILLISECONDS: measured[name]["median"] * 1e3,
                claimed.MEGABYTES: measured[name]["held"] / 1e6,
                claimed.TIMES_AS_FAST: report.times_as_fast(measured, name, REFERENCE),
            }
    for row, name in names.items():
        cells[row] = {
            claimed.TIMES_AS_FAST: report.times_as_fast(measured, name, REFERENCE),
            claimed.OF_PREALLOCATED: report.times_as_fast(measured, name, FLOOR),
            claimed.OVER_DYNAMIC: report.times_as_fast(measured, name, KVLAYERS),
            claimed.OVER_QUANTO: report.times_as_fast(measured, name, TRANSFORMERS_4_BITS[0]),
            claimed.OF_DENSE: measured[name]["held"] / dense,
        }
    return {"step": cells}


def measure_batches(run: Run) -> Mapping[str, Cells]:
    workload = run.real(torch.bfloat16)
    cells = {}
    for batch, length in claimed.BATCHES:
        case = (2, 64) if run.quick else (batch, length)
        steps, trials = (3, 1) if run.quick else (16, 2 if batch * length < 8192 else 1)
        disagreements = Disagreements()
        turns = ordinary.measure_batch(workload, case, steps, trials, disagreements).turns
        check_tokens(disagreements, ordinary.IN_BATCHES)
        cells[claimed.batch_row(batch, length)] = {
            claimed.TIMES_AS_FAST: turns.ratio(REFERENCE, KVLAYERS),
            claimed.OVER_BETTER: min(turns.ratio(each, KVLAYERS) for each in (REFERENCE, TRANSFORMERS_STATIC)),
        }
    return {"batches": cells}


def measure_static(run: Run) -> Mapping[str, Cells]:
    length, most = (64, 512) if run.quick else (1024, 32768)
    trials = Trials(3 if run.quick else 12, 1 if run.quick else 2, run.ticking)
    plan = static.Plan([length], [1, most // length], most, trials, "eager" if run.quick else INDUCTOR)
    makers = {name: CONTENDERS[name] for name in (REFERENCE, KVLAYERS, KVLAYERS_STATIC, TRANSFORMERS_STATIC)}
    with nothing_in_memory(plan.backend):
        eager, in_graphs = static.measure_steps(run.random, makers, length, plan)
    check_tokens(trials.disagreements, (*eager, *in_graphs))
    small = static.with_reservation(KVLAYERS_STATIC, 1)
    large, baseline = (static.with_reservation(name, plan.times[1]) for name in (KVLAYERS_STATIC, TRANSFORMERS_STATIC))
    cells = {}
    for row, measured, named in (
        (claimed.EAGER_STATIC, eager, str),
        (claimed.COMPILED_STATIC, in_graphs, compiled),
    ):
        cells[row] = {
            claimed.TIMES_STATIC: report.times_as_fast(measured, named(large), named(baseline)),
            claimed.TIME_OF_SMALL: report.times_as_fast(measured, named(small), named(large)),
        }
    return {"static": cells}


def measure_graphs(run: Run) -> Mapping[str, Cells]:
    """Graphs that `generate()` compiles, counted with a backend that compiles no kernels."""
    prompt, new, reserve = (250, 16, 1024) if run.quick else (200, 512, 4096)
    workload = RandomModel(QUICK_SHAPE)
    job = Job(workload.name, workload.model, workload.prompt(prompt), new, reserve, "eager")
    arguments = {name: GENERATORS[name] for name in (REFERENCE, compiled(KVLAYERS_STATIC))}
    disagreements = Disagreements()
    tick = run.ticking(f"graphs of {new} tokens", len(arguments) + 1)
    with nothing_in_memory(job.backend):
        calls = measure_generate(job, arguments, 1, disagreements, tick)
    check_tokens(disagreements, arguments)
    entry = calls[compiled(KVLAYERS_STATIC)]
    return {"graphs": {claimed.STATIC: {claimed.FIRST_CALL: entry["graphs"], claimed.LATER_CALLS: entry["recompiles"]}}}


def measure_fidelity(run: Run) -> Mapping[str, Cells]:
    """What quantized caches change in predictions, and their bytes; quanto also with more than kvlayers."""
    rows = {
        claimed.INT8: Contender("kvlayers", "native", 8),
        claimed.FP8: Contender("kvlayers", "fp8", 8),
        claimed.INT4: Contender("kvlayers", "native", 4),
        claimed.INT2: Contender("kvlayers", "native", 2),
        claimed.QUANTO_4: Contender("transformers", "quanto", 4),
        claimed.QUANTO_2: Contender("transformers", "quanto", 2),
        claimed.FINE_4: Contender("transformers", f"quanto, groups of {FINE}", 4),
        claimed.FINE_2: Contender("transformers", f"quanto, groups of {FINE}", 2),
    }
    makers: dict[Contender, CacheMaker] = {IN_FULL: FULL[IN_FULL], **{each: each.make for each in rows.values()}}
    for row, nbits in ((claimed.FINE_4, 4), (claimed.FINE_2, 2)):
        make = transformers_packed("quanto", nbits, q_group_size=FINE)
        makers[rows[row]] = functools.partial(make, length=0)
    source = RANDOM if run.quick else str(run.model)
    sizes = ["--context", "640", "--scored", "64"] if run.quick else ["--context", "2048", "--scored", "1024"]
    given = fidelity.parse(["--model", source, *sizes, "--passages", "1", "--chunk", "64", "--outlier", "0"])
    measured = fidelity.measure(run.session, source, makers, given)
    cells: dict[str, dict[str, float]] = {}
    for row, contender in rows.items():
        entry = measured["plain"][contender.name]
        if "failure" not in entry:
            cells[row] = {
                claimed.KL: entry["kl"],
                claimed.AGREEMENT: entry["agreement"],
                claimed.BYTES_A_TOKEN: measured["bytes"][contender.name]["bytes"],
            }
    ratios = {}
    for row, baseline, fine in (
        (claimed.INT4, claimed.QUANTO_4, claimed.FINE_4),
        (claimed.INT2, claimed.QUANTO_2, claimed.FINE_2),
    ):
        if {row, baseline, fine} <= cells.keys():
            ratios[row] = {
                claimed.TIMES_LESS: cells[baseline][claimed.KL] / cells[row][claimed.KL],
                claimed.BYTES_OF_QUANTO: cells[row][claimed.BYTES_A_TOKEN] / cells[baseline][claimed.BYTES_A_TOKEN],
                claimed.LESS_THAN_FINE: cells[fine][claimed.KL] / cells[row][claimed.KL],
                claimed.BYTES_OF_FINE: cells[row][claimed.BYTES_A_TOKEN] / cells[fine][claimed.BYTES_A_TOKEN],
            }
    return {"fidelity": cells, "ratios": ratios}


def measure_updates(run: Run) -> Mapping[str, Cells]:
    shape = QUICK_SHAPE if run.quick else Shape(layers=1, heads=9, kv_heads=3)
    steps, trials = (8, 1) if run.quick else (64, 5)
    config = RandomModel(shape).model.config
    makers = {name: CONTENDERS[name] for name in (REFERENCE, KVLAYERS)}
    cells = {}
    with threads(1):
        for tokens in claimed.UPDATES:
            asked = Trials(steps, trials, run.ticking)
            measured = measure_update(config, shape, makers, tokens, asked)
            check_tokens(asked.disagreements, makers)
            of_transformers = report.times_as_fast(measured, REFERENCE, KVLAYERS)
            cells[claimed.update_row(tokens)] = {claimed.TIME_OF_TRANSFORMERS: of_transformers}
    return {"update": cells}


def measure_window(run: Run) -> Mapping[str, Cells]:
    """Bytes that caches hold after a prefill that is longer than the window."""
    window, tokens = (32, 256) if run.quick else (512, 4096)
    workload = RandomModel(QUICK_SHAPE if run.quick else Shape(), sliding_window=window)
    tick = run.ticking(f"a window of {window}", 2)
    held = {}
    for name in (REFERENCE, KVLAYERS):
        # Each has states of its own: what one holds must not be seen through the other.
        workload.prepare(tokens)
        cache = CONTENDERS[name](workload.model.config, tokens)
        fill(cache, workload.states, tokens)
        workload.states = []
        held[name] = cache_nbytes(cache)
        tick()
    return {"window": {claimed.DYNAMIC: {claimed.BYTES_OF_TRANSFORMERS: held[KVLAYERS] / held[REFERENCE]}}}


def measure_sinks(run: Run) -> Mapping[str, Cells]:
    window, windows = (16, 4) if run.quick else (64, 8)
    workload = run.real(torch.float32)
    found = sinks.stream_both(workload.model, workload.prompt(windows * window + 1), window, run.ticking)
    times = found[sinks.WINDOW]["perplexity"] / found[sinks.SINKS]["perplexity"]
    return {"sinks": {claimed.SINK: {claimed.TIMES_PERPLEXITY: times}}}


def measure_offload(run: Run) -> Mapping[str, Cells]:
    tokens, new = (128, 4) if run.quick else (2048, 16)
    shape = offload.QUICK_SHAPE
    workload = RandomModel(shape)
    tick = run.ticking("offloading", 1)
    traffic = offload.count_traffic(workload.model, workload.prompt(tokens), new)
    tick()
    token = 2 * shape.layers * shape.kv_heads * shape.head_dim * torch.bfloat16.itemsize
    rows = {claimed.OFFLOADED: traffic[offload.KVLAYERS], claimed.OFFLOADED_PACKED: traffic[offload.KVLAYERS_PACKED]}
    cells = {
        row: {
            claimed.NEW_BYTES: entry["to_host"] / token,
            claimed.MOST_ON_DEVICE: entry["peak_on_device"] / entry["held"],
            claimed.SENT_OF_OFFLOADED: entry["to_device"] / traffic[offload.KVLAYERS]["to_device"],
        }
        for row, entry in rows.items()
    }
    return {"offload": cells}


def measure_prefix(run: Run) -> Mapping[str, Cells]:
    tokens, question = (128, 16) if run.quick else (2048, 16)
    workload = run.real(torch.float32)
    model = workload.model
    model.generation_config.pad_token_id = model.config.eos_token_id
    text = workload.prompt(tokens + question)
    ways = (prefix.COLD, prefix.MEMORY, prefix.DISK)
    disagreements = Disagreements(torch.float32)
    with tempfile.TemporaryDirectory() as place:
        directory = prefix.stored_in(place, model, text[:, :tokens])
        first = prefix.FirstTokens(model, text[:, :tokens], text[:, tokens:], directory)
        found = first.measure(1, ways, disagreements, run.ticking("a prefix", len(ways)))
    check_tokens(disagreements, ways)
    cold = found["medians"][prefix.COLD]
    rows = {claimed.FROM_MEMORY: prefix.MEMORY, claimed.FROM_DISK: prefix.DISK}
    return {"prefix": {row: {claimed.TIME_OF_COLD: found["medians"][way] / cold} for row, way in rows.items()}}


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


MEASUREMENTS: dict[str, Callable[[Run], Mapping[str, Cells]]] = {
    "window": measure_window,
    "offload": measure_offload,
    "update": measure_updates,
    "graphs": measure_graphs,
    "step": measure_steps,
    "batches": measure_batches,
    "static": measure_static,
    "prefix": measure_prefix,
    "sinks": measure_sinks,
    "fidelity": measure_fidelity,
}
"""By name, what answers the claims of the groups that it returns."""


def measure(
    run: Run, names: Sequence[str], keeping: Callable[[Mapping[str, Any]], object]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run measurements, and call `keeping` with what is found so far whenever one has ended.

    Returns:
        For each group `cells`, `seconds` that the measurement took, `threads`, and `at`, where it ran; and what the
        measurements raised that failed, by their names.
    """
    found: dict[str, Any] = {}
    failures = {}
    tick = run.ticking("measurements", len(names))
    for name in names:
        at, begin = report.environment(), time.perf_counter()
        try:
            answered = MEASUREMENTS[name](run)
        except Exception as error:
            # What the others find is worth more than an early end.
            failures[name] = f"{type(error).__name__}: {error}"
        else:
            seconds = round(time.perf_counter() - begin, 1)
            used = 1 if name == "update" else torch.get_num_threads()
            for group, cells in answered.items():
                found[group] = {"cells": cells, "seconds": seconds, "threads": used, "at": at}
            keeping(found)
        tick()
    return found, failures


def table(found: Mapping[str, Any], record: Mapping[str, Any], names: Sequence[str], bounds: bool) -> tuple[Any, int]:
    """A table of what was recorded and what is found now, and how many claims do not hold.

    With `bounds`, a bound decides; a figure of any size is enough otherwise.
    """
    made = report.new_table("Claims", "claim", "asked", "recorded", "now", "verdict")
    failed = 0
    for group in GROUPS:
        if group.measurement not in names:
            continue
        for claim in group.claims:
            before, now = (claimed.value_of(values, group, claim) for values in (record, found))
            holds = now is not None and (claim.holds(now) or not bounds)
            failed += not holds
            verdict = "not measured" if now is None else "holds" if claim.holds(now) else "does not hold"
            shown = ("" if value is None else claimed.written(value, claim.form) for value in (before, now))
            row = (f"{group.name}: {claim.row}, {claim.column}", claim.asked, *shown)
            made.add_row(*row, verdict, style="" if holds else "red")
        made.add_section()
    return made, failed


def keep(found: Mapping[str, Any], content: Mapping[str, Any]) -> pathlib.Path:
    """Record what was found, with what was recorded before of groups that were not measured; return the file."""
    old = claimed.recorded_path()
    kept = {**claimed.read_record(old), **found}
    path = claimed.RECORDED / f"claims-{datetime.date.today()}.json"
    in_order = {group.name: kept[group.name] for group in GROUPS if group.name in kept}
    path.write_text(json.dumps({**content, "results": {"claims": in_order}}, indent=1) + "\n")
    if old not in (None, path):
        old.unlink()
    return path


def write_pages() -> None:
    record = claimed.read_record(claimed.recorded_path())
    if claimed.has_steps(record):
        claimed.BENCHMARKS.write_text(claimed.with_steps(claimed.BENCHMARKS.read_text(), record))
        plots.draw_picture(record["step"], plots.PICTURE)
    claimed.CHOOSING.write_text(claimed.with_tables(claimed.CHOOSING.read_text(), record))
    claimed.README.write_text(claimed.with_readme_table(claimed.README.read_text(), record))
    claimed.HOME.write_text(claimed.with_home_table(claimed.HOME.read_text(), record))


def parse(arguments: Sequence[str] | None) -> Any:
    made = report.Options("claims", __doc__, quick="a small random model and few tokens, under a minute")
    made.some_of("--only", list(MEASUREMENTS), "measurements")
    made.real_model("directory or hub name of the real model", default_model())
    made.add("--record", action="store_true", help="record the measurements, and write them into the pages")
    made.add("--write", action="store_true", help="write the record into README.md and docs/choosing.md, and stop")
    given = made.parse(arguments)
    if given.quick and given.record:
        made.parser.error("--record needs the full models, and --quick uses small ones: pass only one of the two")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    if given.write:
        write_pages()
        written = (claimed.README, claimed.HOME, claimed.CHOOSING, claimed.BENCHMARKS, plots.PICTURE)
        print(f"written: {', '.join(map(str, written))}")
        return 0
    # Before what is recorded is replaced.
    before = claimed.read_record(claimed.recorded_path())
    with report.session(given) as session:
        content = {**session.environment, "arguments": {"only": given.only, "threads": given.threads}}
        keeping = functools.partial(keep, content=content) if given.record else len
        found, failures = measure(Run(session), given.only, keeping)
    made, failed = table(found, before, given.only, not given.quick)
    console = session.console
    console.print(made)
    for name, failure in failures.items():
        console.print(f"{name} failed: {failure}", markup=False)
    console.print(f"{failed} claims do not hold or were not measured")
    session.finish({"claims": found}, failures=failures)
    if given.record:
        write_pages()
        console.print(f"recorded in {claimed.recorded_path()}, and written to {claimed.README}, {claimed.CHOOSING}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
