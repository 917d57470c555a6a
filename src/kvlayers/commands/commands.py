"""The commands of the library: their options. What they do is imported late, since torch takes seconds to import, and
`--help` does not need it.
"""

import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvlayers.commands.common import CHECK_FAILED, FLAG, INPUT_ERROR, Dtype, one_line_errors
from kvlayers.errors import OptionError

PLAN_OPTIONS = {
    "context_length": "--context",
    "batch_size": "--batch",
    "memory": "--memory",
    "encoder_length": "--encoder-length",
    "names": "--cache",
    "cache": "--cache",
    "max_bytes": "--max-bytes",
}


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Directory of a model, its config.json, or its name on the hub.")
    ],
    tokens_given: Annotated[str | None, typer.Argument(metavar="CONTEXT", help="The same as --context.")] = None,
    context: Annotated[
        str | None, typer.Option(help="Tokens of a sequence, prompt and continuation: 32768 or 32k.")
    ] = None,
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
            metavar="DTYPE",
            help="Dtype of the model: float32 (fp32), bfloat16 (bf16), float16 (fp16), or auto, that of its config.",
        ),
    ] = Dtype.auto,
    encoder_length: Annotated[
        str | None, typer.Option(help="Tokens of the encoder's output, if the model has an encoder.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--cache",
            help="A cache to plan, also with options (sink:window_length=512); several with commas, or by repeating "
            "it. Default: all.",
        ),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            help="What one cache may take (2GiB, or 50% of full precision): says how many tokens stay exact. Unlike "
            "--memory, it chooses no cache."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar=FLAG, help="Print JSON.")] = False,
) -> None:
    """Show what each kind of cache would cost for a model, from its config alone, and which one to use.

    For example: kvlayers plan HuggingFaceTB/SmolLM2-135M-Instruct 8k

    Exits with 2 if the input cannot be used, or if no cache is within the memory.
    """
    from kvlayers.commands.console import config_of, print_json, quiet_libraries, table
    from kvlayers.planning import plan as plan_caches
    from kvlayers.utils.units import bytes_or_share, tokens

    with one_line_errors("plan", PLAN_OPTIONS), quiet_libraries():
        # Checked before the config, which may come from the hub.
        if (context is None) == (tokens_given is None):
            raise OptionError(
                f"`--context` must be given once, got {' and '.join(filter(None, (tokens_given, context))) or 'none'}: "
                "write, for example, kvlayers plan MODEL 8k."
            )
        length = tokens(context or tokens_given or "", "--context")
        if memory is not None:
            bytes_or_share(memory, "--memory")
        encoded = None if encoder_length is None else tokens(encoder_length, "--encoder-length")
        planned = plan_caches(
            config_of(model),
            length,
            batch,
            dtype.name_or_none,
            memory,
            # Between caches, and neither in a list nor before another option of the same cache.
            names=name and [each.strip() for text in name for each in re.split(r",(?!\s*[\w.]+=|[^\[]*\])", text)],
            encoder_length=encoded,
            max_bytes=max_bytes,
        )
    if as_json:
        print_json(planned)
        return
    console = Console()
    head, *rows = planned.rows()
    styles = ["bold" if planned.recommended in group else "" if group[0].fits else "dim" for group in planned.groups()]
    console.print(
        table(
            [name.capitalize() for name in head],
            rows,
            planned.title,
            styles,
            [head.index("cache"), head.index("states")],
        )
    )
    for note in planned.notes:
        style = "yellow" if note.startswith("Careful") else "" if note.startswith("Use") else "dim"
        console.print(note, style=style, highlight=False, markup=False)
    if planned.left_out:
        console.print(f"Not for this model (--json gives the reasons): {', '.join(planned.left_out)}", style="dim")


def inspect(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="A file that save_cache() wrote, or the directory of a prefix store: a path or a URL."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", metavar=FLAG, help="Print JSON.")] = False,
) -> None:
    """Describe a saved cache, or draw what the directory of a prefix store holds, without loading states.

    Exits with 2 if the file is not a saved cache, or is damaged; or if the directory cannot be reached, or has no
    entries. Exits with 1 if files in a directory are damaged or missing.
    """
    from kvlayers.commands.inspect_results import show_directory, show_file

    with one_line_errors("inspect"):
        is_whole = (show_directory if "://" in path or Path(path).is_dir() else show_file)(path, as_json)
    if not is_whole:
        raise typer.Exit(CHECK_FAILED)


def compile_command() -> None:
    """Compile the kernels for this CPU now, so that no script waits for them. The first call takes half a minute or so.

    Later calls only say where the kernels are, as they do if the kernels came with kvlayers. Exits with 1 if the
    compiler fails.
    """
    from kvlayers.errors import KernelError
    from kvlayers.kernels.attention.cpu.kernel import LIBRARIES

    console = Console()
    with one_line_errors("compile", errors=KernelError, code=CHECK_FAILED):
        for library in LIBRARIES:
            began = time.monotonic()
            with console.status(f"compiling the kernel for {library.purpose}"):
                path = library.compile()
            console.print(
                f"{library.purpose}: {path} ({time.monotonic() - began:.1f} s)", highlight=False, soft_wrap=True
            )


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
        typer.Argument(
            metavar="COMMAND", help="The command, behind --, such as: transformers serve MODEL, or: python script.py."
        ),
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
            metavar=FLAG,
            help="Only requests to transformers serve use the store, each API key in a namespace of its own.",
        ),
    ] = False,
) -> None:
    """Run a command with kvlayers installed in it, and in all Python processes that it starts.

    They install kvlayers when they import the models of transformers. The exit code is that of the command, or 2 if it
    is not found, the cache is unknown or the store cannot be used.
    """
    from kvlayers.commands.running import Running

    options = Running(cache, prefix_store, namespace, by_key)
    with one_line_errors("run", RUN_OPTIONS):
        program = shutil.which(command[0])
        if program is None:
            raise OptionError(
                f"there is no command {command[0]!r} on the PATH: install it, or name its file, which must be "
                "executable; a script of Python runs as `python FILE`."
            )
        options.check()
        sys.stdout.flush()
        try:
            os.execve(program, command, options.environment(os.environ))
        except OSError as error:
            raise OptionError(f"{program} cannot be started: {error.strerror}.") from error


OF_THE_LAB = ("bench", "fidelity", "calibrate", "lm-eval")
"""Commands that people look for here, and that another package adds."""

GET_THE_LAB = "pip install ./lab (in a checkout of kvlayers)"

ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings under which typer refuses no argument, and answers no `--help`."""


def not_installed(call: typer.Context) -> None:
    """Say how to install a command of the lab, and exit."""
    print(f"kvlayers {call.info_name}: this command is in the package kvlayers-lab: {GET_THE_LAB}", file=sys.stderr)
    raise typer.Exit(INPUT_ERROR)
