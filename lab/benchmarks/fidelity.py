"""Compares a model's predictions with quantized caches and with a cache in full precision.

    python lab/benchmarks/fidelity.py                         # the demo model, about an hour on two idle cores
    python lab/benchmarks/fidelity.py --model DIR --model DIR # other models, side by side
    python lab/benchmarks/fidelity.py --quick                 # a small random model, to see that it runs

Real text is read in chunks through every cache, both the context and the scored part, so that the loss of each further
quantization adds up as it does in use. Each next-token distribution of the scored part is compared with the one from
the same model, in the same dtype, with transformers' DynamicCache. `--help` lists the options.

The model computes in float32 by default: in bfloat16, changing states by half a unit in the last place alone gives a
mean KL divergence of 0.002 and changes 2 % of the most likely tokens on SmolLM2-135M, more than a good cache of 8 bits
should. Bytes are for states in bfloat16, whatever dtype the model computes in.

The exit code is 1 if a cache in full precision scores other than zero, or if one of kvlayers' caches fails.
"""

import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import transformers

from lib import report
from lib.internals import CacheMaker, NoRecord, PassageScores, read
from lib.quantized import EXACT, FULL, RANDOM, REFERENCE, Contender, contenders, load, measure_bytes, summaries
from lib.report import shown

BASELINES = ("quanto", "hqq")
BACKENDS = ("kvlayers:native", "transformers:quanto", "transformers:hqq", "transformers:fp8")
KNOWN = [f"{library}:{name}" for library in ("kvlayers", "transformers") for name in ("native", "quanto", "hqq", "fp8")]


def options() -> report.Options:
    made = report.Options("fidelity", __doc__, quick="a small random model and short passages")
    made.add("--model", action="append", help="directory or hub name; several times for several models")
    made.add("--text", type=pathlib.Path, help="what the models read (the topics of Python's help)")
    made.sized("--passages", 8, 2, "from places spread over the text")
    made.sized("--context", 2048, 448, "tokens of each read before scoring begins")
    made.sized("--scored", 1024, 64, "tokens of each that are scored")
    made.sized("--chunk", 32, 32, "tokens read at once")
    made.sized("--bits", [2, 3, 4, 8], [2, 3, 4, 8], "separated by commas", report.numbers)
    made.some_of("--backends", KNOWN, "libraries and backends", BACKENDS)
    made.dtype("float32", ("float32", "bfloat16"))
    return made


def parse(arguments: Sequence[str] | None) -> Any:
    made = options()
    given = made.parse(arguments)
    if given.chunk < 1 or given.context % given.chunk or given.scored % given.chunk:
        made.parser.error("--context and --scored must be multiples of --chunk")
    given.model = given.model or ([RANDOM] if given.quick else list(filter(None, [report.default_model()])))
    if not given.model:
        made.parser.error(report.NO_MODEL)
    return given


def measure(run: report.Session, source: str, makers: dict[Contender, CacheMaker], given: Any) -> dict[str, Any]:
    """The figures of one model: those of its predictions, `plain`, and the `bytes` per token of each contender."""
    model, texts = load(source, given.text, given.dtype, given.passages, given.context + given.scored + 1)
    steps = (given.context + given.scored) // given.chunk * len(texts)
    name = pathlib.Path(source).name
    tick = run.ticking(f"{name}: reading", steps)
    plain = read(model, texts, makers, given.context, given.chunk, NoRecord(), tick)
    alive = {key: make for key, make in makers.items() if plain[key].failure is None}
    held = {}
    tick = run.ticking(f"{name}: bytes", len(alive))
    for key, make in list(alive.items()):
        try:
            held[key.name] = measure_bytes(make, model.config, given.context, given.scored, given.chunk)
        except Exception as error:
            # An early end would lose the results of an hour.
            plain[key].passages.append(PassageScores(failure=f"its bytes: {type(error).__name__}: {error}"))
            del alive[key]
        tick()
    results = {"model": name, "bytes": held, "plain": summaries(plain)}
    assembled = [key.name for key in alive if key.bits and type(makers[key](model.config)) is transformers.Cache]
    results["notes"] = [
        f"{each}: transformers.QuantizedCache refuses the windows of {name}; these are its layers, put together by "
        "hand, which hold every token"
        for each in assembled
    ]
    return results


def better_baseline(measured: dict[str, Any], bits: int | None) -> dict[str, Any] | None:
    """The figures of transformers' quanto or hqq, whichever diverges less; `None` if neither ran."""
    names = [Contender("transformers", backend, bits).name for backend in BASELINES]
    entries = [measured.get(name, {}) for name in names]
    # Comparisons with a divergence of nan are always false.
    return min(
        (entry for entry in entries if math.isfinite(entry.get("kl", math.nan))),
        key=lambda entry: entry["kl"],
        default=None,
    )


def show(run: report.Session, measured: dict[str, Any]) -> None:
    columns = {"KL": shown("kl", ".3g"), "99th": shown("kl_99", ".3g"), "over better": shown("over_better", ".4f")}
    columns |= {"perplexity": shown("perplexity", ".3f"), "agreement": shown("agreement", ".2%")}
    columns |= {"bytes/token": shown("bytes", ",.0f"), "of dense": shown("of_dense", ".4f")}
    dense = measured["bytes"][REFERENCE.name]["bytes"]
    rows, failures, plain = {}, {}, measured["plain"]
    for name, entry in plain.items():
        if "failure" in entry:
            failures[f"{name} failed: {entry['failure']}"] = None
            continue
        held, baseline = measured["bytes"][name]["bytes"], better_baseline(plain, entry["bits"])
        rows[name] = {**entry, "bytes": held, "of_dense": held / dense}
        rows[name]["over_better"] = entry["kl"] / baseline["kl"] if baseline else None
    title = f"{measured['model']} (perplexity in full precision: {plain[REFERENCE.name]['perplexity']:.3f})"
    run.table(title, "cache", {"": rows}, {**columns, "seconds": shown("seconds", ".0f")})
    for line in (*failures, *measured["notes"]):
        run.console.print(line, markup=False)


def check(run: report.Session, measured: dict[str, Any]) -> None:
    """Full precision scores zero, and none of kvlayers' caches fails."""
    for name, entry in measured["plain"].items():
        on = f"{name} on {measured['model']}"
        if "failure" in entry:
            run.expect(entry["library"] != "kvlayers", f"{on} failed: {entry['failure']}")
        # For a single query over long keys, attention adds in another order.
        elif name == EXACT.name and run.given.chunk > 1:
            run.expect(entry["kl"] == 0, f"{on} differs from full precision: {entry['kl']}")


def main(arguments: Sequence[str] | None = None, makers: dict[Contender, CacheMaker] | None = None) -> int:
    """Run it.

    Args:
        arguments: the command line.
        makers: caches to compare in place of those from `--backends` and `--bits`.

    Returns:
        The exit code: 1 if full precision scores other than zero, or if one of kvlayers' caches fails.
    """
    given = parse(arguments)
    chosen = contenders(given.backends, given.bits)
    caches = {**FULL, **({contender: contender.make for contender in chosen} if makers is None else makers)}
    with report.session(given) as run:
        results = [measure(run, source, caches, given) for source in given.model]
    for measured in results:
        show(run, measured)
        check(run, measured)
    return run.finish(results)


if __name__ == "__main__":
    sys.exit(main())
