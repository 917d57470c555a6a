"""Prompts beside transformers: seconds, equal logits, the share of a matrix product's rate, and peak memory.

    python lab/benchmarks/prompts.py                            # SmolLM2 and two random llamas, half an hour
    python lab/benchmarks/prompts.py --model DIR --model DIR    # these models and two random llamas
    python lab/benchmarks/prompts.py --models attention         # attention of one layer alone
    python lab/benchmarks/prompts.py --record                   # keep the figures in recorded/prompts-<date>.json
    python lab/benchmarks/prompts.py --write                    # the record into the pages, and measure nothing
    python lab/benchmarks/prompts.py --quick                    # small random models, few tokens, to see that it runs

`bfloat16` and `float32` read one prompt of each length into each cache, then a second turn behind a prompt of 8,192
tokens, or the longest below.
`batch` reads four prompts of different lengths, padded on the left. `memory` reads 16,384 tokens in three processes
for each cache, and asks the system how much memory they held at most. `uncompiled` reads short prompts in a process
without kernels (`KVLAYERS_COMPILE=never`). `attention` is that of one layer, beside a product of two matrices.

Caches take turns in one process, in an order that rotates, and figures are medians. There are as many turns as fit
`--seconds`, at least one. Before the turns of a short prompt, each cache reads it once more: that warms up, and its
last logits are compared with those of transformers in float32.

The exit code is 1 if logits are further from float32's than they may be. Times decide nothing, and the targets say
which bounds they keep. Run it on an idle machine.
"""

import contextlib
import copy
import functools
import gc
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import pages
import prompt_tables as tables
from lib import report
from lib.contenders import CONTENDERS, KVLAYERS, KVLAYERS_STATIC, REFERENCE, Maker, packed
from lib.internals import quiet_clock
from lib.serving import most_memory
from lib.timing import Turns
from lib.workload import RandomModel, RealModel, Shape, default_model
from prompt_tables import BATCH, DYNAMIC, INT4, INT8, ONE, STATIC, TRANSFORMERS, TURN, UNCOMPILED

MAKERS: dict[str, Maker] = {
    TRANSFORMERS: CONTENDERS[REFERENCE],
    DYNAMIC: CONTENDERS[KVLAYERS],
    INT8: packed(nbits=8),
    INT4: packed(nbits=4),
    STATIC: CONTENDERS[KVLAYERS_STATIC],
}
EXACT = (DYNAMIC, STATIC)
"""The caches that hold states as they came, so that a second turn has transformers' logits."""

SHAPES = {
    tables.NARROW: Shape(layers=4),
    tables.WIDE: Shape(layers=2, heads=32, kv_heads=8, head_dim=128, intermediate=8192),
}
SECTIONS = ("bfloat16", "float32", "batch", "memory", "uncompiled")
SHARES = (1, 2, 3, 4)
"""The lengths of a batch's prompts, as parts of the longest."""

COMPARED = 64
"""The last tokens of a prompt whose logits are compared, where it is read once more for that."""

PEAK_PROCESSES = 3
"""Processes of each cache whose memory is measured."""

RETURNED = {"MALLOC_MMAP_THRESHOLD_": "1048576"}
"""Environment with which glibc returns each tensor of a megabyte to the system. Otherwise it keeps some of up to 32 MB,
and chance decides which: a fortieth of the figure."""

READ_TWICE = 4096
"""Tokens of a prompt that is read once more, to warm up and to compare logits."""

EXACT_UP_TO = 2048
"""Tokens of a prompt that is also read in float32, whose logits those in bfloat16 are compared with."""

MOST_BEFORE_TURN = 8192
"""Tokens of the prompt that a second turn follows, at most."""

MOST_TURNS = 15
NEVER = {"KVLAYERS_COMPILE": "never"}


