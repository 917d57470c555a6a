"""`kvlayers fidelity` of tasks and of documents: scores through caches, what documents that are computed apart lose,
budgets, files that a run goes on from, and reports."""

import functools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import kvlayers
import kvlayers_lab
from command_line import run, words
from kvlayers_lab.calibration import MeasuredSetting
from kvlayers_lab.cli import report as page
from kvlayers_lab.cli.fidelity_run import fitting_lengths
from kvlayers_lab.documents import Apart, documents_of, measure_documents
from kvlayers_lab.measuring.contenders import is_installed
from kvlayers_lab.names import TASKS
from kvlayers_lab.tasks import Needle, Task, TaskText, register_task, samples_of, task_names, unregister_task
from model_directories import random_text, save_sharp_model, word_tokenizer
from models import fresh_model, passes_of, read
from web_page import check_self_contained

pytestmark = pytest.mark.usefixtures("text_directory")

LENGTHS = (320, 384)
DEPTHS = (0.0, 0.5)
SAMPLES = len(LENGTHS) * len(DEPTHS)
QUICK = ("--text", "text.txt", "--tasks", "echo", "--lengths", "320,384", "--depths", "0,50")

needs_report = pytest.mark.skipif(
    bool(page.missing_packages()), reason="no matplotlib or jinja2 here: the extra 'report' brings them"
)


class Echo(Task):
    """A task for a random model: a right answer is what the model says with the exact cache.

    Attributes:
        expected: the words of a right answer, by length and depth.
    """

    name = "echo"
    expected: ClassVar[dict[tuple[int, float], tuple[str, ...]]] = {}

    def text(self, haystack: Any, length: int, depth: float, chooser: random.Random) -> TaskText:
        word = f"w{chooser.randrange(50)}"
        return TaskText(
            introduction="the sea is w1 .",
            needles=(Needle(f"the sea of {word} .", depth),),
            # As many tokens as transformers' quanto cache needs: it fails if a context does not fill its groups.
            question=" is the sea of",
            answer=f" {word}",
            expected=self.expected.get((length, depth), ("never",)),
        )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharp_model(tmp_path_factory.mktemp("models") / "<i>llama", queries=8, max_position_embeddings=512)


@pytest.fixture(autouse=True, scope="module")
def _echo() -> Iterator[None]:
    register_task(Echo)
    yield
    unregister_task("echo")


@pytest.fixture(scope="module")
def right_answers(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, float], tuple[str, ...]]:
    """What the model says with the exact cache, by length and depth."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(random_text(600))
    said = measured(llama, "--text", text, "--cache", "dynamic")
    return {(each["length"], each["depth"]): tuple(each["answer"].split()) for each in said["outcomes"]}


@pytest.fixture
def able(right_answers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task is one that the exact cache does to perfection."""
    monkeypatch.setattr(Echo, "expected", right_answers)


