"""Measures every claim in README.md and docs/benchmarks.md again, and says whether it holds.

    python lab/benchmarks/claims.py                     # all of them, about 20 minutes on two idle cores
    python lab/benchmarks/claims.py --only step,update  # some of the measurements
    python lab/benchmarks/claims.py --record            # record them in lab/benchmarks/recorded/claims-<date>.json
    python lab/benchmarks/claims.py --write             # write the record into the pages, and measure nothing
    python lab/benchmarks/claims.py --quick             # a small random model, to see that it runs

The pages give bounds, which `claimed.py` lists. A claim holds if its measurement is within the bound. The bounds are
ratios, bytes and counts, set for an AMD EPYC with two cores; on other machines, ratios of time may be outside them.

The measurements are independent: if one raises, the others continue, and its claims count as not measured. `--record`
keeps the earlier record of measurements that did not run or that raised. The exit code is 1 if a claim does not hold or
was not measured. What the machine lacks a model for is skipped, with the reason, and is no failure.

Of prompts a few are measured here: one of 8,192 and one of 4,096 tokens of the real model, short ones of a random
llama, and the memory of one of 16,384. `prompts.py` measures all of them, against the same bounds.
"""

import contextlib
import functools
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.table import Column, Table

import claimed
import kvlayers
import pages
import plots
import prompt_tables
import prompts
from claimed import GROUPS, Cells
from lib import cases, report
from lib.compiled import INDUCTOR, count_graphs, measure_static, nothing_in_memory, with_reservation
from lib.contenders import (
    CONTENDERS,
    FLOOR,
    KVLAYERS,
    KVLAYERS_4_BITS,
    KVLAYERS_STATIC,
    QUANTIZED,
    QUANTO_4_BITS,
    REFERENCE,
    TRANSFORMERS_STATIC,
    Maker,
    compiled,
    measure_bytes,
    packed,
    quanto,
)
from lib.internals import NoRecord, cache_nbytes, quiet_clock, read
from lib.timing import Decoded, Disagreements, Trials, measure_decode, measure_update
from lib.workload import QUICK_SHAPE, RandomModel, RealModel, Shape

GEMMA = ".models/gemma-3-270m"
"""Where a run looks for the model with windows."""

FINE = 16
"""Numbers of a group with which quanto holds more bytes than kvlayers' native backend with its groups of 64. A longer
residual would take as many bytes, and leave quanto with more divergence."""

NUM_SINK_TOKENS = 4

SPARE = 64
"""Tokens that the smallest reservation has beyond those in the cache, unless more steps are timed."""

MOST_APART = 1e-4
"""How far logits of a model with latents may be from transformers', in float32."""

SECONDS_OF_PACKED = 100.0
"""For turns of a prompt with and without packing, which differ by less than a turn from the next."""

LARGE = Shape(layers=16, heads=32, kv_heads=8, intermediate=8192, vocab=128256)
"""The shape of Llama-3.2-1B."""


class OtherTokensError(Exception):
    """A cache that is exact gave other tokens than transformers' DynamicCache: its times mean nothing."""


class LackingError(Exception):
    """This machine lacks what a measurement needs and most machines lack: its claims are skipped."""


class Run(report.Session):
    """A session whose real model is a small random one in a quick run."""

    @functools.cached_property
    def llama(self) -> RandomModel:
        """The random llama, in bfloat16.

        Caches are filled at once: transformers' quantized ones would quantize all that they hold with every chunk.
        """
        return self.random(chunk=1 << 16)

    def needed(self, dtype: torch.dtype) -> RandomModel | RealModel:
        workload = self.random(dtype=dtype) if self.quick else self.real(dtype)
        if workload is None:
            raise FileNotFoundError(report.NO_MODEL)
        return workload


def check_tokens(disagreements: Disagreements, exact: Iterable[str]) -> None:
    """Raise if a cache that computes the reference's sums predicted other tokens."""
    failures = [entry for entry in disagreements.found if not entry["tie"] and entry["cache"] in exact]
    if failures:
        raise OtherTokensError(f"{len(failures)} other tokens, the first: {failures[0]}")


