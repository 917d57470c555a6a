"""Bytes that a prefix store holds for a document and its questions, beside deep copies of transformers' cache."""

import copy
import pathlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

import kvlayers
from lib.timing import Disagreements, Tick
from lib.workload import RealModel

STORE = "kvlayers, PrefixStore"
QUESTION_TOKENS, ANSWER_TOKENS = 16, 8
ROOM = 2**34


@dataclass(frozen=True)
class Case:
    """Questions about one document.

    Attributes:
        tokens: tokens of the document.
        questions: questions about it.
        budget: bytes of a second store, whose evictions are counted.
        of_private: the most bytes behind the document, as a multiple of those of the private tokens; `None` if it is
            not asked.
        of_document: the most bytes of everything, as a multiple of those of the document; `None` if it is not asked.
    """

    tokens: int
    questions: int
    budget: int
    of_private: float | None = None
    of_document: float | None = None


CASES = (Case(1000, 6, 200 * 2**20, of_private=1.05), Case(3000, 10, 200 * 2**20, of_document=1.2))
QUICK_CASES = (Case(128, 3, 32 * 2**20, of_private=1.05),)


def distinct_tokens(sequences: Sequence[Sequence[int]]) -> int:
    """The nodes of the tree of all prefixes of some sequences: tokens that a store holds if it holds each once."""
    return len({tuple(sequence[:end]) for sequence in sequences for end in range(1, len(sequence) + 1)})


def bytes_on_disk(directory: pathlib.Path) -> int:
    """Bytes that the files of a directory take in whole sectors, as `du` counts them."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def bytes_of(cache: transformers.Cache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def compare_answers(
    disagreements: Disagreements, where: dict[str, Any], expected: Sequence[Tensor], seen: Tensor
) -> None:
    """Compare an answer `[tokens]` with the logits `[1, vocab]` of each step, up to the first token that differs."""
    for index, (logits, token) in enumerate(zip(expected, seen.tolist(), strict=True)):
        disagreements.compare_token({**where, "tokens": where["tokens"] + index}, logits[0].float(), token)
        if int(logits[0].argmax()) != token:
            # The texts differ from here on.
            return


def ask_all(model: Any, document: Tensor, prompts: Sequence[Tensor], store: kvlayers.PrefixStore) -> list[Tensor]:
    """The document, and then each prompt `[1, tokens]` with its answer, through one store: their sequences."""
    kvlayers.generate(model, document, prefix_store=store, max_new_tokens=1, do_sample=False)
    asked = {"max_new_tokens": ANSWER_TOKENS, "min_new_tokens": ANSWER_TOKENS, "do_sample": False}
    return [kvlayers.generate(model, prompt, prefix_store=store, **asked) for prompt in prompts]


def copied_for_all(model: Any, document: Tensor, prompts: Sequence[Tensor]) -> tuple[int, list[Sequence[Tensor]]]:
    """The same with a deep copy of transformers' cache for each prompt: bytes of all caches, and logits of answers."""
    kept = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(document, past_key_values=kept, logits_to_keep=1)
    asked = {"max_new_tokens": ANSWER_TOKENS, "min_new_tokens": ANSWER_TOKENS, "do_sample": False}
    nbytes, logits = bytes_of(kept), []
    for prompt in prompts:
        own = copy.deepcopy(kept)
        mask = torch.ones_like(prompt)
        found = model.generate(
            prompt,
            attention_mask=mask,
            past_key_values=own,
            return_dict_in_generate=True,
            output_logits=True,
            **asked,
        )
        nbytes += bytes_of(own)
        logits.append(found.logits)
    return nbytes, logits


def measure_memory(workload: RealModel, case: Case, disagreements: Disagreements, tick: Tick) -> dict[str, Any]:
    """Bytes of a store without a bound and of its directory, evictions of one with a budget; answers are compared."""
    model = workload.model
    text = workload.prompt(case.tokens + case.questions * QUESTION_TOKENS)
    document, rest = text[:, : case.tokens], text[:, case.tokens :]
    prompts = [torch.cat([document, question], dim=1) for question in rest.split(QUESTION_TOKENS, dim=1)]
    with tempfile.TemporaryDirectory() as place:
        directory = pathlib.Path(place) / "store"
        store = kvlayers.PrefixStore(ROOM, directory)
        sequences = ask_all(model, document, prompts, store)
        store.flush()
        held, files = store.statistics, bytes_on_disk(directory)
    tick()
    bounded = kvlayers.PrefixStore(case.budget)
    ask_all(model, document, prompts, bounded)
    tick()
    copied, logits = copied_for_all(model, document, prompts)
    tick()
    for sequence, expected in zip(sequences, logits, strict=True):
        where = {"cache": STORE, "model": workload.name, "tokens": prompts[0].shape[1], "trial": 0}
        compare_answers(disagreements, where, expected, sequence[0, -ANSWER_TOKENS:])
    # The last token of an answer was never passed to the model.
    private = distinct_tokens([sequence[0, case.tokens : -1].tolist() for sequence in sequences])
    config = model.config.get_text_config()
    of_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    document_bytes, private_bytes = case.tokens * of_token, private * of_token
    return {
        "document_bytes": document_bytes,
        "private_tokens": private,
        "private_bytes": private_bytes,
        "entries": held.entries,
        "bytes": held.bytes,
        "behind_document_of_private": (held.bytes - document_bytes) / private_bytes,
        "of_document": held.bytes / document_bytes,
        "files": files,
        "files_behind_document_of_private": (files - document_bytes) / private_bytes,
        "files_of_document": files / document_bytes,
        "bounded_evictions": bounded.statistics.evictions,
        "bounded_refused": bounded.statistics.refused,
        "bounded_bytes": bounded.statistics.bytes,
        "bounded_tokens_covered": bounded.statistics.tokens_covered,
        "copied_bytes": copied,
    }
