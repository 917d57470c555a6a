"""Documents that are computed once, and a changed middle, beside computing everything again, in one run.

    python lab/benchmarks/documents.py            # SmolLM2, or the model of --model
    python lab/benchmarks/documents.py --quick    # a random model and few tokens, to see that it runs
    python lab/benchmarks/documents.py --write    # the recorded figures, into docs/documents.md

`join`: seconds to the first token after six documents in a new order, which a store has, and the bytes of the store in
memory and in files. `replace`: a changed line in the middle of a context: seconds, and KL divergence after it. `kl` and
`tasks`: `kvlayers fidelity --documents`. The
answers are written as they come, so that a second start goes on where the first one stopped. Contenders take turns, and
seconds are medians over the trials.

The exit code is 1 if a full computation has other tokens than transformers, or if recomputing all that follows the
change gives other predictions than computing everything.
"""

import pathlib
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import kvlayers
import pages
from lib import report
from lib.internals import divergences, newest_logits, quiet_clock
from lib.timing import Turns

DOCUMENTS = 6
AMOUNTS: tuple[int | str, ...] = (0, "5%", "15%", "30%", "100%")
CHANGED_TOKENS, NEW_TOKENS = 24, 16
ALL = "all of it"


def options() -> report.Options:
    made = report.Options(
        "documents",
        __doc__,
        written_pages,
        threads=2,
        quick="a random model and few tokens",
        kind=lambda given: (
            "documents-join" if "join" in given.only else f"documents-fidelity-{pages.model_name(vars(given))}"
        ),
    )
    made.some_of("--only", ("join", "replace", "kl", "tasks"), "sections")
    made.real_model()
    made.sized("--document-tokens", 512, 48, "tokens of each document of `join` and `kl`")
    made.sized("--task-tokens", 256, 0, "tokens of each document of `tasks`")
    made.sized("--samples", 2, 1, "samples of each task and document")
    made.sized("--context", 4096, 128, "tokens of the context whose middle changes")
    made.sized("--passages", 6, 1, "sets of documents of `kl`")
    made.sized("--trials", 3, 1, "trials of `join`, and contexts of `replace`")
    return made


class Subject:
    """A model in float32, and texts for it."""

    def __init__(self, run: report.Session) -> None:
        self._workload = run.some_model(torch.float32)
        self.model: Any = self._workload.model

    def texts(self, count: int, tokens: int) -> list[Tensor]:
        """Passages of a text, int64 `[tokens]` each."""
        return [ids[0] for ids in self._workload.passages(count, tokens)]

    def read(self, ids: Tensor) -> Any:
        """A cache that keeps every token, after these tokens."""
        cache = kvlayers.DynamicCache()
        newest_logits(self.model, ids[None], cache, 1)
        return cache


def join(run: report.Session) -> dict[str, Any]:
    """Seconds to the first token after documents in a new order, and the bytes of a store."""
    subject, given = Subject(run), run.given
    model, length = subject.model, given.document_tokens
    beginning, question, *documents = subject.texts(DOCUMENTS + 2, length)
    beginning, question = beginning[:16], question[:16]
    how = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    orders = random.Random(0)

    with tempfile.TemporaryDirectory() as directory:
        store = kvlayers.PrefixStore("4GiB", directory=directory)
        for ids in documents:
            kvlayers.store_document(store, ids, model, beginning=beginning)
        order: list[Tensor] = []

        def first_token(name: str) -> Tensor:
            if name == "transformers":
                ids = torch.cat([beginning, *order, question])[None]
                return model.generate(ids, attention_mask=torch.ones_like(ids), **how)  # type: ignore[no-any-return]
            amount: int | str = int(name) if name.isdecimal() else name
            found: Tensor = kvlayers.generate(
                model,
                documents=order,
                question=question,
                beginning=beginning,
                recompute=amount,
                prefix_store=store,
                **how,
            )
            return found

        names = ["transformers", *(str(amount) for amount in AMOUNTS if amount != "100%")]
        turns = Turns(names)
        with quiet_clock():
            for trial in range(given.trials + 1):
                order[:] = orders.sample(documents, len(documents))
                turns.take(first_token, is_counted=trial > 0)
        store.flush()
        statistics = store.statistics
        held = subject.read(torch.cat([beginning, *documents]))
        states = sum(layer.keys.nbytes + layer.values.nbytes for layer in held.layers)
        store.close()
    ids = torch.cat([beginning, *order, question])[None]
    how["max_new_tokens"] = 8
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    exact = kvlayers.generate(model, documents=order, question=question, beginning=beginning, **how)
    run.expect(bool((exact == expected).all()), "a full computation has other tokens than transformers")
    found = {name: {"seconds": turns.median(name), "share": turns.ratio(name, "transformers")} for name in names}
    nbytes = {"states": states, "memory": statistics.bytes, "files": statistics.file_bytes}
    run.target("recompute 15%", found["15%"]["share"], at_most=0.25)
    run.target("recompute 0", found["0"]["share"], at_most=0.1)
    run.target("bytes in memory", statistics.bytes / states, at_most=1.05)
    run.target("bytes in files", statistics.file_bytes / states, at_most=1.1)
    return {"tokens": ids.shape[1], "seconds": found, "bytes": nbytes}


