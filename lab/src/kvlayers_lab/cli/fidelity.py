"""The command `kvlayers fidelity`."""

from pathlib import Path
from typing import Annotated

import typer

from kvlayers.commands.common import CHECK_FAILED, FLAG, Dtype, one_line_errors
from kvlayers.errors import OptionError
from kvlayers_lab.names import (
    DOCUMENT_SCORED,
    DOCUMENT_TOKENS,
    FIDELITY_BITS,
    FIDELITY_CHUNK,
    FIDELITY_CONTEXT,
    FIDELITY_SCORED,
    HUB_NAME,
    RECOMPUTES,
    TASK_BITS,
    TASK_DEPTHS,
    TASK_LENGTHS,
    TASKS,
)

OF_TEXT = ("context", "scored", "passages", "max_kl", "max_perplexity_increase", "max_bytes")
"""Options that only a run over a text has."""

OF_TASKS = ("lengths", "depths", "samples", "seed", "budget", "question_chunk")
"""Options that only a run over tasks has."""

OF_DOCUMENTS = ("document_tokens", "recompute")
"""Options that only a run with documents has."""

OF_CACHES = (
    *("bits", "name", "against", "calibration", "context", "chunk", "max_perplexity_increase", "max_bytes"),
    *("lengths", "depths", "question_chunk"),
)
"""Options that a run with documents does not have."""

TEXT_PANEL = "A running text"
TASKS_PANEL = "Tasks (with --tasks)"
DOCUMENTS_PANEL = "Documents that are computed apart (with --documents)"