class AttentionShape(NamedTuple):
    """Attention of one layer.

    Attributes:
        window: tokens that a query sees, `None` for all before it.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    def pairs(self, tokens: int) -> int:
        """Pairs of a query and a key that it sees."""
        window = min(self.window or tokens, tokens)
        return window * (window + 1) // 2 + (tokens - window) * window

    def mask(self, tokens: int) -> Tensor | None:
        """Bool `[1, 1, tokens, tokens]`; `None` if the mask is causal."""
        if self.window is None:
            return None
        return torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - self.window)[None, None]


ATTENTION_SHAPES = {
    tables.WIDE_ATTENTION: AttentionShape(32, 8, 128),
    tables.SMALL_ATTENTION: AttentionShape(9, 3, 64),
    tables.WINDOW_ATTENTION: AttentionShape(4, 1, 256, 512),
}


def options() -> report.Options:
    made = report.Options(
        "prompts", __doc__, tables.written_pages, threads=2, quick="small random models and few tokens"
    )
    made.add("--model", action="append", help="directory of a real model, may be repeated (the demo model)")
    made.add("--models", help="some of the models by name, and 'attention', separated by commas (all)")
    made.some_of("--only", SECTIONS, "sections of each model")
    made.some_of("--caches", tables.CACHES, "caches beside transformers'")
    made.sized("--lengths", [512, 2048, 4096, 8192, 16_384], [96, 160], "tokens of one prompt", report.numbers)
    made.sized("--lengths-float32", [512, 2048], [160], "tokens of one prompt in float32", report.numbers)
    made.sized("--lengths-uncompiled", [512, 2048], [96], "tokens of prompts without kernels", report.numbers)
    made.sized("--batch", 2048, 128, "tokens of the longest prompt of the batch")
    made.sized("--turn", 256, 24, "tokens of the second turn")
    made.sized("--long", 16_384, 192, "tokens of the prompt whose memory is measured")
    made.sized("--attention", 4096, 256, "tokens of one layer's attention")
    made.sized("--seconds", 20.0, 0.0, "seconds of the turns of a prompt, if it takes less", float)
    made.add("--record", action="store_true", help="record each part when it is done, and write the pages at the end")
    made.add("--peak", choices=tuple(MAKERS), help="read the long prompt with this cache alone, and print its memory")
    return made


class Subject:
    """A model in bfloat16, and prompts for it."""

    def __init__(self, name: str, load: Callable[[], RandomModel | RealModel]) -> None:
        self.name, self._load = name, load

    @functools.cached_property
    def workload(self) -> RandomModel | RealModel:
        return self._load()

    @functools.cached_property
    def in_float32(self) -> Any:
        return copy.deepcopy(self.workload.model).float()

    def model(self, dtype: str) -> Any:
        return self.in_float32 if dtype == "float32" else self.workload.model

    def ids(self, tokens: int) -> Tensor:
        """Int64 `[1, tokens]`. A text that is too short is read again and again."""
        if isinstance(self.workload, RandomModel):
            return self.workload.prompt(tokens)
        text = self.workload.ids
        return text.repeat(1, -(-tokens // text.shape[1]))[:, :tokens]

    def batch(self, longest: int) -> "Prompt":
        """Prompts of different lengths, padded on the left."""
        lengths = [longest * share // max(SHARES) for share in SHARES]
        mask = torch.stack([torch.arange(longest) >= longest - length for length in lengths]).long()
        ids = self.ids(longest * len(lengths)).view(len(lengths), longest) * mask
        return Prompt(ids, mask, (mask.cumsum(1) - 1).clamp(min=0))


class Prompt(NamedTuple):
    """What a model reads at once: ids, mask and positions, int64 `[batch, tokens]`."""

    ids: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None

    def read(self, model: Any, cache: Any, kept: int = 1) -> Tensor:
        """The logits of the last tokens, float32 `[batch, kept, vocab]`."""
        masks = {} if self.mask is None else {"attention_mask": self.mask, "position_ids": self.positions}
        logits = model(input_ids=self.ids, past_key_values=cache, use_cache=True, logits_to_keep=kept, **masks).logits
        return logits.float()  # type: ignore[no-any-return]


def apart(logits: Tensor, expected: Tensor) -> float:
    """The distance of logits `[..., vocab]` from others, relative to the size of these, without their mean."""
    one, other = (each.double() - each.double().mean(-1, keepdim=True) for each in (logits, expected))
    return float((one - other).norm() / other.norm())


class Case(NamedTuple):
    """One prompt of one model in one dtype."""

    subject: Subject
    dtype: str
    name: str
    tokens: int

    @property
    def title(self) -> str:
        return f"{self.subject.name}, {self.dtype}, {self.name} of {self.tokens:,}"

    def entry(self, cache: str, turns: Turns, further: Mapping[str, float]) -> dict[str, Any]:
        ratios = {"ratio": turns.ratio(cache, TRANSFORMERS)} if cache != TRANSFORMERS else {}
        if cache != DYNAMIC and DYNAMIC in turns.seconds and ratios:
            ratios["of_dynamic"] = turns.ratio(cache, DYNAMIC)
        where = {"model": self.subject.name, "dtype": self.dtype, "case": self.name, "tokens": self.tokens}
        figures = {"cache": cache, "seconds": turns.median(cache), "turns": len(turns.seconds[cache]), **ratios}
        return {**where, **figures, **({"apart": further[cache]} if cache in further else {})}


class Run(report.Session):
    """A session that knows how far transformers' logits in bfloat16 were from float32's."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.rounding: dict[str, float] = {}
        self.prefix = "" if os.environ.get("KVLAYERS_COMPILE") != "never" else UNCOMPILED

    @property
    def makers(self) -> dict[str, Maker]:
        return {TRANSFORMERS: MAKERS[TRANSFORMERS], **{name: MAKERS[name] for name in self.given.caches}}

    def compare(self, case: Case, logits: Mapping[str, Tensor], exact: Tensor | None) -> dict[str, float]:
        """Hold logits against transformers', or against those of float32; return how far each is from these."""
        checked = [name for name in logits if name != TRANSFORMERS]
        if case.name.endswith(TURN):
            checked = [name for name in checked if name in EXACT]
        reference = logits[TRANSFORMERS]
        if case.dtype == "float32":
            found = {name: apart(logits[name], reference) for name in checked}
            most = tables.MOST_APART_IN_FLOAT32
        elif exact is not None:
            found = {name: apart(logits[name], exact) for name in (TRANSFORMERS, *checked)}
            self.rounding[case.subject.name] = max(found[TRANSFORMERS], self.rounding.get(case.subject.name, 0.0))
            most = tables.MOST_FURTHER * found[TRANSFORMERS]
        else:
            found = {name: apart(logits[name], reference) for name in checked}
            most = tables.MOST_APART * self.rounding.get(case.subject.name, float("inf"))
        for name in checked:
            self.expect(
                found[name] <= most, f"{case.title}, {name}: logits {found[name]:.2g} apart, allowed {most:.2g}"
            )
        return found

    def count(self, seconds: float) -> int:
        """How many turns there are, if one takes so long."""
        return max(1, min(MOST_TURNS, int(self.given.seconds / max(seconds, 1e-9))))

    def measure(
        self,
        case: Case,
        prompt: Prompt,
        caches: Callable[[], Mapping[str, Any]],
        following: Sequence[Prompt] = (),
    ) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
        """Time a prompt with new caches in each turn, or each of the `following` prompts with the same ones.

        Returns:
            An entry for each cache, and the caches of the last turn.
        """
        begin, model, turns = time.perf_counter(), case.subject.model(case.dtype), Turns(self.makers)
        made: Mapping[str, Any] = {}
        reads_twice = not following and case.tokens <= READ_TWICE
        kept = min(COMPARED, case.tokens)
        further: dict[str, float] = {}
        tick = self.ticking(case.title, int(reads_twice) + (len(following) or 1))
        with quiet_clock():
            if reads_twice:
                made = caches()
                logits = turns.take(lambda name: prompt.read(model, made[name], kept), is_counted=False)
                exact = None
                if case.dtype != "float32" and case.tokens <= EXACT_UP_TO:
                    wide = case.subject.in_float32
                    exact = prompt.read(wide, MAKERS[TRANSFORMERS](wide.config, case.tokens), kept)
                further = self.compare(case, logits, exact)
                tick()
            done, number = 0, len(following) or 1
            while done < number:
                gc.collect()
                # These caches may need the memory of earlier ones.
                made = made if following else {}
                made = made or caches()
                read = following[done] if following else prompt
                started = time.perf_counter()
                logits = turns.take(lambda name, read=read, made=made: read.read(model, made[name]))
                if not following and done == 0:
                    number = self.count(time.perf_counter() - started)
                done += 1
                tick()
            if not reads_twice:
                further = self.compare(case, logits, None)
        entries = [case.entry(name, turns, further) for name in turns.seconds]
        shown = ", ".join(f"{entry['cache']} {entry['ratio']:.2f}" for entry in entries[1:])
        took = time.perf_counter() - begin
        self.say(
            f"{case.title}: transformers {entries[0]['seconds']:.2f} s, {shown} ({done} turns, {took:.0f} s in all)"
        )
        return entries, made

    def prompts(self, subject: Subject, dtype: str, lengths: Sequence[int]) -> list[dict[str, Any]]:
        """One prompt of each length, and a second turn behind one of them."""
        given, found = self.given, list[dict[str, Any]]()
        config = subject.model(dtype).config
        turns = 3
        before_turn = max((tokens for tokens in lengths if tokens <= MOST_BEFORE_TURN), default=None)
        for tokens in lengths:
            # Room for what follows.
            room = tokens + turns * given.turn

            def caches(room: int = room) -> dict[str, Any]:
                return {name: make(config, room) for name, make in self.makers.items()}

            case = Case(subject, dtype, self.prefix + ONE, tokens)
            entries, made = self.measure(case, Prompt(subject.ids(tokens)), caches)
            found += entries
            if tokens == before_turn:
                more = subject.ids(room)[:, tokens:].split(given.turn, 1)
                case = Case(subject, dtype, self.prefix + TURN, tokens)
                found += self.measure(case, Prompt(more[0]), lambda made=made: made, [Prompt(ids) for ids in more])[0]
            del made
        return found

    def batches(self, subject: Subject, dtype: str, longest: int) -> list[dict[str, Any]]:
        config, prompt = subject.model(dtype).config, subject.batch(longest)
        case = Case(subject, dtype, self.prefix + BATCH, longest)
        return self.measure(case, prompt, lambda: {name: make(config, longest) for name, make in self.makers.items()})[
            0
        ]