def replacing(subject: Subject, context: Tensor, other: Tensor) -> Callable[[int | str | None], Any]:
    """What makes the cache of a context whose middle has changed: by computing a part again, or all for `None`.

    Before, other tokens stood where the context has `NEW_TOKENS` tokens from its middle on.
    """
    start = len(context) // 2
    old = torch.cat([context[:start], other[:CHANGED_TOKENS], context[start + NEW_TOKENS :]])
    held = subject.read(old)

    def made(amount: int | str | None) -> Any:
        if amount is None:
            return subject.read(context)
        cache, new = held.fork(), context[start : start + NEW_TOKENS]
        kvlayers.replace_tokens(
            cache, start, start + CHANGED_TOKENS, new, subject.model, recompute=amount, known_ids=old
        )
        return cache

    return made


def replace(run: report.Session) -> dict[str, Any]:
    """A changed line in the middle of a context: seconds, and KL divergence."""
    subject, given = Subject(run), run.given
    contenders: dict[str, int | str | None] = {ALL: None, **{str(amount): amount for amount in AMOUNTS}}
    turns = Turns(contenders)
    texts = subject.texts(given.trials + 1, given.context + 64)
    kl: dict[str, list[Tensor]] = {name: [] for name in contenders}
    agrees: dict[str, list[Tensor]] = {name: [] for name in contenders}
    with torch.no_grad(), quiet_clock():
        tick = run.ticking("contexts", given.trials)
        for text in texts[:-1]:
            make = replacing(subject, text[: given.context], texts[-1])
            made = turns.take(lambda name, make=make: make(contenders[name]))
            target = text[None, given.context :]
            seen = {
                name: newest_logits(subject.model, target, cache, target.shape[1]).double().log_softmax(-1)
                for name, cache in made.items()
            }
            for name, logprobs in seen.items():
                kl[name].append(divergences(seen[ALL], logprobs))
                agrees[name].append(logprobs.argmax(-1) == seen[ALL].argmax(-1))
            tick()
    found: dict[str, Any] = {
        name: {
            "seconds": turns.median(name),
            "share": turns.ratio(name, ALL),
            "kl": float(torch.cat(kl[name]).mean()),
            "agreement": float(torch.cat(agrees[name]).double().mean()),
        }
        for name in contenders
    }
    run.expect(found["100%"]["kl"] < 1e-6, "recomputing all that follows the change differs from computing all")
    return found


def fidelity(run: report.Session, *arguments: object) -> dict[str, Any]:
    """What `kvlayers fidelity --documents` finds for the model; nothing for a random one."""
    if run.given.model in (None, "none"):
        run.say(report.NO_MODEL)
        return {}
    asked = ("--documents", f"2,{DOCUMENTS}", "--threads", run.given.threads, *arguments)
    found = report.fidelity(run.given.model, *asked)
    run.expect(found["passed"], f"kvlayers fidelity {' '.join(map(str, arguments))}: a cache has failed")
    return found


def kl(run: report.Session) -> dict[str, Any]:
    """KL divergence after documents that were concatenated."""
    given = run.given
    again = ",".join(map(str, (0, 8, *AMOUNTS[1:-1])))
    said = fidelity(run, "--document-tokens", given.document_tokens, "--passages", given.passages, "--recompute", again)
    return {name: said[name] for name in ("documents", "document_tokens", "scored", "passages") if said}


def tasks(run: report.Session) -> dict[str, Any]:
    """Answers to long-context tasks after documents that were concatenated."""
    given = run.given
    again = ",".join(map(str, AMOUNTS[:-1]))
    name = pathlib.Path(given.model or "none").resolve().name
    file = report.RESULTS / f"documents-tasks-{name}-{given.task_tokens}.jsonl"
    file.parent.mkdir(exist_ok=True)
    arguments = ("--tasks", "all", "--document-tokens", given.task_tokens, "--samples", given.samples)
    said = fidelity(run, *arguments, "--recompute", again, "--results", file)
    if not said:
        return {}
    return {name: said["summary"][name] for name in ("reference", "comparable")}


NAMES = {"SmolLM2-135M-Instruct": "SmolLM2", "gemma-3-270m": "Gemma"}


def model_of(record: dict[str, Any]) -> str:
    name = pages.model_name(record["arguments"])
    return NAMES.get(name, name)


def code(recompute: str) -> str:
    """What `recompute=` is given, as code."""
    return f"`{recompute}`" if recompute.isdecimal() else f'`"{recompute}"`'


