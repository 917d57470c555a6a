"""The commands of `kvlayers`, but `fidelity`: their options. What they do is imported late, since torch takes seconds
to import, and `--help` does not need it.
"""

import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvlayers.errors import OptionError
from kvlayers.tools.cli.common import CHECK_FAILED, INPUT_ERROR, Dtype, one_line_errors
from kvlayers.tools.names import BENCH_REPORT, HUB_NAME, TRANSFORMERS_CACHES

PLAN_OPTIONS = {
    "context_length": "--context",
    "batch_size": "--batch",
    "memory": "--memory",
    "encoder_length": "--encoder-length",
    "names": "--name",
}


def plan(
    model: Annotated[str, typer.Argument(help="Directory of a model, its config.json, or its name on the hub.")],
    context: Annotated[str, typer.Option(help="Tokens of a sequence, prompt and continuation: 32768 or 32k.")],
    batch: Annotated[int, typer.Option(help="Sequences in the batch, beams included.")] = 1,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Device memory for the cache, weights not included: 24GiB, 80GB, or 50% of what full precision takes."
        ),
    ] = None,
    dtype: Annotated[
        Dtype,
        typer.Option(
            metavar="DTYPE", help="Dtype of the model: float32, bfloat16, float16, or auto, that of its config."
        ),
    ] = Dtype.auto,
    encoder_length: Annotated[
        str | None, typer.Option(help="Tokens of the encoder's output, if the model has an encoder.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="A cache to plan, also with options (sink:window_length=512); repeat for several. Default: all."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what each kind of cache would cost for a model, from its config alone, and which one to use.

    Exits with 2 if the input cannot be used, or if no cache is within the memory.
    """
    from kvlayers.planning import plan as plan_caches
    from kvlayers.tools.cli.console import config_of, print_json, quiet_libraries, table
    from kvlayers.utils.units import bytes_or_share, tokens

    with one_line_errors("plan", PLAN_OPTIONS), quiet_libraries():
        # Checked before the config, which may come from the hub.
        length = tokens(context, "--context")
        if memory is not None:
            bytes_or_share(memory, "--memory")
        encoded = None if encoder_length is None else tokens(encoder_length, "--encoder-length")
        planned = plan_caches(
            config_of(model),
            length,
            batch,
            dtype.name_or_none,
            memory,
            names=name,
            encoder_length=encoded,
        )
    if as_json:
        print_json(planned)
        return
    console = Console()
    use, *others = planned.notes
    console.print(use, highlight=False, markup=False)
    head, *rows = planned.rows()
    styles = ["bold" if planned.recommended in group else "" if group[0].fits else "dim" for group in planned.groups()]
    texts = [head.index("cache"), head.index("states")]
    console.print(table([name.capitalize() for name in head], rows, planned.title, styles, texts))
    for note in others:
        console.print(note, style="yellow" if note.startswith("Careful") else "dim", highlight=False, markup=False)
    if planned.left_out:
        console.print(f"Not for this model (--json gives the reasons): {', '.join(planned.left_out)}", style="dim")


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
            help="A cache of kvlayers, also with options (sink:window_length=512); repeat for several. Default: the "
            "exact ones, int8 and int4."
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, everything else on stderr.")] = False,
) -> None:
    """Measure the speed and memory of kvlayers' and transformers' caches on this machine, with an HTML report.

    Exits with 1 if an exact cache of kvlayers gives other tokens than transformers' DynamicCache (ties aside) or any
    cache of kvlayers fails, and with 2 if the input cannot be used.
    """
    from kvlayers.tools.cli.bench_results import run

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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, everything else on stderr.")] = False,
) -> None:
    """Choose bits for the keys and values of each layer, within a budget of bytes or of KL divergence.

    It takes minutes, and writes the result as JSON. `kvlayers fidelity --calibration` measures it on another text.

    Exits with 1 if the KL divergence cannot be met or predictions are not finite, and with 2 if the input cannot be
    used.
    """
    from kvlayers.tools.cli.calibrate_results import run

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


PROMPT = "Once upon a time, a programmer"
DEFAULT_CONTEXT = 4096


def demo(
    prompt: Annotated[
        str | None,
        typer.Argument(help=f"Text to continue. Default: '{PROMPT}', after {DEFAULT_CONTEXT} tokens of context."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help=f"Model directory, or name on the hub. Default: {HUB_NAME}."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Tokens of Python's documentation before the prompt. "
            f"Default: 0 with a prompt, {DEFAULT_CONTEXT} without.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens to generate.")] = 32,
    trials: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each cache; the table shows medians.")] = 1,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1024, help="CPU threads. Default: torch's choice.")
    ] = None,
    dtype: Annotated[
        Dtype,
        typer.Option(
            metavar="DTYPE",
            help="float32, bfloat16, float16, or auto: bfloat16, but float32 on a CPU without bfloat16 instructions.",
        ),
    ] = Dtype.auto,
    device: Annotated[str | None, typer.Option(help="Default: cuda if available, else cpu.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, everything else on stderr.")] = False,
) -> None:
    """Continue a text with a language model through every cache, sample continuations, and answer a second turn.

    Exits with 1 if an exact cache of kvlayers gives other tokens than transformers' DynamicCache (ties aside), and with
    2 if the input cannot be used.
    """
    from kvlayers.tools.cli.demo_run import run_demo

    if context is None:
        context = DEFAULT_CONTEXT if prompt is None else 0
    run_demo(PROMPT if prompt is None else prompt, model, context, tokens, trials, threads, dtype, device, as_json)


def inspect(
    path: Annotated[
        str, typer.Argument(help="A file that save_cache() wrote, or the directory of a prefix store: a path or a URL.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe a saved cache, or draw what the directory of a prefix store holds, without loading states.

    Exits with 2 if the file is not a saved cache, or is damaged; or if the directory cannot be reached, or has no
    entries. Exits with 1 if files in a directory are damaged or missing.
    """
    from kvlayers.tools.cli.inspect_results import show_directory, show_file

    with one_line_errors("inspect"):
        is_whole = (show_directory if "://" in path or Path(path).is_dir() else show_file)(path, as_json)
    if not is_whole:
        raise typer.Exit(CHECK_FAILED)


def compile_command() -> None:
    """Compile the kernels for this CPU now, so that no script waits for them. It takes about half a minute, once.

    Nothing is compiled if the kernels are in the wheel, or were compiled before. Exits with 1 if the compiler fails.
    """
    from kvlayers.errors import KernelError
    from kvlayers.tools.kernels import LIBRARIES

    console = Console()
    with one_line_errors("compile", errors=KernelError, code=CHECK_FAILED):
        for library in LIBRARIES:
            began = time.monotonic()
            with console.status(f"compiling the kernel for {library.purpose}"):
                path = library.compile()
            seconds = time.monotonic() - began
            console.print(f"{library.purpose}: {path} ({seconds:.1f} s)", highlight=False, soft_wrap=True)


RUN_OPTIONS = {
    "cache": "--cache",
    "prefix_store": "--prefix-store",
    "directory": "--prefix-store",
    "max_bytes": "--prefix-store",
    "namespace": "--namespace",
    "by_key": "--namespace-by-key",
}


def run(
    command: Annotated[
        list[str],
        typer.Argument(help="The command, behind --, such as: transformers serve MODEL, or: python script.py."),
    ],
    cache: Annotated[
        str | None,
        typer.Option(help="Cache of calls that name none, also with options: int4, or sink:window_length=512."),
    ] = None,
    prefix_store: Annotated[
        str | None,
        typer.Option(
            help="A prefix store: bytes of memory (2GiB), a directory, a URL (redis://...), or 2GiB,DIRECTORY."
        ),
    ] = None,
    namespace: Annotated[str, typer.Option(help="Namespace of the store.")] = "",
    by_key: Annotated[
        bool,
        typer.Option(
            "--namespace-by-key",
            help="Only requests to transformers serve use the store, each API key in a namespace of its own.",
        ),
    ] = False,
) -> None:
    """Run a command with kvlayers installed in it, and in all Python processes that it starts.

    They install kvlayers when they import the models of transformers. The exit code is that of the command, or 2 if it
    is not found, the cache is unknown or the store cannot be used.
    """
    from kvlayers.tools.running import Running

    options = Running(cache, prefix_store, namespace, by_key)
    with one_line_errors("run", RUN_OPTIONS):
        program = shutil.which(command[0])
        if program is None:
            raise OptionError(f"there is no command {command[0]!r} on the PATH: install it, or name its file.")
        options.check()
        sys.stdout.flush()
        try:
            os.execve(program, command, options.environment(os.environ))
        except OSError as error:
            raise OptionError(f"{program} cannot be started: {error.strerror}.") from error


FOR_THE_HARNESS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
"""Settings under which typer leaves all arguments to the harness, from the first that is not `--help`."""


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with the additional model `kvlayers`: `kvlayers lm-eval run --model kvlayers ...`.

    All arguments go to the command of the harness: `kvlayers lm-eval run --help` lists them.

    The model takes the model arguments of `hf`, and cache, cache_config, chunk and prefix_store. Without
    `--include_path`, the tasks kvlayers_needle, kvlayers_keys, ... and their group kvlayers_long_context are known.
    """
    if importlib.util.find_spec("lm_eval") is None:
        print('kvlayers lm-eval: lm-evaluation-harness is not installed: pip install "kvlayers[eval]"', file=sys.stderr)
        raise typer.Exit(INPUT_ERROR)
    from lm_eval.__main__ import cli_evaluate

    import kvlayers.evaluation.harness  # noqa: F401
    from kvlayers.generation.install import installed
    from kvlayers.tools.tasks import HARNESS_TASKS

    arguments = context.args
    # A file that `--config` names may include tasks too, which an argument would replace.
    if "run" in arguments[:1] and not any(each.startswith(("--include", "--config", "-C")) for each in arguments):
        arguments = [*arguments, "--include_path", str(HARNESS_TASKS)]
    sys.argv = ["lm-eval", *arguments]
    with one_line_errors("lm-eval"), installed():
        cli_evaluate()
