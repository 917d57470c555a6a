"""The claims in README.md and docs/benchmarks.md: the text of each claim, its bound, and the recorded measurement.

`claims.py` measures them. This module imports only the standard library, so that a test can compare the pages with the
record.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pages
import prompt_tables as of_prompts
from pages import DOCS, ROOT, markdown

README = ROOT / "README.md"
HOME, CHOOSING, BENCHMARKS = (DOCS / f"{name}.md" for name in ("index", "choosing", "benchmarks"))


@dataclass(frozen=True)
class Claim:
    """One figure and the bound that the pages give for it.

    Args:
        row: the row of the group's table, usually a cache.
        column: the column of the group's table: the quantity.
        bound: the figure that the pages give. It is conservative, so that a rerun on the same machine stays within it.
        at_most: whether the bound is an upper one. It is a lower one otherwise.
        form: the format specification for the bound and the figure.
    """

    row: str
    column: str
    bound: float
    at_most: bool = False
    form: str = "g"

    def holds(self, value: float) -> bool:
        return math.isfinite(value) and (value <= self.bound if self.at_most else value >= self.bound)

    @property
    def asked(self) -> str:
        """The bound as the tables write it."""
        return f"{'≤' if self.at_most else '≥'} {self.bound:{self.form}}"


@dataclass(frozen=True)
class Group:
    """Claims that come from one measurement.

    Args:
        name: its key in the record and, unless `also_by` is given, the name of its measurement on the command line.
        title: the heading of its table.
        conditions: model, dtype, tokens, batch size, and what is compared.
        claims: in the order of the table, row by row.
        figures: the anchor in docs/benchmarks.md of the section with more figures, if there is one.
        also_by: the measurement that answers it, if that is named after another group.
    """

    name: str
    title: str
    conditions: str
    claims: tuple[Claim, ...]
    figures: str = ""
    also_by: str = ""

    @property
    def measurement(self) -> str:
        return self.also_by or self.name


def at_least(row: str, column: str, bound: float, form: str = ".1f") -> Claim:
    return Claim(row, column, bound, form=form)


def at_most(row: str, column: str, bound: float, form: str = ".2f") -> Claim:
    return Claim(row, column, bound, at_most=True, form=form)


# Names of rows and columns. The record uses them as keys.
DYNAMIC, STATIC, INT8, FP8, INT4, INT2 = "`dynamic`", "`static`", "`int8`", "`fp8`", "`int4`", "`int2`"
OFFLOADED, OFFLOADED_PACKED = "`offloaded`", "`offloaded_quantized`"
QUANTO_4, QUANTO_2 = "transformers quanto, 4 bits", "transformers quanto, 2 bits"
FINE_4, FINE_2 = (f"{name}, groups of 16" for name in (QUANTO_4, QUANTO_2))
TIMES_AS_FAST = "times as fast as transformers' `DynamicCache`"
OF_PREALLOCATED = "speed relative to preallocated memory"
OF_DENSE = "bytes relative to dense"
OVER_QUANTO = "times as fast as quanto at 4 bits"
OVER_DYNAMIC = "times as fast as `dynamic`"
TIMES_STATIC = "times as fast as transformers' `StaticCache`"
EXACT_STATIC = "transformers `StaticCache` of the exact length"
OVER_EXACT_STATIC = f"times as fast as {EXACT_STATIC}"
TIME_OF_SMALL = "time relative to the smallest reservation"
SINK = "`sink`, 64 tokens held"
COMPILED_STATIC, EAGER_STATIC = f"{STATIC}, compiled", f"{STATIC}, eager"
FIRST_CALL, LATER_CALLS = "graphs, first call", "graphs, later calls"
UPDATES = (64, 1024)
BATCHES = ((8, 128), (32, 128), (8, 1024))
OVER_BETTER = "times as fast as the faster of transformers' dynamic and static"
KL, AGREEMENT = "KL", "agreement"
BYTES_A_TOKEN = "bytes a token"
TIMES_LESS = "times less KL than quanto"
BYTES_OF_QUANTO = "bytes relative to quanto"
LESS_THAN_FINE = "times less KL than quanto with groups of 16"
BYTES_OF_FINE = "bytes relative to quanto with groups of 16"
TIME_OF_TRANSFORMERS = "time relative to transformers' `DynamicCache`"
BYTES_OF_TRANSFORMERS = "bytes relative to transformers' `DynamicCache`"
TIMES_PERPLEXITY = "times lower perplexity than a window without sinks"
NEW_BYTES = "bytes a step to the host, relative to the new token"
MOST_ON_DEVICE = "peak bytes on the device, relative to the cache"
SENT_OF_OFFLOADED = "bytes a step to the device, relative to `offloaded`"
FROM_MEMORY, FROM_DISK = "`PrefixStore` in memory", "`PrefixStore` on disk"
TIME_OF_COLD = "time to the first token, relative to no store"
TIME_OF_DYNAMIC = "time relative to `dynamic`"
SHARE_OF_PRODUCT = "rate relative to a matrix product"
PEAK_OF_TRANSFORMERS = "peak memory relative to transformers' `DynamicCache`"
PROMPT_OF_8K, PROMPT_OF_4K = "8,192 tokens, `dynamic`", "4,096 tokens, `int4`"
PROMPT_OF_2K = "a prompt of 2,048 tokens, `dynamic`"
SLOWEST = "the slowest short prompt"
SLOWEST_UNCOMPILED = f"{SLOWEST}, without a kernel, `dynamic` and `static`"
SLOWEST_PACKED_UNCOMPILED = f"{SLOWEST}, without a kernel, `int8` and `int4`"
PEAK = "16,384 tokens, `dynamic`"


def batch_row(batch: int, tokens: int) -> str:
    return f"{batch} sequences of {tokens:,} tokens"


LARGE_LENGTHS = (4096, 16384)
"""Tokens held in steps of the model with more than a billion weights."""

LENGTHS = (1024, 4096, 8192, 16384)
"""Tokens held in the picture of README.md and in the table of docs/benchmarks.md."""

TRANSFORMERS = "transformers `DynamicCache`"
MILLISECONDS, MEGABYTES = "ms a step", "MB held"


def length_row(row: str, tokens: int) -> str:
    return f"{row}, {tokens:,} tokens"


def update_row(tokens: int) -> str:
    return f"{tokens:,} tokens held"


LLAMA = "The model is a random llama in bfloat16, of 8 layers with 16 heads and 8 KV heads of 64. The batch is 1"
SMOLLM2 = f"{of_prompts.SMOLLM2} (30 layers, 9 heads, 3 KV heads of 64; {of_prompts.CONVERTED}) reads real text"

GROUPS = (
    Group(
        "step",
        "A decode step at 16,384 tokens",
        f'{LLAMA}, and the cache holds 16,384 tokens. "Preallocated memory" is a cache of the exact final length '
        "that is written in place, without any checks.",
        (
            at_least(DYNAMIC, TIMES_AS_FAST, 4),
            at_least(DYNAMIC, OF_PREALLOCATED, 0.9, ".2f"),
            at_most(DYNAMIC, OF_DENSE, 1.13),
            at_least(INT8, TIMES_AS_FAST, 5),
            at_most(INT8, OF_DENSE, 0.55),
            at_least(FP8, TIMES_AS_FAST, 4.5),
            at_most(FP8, OF_DENSE, 0.53),
            at_least(INT4, TIMES_AS_FAST, 5),
            at_least(INT4, OVER_DYNAMIC, 1.05, ".2f"),
            at_least(INT4, OVER_QUANTO, 6, ".0f"),
            at_most(INT4, OF_DENSE, 0.3),
            at_least(INT2, TIMES_AS_FAST, 5),
            at_most(INT2, OF_DENSE, 0.18),
            at_most(QUANTO_4, TIMES_AS_FAST, 0.9),
            at_most(QUANTO_4, OF_DENSE, 0.29),
        ),
        "a-decode-step",
    ),
    Group(
        "baseline",
        "The best that transformers can do",
        f"{LLAMA}, and the cache holds 16,384 tokens; nothing is compiled. transformers' `StaticCache` reserves "
        "exactly as many tokens as the cache will hold.",
        (
            at_least(EXACT_STATIC, TIMES_AS_FAST, 1.5),
            at_most(EXACT_STATIC, OF_DENSE, 1.01),
            at_least(DYNAMIC, OVER_EXACT_STATIC, 1.2),
            at_least(INT4, OVER_EXACT_STATIC, 1.4),
        ),
        "a-decode-step",
    ),
    Group(
        "large",
        "A model with more than a billion weights",
        "Random weights in bfloat16, in the shape of Llama-3.2-1B: 16 layers, 32 heads and 8 KV heads of 64, 128,256 "
        "words. A step reads 2.5 GB of weights, whatever the cache.",
        (
            at_least(length_row(DYNAMIC, 4096), TIMES_AS_FAST, 1.5),
            at_least(length_row(DYNAMIC, 16384), TIMES_AS_FAST, 3.0),
            at_least(length_row(INT4, 4096), TIMES_AS_FAST, 1.5),
            at_least(length_row(INT4, 16384), TIMES_AS_FAST, 3.0),
            at_most(PROMPT_OF_2K, TIME_OF_TRANSFORMERS, 0.9),
        ),
    ),
    Group(
        "batches",
        "A decode step of a batch",
        f"{SMOLLM2} in bfloat16. `dynamic` and transformers' caches take turns.",
        (
            at_least(batch_row(8, 128), TIMES_AS_FAST, 1.2),
            at_least(batch_row(8, 128), OVER_BETTER, 0.93, ".2f"),
            at_least(batch_row(32, 128), TIMES_AS_FAST, 1.6),
            at_least(batch_row(32, 128), OVER_BETTER, 0.93, ".2f"),
            at_least(batch_row(8, 1024), TIMES_AS_FAST, 1.5),
            at_least(batch_row(8, 1024), OVER_BETTER, 0.93, ".2f"),
        ),
    ),
    Group(
        "static",
        "A decode step with a large reservation",
        f"{LLAMA}, and the cache holds 1,024 tokens. Both libraries reserve 32,768 tokens; the smallest reservation "
        "is 1,088 tokens.",
        (
            at_least(COMPILED_STATIC, TIMES_STATIC, 10, ".0f"),
            at_most(COMPILED_STATIC, TIME_OF_SMALL, 1.3),
            at_least(EAGER_STATIC, TIMES_STATIC, 2.5),
            at_most(EAGER_STATIC, TIME_OF_SMALL, 1.15),
        ),
    ),
    Group(
        "graphs",
        "Graphs that `generate()` compiles",
        "`static` reserves 4,096 tokens, and 512 tokens follow a prompt of 200, so that decode steps reach three "
        "buckets. The model is a random llama of 2 layers: the number of graphs depends on neither the size nor the "
        "backend.",
        (
            at_most(STATIC, FIRST_CALL, 2, ".0f"),
            at_most(STATIC, LATER_CALLS, 0, ".0f"),
        ),
    ),
    Group(
        "fidelity",
        "How rounding changes predictions",
        f"{SMOLLM2} in float32, one passage: 2,048 tokens of context and 1,024 scored tokens, read 64 at a time. KL is "
        "the mean divergence of the next-token distribution from the one with transformers' `DynamicCache`, in "
        "nats. Agreement is how often the most likely token is the same. Bytes are for states in bfloat16, for which a "
        "dense cache takes 23,040 bytes a token.",
        (
            at_most(INT8, KL, 0.00001, ".5f"),
            at_least(INT8, AGREEMENT, 0.995, ".1%"),
            at_most(INT8, BYTES_A_TOKEN, 13_700, ",.0f"),
            at_most(FP8, KL, 0.0012, ".4f"),
            at_least(FP8, AGREEMENT, 0.97, ".1%"),
            at_most(FP8, BYTES_A_TOKEN, 13_400, ",.0f"),
            at_most(INT4, KL, 0.002, ".4f"),
            at_least(INT4, AGREEMENT, 0.97, ".1%"),
            at_most(INT4, BYTES_A_TOKEN, 8_100, ",.0f"),
            at_most(INT2, KL, 0.06, ".3f"),
            at_least(INT2, AGREEMENT, 0.85, ".1%"),
            at_most(INT2, BYTES_A_TOKEN, 5_400, ",.0f"),
            at_least(QUANTO_4, KL, 0.015, ".4f"),
            at_most(QUANTO_4, AGREEMENT, 0.94, ".1%"),
            at_most(QUANTO_4, BYTES_A_TOKEN, 6_900, ",.0f"),
            at_least(FINE_4, KL, 0.007, ".4f"),
            at_most(FINE_4, AGREEMENT, 0.96, ".1%"),
            at_most(FINE_4, BYTES_A_TOKEN, 9_000, ",.0f"),
            at_least(QUANTO_2, KL, 2, ".3f"),
            at_most(QUANTO_2, AGREEMENT, 0.3, ".1%"),
            at_most(QUANTO_2, BYTES_A_TOKEN, 4_000, ",.0f"),
            at_least(FINE_2, KL, 0.4, ".3f"),
            at_most(FINE_2, AGREEMENT, 0.7, ".1%"),
            at_most(FINE_2, BYTES_A_TOKEN, 6_200, ",.0f"),
        ),
        "fidelity-of-quantized-caches",
    ),
    Group(
        "ratios",
        "Rounding compared with quanto",
        "This is the same run. At 3,072 tokens and with the defaults, `int4` and `int2` hold more bytes than "
        "quanto, because they keep the sinks and more of the newest tokens in full precision. With groups of 16 "
        "numbers instead of 64, quanto holds more bytes.",
        (
            at_least(INT4, TIMES_LESS, 10, ".0f"),
            at_most(INT4, BYTES_OF_QUANTO, 1.2),
            at_least(INT4, LESS_THAN_FINE, 5, ".0f"),
            at_most(INT4, BYTES_OF_FINE, 1),
            at_least(INT2, TIMES_LESS, 40, ".0f"),
            at_most(INT2, BYTES_OF_QUANTO, 1.4),
            at_least(INT2, LESS_THAN_FINE, 8, ".0f"),
            at_most(INT2, BYTES_OF_FINE, 1),
        ),
        also_by="fidelity",
    ),
    Group(
        "update",
        "An update of one layer by one token",
        "The layer has 3 KV heads of 64 in bfloat16, and times include Python. `dynamic` checks its input and "
        "writes in place; transformers' cache copies all earlier tokens. So `dynamic` is slower until there are "
        "many of them.",
        (
            at_most(update_row(UPDATES[0]), TIME_OF_TRANSFORMERS, 3, ".1f"),
            at_most(update_row(UPDATES[1]), TIME_OF_TRANSFORMERS, 0.8, ".1f"),
        ),
    ),
    Group(
        "window",
        "Memory of a model with sliding windows",
        "A random mistral in bfloat16, of 8 layers with 8 KV heads of 64 and a window of 512, has read a prompt of "
        "4,096 tokens.",
        (at_most(DYNAMIC, BYTES_OF_TRANSFORMERS, 0.2),),
    ),
    Group(
        "sinks",
        "A text of several windows with sinks",
        f"{SMOLLM2} in float32: a text of 8 windows of 64 tokens, token by token; the second half is scored.",
        (at_least(SINK, TIMES_PERPLEXITY, 1.5),),
    ),
    Group(
        "latents",
        "A decode step of a model with latents",
        "The model is like DeepSeek-V3, with random weights in bfloat16: 8 layers, 16 heads, latents of 512 channels "
        "and rotated keys of 64. The cache holds 4,096 tokens.",
        (at_least(DYNAMIC, TIMES_AS_FAST, 8),),
    ),
    Group(
        "offload",
        "Offloading traffic",
        "The model is a random llama in bfloat16, of 4 layers with 2 KV heads of 32, with 2,048 tokens. Two pools "
        "of host memory stand for a device and its host.",
        (
            at_most(OFFLOADED, NEW_BYTES, 1),
            at_most(OFFLOADED, MOST_ON_DEVICE, 0.5),
            at_most(OFFLOADED_PACKED, NEW_BYTES, 1),
            at_most(OFFLOADED_PACKED, MOST_ON_DEVICE, 0.5),
            at_most(OFFLOADED_PACKED, SENT_OF_OFFLOADED, 0.4),
        ),
    ),
    Group(
        "prefix",
        "A prompt with a stored prefix",
        f"{SMOLLM2} in float32. The store holds 2,048 tokens, and the prompt has 16 more. The time is of a whole "
        "call of `generate()`.",
        (
            at_most(FROM_MEMORY, TIME_OF_COLD, 0.1, ".0%"),
            at_most(FROM_DISK, TIME_OF_COLD, 0.15, ".0%"),
        ),
    ),
    Group(
        "prompts",
        "A new prompt",
        f"{SMOLLM2} in bfloat16, one prompt at a time. The slowest short prompt is that of `dynamic`, `int8`, `int4` "
        "and `static`, and of 512 tokens, a second turn of 256 and a batch of four, padded on the left. Its model "
        "is a random llama of 4 layers.",
        (
            at_most(PROMPT_OF_8K, TIME_OF_TRANSFORMERS, of_prompts.MOST_OF_SMOLLM2),
            at_most(PROMPT_OF_4K, TIME_OF_DYNAMIC, of_prompts.MOST_OF_INT4),
            at_most(SLOWEST, TIME_OF_TRANSFORMERS, of_prompts.MOST_OF_ANY),
            at_most(SLOWEST_UNCOMPILED, TIME_OF_TRANSFORMERS, of_prompts.MOST_WITHOUT_KERNEL),
            at_most(SLOWEST_PACKED_UNCOMPILED, TIME_OF_TRANSFORMERS, of_prompts.MOST_PACKED_WITHOUT_KERNEL),
        ),
        "prompts",
    ),
    Group(
        "gemma",
        "A new prompt of a model with sliding windows",
        "Gemma-3-270M (18 layers, of which 15 have a window of 512, 4 heads and 1 KV head of 256) reads "
        "real text in bfloat16, one prompt at a time.",
        (at_most(PROMPT_OF_8K, TIME_OF_TRANSFORMERS, of_prompts.MOST_OF_GEMMA),),
        "prompts",
    ),
    Group(
        "attention",
        "Attention of a prompt beside a matrix product",
        "One layer, 4,096 tokens, bfloat16. The rate is that of the products that the mask asks for.",
        tuple(at_least(name, SHARE_OF_PRODUCT, least, ".2f") for name, least in of_prompts.LEAST_SHARES.items()),
        "prompts",
    ),
    Group(
        "peak",
        "Peak memory of a prompt",
        "Random llama of 4 layers with 16 heads and 8 KV heads of 64, bfloat16, each cache in processes of its own, "
        "with the model and all libraries: the least of three, in which each tensor of a megabyte goes back to the "
        "system at once (`MALLOC_MMAP_THRESHOLD_`).",
        (at_most(PEAK, PEAK_OF_TRANSFORMERS, of_prompts.MOST_MEMORY),),
        "prompts",
    ),
)

Cells = Mapping[str, Mapping[str, float]]
"""The figures of a measurement, by row and column."""


def value_of(record: Mapping[str, Any], group: Group, claim: Claim) -> float | None:
    """The figure of a claim in a record, or `None` if the record lacks it."""
    value: float | None = record.get(group.name, {}).get("cells", {}).get(claim.row, {}).get(claim.column)
    return value


def tables(record: Mapping[str, Any]) -> str:
    """The section in docs/benchmarks.md: a table for each group, with the bound and the recorded figure in each cell.

    What was never measured is not claimed.
    """
    groups = [group for group in GROUPS if group.name in record]
    usual, _ = Counter(_where(record[group.name]) for group in groups).most_common(1)[0]
    said = f"Measured, where nothing else is said: {usual}"
    return "\n\n".join([said, *(_table(record, group, usual) for group in groups)])


def _table(record: Mapping[str, Any], group: Group, usual: str) -> str:
    columns = list(dict.fromkeys(claim.column for claim in group.claims))
    cells: dict[str, dict[str, str]] = {}
    for claim in group.claims:
        value = value_of(record, group, claim)
        seen = "not recorded" if value is None else written(value, claim.form)
        cells.setdefault(claim.row, {})[claim.column] = f"{claim.asked} ({seen})"
    more = f" [More figures](#{group.figures})." if group.figures else ""
    where = _where(record[group.name])
    conditions = f"{group.conditions}{'' if where == usual else f' {where}'}{more}"
    rows = [[row, *(own.get(column, "") for column in columns)] for row, own in cells.items()]
    return "\n\n".join([f"### {group.title}", conditions, markdown(["", *columns], rows)])


def written(value: float, form: str) -> str:
    """A measured figure, with one digit more than its bound if the format gives a number of digits."""
    more = re.fullmatch(r"\.(\d)([f%])", form)
    return f"{value:.{int(more[1]) + 1}{more[2]}}" if more else f"{value:{form}}"


def _where(found: Mapping[str, Any]) -> str:
    at = found["at"]
    threads = found["threads"]
    return (
        f"{at['date'][:10]}, {at['hardware']['cpu']}, {threads} {'thread' if threads == 1 else 'threads'}, torch "
        f"{at['versions']['torch']}, transformers {at['versions']['transformers']}."
    )


COMPARED = (
    (EXACT_STATIC, EXACT_STATIC),
    ("transformers `QuantizedCache`, quanto, 4 bits", QUANTO_4),
    ("kvlayers `DynamicCache`", DYNAMIC),
    ("kvlayers `int8`", INT8),
    ("kvlayers `int4`", INT4),
    ("kvlayers `int2`", INT2),
)
"""The rows of the table in README.md, with the names of their rows in the record."""


BESIDE_STATIC = (
    "transformers' `StaticCache` gets exactly the length that it needs. It must know that length and the batch size in "
    "advance: [what else it asks for]({docs}choosing.md#beside-transformers-staticcache)"
)


def readme_table(record: Mapping[str, Any], docs: str) -> str:
    """The table in README.md and on the home page: bytes, step time and fidelity, beside transformers' `DynamicCache`.

    Args:
        record: what was measured.
        docs: path of the other pages, as links have it.
    """
    steps, rounding, baseline = (record[name]["cells"] for name in ("step", "fidelity", "baseline"))
    steps = {**steps, EXACT_STATIC: baseline[EXACT_STATIC]}
    rows = [["transformers `DynamicCache`", "1", "1", "reference"]]
    for title, row in COMPARED:
        speed = steps[row][TIMES_AS_FAST]
        step = f"{speed:.1f}" if speed >= 1 else f"{speed:.2f}"
        kept = f"rounded, {rounding[row][AGREEMENT]:.1%} same top token" if row in rounding else "exact"
        rows.append([title, f"{steps[row][OF_DENSE]:.2f}", step, kept])
    return "\n\n".join(
        [
            markdown(["cache", "memory, as a share", "decode step, times as fast", "predictions"], rows),
            f"At 16,384 tokens, relative to transformers' `DynamicCache`. {LLAMA}. {_where(record['step'])} \"Same "
            'top token": how often the most likely next token stays the same, for SmolLM2-135M-Instruct in float32 '
            f"({of_prompts.CONVERTED}) on 1,024 tokens of real text after 2,048. [More "
            f"figures]({docs}benchmarks.md#claims)",
            BESIDE_STATIC.format(docs=docs),
        ]
    )


def headline(record: Mapping[str, Any], prompts: Mapping[str, Any]) -> str:
    """What README.md and the home page say first: how much faster steps and prompts are, by length.

    Args:
        record: the claims that were measured.
        prompts: the record of prompts.
    """
    cells = record["step"]["cells"]
    steps = [(f"after {tokens:,}", cells[length_row(DYNAMIC, tokens)][TIMES_AS_FAST]) for tokens in LENGTHS]
    prompt = {"model": of_prompts.SMOLLM2, "dtype": "bfloat16", "case": of_prompts.ONE, "cache": of_prompts.DYNAMIC}
    read = [
        (f"for {cell['tokens']:,}", 1 / cell["ratio"])
        for cell in of_prompts.find(of_prompts.cells_of(prompts), **prompt)
    ]
    of_large = record["large"]["cells"]
    large = [(f"after {tokens:,}", of_large[length_row(DYNAMIC, tokens)][TIMES_AS_FAST]) for tokens in LARGE_LENGTHS]
    lines = [
        f"{of_prompts.SMOLLM2} reads a prompt {_times(read)}",
        f"a random llama with 1.2 billion weights decodes {_times(large)}",
        f"a random llama of 8 layers decodes {_times(steps)}",
        f"`int4` holds {cells[INT4][OF_DENSE]:.0%} of the bytes of 16,384 tokens there, and decodes "
        f"{cells[INT4][OVER_DYNAMIC]:.1f} times as fast as kvlayers' own `dynamic`.",
    ]
    threads = record["step"]["threads"]
    parts = [
        f"**On a CPU** ({threads} threads, bfloat16), beside transformers' `DynamicCache`:",
        "\n".join(f"- {line}" for line in lines),
        f"({of_prompts.SMOLLM2} is the one that `make demo` downloads: {of_prompts.CONVERTED}.)",
    ]
    return "\n\n".join(parts)


def _times(figures: Sequence[tuple[str, float]]) -> str:
    (where, ratio), *others = figures
    *most, last = [f"{ratio:.1f} times as fast {where} tokens", *(f"{ratio:.1f} {where}" for where, ratio in others)]
    return f"{', '.join(most)} and {last};"


DRAWN = ((TRANSFORMERS, TRANSFORMERS), ("kvlayers `DynamicCache`", DYNAMIC), ("kvlayers `int4`", INT4))
"""The caches whose steps are shown by length, with the names of their rows in the record."""


def steps_table(record: Mapping[str, Any]) -> str:
    """The table of decode steps in docs/benchmarks.md, from the record of the picture and the table in README.md."""
    cells = record["step"]["cells"]
    titles = [title for title, _ in DRAWN]
    rows = []
    for tokens in LENGTHS:
        found = [cells[length_row(row, tokens)] for _, row in DRAWN]
        times = [f"{each[MILLISECONDS]:.1f} ms" for each in found]
        held = [f"{each[MEGABYTES]:.0f}" for each in found]
        ratios = ", ".join(f"{each[TIMES_AS_FAST]:.1f}" for each in found[1:])
        rows.append([f"{tokens:,}", *times, ratios, *held])
    head = ["tokens held", *titles, "times as fast", *(f"{title}, MB" for title in titles)]
    return f"{LLAMA}. {_where(record['step'])}\n\n{markdown(head, rows)}"


def written_pages() -> pages.Pages:
    """The pages with the tables of the newest record."""
    record = pages.parts("claims")
    short = {README: readme_table(record, "docs/"), **dict.fromkeys((HOME, CHOOSING), readme_table(record, ""))}
    of_pages = {(page, "table"): text for page, text in short.items()}
    of_pages[BENCHMARKS, "claims"] = tables(record)
    of_pages[BENCHMARKS, "steps"] = steps_table(record)
    for page in (README, HOME):
        of_pages[page, "headline"] = headline(record, pages.parts("prompts"))
    return pages.written("claims", of_pages)