def join_table(record: dict[str, Any]) -> str:
    """Seconds to the first token, and bytes."""
    found, nbytes = record["results"]["join"]["seconds"], record["results"]["join"]["bytes"]
    least, most = (found[share]["share"] for share in ("0", "30%"))
    named = {
        "all of it, by transformers" if name == "transformers" else code(name): each for name, each in found.items()
    }
    columns = (pages.shown("s to the first token", "seconds"), pages.shown("share", "share", ".3f"))
    return (
        f"**The first token comes after {least:.0%} of the time if nothing is recomputed, after {most:.0%} with "
        f'`"30%"`.** {DOCUMENTS} documents of {record["arguments"]["document_tokens"]} tokens from a store, each '
        f"time in a new order, {model_of(record)} in float32:\n\n"
        f"{pages.table('`recompute`', named, columns, '---:')}\n\n"
        f"In memory, the store takes {nbytes['memory'] / nbytes['states']:.3f} of the bytes of all states, in "
        f"files {nbytes['files'] / nbytes['states']:.3f}."
    )


def kl_table(records: Sequence[dict[str, Any]]) -> str:
    """KL divergence and top-1 after documents, by model and number of documents."""
    found = {
        (model_of(record), each["documents"], each["recompute"]): each
        for record in records
        for each in record["results"]["kl"]["documents"]
        if each["recompute"] is not None
    }
    columns = list(dict.fromkeys((model, count) for model, count, _ in found))
    head = ["`recompute`", *(f"{model}, {count} documents" for model, count in columns)]
    rows = []
    for again in dict.fromkeys(again for _, _, again in found):
        entries = [found[(*column, again)] for column in columns]
        rows.append([code(str(again)), *(f"{each['kl']:.3f} ({each['agreement']:.0%})" for each in entries)])
    left = [found[(*column, "30%")]["kl"] / found[(*column, 0)]["kl"] for column in columns]
    first = records[0]["results"]["kl"]
    return (
        f'**`"30%"` leaves {min(left):.0%} to {max(left):.0%} of the divergence.** KL divergence in nats, and '
        f"equal top tokens, of {first['scored']} tokens that go on with one of the documents of "
        f"{first['document_tokens']} tokens ({first['passages']} sets):\n\n"
        f"{pages.markdown(head, rows, '---:')}"
    )


def loss_table(records: Sequence[dict[str, Any]]) -> str:
    """What the mean score of tasks loses, by model."""
    losses = [{each["cache"]: each for each in record["results"]["tasks"]["comparable"]} for record in records]
    rows = [
        [
            code(cache.rpartition(" ")[2]),
            *(f"{100 * found[cache]['loss']:.1f} ± {100 * found[cache]['loss_error']:.0f}" for found in losses),
        ]
        for cache in losses[0]
        if cache != records[0]["results"]["tasks"]["reference"]
    ]
    given = records[0]["arguments"]
    return (
        "What the mean score of long-context tasks loses, in percentage points with the standard error over the "
        f"samples, after 2 and {DOCUMENTS} documents of {given['task_tokens']} tokens:\n\n"
        f"{pages.markdown(['`recompute`', *map(model_of, records)], rows, '---:')}"
    )


def replace_table(records: Sequence[dict[str, Any]]) -> str:
    """A changed line: time and KL divergence, by model."""
    head = ["`recompute`", *(f"{model_of(record)}, {column}" for record in records for column in ("time", "KL"))]
    rows = []
    for name in records[0]["results"]["replace"]:
        entries = [record["results"]["replace"][name] for record in records]
        figures = [figure for each in entries for figure in (f"{each['share']:.3f}", f"{each['kl']:.2g}")]
        rows.append([name if name == ALL else code(name), *figures])
    return (
        f"**A changed line costs a part of the time.** {CHANGED_TOKENS} tokens in the middle of "
        f"{records[0]['arguments']['context']:,} become {NEW_TOKENS}. Time is a share of computing all of it:\n\n"
        f"{pages.markdown(head, rows, '---:')}"
    )


def of_one(name: str, table: Callable[[Sequence[dict[str, Any]]], str]) -> Callable[[Mapping[str, Any], Any], str]:
    """A table of a section, of one run."""
    return lambda arguments, found: table([{"arguments": arguments, "results": {name: found}}])


SECTIONS: dict[str, report.Section] = {
    "join": (join, of_one("join", lambda records: join_table(records[0]))),
    "replace": (replace, of_one("replace", replace_table)),
    "kl": (kl, of_one("kl", kl_table)),
    "tasks": (tasks, of_one("tasks", loss_table)),
}


def command(record: dict[str, Any]) -> str:
    given = " ".join(f"--{flag} {record['arguments'][flag]}" for flag in ("threads", "samples", "passages", "trials"))
    return f"`python lab/benchmarks/documents.py --only {','.join(record['arguments']['only'])} {given}`"


def page_tables(joined: dict[str, Any], records: Sequence[dict[str, Any]]) -> str:
    return "\n\n".join(
        [
            join_table(joined),
            kl_table(records),
            loss_table(records),
            replace_table(records),
            f"{command(joined)}, and {command(records[0])} for each model; {pages.measured_at(joined)}.",
        ]
    )


def written_pages() -> pages.Pages:
    tables = page_tables(pages.newest("documents-join"), pages.records_by_model("documents-fidelity"))
    return pages.written("documents", {(pages.DOCS / "documents.md", "documents"): tables})


def main(arguments: Sequence[str] | None = None) -> int:
    return report.run(options().parse(arguments), SECTIONS)


if __name__ == "__main__":
    sys.exit(main())