def decoding(
    run: Run, workload: Any, makers: Mapping[str, Maker], tokens: int, usual: tuple[int, int], alike: str = ""
) -> Decoded:
    """So many steps in so many trials. kvlayers' DynamicCache must give the tokens of the reference.

    It may differ where the cache `alike` does: a random model in bfloat16 decides some tokens by how sums are rounded,
    which differs where a cache keeps its states elsewhere than transformers' does, whatever it is.
    """
    asked = Trials(*((4, 1) if run.quick else usual), run.ticking)
    measured = measure_decode(workload, makers, tokens // 64 if run.quick else tokens, asked)
    differences = asked.disagreements
    shared = {(entry["tokens"], entry["trial"]) for entry in differences.found if entry["cache"] == alike}
    differences.found = [entry for entry in differences.found if (entry["tokens"], entry["trial"]) not in shared]
    check_tokens(differences, (KVLAYERS,))
    return measured


def measure_steps(run: Run) -> Mapping[str, Cells]:
    """Decode steps of caches in full precision and of quantized ones, all of them at the greatest length."""
    names = {
        claimed.DYNAMIC: KVLAYERS,
        claimed.INT4: KVLAYERS_4_BITS,
        claimed.INT8: "kvlayers 8 bits",
        claimed.FP8: "kvlayers fp8",
        claimed.INT2: "kvlayers 2 bits",
        claimed.QUANTO_4: QUANTO_4_BITS,
    }
    by_length = {claimed.TRANSFORMERS: REFERENCE, claimed.DYNAMIC: KVLAYERS, claimed.INT4: KVLAYERS_4_BITS}
    cells: dict[str, dict[str, float]] = {}
    for length in claimed.LENGTHS:
        makers = {REFERENCE: QUANTIZED[REFERENCE], FLOOR: CONTENDERS[FLOOR]}
        of_length = names if length == claimed.LENGTHS[-1] else by_length
        makers |= {name: QUANTIZED[name] for name in of_length.values()}
        measured = decoding(run, run.llama, makers, length, (16, 3), FLOOR)
        for row, name in by_length.items():
            cells[claimed.length_row(row, length)] = {
                claimed.MILLISECONDS: measured.turns.median(name) * 1e3,
                claimed.MEGABYTES: measured.held[name] / 1e6,
                claimed.TIMES_AS_FAST: measured.turns.ratio(REFERENCE, name),
            }
    for row, name in names.items():
        cells[row] = {
            claimed.TIMES_AS_FAST: measured.turns.ratio(REFERENCE, name),
            claimed.OF_PREALLOCATED: measured.turns.ratio(FLOOR, name),
            claimed.OVER_DYNAMIC: measured.turns.ratio(KVLAYERS, name),
            claimed.OVER_QUANTO: measured.turns.ratio(QUANTO_4_BITS, name),
            claimed.OF_DENSE: measured.held[name] / measured.held[REFERENCE],
        }
    return {"step": cells}


def measure_baseline(run: Run) -> Mapping[str, Cells]:
    """Steps of transformers' static cache of exactly the length that is needed, beside kvlayers' caches."""
    names = {claimed.DYNAMIC: KVLAYERS, claimed.INT4: KVLAYERS_4_BITS}
    makers = {name: QUANTIZED[name] for name in (REFERENCE, *names.values())}
    makers[TRANSFORMERS_STATIC] = CONTENDERS[TRANSFORMERS_STATIC]
    # Its mask makes attention add in the order of kvlayers' caches.
    measured = decoding(run, run.llama, makers, claimed.LENGTHS[-1], (16, 3), TRANSFORMERS_STATIC)
    cells = {
        row: {claimed.OVER_EXACT_STATIC: measured.turns.ratio(TRANSFORMERS_STATIC, name)} for row, name in names.items()
    }
    of_rival = {
        claimed.TIMES_AS_FAST: measured.turns.ratio(REFERENCE, TRANSFORMERS_STATIC),
        claimed.OF_DENSE: measured.held[TRANSFORMERS_STATIC] / measured.held[REFERENCE],
    }
    return {"baseline": {claimed.EXACT_STATIC: of_rival, **cells}}


def measure_large(run: Run) -> Mapping[str, Cells]:
    """Steps and a prompt of a random model whose weights are large beside its cache."""
    workload = run.random(LARGE, chunk=1 << 16)
    rows = {claimed.DYNAMIC: KVLAYERS, claimed.INT4: KVLAYERS_4_BITS}
    makers = {name: QUANTIZED[name] for name in (REFERENCE, *rows.values())}
    cells = {}
    for length in claimed.LARGE_LENGTHS:
        measured = decoding(run, workload, makers, length, (8, 2))
        for row, name in rows.items():
            cells[claimed.length_row(row, length)] = {claimed.TIMES_AS_FAST: measured.turns.ratio(REFERENCE, name)}
    of_prompts = reading(run, (prompt_tables.DYNAMIC,), *([] if run.quick else ["--seconds", "20"]))
    subject = prompts.Subject("random llama of 1.2 billion weights", lambda: workload)
    read_whole = of_prompts.prompts(subject, "bfloat16", [160 if run.quick else 2048])
    check_logits(of_prompts)
    [cell] = prompt_tables.find(read_whole, case=prompt_tables.ONE, cache=prompt_tables.DYNAMIC)
    cells[claimed.PROMPT_OF_2K] = {claimed.TIME_OF_TRANSFORMERS: cell["ratio"]}
    return {"large": cells}


def measure_batches(run: Run) -> Mapping[str, Cells]:
    workload, cells = run.needed(torch.bfloat16), {}
    makers = {name: CONTENDERS[name] for name in (REFERENCE, TRANSFORMERS_STATIC, KVLAYERS, KVLAYERS_STATIC)}
    for batch, length in claimed.BATCHES:
        case = (2, 64) if run.quick else (batch, length)
        steps, trials = (3, 1) if run.quick else (16, 2 if batch * length < 8192 else 1)
        asked = Trials(steps, trials, run.ticking, block=1)
        measured = measure_decode(workload, makers, case[1], asked, batch=case[0])
        check_tokens(asked.disagreements, makers)
        over = {name: measured.turns.ratio(name, KVLAYERS) for name in (REFERENCE, TRANSFORMERS_STATIC)}
        row = claimed.batch_row(batch, length)
        cells[row] = {claimed.TIMES_AS_FAST: over[REFERENCE], claimed.OVER_BETTER: min(over.values())}
    return {"batches": cells}


def measure_reservations(run: Run) -> Mapping[str, Cells]:
    length, most, backend = (64, 512, "eager") if run.quick else (1024, 32768, INDUCTOR)
    trials = Trials(3 if run.quick else 12, 1 if run.quick else 2, run.ticking)
    makers = {name: CONTENDERS[name] for name in (REFERENCE, KVLAYERS_STATIC, TRANSFORMERS_STATIC)}
    least = length + max(SPARE, trials.steps)
    with nothing_in_memory(backend):
        eager, in_graphs = measure_static(run.llama, makers, length, (least, most), trials, backend)
    check_tokens(trials.disagreements, (*eager.turns.seconds, *in_graphs.turns.seconds))
    small = with_reservation(KVLAYERS_STATIC, least)
    large, baseline = (with_reservation(name, most) for name in (KVLAYERS_STATIC, TRANSFORMERS_STATIC))
    cells = {}
    for row, measured, named in (
        (claimed.EAGER_STATIC, eager, str),
        (claimed.COMPILED_STATIC, in_graphs, compiled),
    ):
        cells[row] = {
            claimed.TIMES_STATIC: measured.turns.ratio(named(baseline), named(large)),
            claimed.TIME_OF_SMALL: measured.turns.ratio(named(large), named(small)),
        }
    return {"static": cells}


def measure_graphs(run: Run) -> Mapping[str, Cells]:
    """Graphs that `generate()` compiles, counted with a backend that compiles no kernels."""
    prompt, new, reserve = (250, 16, 1024) if run.quick else (200, 512, 4096)
    workload = RandomModel(QUICK_SHAPE)
    disagreements = Disagreements()
    with nothing_in_memory("eager"):
        first, later = count_graphs(workload, prompt, new, reserve, disagreements)
    check_tokens(disagreements, [compiled(KVLAYERS_STATIC)])
    return {"graphs": {claimed.STATIC: {claimed.FIRST_CALL: first, claimed.LATER_CALLS: later}}}


def measure_fidelity(run: Run) -> Mapping[str, Cells]:
    """What quantized caches change in predictions, and their bytes; quanto also with more than kvlayers."""
    makers = {
        claimed.INT8: packed(nbits=8),
        claimed.FP8: packed("fp8"),
        claimed.INT4: packed(nbits=4),
        claimed.INT2: packed(nbits=2),
        claimed.QUANTO_4: quanto(4),
        claimed.QUANTO_2: quanto(2),
        claimed.FINE_4: quanto(4, q_group_size=FINE),
        claimed.FINE_2: quanto(2, q_group_size=FINE),
    }
    workload = run.needed(torch.float32)
    context, scored, chunk = (640, 64, 64) if run.quick else (2048, 1024, 64)
    model, texts = workload.model, workload.passages(1, context + scored + 1)
    tick = run.ticking("fidelity", (context + scored) // chunk)
    scores = read(model, texts, {REFERENCE: CONTENDERS[REFERENCE], **makers}, context, chunk, NoRecord(), tick)
    cells: dict[str, dict[str, float]] = {}
    for row, make in makers.items():
        entry = scores[row].summary()
        if "failure" not in entry:
            held = measure_bytes(make, model.config, context, scored, chunk)
            cells[row] = {
                claimed.KL: entry["kl"],
                claimed.AGREEMENT: entry["agreement"],
                claimed.BYTES_A_TOKEN: held["bytes"],
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
            cells[claimed.update_row(tokens)] = {claimed.TIME_OF_TRANSFORMERS: measured.ratio(KVLAYERS, REFERENCE)}
    return {"update": cells}


def measure_window(run: Run) -> Mapping[str, Cells]:
    """Bytes that caches hold after a prefill that is longer than the window."""
    window, tokens = (32, 256) if run.quick else (512, 4096)
    workload, held = run.random(sliding_window=window, chunk=tokens), {}
    for name in (REFERENCE, KVLAYERS):
        # Each has states of its own: what one holds must not be seen through the other.
        workload.prepare(tokens)
        cache = CONTENDERS[name](workload.model.config, tokens)
        workload.fill(cache)
        workload.states = []
        held[name] = cache_nbytes(cache)
    return {"window": {claimed.DYNAMIC: {claimed.BYTES_OF_TRANSFORMERS: held[KVLAYERS] / held[REFERENCE]}}}


def measure_sinks(run: Run) -> Mapping[str, Cells]:
    window, windows = (16, 4) if run.quick else (64, 8)
    workload = run.needed(torch.float32)
    model, ids = workload.model, workload.prompt(windows * window + 1)
    makers = {
        "window": lambda config: kvlayers.Cache(
            [kvlayers.SlidingLayer(window) for _ in range(config.num_hidden_layers)]
        ),
        "sinks": lambda config: kvlayers.SinkCache(window, NUM_SINK_TOKENS, config=config),
    }
    tokens = windows * window
    found = read(model, [ids], makers, tokens // 2, 1, NoRecord(), run.ticking("sinks", tokens))
    perplexity = {name: each.summary()["perplexity"] for name, each in found.items()}
    return {"sinks": {claimed.SINK: {claimed.TIMES_PERPLEXITY: perplexity["window"] / perplexity["sinks"]}}}


def measure_offload(run: Run) -> Mapping[str, Cells]:
    tokens, new = (128, 4) if run.quick else (2048, 16)
    shape, workload = cases.TRAFFIC_SHAPE, RandomModel(cases.TRAFFIC_SHAPE)
    traffic = {name: cases.traffic_of(workload.model, name, workload.prompt(tokens), new) for name in cases.OFFLOADED}
    token = 2 * shape.layers * shape.kv_heads * shape.head_dim * torch.bfloat16.itemsize
    rows = {claimed.OFFLOADED: traffic["dynamic"], claimed.OFFLOADED_PACKED: traffic["int4"]}
    cells = {
        row: {
            claimed.NEW_BYTES: entry["to_host"] / token,
            claimed.MOST_ON_DEVICE: entry["peak_on_device"] / entry["held"],
            claimed.SENT_OF_OFFLOADED: entry["to_device"] / traffic["dynamic"]["to_device"],
        }
        for row, entry in rows.items()
    }
    return {"offload": cells}


def measure_prefix(run: Run) -> Mapping[str, Cells]:
    """Whole calls of `generate()` for one token: with no store, and with one that has the beginning of the prompt."""
    tokens, question = (128, 16) if run.quick else (2048, 16)
    workload = run.needed(torch.float32)
    model, text = workload.model, workload.prompt(tokens + question)
    model.generation_config.pad_token_id = model.config.eos_token_id
    asked = {"max_new_tokens": 1, "do_sample": False}
    wanted = {**asked, "attention_mask": torch.ones_like(text), "return_dict_in_generate": True, "output_logits": True}
    disagreements, seconds = Disagreements(torch.float32), dict[str, float]()
    with tempfile.TemporaryDirectory() as place:
        first, copied = (pathlib.Path(place, name) for name in ("first", "copied"))
        in_memory = kvlayers.PrefixStore("64GiB", first)
        kvlayers.generate(model, text[:, :tokens], prefix_store=in_memory, **asked)
        in_memory.flush()
        # What it reads, the system may have cached.
        on_disk = kvlayers.PrefixStore("64GiB", shutil.copytree(first, copied))
        ways = {
            "": contextlib.nullcontext(),
            claimed.FROM_MEMORY: kvlayers.installed(prefix_store=in_memory),
            claimed.FROM_DISK: kvlayers.installed(prefix_store=on_disk),
        }
        expected: torch.Tensor | None = None
        for name, settings in ways.items():
            with settings, quiet_clock():
                begin = time.perf_counter()
                [logits] = model.generate(text, **wanted).logits
                seconds[name] = time.perf_counter() - begin
            expected = logits if expected is None else expected
            where = {"cache": name, "model": workload.name, "tokens": tokens + question, "trial": 0}
            disagreements.compare_step(where, expected, logits)
    check_tokens(disagreements, ways)
    rows = (claimed.FROM_MEMORY, claimed.FROM_DISK)
    return {"prefix": {row: {claimed.TIME_OF_COLD: seconds[row] / seconds[""]} for row in rows}}


def measure_latents(run: Run) -> Mapping[str, Cells]:
    layers, length, steps = (1, 200, 2) if run.quick else (8, 4096, 5)
    makers = {name: CONTENDERS[name] for name in (REFERENCE, KVLAYERS)}
    trials = Trials(steps, 1, run.ticking, 1, Disagreements(torch.float32))
    exact = measure_decode(cases.LatentModel(torch.float32, layers), makers, length, trials)
    apart = exact.logit_distance[KVLAYERS]
    if apart > MOST_APART:
        raise OtherTokensError(f"logits in float32 are {apart:.1e} from transformers'")
    # In bfloat16 a token may be a tie.
    trials = Trials(steps, 1, run.ticking, 1)
    measured = measure_decode(cases.LatentModel(torch.bfloat16, layers), makers, length, trials)
    return {"latents": {claimed.DYNAMIC: {claimed.TIMES_AS_FAST: measured.turns.ratio(REFERENCE, KVLAYERS)}}}


def reading(run: Run, caches: Sequence[str], *sizes: str) -> prompts.Run:
    """A run of `prompts.py` with some of the caches, which shows its bars in this one."""
    quick = ["--quick"] if run.quick else []
    usual = ["--threads", str(torch.get_num_threads()), "--seconds", "0"]
    given = prompts.parse([*usual, "--caches", ",".join(caches), *quick, *sizes])
    return prompts.Run(given, run.progress)


def read_one(run: Run, source: str | None, tokens: int, *caches: str, seconds: float = 20.0) -> Mapping[str, Any]:
    """The cells of one prompt, by cache; of a random model in a quick run."""
    of_prompts = reading(run, caches, *([] if run.quick else ["--seconds", str(seconds)]))
    if run.quick or source is None:
        subject, tokens = prompts.subjects(of_prompts.given)[prompt_tables.NARROW], 160
    else:
        name = pathlib.Path(source).name
        subject = prompts.Subject(name, functools.partial(RealModel, source))
    cells = of_prompts.prompts(subject, "bfloat16", [tokens])
    check_logits(of_prompts)
    return {cell["cache"]: cell for cell in prompt_tables.find(cells, case=prompt_tables.ONE)}


def check_logits(of_prompts: prompts.Run) -> None:
    """Raise if logits are further from transformers' than rounding explains."""
    if of_prompts.wrong:
        raise OtherTokensError(of_prompts.wrong[0])


def measure_prompts(run: Run) -> Mapping[str, Cells]:
    source = None if run.quick else run.given.model
    if source is None and not run.quick:
        raise FileNotFoundError(report.NO_MODEL)
    long = read_one(run, source, 8192, prompt_tables.DYNAMIC)
    packed = read_one(run, source, 4096, prompt_tables.DYNAMIC, prompt_tables.INT4, seconds=SECONDS_OF_PACKED)
    # Several turns: of one, chance decides which cache is the slowest.
    sizes = [] if run.quick else ["--lengths-uncompiled", "512", "--batch", "512", "--seconds", "10"]
    short = reading(run, prompt_tables.CACHES, *sizes)
    llama = prompts.subjects(short.given)[prompt_tables.NARROW]
    compiled_cells = short.prompts(llama, "bfloat16", [160 if run.quick else 512])
    compiled_cells += short.batches(llama, "bfloat16", short.given.batch)
    without = prompts.uncompiled(short, llama)["cells"]
    check_logits(short)
    packing = (prompt_tables.INT8, prompt_tables.INT4)
    of_rows = {
        claimed.SLOWEST: compiled_cells,
        claimed.SLOWEST_UNCOMPILED: [cell for cell in without if cell["cache"] not in packing],
        claimed.SLOWEST_PACKED_UNCOMPILED: [cell for cell in without if cell["cache"] in packing],
    }
    slowest = {
        row: {claimed.TIME_OF_TRANSFORMERS: max(cell.get("ratio", 0.0) for cell in found)}
        for row, found in of_rows.items()
    }
    of_model = {
        claimed.PROMPT_OF_8K: {claimed.TIME_OF_TRANSFORMERS: long[prompt_tables.DYNAMIC]["ratio"]},
        claimed.PROMPT_OF_4K: {claimed.TIME_OF_DYNAMIC: packed[prompt_tables.INT4]["of_dynamic"]},
    }
    return {"prompts": {**of_model, **slowest}}


def measure_gemma(run: Run) -> Mapping[str, Cells]:
    source = run.given.gemma
    if not run.quick and source is None:
        raise LackingError(f"there is no {GEMMA}: pass --gemma DIR")
    found = read_one(run, source, 8192, prompt_tables.DYNAMIC)[prompt_tables.DYNAMIC]
    return {"gemma": {claimed.PROMPT_OF_8K: {claimed.TIME_OF_TRANSFORMERS: found["ratio"]}}}


def measure_attention_of_prompts(run: Run) -> Mapping[str, Cells]:
    of_prompts = reading(run, (prompt_tables.DYNAMIC,))
    shares = prompts.measure_attention(of_prompts, of_prompts.given.attention, ("bfloat16",))["bfloat16"]
    check_logits(of_prompts)
    of_shapes = {
        name: {claimed.SHARE_OF_PRODUCT: ways[prompt_tables.KVLAYERS]["share"]} for name, ways in shares.items()
    }
    return {"attention": of_shapes}


def measure_memory(run: Run) -> Mapping[str, Cells]:
    of_prompts = reading(run, (prompt_tables.DYNAMIC,))
    llama = prompts.subjects(of_prompts.given)[prompt_tables.NARROW]
    peak = prompts.memory(of_prompts, llama)["peaks"][prompt_tables.DYNAMIC]["ratio"]
    return {"peak": {claimed.PEAK: {claimed.PEAK_OF_TRANSFORMERS: peak}}}


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
    "baseline": measure_baseline,
    "large": measure_large,
    "batches": measure_batches,
    "static": measure_reservations,
    "prefix": measure_prefix,
    "sinks": measure_sinks,
    "latents": measure_latents,
    "fidelity": measure_fidelity,
    "prompts": measure_prompts,
    "gemma": measure_gemma,
    "attention": measure_attention_of_prompts,
    "peak": measure_memory,
}
"""By name, what answers the claims of the groups that it returns."""


def measure(
    run: Run, names: Sequence[str], keeping: Callable[[Mapping[str, Any]], object]
) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Run measurements, and call `keeping` with what is found so far whenever one has ended.

    Returns:
        For each group `cells`, `seconds` that the measurement took, `threads`, and `at`, where it ran; and what the
        measurements raised that failed, and why others were skipped, by their names.
    """
    found: dict[str, Any] = {}
    failures, skipped = {}, {}
    tick = run.ticking("measurements", len(names))
    for name in names:
        at, begin = report.environment(), time.perf_counter()
        try:
            answered = MEASUREMENTS[name](run)
        except LackingError as reason:
            skipped[name] = str(reason)
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
    return found, failures, skipped


def table(found: Mapping[str, Any], record: Mapping[str, Any], names: Sequence[str], bounds: bool) -> tuple[Any, int]:
    """A table of what was recorded and what is found now, and how many claims do not hold.

    With `bounds`, a bound decides; a figure of any size is enough otherwise. `names` are those of the measurements that
    were not skipped.
    """
    made = Table("claim", *(Column(name, justify="right") for name in ("asked", "recorded", "now", "verdict")))
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
    names = [group.name for group in GROUPS]
    return pages.keep("claims", found, content, lambda kept: [name for name in names if name in kept])


def written_pages() -> pages.Pages:
    """The pages with the tables of the record. The picture is drawn."""
    plots.draw_picture(pages.parts("claims")["step"], plots.PICTURE)
    return claimed.written_pages()


def parse(arguments: Sequence[str] | None) -> Any:
    made = report.Options("claims", __doc__, written_pages, quick="a small random model and few tokens, under a minute")
    made.some_of("--only", list(MEASUREMENTS), "measurements")
    made.real_model()
    usual = GEMMA if pathlib.Path(GEMMA).is_dir() else None
    made.add("--gemma", default=usual, help=f"directory of Gemma-3-270M ({GEMMA} if it is there)")
    made.add("--record", action="store_true", help="record the measurements, and write them into the pages")
    return made.parse(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    # Before what is recorded is replaced.
    before = pages.parts("claims")
    with report.session(given, Run) as run:
        content = {**run.environment, "arguments": {"only": given.only, "threads": given.threads}}
        keeping = functools.partial(keep, content=content) if given.record else len
        found, failures, skipped = measure(run, given.only, keeping)
    made, failed = table(found, before, [name for name in given.only if name not in skipped], not given.quick)
    say = run.console.print
    say(made)
    for name, failure in failures.items():
        say(f"{name} failed: {failure}", markup=False)
    for name, reason in skipped.items():
        say(f"{name} skipped: {reason}", markup=False)
    say(f"{failed} claims do not hold or were not measured")
    run.finish({"claims": found}, failures=failures, skipped=skipped)
    if given.record:
        pages.write_pages(written_pages())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