def fidelity(
    call: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help=f"Model directory, or name on the hub. Default: {HUB_NAME}.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="File that the model reads, or the filler of tasks. Default: Python's help.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help=f"Give the model long-context tasks instead of a running text: {', '.join(TASKS)}, separated by "
            "commas, or all."
        ),
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option(
            help="Settings, separated by commas: bits (4), bits of keys and of values (k4v2), a backend (fp8), or a "
            f"backend with bits (hqq:4). Default: {FIDELITY_BITS}; with --tasks: {TASK_BITS}; with --cache: none."
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--cache",
            help="A cache by its registered name (sink), also with options (snapkv:keep=0.5,quantization.nbits=4), a "
            "callable that makes a cache from a model config (package.module:callable, file.py:callable), or an "
            "eviction rule of your own (file.py:Rule:keep=0.5); repeat for several.",
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="A cache of transformers (quanto, quanto:2, hqq, hqq:2), or transformers for all whose packages are "
            "installed; repeat for several."
        ),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="A file from `kvlayers calibrate`, or its directory, to measure as well.")
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            help=f"Tokens of each passage before the scored ones. Default: {FIDELITY_CONTEXT}.",
            rich_help_panel=TEXT_PANEL,
        ),
    ] = None,
    scored: Annotated[
        str | None,
        typer.Option(
            help=f"Tokens of each passage to score. Default: {FIDELITY_SCORED}; with --documents: {DOCUMENT_SCORED}.",
            rich_help_panel=TEXT_PANEL,
        ),
    ] = None,
    passages: Annotated[
        int, typer.Option(metavar="N", min=1, help="Passages, spread over the text.", rich_help_panel=TEXT_PANEL)
    ] = 4,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens of context and question together, separated by commas. Default: of "
            f"{TASK_LENGTHS}, the lengths that the model has positions for.",
            rich_help_panel=TASKS_PANEL,
        ),
    ] = None,
    depths: Annotated[
        str,
        typer.Option(
            help="Where the answer stands, in percent of the context, separated by commas.", rich_help_panel=TASKS_PANEL
        ),
    ] = TASK_DEPTHS,
    samples: Annotated[
        int, typer.Option(metavar="N", min=1, help="Samples for each length and depth.", rich_help_panel=TASKS_PANEL)
    ] = 1,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.", rich_help_panel=TASKS_PANEL)] = 0,
    chunk: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help=f"Tokens of a forward pass. Default: {FIDELITY_CHUNK}; with --tasks: the whole context, which every "
            "cache then sees in full precision.",
        ),
    ] = None,
    question_chunk: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens of a forward pass while the question is read. Default: as `--chunk`. With 1, a cache that "
            "leaves tokens out for single queries (recall) does so for the question too.",
            rich_help_panel=TASKS_PANEL,
        ),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            metavar="N", min=0, help="Budget: mean KL divergence, in nats a token.", rich_help_panel=TEXT_PANEL
        ),
    ] = None,
    max_perplexity_increase: Annotated[
        float | None,
        typer.Option(
            metavar="N", min=0, help="Budget: increase of perplexity, in percent.", rich_help_panel=TEXT_PANEL
        ),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            help="Budget: bytes of a cache that holds a passage (24MiB), or a share of full precision (50%). The "
            "answer is then the cache that loses least.",
            rich_help_panel=TEXT_PANEL,
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Budget: percentage points of the mean score that a cache may lose.",
            rich_help_panel=TASKS_PANEL,
        ),
    ] = None,
    documents: Annotated[
        str | None,
        typer.Option(
            help="How many documents to concatenate. Separate several numbers by commas. With --tasks, the answer "
            "stands in each document in turn.",
            rich_help_panel=DOCUMENTS_PANEL,
        ),
    ] = None,
    document_tokens: Annotated[
        str, typer.Option(help="Tokens of each document.", rich_help_panel=DOCUMENTS_PANEL)
    ] = str(DOCUMENT_TOKENS),
    recompute: Annotated[
        str,
        typer.Option(
            help="Amounts to compare, separated by commas: a share of the tokens after the first document (15%), or "
            "the first tokens of each document but the first (32).",
            rich_help_panel=DOCUMENTS_PANEL,
        ),
    ] = RECOMPUTES,
    dtype: Annotated[
        Dtype,
        typer.Option(
            metavar="DTYPE",
            help="Dtype that the model computes in: float32, bfloat16, float16, or auto: bfloat16, but float32 on a "
            "CPU without bfloat16 instructions.",
        ),
    ] = Dtype.float32,
    device: Annotated[str | None, typer.Option(help="Default: cuda if available, else cpu.")] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1024, help="CPU threads. Default: torch's choice.")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="File (JSON Lines) that results are added to as they come; a stopped run goes on from it."),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="HTML file to write. Default: none.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", metavar=FLAG, help="Print JSON on stdout, everything else on stderr.")
    ] = False,
) -> None:
    """Measure how caches, or documents that are computed apart, change a model's predictions and answers.

    Exits with 1 if nothing is within the budget or a cache fails, and with 2 if the input cannot be used.
    """
    with one_line_errors("fidelity"):
        _check_options_of_kind(call, tasks is not None, documents is not None)
    # Imported late: torch takes seconds to import, and `--help` does not need it.
    from kvlayers_lab.cli.documents_results import DocumentsRun
    from kvlayers_lab.cli.fidelity_run import FidelityRun

    run = FidelityRun(
        model, text, bits, name or (), against or (), calibration, dtype, device, threads, results, report, as_json
    )
    if documents is not None:
        apart = DocumentsRun(run, documents, document_tokens, recompute)
        if tasks is None:
            passed = apart.over_text(scored, passages, max_kl)
        else:
            passed = apart.over_tasks(tasks, samples, seed, budget)
    elif tasks is None:
        passed = run.over_text(context, scored, passages, chunk, max_kl, max_perplexity_increase, max_bytes)
    else:
        passed = run.over_tasks(tasks, lengths, depths, samples, seed, chunk, question_chunk, budget)
    if not passed:
        raise typer.Exit(CHECK_FAILED)


def _check_options_of_kind(call: typer.Context, is_of_tasks: bool, has_documents: bool) -> None:
    """Raise `OptionError` if the user has given an option that only another kind of run has."""

    rules = (
        (has_documents, OF_CACHES, "{} does not apply to `--documents`: leave one of them out."),
        (not has_documents, OF_DOCUMENTS, "{} is for documents: pass `--documents` as well, or leave {} out."),
        (
            has_documents and not is_of_tasks,
            ("results",),
            "{} needs `--tasks` if there are documents: pass `--tasks`, or leave {} out.",
        ),
        (is_of_tasks, OF_TEXT, "{} is for a running text: leave out either it or `--tasks`."),
        (not is_of_tasks, OF_TASKS, "{} is for tasks: pass `--tasks` as well, or leave {} out."),
    )
    for applies, parameters, message in rules:
        for parameter in parameters if applies else ():
            source = call.get_parameter_source(parameter)
            if source is not None and source.name != "DEFAULT":
                option = f"`--{parameter.replace('_', '-')}`"
                raise OptionError(message.format(option, option))