@pytest.fixture(scope="module")
def known(llama: Path, right_answers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the answers with 8 and 2 bits, from which other runs go on: they compute nothing."""
    folder = tmp_path_factory.mktemp("known")
    (folder / "text.txt").write_text(random_text(600))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Echo, "expected", right_answers)
        measured(llama, "--text", folder / "text.txt", "--bits", "8,2", "--results", folder / "known")
    return folder / "known"


tasks = functools.partial(run, "fidelity")


def measured(model: Path, *arguments: object) -> Any:
    return json.loads(tasks(model, *QUICK, "--json", *arguments, code=0).stdout)


def rows(output: str) -> dict[str, list[str]]:
    """The cells of the table on the console, by the first word of the row."""
    return {line.split()[0]: line.split() for line in output.splitlines() if line.strip()}


@pytest.mark.usefixtures("able")
def test_scores_of_caches_stand_beside_the_exact_cache(llama: Path, known: Path) -> None:
    result = tasks(llama, *QUICK, "--bits", "8,2", "--results", known, "--json", code=0)
    said = json.loads(result.stdout)
    assert [each["name"] for each in said["caches"]] == ["kvlayers dynamic", "kvlayers int8", "kvlayers int2"]
    assert len(said["outcomes"]) == 3 * SAMPLES
    exact, _, int2 = said["summary"]["overall"]
    assert exact["score"] == 1
    scores = [each["score"] for each in said["outcomes"] if each["cache"] == "kvlayers int2"]
    assert int2["score"] == pytest.approx(sum(scores) / SAMPLES)
    assert int2["loss"] == pytest.approx(1 - int2["score"])
    assert int2["loss"] > 0.05

    shown = rows(result.stderr)
    assert shown["Cache"] == ["Cache", "echo", "Mean", "Loss"]
    assert shown["dynamic"] == ["dynamic", "(exact)", "100.0", "100.0"]
    percent = f"{100 * int2['score']:.1f}"
    assert shown["int2"] == ["int2", percent, percent, f"{100 * int2['loss']:.1f}"]
    assert "Scores in percent at 320 and 384 tokens" in result.stderr


@pytest.mark.usefixtures("able")
def test_a_budget_decides_the_exit_code(llama: Path, known: Path) -> None:
    arguments = (llama, *QUICK, "--results", known, "--bits")
    said = measured(llama, "--bits", "8,2", "--results", known)
    losses = {each["cache"]: 100 * each["loss"] for each in said["summary"]["comparable"]}
    assert losses["kvlayers int8"] < losses["kvlayers int2"]
    between = (losses["kvlayers int8"] + losses["kvlayers int2"]) / 2
    result = tasks(*arguments, "8,2", "--budget", between, "--json", code=0)
    assert f"Within a loss of {between:g} percentage points: int8. The smallest is int8, with " in words(result.stderr)
    assert "\nTo use it: kvlayers.generate(model, ..., cache_implementation='int8')\n" in result.stderr

    within = json.loads(result.stdout)
    assert (within["recommended"], within["passed"]) == ("kvlayers int8", True)
    assert [each.get("within") for each in within["caches"]] == [None, True, False]
    assert within["caches"][1]["use"] == {"cache_implementation": "int8"}

    both = measured(llama, "--bits", "8,2", "--results", known, "--budget", losses["kvlayers int2"] + 1e-6)
    assert both["recommended"] == "kvlayers int2"

    none = tasks(*arguments, "2", "--budget", between, code=1)
    assert f"No cache is within a loss of {between:g} percentage points" in words(none.output)
    assert all(len(line) <= 80 for line in none.output.splitlines() if str(known) not in line)


def test_a_model_that_is_too_weak_is_said(llama: Path) -> None:
    result = tasks(llama, *QUICK, "--bits", "8", "--budget", 100, "--results", "answers", code=1)
    shown = words(result.output)
    assert "The model is too weak for echo at 320 and 384 tokens: even with the exact cache, it scores less" in shown
    assert "The model is too weak for all of these tasks, so the budget cannot be judged" in shown
    assert rows(result.output)["int8"] == ["int8", "0.0"]
    tasks(llama, *QUICK, "--bits", "8", "--results", "answers", code=0)


@pytest.mark.usefixtures("able")
def test_json_says_what_was_measured_and_how(llama: Path) -> None:
    at_once = measured(llama, "--bits", "4", "--seed", 3)
    said = measured(llama, "--bits", "4", "--seed", 3, "--chunk", 16, "--question-chunk", 1)
    expected = {
        "tasks": ["echo"], "lengths": list(LENGTHS), "depths": list(DEPTHS), "seed": 3, "samples": 1, "chunk": 16,
        "question_chunk": 1, "text": "text.txt",
    }  # fmt: skip
    assert {name: said[name] for name in expected} == expected
    assert at_once["question_chunk"] is None
    assert {"torch", "transformers", "kvlayers"} <= set(said["versions"])
    of_an_answer = ("cache", "task", "length", "depth", "index", "score", "logprob", "answer", "failure")
    assert set(of_an_answer) <= set(said["outcomes"][0])
    # What is read in pieces attends to rounded states.
    logprobs = [[each["logprob"] for each in run["outcomes"][1::2]] for run in (at_once, said)]
    assert logprobs[0] != pytest.approx(logprobs[1], abs=1e-4)
    exact, int4 = said["caches"]
    assert int4["nbytes"] < exact["nbytes"]
    assert exact["bytes_per_token"] == pytest.approx(2 * 2 * 2 * 8 * 2)


@pytest.mark.usefixtures("able")
def test_a_run_goes_on_with_the_answers_of_its_file(llama: Path, known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", lambda *_, **__: 1 / 0)
    arguments = (llama, *QUICK, "--bits", "8,2", "--results", known)
    shown = words(tasks(*arguments, code=0).output)
    assert f"{3 * SAMPLES} of {3 * SAMPLES} answers were in {known} before." in shown
    for changed, said in (
        (("--seed", 5), r"seed 0 \(now 5\)"),
        (("--question-chunk", 1), r"question_chunk None \(now 1\)"),
    ):
        refused = tasks(*arguments, *changed, code=2)
        assert re.search(f"^kvlayers fidelity: `--results`.*{said}.*$", refused.stderr)


@needs_report
@pytest.mark.usefixtures("able")
def test_the_report_of_tasks_is_one_file_that_needs_nothing(llama: Path, known: Path, tmp_path: Path) -> None:
    result = tasks(llama, *QUICK, "--bits", "8,2", "--results", known, "--budget", 10, "--report", "report.html")
    assert "Report: report.html" in result.output
    page = (tmp_path / "report.html").read_text()
    assert page.count('<tr class="bold">') == page.count('<tr class="bold"><td>int8</td>') == 1
    parsed = check_self_contained(page)
    table = {row[0]: row for row in parsed.cells[:4]}
    assert table["Cache"] == ["Cache", "echo", "Mean", "Loss", "±", "Log-prob.", "Same", "A token"]
    assert table["dynamic (exact)"][1:5] == ["100.0", "100.0", "", ""]
    facts = {row[0]: row[1] for row in parsed.cells if len(row) == 2}
    shown = {
        "Depths": "0 %, 50 %",
        "Samples": "1 per length and depth, seed 0",
        "Lengths": "320 and 384 tokens of context and question",
    }
    assert facts.items() >= shown.items()
    assert "320 tokens" in parsed.text
    # Scores, and log-probabilities.
    assert parsed.tags.count("svg") == 2
    assert parsed.text.count("dynamic (exact)") == 2 + 1 + len(LENGTHS)
    assert "echo: score by length and depth" in parsed.text


@needs_report
def test_heat_maps_have_a_figure_in_each_cell_that_there_is() -> None:
    maps = {"one": {(64, 0.0): 0.25, (128, 0.0): 1.0}, "two": {(64, 0.0): 0.5}, "m" * 50: {(128, 0.0): 0.75}}
    svg = page.heat_maps("n", "Title", maps, (0, 1))
    assert [svg.count(f">{figure}<") for figure in ("0.25", "1.00", "0.50", "0.75")] == [1, 1, 1, 1]
    assert len(re.findall(r">\d\.\d\d<", svg)) == 4
    assert f">…{'m' * 33}<" in svg


@pytest.mark.usefixtures("able")
def test_caches_of_other_libraries_take_part(llama: Path) -> None:
    against = [name for name in ("quanto", "quanto:2") if is_installed(name)]
    options = [option for name in against for option in ("--against", name)]
    own = "caches_of_a_user:full"
    said = measured(llama, *options, "--cache", own, "--cache", "sink")
    names = ["kvlayers dynamic", own, "kvlayers sink", *(f"transformers {name}" for name in against)]
    assert [each["name"] for each in said["caches"]] == names
    scores = {each["cache"]: each["score"] for each in said["summary"]["overall"]}
    assert scores[own] == 1
    assert all(each["nbytes"] for each in said["caches"][:3])


def test_a_calibration_is_given_the_tasks(llama: Path, tmp_path: Path) -> None:
    for bits, resumed in ((4, 0), (2, 3 * SAMPLES), (2, 4 * SAMPLES)):
        found = MeasuredSetting({"nbits": bits}, 100.0, 0.1)
        kvlayers_lab.Calibration(found, None, ()).save(tmp_path)
        said = measured(llama, "--bits", "4,2", "--calibration", tmp_path, "--results", "answers")
        assert said["resumed"] == resumed
        answers: dict[str, list[str]] = {each["name"]: [] for each in said["caches"]}
        for each in said["outcomes"]:
            answers[each["cache"]].append(each["answer"])
        assert answers["kvlayers calibrated"] == answers[f"kvlayers int{bits}"]
    assert answers["kvlayers int2"] != answers["kvlayers int4"]


@pytest.mark.usefixtures("able")
def test_a_cache_that_fails_is_said_and_ends_with_1(llama: Path) -> None:
    name = "caches_of_a_user:failing"
    result = tasks(llama, *QUICK, "--bits", "8", "--cache", name, "--budget", 100, code=1)
    assert f"{name} failed at {SAMPLES} samples: RuntimeError: no more than 96" in words(result.output)


def test_the_tasks_that_help_names_are_those_that_there_are() -> None:
    assert sorted([*TASKS, "echo"]) == task_names()


@pytest.mark.parametrize(
    ("positions", "given", "fitting"),
    [(8192, None, [512, 1024, 2048]), (2048, None, [512, 1024]), (256, None, [192]), (256, [100, 256], [100, 256])],
)
def test_usual_lengths_of_tasks_are_those_that_the_model_has_positions_for(
    positions: int, given: list[int] | None, fitting: list[int]
) -> None:
    config = fresh_model("llama", max_position_embeddings=positions).config
    assert fitting_lengths(config, given) == fitting


def test_a_file_that_has_no_results_is_refused(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("the sea\n")
    result = tasks(llama, *QUICK, "--bits", "8", "--results", "text.jsonl", code=2)
    assert "`--results`: text.jsonl must be a file of results" in result.stderr
    assert (tmp_path / "text.jsonl").read_text() == "the sea\n"


# Documents

LENGTH, AFTER = 40, 16
APART = ("--text", "text.txt", "--document-tokens", LENGTH, "--documents")


def test_the_more_is_computed_again_the_less_is_lost(llama: Path) -> None:
    arguments = (llama, *APART, "2,3", "--recompute", "0,4,60%,100%", "--scored", AFTER, "--passages", 2)
    result = tasks(*arguments, "--json", code=0)
    said = json.loads(result.stdout)
    assert (said["document_tokens"], said["scored"], said["passages"]) == (LENGTH, AFTER, 2)
    for count in (2, 3):
        full, none, _, more, every = (each for each in said["documents"] if each["documents"] == count)
        assert [full["recompute"], none["recompute"], more["recompute"]] == [None, 0, "60%"]
        assert full["kl"] == 0 < every["kl"] + 1e-9 < 1e-6 < more["kl"] < none["kl"]
        assert full["agreement"] == every["agreement"] == 1
        assert every["perplexity"] == pytest.approx(full["perplexity"], rel=1e-4)
        assert none["tokens"] == 2 * (AFTER - 1)
        assert full["of_full"] == 1
        # Without the first document, and in all of its tokens the beginning.
        after, tokens = (count - 1) * LENGTH, count * LENGTH + 5
        assert [each["recomputed"] for each in (none, more, every)] == [
            0,
            pytest.approx(0.6 * after / tokens, abs=1 / tokens),
            pytest.approx(after / tokens),
        ]

    assert f"2 sets of documents of {LENGTH} tokens, and {AFTER} tokens after them" in result.stderr
    assert "all at once" in result.stderr
    assert all(len(line) <= 80 for line in result.stderr.splitlines())


def test_a_slow_reference_scores_the_same() -> None:
    model, tokenizer, text = fresh_model("llama").eval(), word_tokenizer(), random_text(600)
    [_, found] = measure_documents(model, tokenizer, text, [2], LENGTH, AFTER, 2, [0], lambda what: None)
    places = [0, *(text.find("\n", len(text) * quarter // 4) + 1 for quarter in (1, 2, 3))]
    encoded = [tokenizer(text[place:]).input_ids[: LENGTH + AFTER] for place in places]
    begin = tokenizer("Read the following texts.").input_ids
    kl, agrees = [], []
    # The first set goes on with its first document, the second one with its second.
    for number, pair in enumerate((encoded[::2], encoded[1::2])):
        documents = [own[:LENGTH] for own in pair]
        whole, _ = read(model, torch.tensor([begin + documents[0] + documents[1]]))
        caches = [read(model, torch.tensor([begin + own]))[0] for own in documents]
        apart = kvlayers.concatenate(caches, model, recompute=0, beginning_tokens=len(begin))
        target = torch.tensor([pair[number][LENGTH:]])
        expected, seen = (read(model, target, cache)[1][0, :-1].double().log_softmax(-1) for cache in (whole, apart))
        kl.append((expected.exp() * (expected - seen)).sum(-1))
        agrees.append(expected.argmax(-1) == seen.argmax(-1))
    # The log-probabilities of float32 sums in another order differ in their last digits.
    assert found.kl == pytest.approx(float(torch.cat(kl).mean()), rel=1e-3)
    assert found.agreement == pytest.approx(float(torch.cat(agrees).double().mean()))


def test_a_budget_of_documents_decides_the_exit_code(llama: Path) -> None:
    arguments = (llama, *APART, "2", "--scored", AFTER, "--passages", 1, "--max-kl", 1e-5)
    shown = words(tasks(*arguments, "--recompute", "0,100%", code=0).output)
    assert "with 2 documents, the fastest is recompute='100%'." in shown
    none = tasks(*arguments, "--recompute", "0", code=1)
    assert "Nothing is within a KL divergence of 1e-05 with 2 documents" in words(none.output)


def test_the_answer_stands_in_each_document_in_turn(llama: Path) -> None:
    arguments = (llama, *APART, "2,3", "--tasks", "needle", "--document-tokens", 120)
    arguments += ("--results", "answers")
    said = json.loads(tasks(*arguments, "--recompute", "0,100%", "--json", code=0).stdout)
    names = ["kvlayers dynamic", "kvlayers recompute 0", "kvlayers recompute 100%"]
    assert [each["name"] for each in said["caches"]] == names
    exact, none, every = ([one for one in said["outcomes"] if one["cache"] == name] for name in names)
    assert [(one["length"], one["depth"]) for one in exact] == [
        (240, 0.25),
        (240, 0.75),
        (360, pytest.approx(1 / 6)),
        (360, 0.5),
        (360, pytest.approx(5 / 6)),
    ]
    assert [one["answer"] for one in every] == [one["answer"] for one in exact]
    logprobs = [one["logprob"] for one in exact]
    assert [one["logprob"] for one in every] == pytest.approx(logprobs, abs=1e-4)
    assert [one["logprob"] for one in none] != pytest.approx(logprobs, abs=1e-4)

    again = json.loads(tasks(*arguments, "--recompute", "0,100%", "--json", code=0).stdout)
    assert (again["resumed"], again["outcomes"]) == (len(said["outcomes"]), said["outcomes"])
    assert "document_tokens" in tasks(*arguments, "--document-tokens", 130, code=2).output


def test_documents_are_cut_at_the_ends_of_sentences() -> None:
    tokenizer = word_tokenizer()
    stop, others = tokenizer("the sea .").input_ids[-1], tokenizer("the").input_ids
    ids = [*others * 37, stop, *others * 40, stop, *others * 21]
    cut = documents_of(tokenizer, ids, 2)
    assert list(map(len, cut)) == [38, 62]
    assert [*cut[0], *cut[1]] == ids
    # Without sentences, or with one that ends far away, all are as long as the others.
    assert list(map(len, documents_of(tokenizer, others * 90, 3))) == [30, 30, 30]
    assert list(map(len, documents_of(tokenizer, [stop, *others * 299], 3))) == [100, 100, 100]


def test_a_sample_knows_its_introduction() -> None:
    tokenizer = word_tokenizer()
    [sample] = samples_of(["needle"], [200], [0.5], 1, 0, tokenizer, random_text(600))
    introduction = tokenizer("A magic number is hidden in the following text. Remember it.").input_ids
    assert sample.context_ids[: sample.introduction_tokens] == tuple(introduction)


def test_documents_are_computed_behind_their_beginning_once() -> None:
    model = fresh_model("llama").eval()
    context = Apart(model, range(3, 8), [range(20, 32), range(40, 50)])
    with passes_of(model) as passes:
        for _ in range(2):
            assert context.joined(0).cache.get_seq_length() == 27
    assert passes == [(1, 5), (1, 12), (1, 10)]
    assert context.at_once().get_seq_length() == 27


def test_the_report_has_a_picture(llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the report needs the extra 'report'")
    arguments = (llama, *APART, "2", "--recompute", "0,50%", "--scored", AFTER, "--passages", 1)
    tasks(*arguments, "--report", "page.html", code=0)
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page
    assert "2 documents" in page
