"""`kvlayers fidelity --documents`: what documents that are computed apart lose, on a text and in answers."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import command_line
import kvlayers
from kvlayers_lab.documents import Apart, documents_of, measure_documents
from kvlayers_lab.tasks import samples_of
from model_directories import random_text, save_sharp_model, word_tokenizer
from models import fresh_model

pytestmark = pytest.mark.usefixtures("text_directory")

LENGTH, SCORED = 40, 16
QUICK = ("--text", "text.txt", "--document-tokens", LENGTH)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharp_model(tmp_path_factory.mktemp("models") / "llama", queries=8, max_position_embeddings=512)


fidelity = functools.partial(command_line.run, "fidelity")


def measured(model: Path, *arguments: object) -> tuple[Any, int]:
    result = fidelity(model, *QUICK, "--json", *arguments)
    assert result.stdout, result.output
    return json.loads(result.stdout), result.exit_code


def words(output: str) -> str:
    return " ".join(output.split())


def test_the_more_is_computed_again_the_less_is_lost(llama: Path) -> None:
    arguments = ("--documents", "2,3", "--recompute", "0,4,60%,100%", "--scored", SCORED, "--passages", 2)
    said, code = measured(llama, *arguments)
    assert code == 0
    assert (said["document_tokens"], said["scored"], said["passages"]) == (LENGTH, SCORED, 2)
    for count in (2, 3):
        full, none, _, more, every = (each for each in said["documents"] if each["documents"] == count)
        assert [full["recompute"], none["recompute"], more["recompute"]] == [None, 0, "60%"]
        assert full["kl"] == 0 < every["kl"] + 1e-9 < 1e-6 < more["kl"] < none["kl"]
        assert full["agreement"] == every["agreement"] == 1
        assert every["perplexity"] == pytest.approx(full["perplexity"], rel=1e-4)
        assert none["tokens"] == 2 * (SCORED - 1)
        assert full["of_full"] == 1
        # Without the first document, and in all of its tokens the beginning.
        after, tokens = (count - 1) * LENGTH, count * LENGTH + 5
        assert [each["recomputed"] for each in (none, more, every)] == [
            0,
            pytest.approx(0.6 * after / tokens, abs=1 / tokens),
            pytest.approx(after / tokens),
        ]

    shown = fidelity(llama, *QUICK, *arguments)
    assert f"2 sets of documents of {LENGTH} tokens, and {SCORED} tokens after them" in shown.output
    assert "all at once" in shown.output
    assert all(len(line) <= 80 for line in shown.output.splitlines())


def test_a_slow_reference_scores_the_same() -> None:
    model, tokenizer, text = fresh_model("llama").eval(), word_tokenizer(), random_text(600)
    [_, found] = measure_documents(model, tokenizer, text, [2], LENGTH, SCORED, 2, [0], lambda what: None)
    places = [0, *(text.find("\n", len(text) * quarter // 4) + 1 for quarter in (1, 2, 3))]
    encoded = [tokenizer(text[place:]).input_ids[: LENGTH + SCORED] for place in places]
    begin = tokenizer("Read the following texts.").input_ids

    @torch.no_grad()
    def read(ids: list[int], cache: Any) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([ids]), past_key_values=cache).logits
        return logits[0].double().log_softmax(-1)

    kl, agrees = [], []
    # The first set goes on with its first document, the second one with its second.
    for number, (first, second) in enumerate((encoded[::2], encoded[1::2])):
        whole, apart, after = (kvlayers.DynamicCache() for _ in range(3))
        read([*begin, *first[:LENGTH], *second[:LENGTH]], whole)
        read([*begin, *first[:LENGTH]], apart)
        read([*begin, *second[:LENGTH]], after)
        moved = kvlayers.moved(after, LENGTH, model)
        for index, layer in enumerate(moved.layers):
            apart.update(layer.keys[:, :, len(begin) :], layer.values[:, :, len(begin) :], index)
        expected, seen = (read((first, second)[number][LENGTH:], cache)[:-1] for cache in (whole, apart))
        kl.append((expected.exp() * (expected - seen)).sum(-1))
        agrees.append(expected.argmax(-1) == seen.argmax(-1))
    # The log-probabilities of float32 sums in another order differ in their last digits.
    assert found.kl == pytest.approx(float(torch.cat(kl).mean()), rel=1e-3)
    assert found.agreement == pytest.approx(float(torch.cat(agrees).double().mean()))


def test_a_budget_decides_the_exit_code(llama: Path) -> None:
    arguments = ("--documents", "2", "--scored", SCORED, "--passages", 1)
    said, code = measured(llama, *arguments, "--recompute", "0,100%", "--max-kl", 1e-5)
    assert (said["passed"], code) == (True, 0)
    result = fidelity(llama, *QUICK, *arguments, "--recompute", "0,100%", "--max-kl", 1e-5)
    assert "with 2 documents, the fastest is recompute='100%'." in words(result.output)
    none = fidelity(llama, *QUICK, *arguments, "--recompute", "0", "--max-kl", 1e-5)
    assert none.exit_code == 1
    assert "Nothing is within a KL divergence of 1e-05 with 2 documents" in words(none.output)


def test_the_answer_stands_in_each_document_in_turn(llama: Path, tmp_path: Path) -> None:
    arguments = ("--documents", "2,3", "--tasks", "needle", "--document-tokens", 120, "--recompute", "0,100%")
    said, code = measured(llama, *arguments, "--results", "answers")
    assert code == 0
    assert [each["name"] for each in said["caches"]] == [
        "kvlayers dynamic",
        "kvlayers recompute 0",
        "kvlayers recompute 100%",
    ]
    exact, none, every = ([one for one in said["outcomes"] if one["cache"] == each["name"]] for each in said["caches"])
    assert [(one["length"], one["depth"]) for one in exact] == [
        (240, 0.25),
        (240, 0.75),
        (360, pytest.approx(1 / 6)),
        (360, 0.5),
        (360, pytest.approx(5 / 6)),
    ]
    assert [one["answer"] for one in every] == [one["answer"] for one in exact]
    assert [one["logprob"] for one in every] == pytest.approx([one["logprob"] for one in exact], abs=1e-4)
    assert [one["logprob"] for one in none] != pytest.approx([one["logprob"] for one in exact], abs=1e-4)

    again, _ = measured(llama, *arguments, "--results", "answers")
    assert again["resumed"] == len(said["outcomes"])
    assert again["outcomes"] == said["outcomes"]
    other = fidelity(llama, *QUICK, *arguments[:-2], "--document-tokens", 130, "--results", "answers")
    assert other.exit_code == 2
    assert "document_tokens" in words(other.output)


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


def test_documents_are_computed_behind_their_beginning_once(llama: Path) -> None:
    model = fresh_model("llama").eval()
    counted: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: counted.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    context = Apart(model, range(3, 8), [range(20, 32), range(40, 50)])
    for _ in range(2):
        assert context.joined(0).cache.get_seq_length() == 27
    assert counted == [5, 12, 10]
    assert context.at_once().get_seq_length() == 27
    hook.remove()


def test_the_report_has_a_picture(llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the report needs the extra 'report'")
    arguments = ("--documents", "2", "--recompute", "0,50%", "--scored", SCORED, "--passages", 1)
    assert fidelity(llama, *QUICK, *arguments, "--report", "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page
    assert "2 documents" in page