# What each section of a model measures


def in_dtype(run: Run, subject: Subject, dtype: str) -> dict[str, Any]:
    lengths = run.given.lengths if dtype == "bfloat16" else run.given.lengths_float32
    return {"cells": run.prompts(subject, dtype, lengths)}


def batches(run: Run, subject: Subject) -> dict[str, Any]:
    longest = run.given.batch
    found = run.batches(subject, "bfloat16", longest)
    return {"cells": found + run.batches(subject, "float32", longest // 4)}


def elsewhere(run: Run, subject: Subject, *arguments: str, may_be_wrong: bool = False, **environment: str) -> list[str]:
    """The lines that another process prints, which reads prompts of the same model.

    Args:
        run: the run.
        subject: the model.
        arguments: further ones, beside the model, the threads and whether it is a quick run.
        may_be_wrong: whether its exit code may be 1, which says that logits were wrong.
        environment: variables of the process.
    """
    sources = [part for source in run.given.model or () for part in ("--model", source)]
    same = ["--models", subject.name, "--threads", str(torch.get_num_threads()), *(["--quick"] if run.quick else [])]
    command = [sys.executable, __file__, *sources, *same, *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, int(may_be_wrong)):
        raise RuntimeError(f"another process ended with {done.returncode}: {' '.join(command)}")
    return done.stdout.splitlines()


def memory(run: Run, subject: Subject) -> dict[str, Any]:
    """The most memory that a process with the long prompt held, for transformers and two caches.

    It is the least of some processes of each, since threads and libraries take a little more in some.
    """
    names = [name for name in (TRANSFORMERS, DYNAMIC, INT4) if name in run.makers]
    processes = 1 if run.quick else PEAK_PROCESSES
    tick = run.ticking(f"{subject.name}, memory at {run.given.long:,}", len(names) * processes)
    entries: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for name in names * processes:
        lines = elsewhere(run, subject, "--peak", name, "--long", str(run.given.long), **RETURNED)
        entries[name].append(json.loads(lines[-1]))
        tick()
    found = dict[str, Any]()
    for name in names:
        peak, seconds = (min(entry[figure] for entry in entries[name]) for figure in ("peak", "seconds"))
        of_transformers = peak / min(entry["peak"] for entry in entries[TRANSFORMERS])
        found[name] = {"peak": peak, "seconds": seconds, "ratio": of_transformers}
        run.say(f"{subject.name}, {run.given.long:,}, {name}: {peak / 1e6:,.1f} MB, {seconds:.1f} s")
    return {"model": subject.name, "tokens": run.given.long, "peaks": found}


def uncompiled(run: Run, subject: Subject) -> dict[str, Any]:
    """Short prompts, a second turn and a batch in a process without kernels."""
    given = run.given
    lengths = ",".join(map(str, given.lengths_uncompiled))
    batch = str(given.batch // 2)
    sizes = ["--lengths", lengths, "--lengths-float32", str(given.lengths_uncompiled[0]), "--batch", batch]
    run.say(f"{subject.name}: a process without kernels reads {lengths} tokens and a batch")
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder, "found.json")
        chosen = ["--only", "bfloat16,float32,batch", "--caches", ",".join(given.caches), "--turn", str(given.turn)]
        chosen += ["--seconds", str(given.seconds), "--output", str(output)]
        for line in elsewhere(run, subject, *sizes, *chosen, may_be_wrong=True, **NEVER):
            # Without its tables and bars.
            if line.startswith(f"{subject.name}, "):
                run.say(line)
        content = json.loads(output.read_text())
    run.wrong += content["wrong"]
    return {"cells": tables.cells_of(content["results"]["prompts"])}


MEASURES: dict[str, Callable[[Run, Subject], dict[str, Any]]] = {
    "bfloat16": functools.partial(in_dtype, dtype="bfloat16"),
    "float32": functools.partial(in_dtype, dtype="float32"),
    "batch": batches,
    "memory": memory,
    "uncompiled": uncompiled,
}


# Attention of one layer


def measure_attention(run: Run, tokens: int, dtypes: Sequence[str] = ("bfloat16", "float32")) -> dict[str, Any]:
    """Attention of each shape beside a product of two matrices, all in turns."""
    found: dict[str, Any] = {}
    for dtype in dtypes:
        found[dtype] = {
            name: one_attention(run, name, shape, tokens, getattr(torch, dtype))
            for name, shape in ATTENTION_SHAPES.items()
        }
    return found


def one_attention(run: Run, name: str, shape: AttentionShape, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.randn(1, heads, tokens, shape.head_dim, generator=generator).to(dtype)

    query, keys, values = normal(shape.heads), normal(shape.kv_heads), normal(shape.kv_heads)
    mask, side = shape.mask(tokens), min(2048, 2 * tokens)
    matrix = torch.randn(side, side, generator=generator).to(dtype)
    config = Shape(1, shape.heads, shape.kv_heads, shape.head_dim).config()

    def attended(states: tuple[Tensor, Tensor]) -> Tensor:
        masking = {"attn_mask": mask, "is_causal": mask is None}
        return scaled_dot_product_attention(query, *states, **masking, enable_gqa=True)

    def attended_in_cache() -> Tensor:
        return attended(MAKERS[DYNAMIC](config, tokens).update(keys, values, 0))

    ways = {
        tables.GEMM: lambda: matrix @ matrix,
        tables.TORCH: lambda: attended((keys, values)),
        tables.KVLAYERS: attended_in_cache,
    }
    useful = 4 * shape.heads * shape.head_dim * shape.pairs(tokens)
    products = {tables.GEMM: 2 * side**3, tables.TORCH: useful, tables.KVLAYERS: useful}
    turns, tick = Turns(ways), run.ticking(f"attention, {name}, {str(dtype)[6:]}", 1)
    with quiet_clock():
        started = time.perf_counter()
        outputs = turns.take(lambda way: ways[way](), is_counted=False)
        exact = scaled_dot_product_attention(
            *(each.float() for each in (query, keys, values)), attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        for _ in range(max(3, run.count(time.perf_counter() - started)) if run.given.seconds else 1):
            turns.take(lambda way: ways[way]())
    tick()
    further = {way: apart(outputs[way].float(), exact) for way in (tables.TORCH, tables.KVLAYERS)}
    most = tables.MOST_APART_IN_FLOAT32 if dtype == torch.float32 else tables.MOST_FURTHER * further[tables.TORCH]
    run.expect(further[tables.KVLAYERS] <= most, f"attention, {name}, {dtype}: {further[tables.KVLAYERS]:.2g} apart")
    gemm = turns.seconds[tables.GEMM]
    entries: dict[str, Any] = {}
    for way, seconds in turns.seconds.items():
        number = products[way]
        shares = [number / one / (products[tables.GEMM] / other) for one, other in zip(seconds, gemm, strict=True)]
        entries[way] = {
            "seconds": turns.median(way),
            "rate": number / turns.median(way),
            "share": statistics.median(shares),
            **({"apart": further[way]} if way in further else {}),
        }
    both = ", ".join(f"{way} {entries[way]['share']:.2f}" for way in further)
    run.say(f"attention, {name}, {str(dtype)[6:]}: of {entries[tables.GEMM]['rate'] / 1e12:.2f} TFLOP/s, {both}")
    return entries


# One process and one cache


def most_of_this_process() -> int:
    """The most bytes that this process has held in memory since `forget_memory`, or ever where that does nothing."""
    with contextlib.suppress(OSError):
        return most_memory("self")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_memory() -> None:
    """Let the system forget how much memory this process has held, where it can: loading a model may take more."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5")


def print_peak(given: Any, subject: Subject) -> int:
    if given.threads:
        torch.set_num_threads(given.threads)
    model, ids = subject.workload.model, subject.ids(given.long)
    with quiet_clock():
        # Compilers and libraries are loaded, and no part of the prompt.
        Prompt(ids[:, :600]).read(model, MAKERS[given.peak](model.config, 600))
        cache = MAKERS[given.peak](model.config, given.long)
        gc.collect()
        forget_memory()
        begin = time.perf_counter()
        Prompt(ids).read(model, cache)
        seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "peak": most_of_this_process()}))
    return 0


# All of it


def subjects(given: Any) -> dict[str, Subject]:
    """The models by name. None is loaded before it is needed."""
    found = {}
    sources = given.model if given.model is not None else list(filter(None, [default_model()]))
    for source in [] if given.quick else sources:
        name = pathlib.Path(source).name
        found[name] = Subject(name, functools.partial(RealModel, source))
    for name, shape in SHAPES.items():
        if given.quick:
            heads = shape.heads // shape.kv_heads * 2
            shape = Shape(layers=2, heads=heads, kv_heads=2, head_dim=shape.head_dim, intermediate=128, vocab=256)
        found[name] = Subject(name, functools.partial(RandomModel, shape))
    return found


def parts_of(run: Run) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Each part by name, and what measures it."""
    known = subjects(run.given)
    for name in chosen_models(run.given, known):
        if name == tables.ATTENTION:
            yield name, lambda: {"shares": measure_attention(run, run.given.attention)}
            continue
        for section in run.given.only:
            yield tables.part_name(name, section), functools.partial(MEASURES[section], run, known[name])
        # The next model may need its memory.
        vars(known[name]).pop("workload", None)
        vars(known[name]).pop("in_float32", None)


def chosen_models(given: Any, known: Mapping[str, Subject]) -> list[str]:
    names = [*known, tables.ATTENTION]
    return names if given.models is None else given.models.split(",")


def measure(run: Run) -> dict[str, Any]:
    given, found = run.given, dict[str, Any]()
    begin = time.perf_counter()
    for name, part in parts_of(run):
        at, started = report.environment(), time.perf_counter()
        figures = part()
        found[name] = {"at": at, "seconds": round(time.perf_counter() - started, 1), **figures}
        run.say(f"{name}: {found[name]['seconds']:.0f} s, {time.perf_counter() - begin:.0f} s in all")
        if given.record:
            content = {**run.environment, "arguments": {"threads": given.threads}}
            pages.keep("prompts", {name: found[name]}, content)
    return found


def parse(arguments: Sequence[str] | None) -> Any:
    made = options()
    given = made.parse(arguments)
    names = [*subjects(given), tables.ATTENTION]
    if unknown := [name for name in (given.models or "").split(",") if name and name not in names]:
        made.parser.error(f"--models takes {', '.join(names)}, got {', '.join(unknown)}")
    for source in given.model or ():
        if not pathlib.Path(source, "config.json").is_file():
            made.parser.error(f"--model must be a directory with a config.json, got {source}")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    if given.peak:
        known = subjects(given)
        return print_peak(given, known[chosen_models(given, known)[0]])
    with report.session(given, Run) as run:
        if given.model is None and default_model() is None and not given.quick:
            run.say(report.NO_MODEL)
        found = measure(run)
        run.say(tables.page_section(found))
        for held in tables.held_of(found):
            bound = {"at_most": held.bound} if held.at_most else {"at_least": held.bound}
            run.target(held.what, held.value, **bound)
    code = run.finish({"prompts": found})
    if given.record:
        pages.write_pages(tables.written_pages())
    return code


if __name__ == "__main__":
    sys.exit(main())
