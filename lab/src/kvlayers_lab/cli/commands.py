"""The commands of the lab, but `fidelity`: their options. What they do is imported late, since torch takes seconds to
import, and `--help` does not need it.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvlayers.commands.common import CHECK_FAILED, FLAG, INPUT_ERROR, Dtype, one_line_errors
from kvlayers_lab.cli.fidelity import fidelity
from kvlayers_lab.names import BENCH_REPORT, HUB_NAME, TRANSFORMERS_CACHES


def bench(
    model: Annotated[
        str | None, typer.Argument(help=f"Model directory, or name on the hub. Default: {HUB_NAME}.")
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, separated by commas, cut to the model's positions.")
    ] = "128,1k,4k",
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Decode steps after each prompt.")] = 32,
    trials: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each cache; the tables show medians.")] = 3,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Sequences in the batch.")] = 1,
    text: Annotated[Path | None, typer.Option(help="File with the prompt text. Default: Python's help.")] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--cache",
            help="A cache of kvlayers, also with options (sink:window_length=512); repeat for several. Default: the "
            "exact ones, int8 and int4.",
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A cache of transformers ({', '.join(TRANSFORMERS_CACHES)}); repeat for several. The dynamic one "
            "always runs. Default: all whose packages are installed."
        ),
    ] = None,
    dtype: Annotated[
        Dtype,
        typer.Option(
            metavar="DTYPE",
            help="float32, bfloat16, float16, or auto: bfloat16, but float32 on a CPU without bfloat16 instructions.",
        ),
    ] = Dtype.auto,
    device: Annotated[str | None, typer.Option(help="Default: cuda if available, else cpu.")] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1024, help="CPU threads. Default: torch's choice.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help=f"HTML file to write. Default: {BENCH_REPORT}.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", metavar=FLAG, help="Print JSON on stdout, everything else on stderr.")
    ] = False,
) -> None:
    """Measure the speed and memory of kvlayers' and transformers' caches on this machine, with an HTML report.

    Exits with 1 if an exact cache of kvlayers gives other tokens than transformers' DynamicCache (ties aside) or any
    cache of kvlayers fails, and with 2 if the input cannot be used.
    """
    from kvlayers_lab.cli.bench_results import run

    passed = run(
        model=model,
        lengths=lengths,
        steps=steps,
        trials=trials,
        batch=batch,
        text=text,
        names=name,
        against=against,
        dtype=dtype,
        device=device,
        threads=threads,
        report=report,
        as_json=as_json,
    )
    if not passed:
        raise typer.Exit(CHECK_FAILED)


def calibrate(
    model: Annotated[
        str | None, typer.Argument(help=f"Model directory, or name on the hub. Default: {HUB_NAME}.")
    ] = None,
    bytes_per_token: Annotated[
        str | None,
        typer.Option(help="Budget: bytes that a packed token may take over all layers, such as 5040 or 5KiB."),
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(help="The other budget: mean KL divergence from full precision, in nats a token.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="File that the model reads. Default: Python's help.")] = None,
    output: Annotated[Path, typer.Option(help="Where to write the result: a .json file, or a directory.")] = Path(),
    bits: Annotated[
        str | None, typer.Option(help="Bits to choose from, separated by commas. Default: all of the backend.")
    ] = None,
    backend: Annotated[str, typer.Option(help="Quantization backend.")] = "native",
    context: Annotated[str, typer.Option(help="Tokens of each passage before the scored ones.")] = "1024",
    scored: Annotated[str, typer.Option(help="Tokens of each passage to score.")] = "64",
    passages: Annotated[int, typer.Option(metavar="N", min=1, help="Passages, spread over the text.")] = 4,
    dtype: Annotated[
        Dtype,
        typer.Option(
            metavar="DTYPE",
            help="Dtype that the model computes in: float32, bfloat16, float16, or auto: bfloat16, but float32 on a "
            "CPU without bfloat16 instructions.",
        ),
    ] = Dtype.float32,
    states: Annotated[
        Dtype,
        typer.Option(
            metavar="DTYPE",
            help="Dtype of the states in use, for which bytes are counted: float32, bfloat16, float16, or auto, as "
            "--dtype.",
        ),
    ] = Dtype.bfloat16,
    device: Annotated[str | None, typer.Option(help="Default: cuda if available, else cpu.")] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1024, help="CPU threads. Default: torch's choice.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", metavar=FLAG, help="Print JSON on stdout, everything else on stderr.")
    ] = False,
) -> None:
    """Choose bits for the keys and values of each layer, within a budget of bytes or of KL divergence.

    It takes minutes, and writes the result as JSON. `kvlayers fidelity --calibration` measures it on another text.

    Exits with 1 if the KL divergence cannot be met or predictions are not finite, and with 2 if the input cannot be
    used.
    """
    from kvlayers_lab.cli.calibrate_results import run

    run(
        model=model,
        bytes_per_token=bytes_per_token,
        max_kl=max_kl,
        text=text,
        output=output,
        bits=bits,
        backend=backend,
        context=context,
        scored=scored,
        passages=passages,
        dtype=dtype,
        states=states,
        device=device,
        threads=threads,
        as_json=as_json,
    )


FOR_THE_HARNESS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
"""Settings under which typer leaves all arguments to the harness, from the first that is not `--help`."""


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with the additional model `kvlayers`: `kvlayers lm-eval run --model kvlayers ...`.

    All arguments go to the command of the harness: `kvlayers lm-eval run --help` lists them.

    The model takes the model arguments of `hf`, and cache, cache_config, chunk and prefix_store. Without
    `--include_path`, the tasks kvlayers_needle, kvlayers_keys, ... and their group kvlayers_long_context are known.
    """
    if importlib.util.find_spec("lm_eval") is None:
        missing = 'lm-evaluation-harness is not installed: pip install . "./lab[eval]" in a checkout of kvlayers'
        print(f"kvlayers lm-eval: {missing}", file=sys.stderr)
        raise typer.Exit(INPUT_ERROR)
    from lm_eval.__main__ import cli_evaluate

    import kvlayers_lab.evaluation.harness  # noqa: F401
    from kvlayers import installed
    from kvlayers_lab.tasks import HARNESS_TASKS

    arguments = context.args
    # A file that `--config` names may include tasks too, which an argument would replace.
    if "run" in arguments[:1] and not any(each.startswith(("--include", "--config", "-C")) for each in arguments):
        arguments = [*arguments, "--include_path", str(HARNESS_TASKS)]
    sys.argv = ["lm-eval", *arguments]
    with one_line_errors("lm-eval"), installed():
        cli_evaluate()


def add_to(app: typer.Typer) -> None:
    """Add the commands of the lab to `kvlayers`, which calls this through the entry point in `kvlayers.commands`."""
    for command in (bench, fidelity, calibrate):
        app.command(command.__name__)(command)
    app.command("lm-eval", context_settings=FOR_THE_HARNESS)(lm_eval)
