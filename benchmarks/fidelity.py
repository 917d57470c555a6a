"""Compares a model's predictions with quantized caches and with a cache in full precision.

    python benchmarks/fidelity.py                         # the demo model, about an hour on two idle cores
    python benchmarks/fidelity.py --model DIR --model DIR # other models, side by side
    python benchmarks/fidelity.py --quick                 # a small random model, to see that it runs

Real text is read in chunks through every cache, both the context and the scored part, so that the loss of each further
quantization adds up as it does in use. Each next-token distribution of the scored part is compared with the one from
the same model, in the same dtype, with transformers' DynamicCache. `--help` lists the options.

The model computes in float32 by default: in bfloat16, changing states by half a unit in the last place alone gives a
mean KL divergence of 0.002 and changes 2 % of the most likely tokens on SmolLM2-135M, more than a good cache of 8 bits
should. Bytes are for states in bfloat16, whatever dtype the model computes in.

The exit code is 1 if a cache in full precision scores other than zero, or if one of kvlayers' caches fails.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn
from torch import Tensor

from kvlayers.errors import OptionError
from kvlayers.tools.measuring.scoring import CacheMaker, NoRecord, Scores, read
from kvlayers.tools.measuring.text import default_text, passages
from lib import report
from lib.fidelity_report import plot, promises, show
from lib.outliers import KeyOutliers
from lib.quantized import EXACT, FULL, Contender, contenders, measure_bytes
from lib.workload import RandomModel, Shape, default_model

BACKENDS = ["kvlayers:native", "transformers:quanto", "transformers:hqq", "transformers:fp8"]
QUICK_SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=64, intermediate=128, vocab=256)
RANDOM = "random llama"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", action="append", help="directory or hub name; several times for several models")
    parser.add_argument("--text", type=pathlib.Path, help="what the models read (the topics of Python's help)")
    parser.add_argument("--passages", type=int, help="from places spread over the text (8)")
    parser.add_argument("--context", type=int, help="tokens of each read before scoring begins (2048)")
    parser.add_argument("--scored", type=int, help="tokens of each that are scored (1024)")
    parser.add_argument("--chunk", type=int, default=32, help="tokens read at once (32)")
    parser.add_argument("--bits", type=_numbers, default=[2, 3, 4, 8], help="separated by commas (2,3,4,8)")
    parser.add_argument("--outlier-bits", type=_numbers, default=[4], help="on the model with outliers (4)")
    parser.add_argument("--outlier", type=float, default=30.0, help="bias of its two key channels; 0 for none (30)")
    parser.add_argument("--backends", type=lambda text: text.split(","), default=BACKENDS, help=",".join(BACKENDS))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the model (float32)")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--plot", type=pathlib.Path, help="PNG or SVG of divergence against bytes; needs matplotlib")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file (benchmarks/results/fidelity-<date>.json)")
    parser.add_argument("--quick", action="store_true", help="a small random model and short passages")
    given = parser.parse_args(arguments)
    given.passages = given.passages or (2 if given.quick else 8)
    given.context = given.context or (448 if given.quick else 2048)
    given.scored = given.scored or (64 if given.quick else 1024)
    if given.chunk < 1 or given.context % given.chunk or given.scored % given.chunk:
        parser.error("--context and --scored must be multiples of --chunk")
    known = [
        f"{library}:{name}" for library in ("kvlayers", "transformers") for name in ("native", "quanto", "hqq", "fp8")
    ]
    if any(backend not in known for backend in given.backends):
        parser.error(f"--backends must be of {','.join(known)}")
    given.model = given.model or ([RANDOM] if given.quick else [default_model()])
    given.output = given.output or report.output_path("fidelity")
    return given


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def load(source: str, text: str, given: argparse.Namespace) -> tuple[Any, list[Tensor]]:
    """A model and its passages of token ids `[1, context + scored + 1]`."""
    dtype = getattr(torch, given.dtype)
    tokens = given.context + given.scored + 1
    if source == RANDOM:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(QUICK_SHAPE.vocab, (given.passages, tokens), generator=generator)
        return RandomModel(QUICK_SHAPE).model.to(dtype), list(ids[:, None])
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        raise SystemExit(f"{source} has a context of {limit} tokens, and passages have {tokens}: use shorter ones")
    try:
        return model, passages(transformers.AutoTokenizer.from_pretrained(source), text, given.passages, tokens)
    except OptionError as error:
        raise SystemExit(str(error)) from None


def measure(
    source: str, makers: dict[Contender, CacheMaker], text: str, given: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    """The figures of one model: `plain`, `outliers`, and the `bytes` per token of each contender."""
    model, texts = load(source, text, given)
    steps = (given.context + given.scored) // given.chunk * len(texts)
    name = pathlib.Path(source).name

    def ticking(what: str, total: int) -> Callable[[], None]:
        task = progress.add_task(f"{name}: {what}", total=total)
        return lambda: progress.advance(task)

    plain = read(model, texts, makers, given.context, given.chunk, NoRecord(), ticking("reading", steps))
    alive = {key: make for key, make in makers.items() if plain[key].failure is None}
    held = {}
    tick = ticking("bytes", len(alive))
    for key, make in list(alive.items()):
        try:
            held[key.name] = measure_bytes(make, model.config, given.context, given.scored, given.chunk)
        except Exception as error:
            # An early end would lose the results of an hour.
            plain[key].failure = f"its bytes: {type(error).__name__}: {error}"
            del alive[key]
        tick()
    results = {"model": name, "bytes": held, "plain": summaries(plain)}
    if given.outlier:
        few = {key: make for key, make in alive.items() if key.bits in (None, *given.outlier_bits)}
        with KeyOutliers("constant", given.outlier).applied(model):
            seen = read(model, texts, few, given.context, given.chunk, NoRecord(), ticking("with outliers", steps))
        results["outliers"] = summaries(seen)
    assembled = [key.name for key in alive if key.bits and type(makers[key](model.config)) is transformers.Cache]
    results["notes"] = [
        f"{each}: transformers.QuantizedCache refuses the windows of {name}; these are its layers, put together by "
        "hand, which hold every token"
        for each in assembled
    ]
    return results


def summaries(scores: dict[Contender, Scores]) -> dict[str, Any]:
    """The figures of each contender, by name."""
    return {key.name: {**key._asdict(), **score.summary()} for key, score in scores.items()}


def main(arguments: Sequence[str] | None = None, makers: dict[Contender, CacheMaker] | None = None) -> int:
    """Run it.

    Args:
        arguments: the command line.
        makers: caches to compare in place of those from `--backends` and `--bits`.

    Returns:
        The exit code: 1 if full precision scores other than zero, or if one of kvlayers' caches fails.
    """
    given = parse(arguments)
    console = report.terminal()
    if None in given.model:
        console.print("no real model: set KVLAYERS_DEMO_MODEL, bring it with `make demo`, or pass --model")
        return 1
    if given.threads:
        torch.set_num_threads(given.threads)
    environment = report.environment()
    chosen = contenders(given.backends, given.bits)
    caches = {**FULL, **({contender: contender.make for contender in chosen} if makers is None else makers)}
    text = given.text.read_text() if given.text else default_text()
    with report.progress_bars(console, TimeRemainingColumn()) as progress:
        results = [measure(source, caches, text, given, progress) for source in given.model]
    for measured in results:
        show(console, measured)
    # A random model attends to all tokens alike, so its figures say nothing about fidelity.
    targets = [] if given.quick else [target for measured in results for target in promises(measured)]
    report.show_targets(console, targets)
    report.write(console, given, environment, {"results": results, "targets": targets})
    if given.plot:
        plot(console, results, given.plot)
    return exit_code(console, results, given.chunk)


def exit_code(console: Console, results: list[dict[str, Any]], chunk: int) -> int:
    """Print every failure; return 1 if there is one, else 0."""
    found = []
    for measured in results:
        for kind in ("plain", "outliers"):
            for name, entry in measured.get(kind, {}).items():
                if entry["library"] == "kvlayers" and "failure" in entry:
                    found.append(f"{name} failed on {measured['model']}: {entry['failure']}")
                # For a single query over long keys, attention adds in another order.
                elif name == EXACT.name and chunk > 1 and entry["kl"] != 0:
                    found.append(f"{name} differs from full precision on {measured['model']}: {entry['kl']}")
    for line in found:
        console.print(f"[red]{line}[/]")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
