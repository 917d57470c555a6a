"""What a prefix store holds for a document and its questions, and what a branch of a stored document costs."""

import copy
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import kvlayers
from lib.contenders import Maker, fill
from lib.internals import quiet_clock
from lib.peak import MovedBytes
from lib.timing import Disagreements, Tick
from lib.workload import FILL_CHUNK, RandomModel, RealModel, Shape

CONTIGUOUS, BEHIND_HIT = "contiguous", "kvlayers, behind a hit"
STORE = "kvlayers, PrefixStore"
QUESTION_TOKENS, ANSWER_TOKENS = 16, 8
COUNTED = 2
ROOM = 2**36
ASKED = {"max_new_tokens": ANSWER_TOKENS, "min_new_tokens": ANSWER_TOKENS, "do_sample": False}


class Case(NamedTuple):
    """Questions about one document, and the bytes of a second store, whose evictions are counted."""

    tokens: int
    questions: int
    budget: int


CASES = (Case(1000, 6, 200 * 2**20), Case(3000, 10, 200 * 2**20))
QUICK_CASES = (Case(128, 3, 32 * 2**20),)


class Kind(NamedTuple):
    """A kind of cache: the dtype of its model, and how it is made."""

    dtype: torch.dtype
    make: Callable[[Any], kvlayers.Cache]


KINDS = {
    "float32": Kind(torch.float32, lambda config: kvlayers.DynamicCache(config=config)),
    "bfloat16": Kind(torch.bfloat16, lambda config: kvlayers.DynamicCache(config=config)),
    "int4": Kind(torch.bfloat16, lambda config: kvlayers.QuantizedCache(config=config, nbits=4)),
}


# Bytes of questions and answers


def distinct_tokens(sequences: Sequence[Sequence[int]]) -> int:
    """The nodes of the tree of all prefixes of some sequences: tokens that a store holds if it holds each once."""
    return len({tuple(sequence[:end]) for sequence in sequences for end in range(1, len(sequence) + 1)})


def ask_all(model: Any, document: Tensor, prompts: Sequence[Tensor], store: kvlayers.PrefixStore) -> list[Tensor]:
    """The document, and then each prompt `[1, tokens]` with its answer, through one store: their sequences."""
    kvlayers.generate(model, document, prefix_store=store, max_new_tokens=1, do_sample=False)
    return [kvlayers.generate(model, prompt, prefix_store=store, **ASKED) for prompt in prompts]


def copied_for_all(model: Any, document: Tensor, prompts: Sequence[Tensor]) -> tuple[int, list[Sequence[Tensor]]]:
    """The same with a deep copy of transformers' cache for each prompt: bytes of all caches, and logits of answers."""
    kept = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(document, past_key_values=kept, logits_to_keep=1)
    caches, logits = [kept], []
    for prompt in prompts:
        caches.append(copy.deepcopy(kept))
        options = {"past_key_values": caches[-1], "return_dict_in_generate": True, "output_logits": True, **ASKED}
        logits.append(model.generate(prompt, attention_mask=torch.ones_like(prompt), **options).logits)
    return sum(layer.keys.nbytes + layer.values.nbytes for cache in caches for layer in cache.layers), logits


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
        # In whole sectors, as `du` counts them.
        files = sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
    bounded = kvlayers.PrefixStore(case.budget)
    ask_all(model, document, prompts, bounded)
    copied, logits = copied_for_all(model, document, prompts)
    tick()
    for sequence, expected in zip(sequences, logits, strict=True):
        answer, at = sequence[0, -ANSWER_TOKENS:].tolist(), prompts[0].shape[1]
        for index, (step, token) in enumerate(zip(expected, answer, strict=True)):
            where = {"cache": STORE, "model": workload.name, "tokens": at + index, "trial": 0}
            disagreements.compare_token(where, step[0].float(), token)
            if int(step[0].argmax()) != token:
                # The texts differ from here on.
                break
    # The last token of an answer was never passed to the model.
    private = distinct_tokens([sequence[0, case.tokens : -1].tolist() for sequence in sequences])
    config = model.config.get_text_config()
    of_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    return {
        "document_bytes": case.tokens * of_token,
        "private_bytes": private * of_token,
        "bytes": store.statistics.bytes,
        "files": files,
        "copied_bytes": copied,
        "bounded_evictions": bounded.statistics.evictions,
    }


# Branches of a stored document


def branch_ids(document: Tensor, number: int, tokens: int) -> Tensor:
    return torch.cat([document, document.new_full((tokens,), int(document.max()) + 1 + number)])


def hit_in(store: kvlayers.PrefixStore, ids: Tensor, covered: int) -> kvlayers.Cache:
    """The cache that a store finds for ids, which has seen `covered` tokens."""
    hit = store.lookup(ids, model="benchmark")
    if hit.cache is None or hit.covered != covered:
        raise RuntimeError(f"the store found {hit.covered} of {covered} tokens: {hit.reason}")
    return hit.cache


class Branches(RandomModel):
    """A model whose caches hold a document and a question, in one piece or behind a hit.

    The hit is the third one on its document, so that the spare room of the document is taken.
    """

    def __init__(self, shape: Shape, name: str) -> None:
        super().__init__(shape, dtype=KINDS[name].dtype)
        self.name = f"{self.name}, {name}"
        self._make = KINDS[name].make
        self.makers: dict[str, Maker] = {
            CONTIGUOUS: lambda config, length: self._filled(self.states, self._questions[-1]),
            BEHIND_HIT: lambda config, length: self._behind_hit(),
        }

    def prepare(self, length: int, batch: int = 1) -> Tensor:
        self._questions = [self.shape.states(QUESTION_TOKENS, self.model.dtype, seed) for seed in (1, 2, 3)]
        return super().prepare(length - QUESTION_TOKENS, batch)

    def fill(self, cache: Any) -> None:
        """Nothing: `makers` make caches that are filled."""

    def _filled(self, *parts: list[tuple[Tensor, Tensor]]) -> kvlayers.Cache:
        cache = self._make(self.model.config)
        for part in parts:
            fill(cache, part, FILL_CHUNK)
        return cache

    def _behind_hit(self) -> kvlayers.Cache:
        tokens = self.states[0][0].shape[2]
        store, ids = kvlayers.PrefixStore(ROOM), torch.arange(tokens)
        store.insert(ids, self._filled(self.states), model="benchmark")
        hits = [hit_in(store, branch_ids(ids, number, QUESTION_TOKENS), tokens) for number in range(3)]
        for hit, question in zip(hits, self._questions, strict=True):
            fill(hit, question, QUESTION_TOKENS)
        return hits[-1]


def measure_insert(
    shape: Shape, dtype: torch.dtype, tokens: int, new: int, branches: int, tick: Tick
) -> dict[str, Any]:
    """What branches of `new` tokens on a document of `tokens` cost: seconds, bytes written, and bytes held more.

    `moved` are bytes that `insert()` writes, and `moved_in_all` those of the look-up, the new states and the insertion.
    They are counted for the first `COUNTED` branches; the others are timed, since a counted operation takes longer.
    """
    ids, store = torch.arange(tokens), kvlayers.PrefixStore(ROOM)
    found: dict[str, Any] = {name: [] for name in ("seconds", "processor", "moved", "moved_in_all", "more_bytes")}
    with torch.no_grad():
        stored = kvlayers.DynamicCache()
        fill(stored, shape.states(tokens, dtype), FILL_CHUNK)
        store.insert(ids, stored, model="benchmark")
        del stored
        for number in range(branches):
            own, states = branch_ids(ids, number, new), shape.states(new, dtype, 1 + number)
            before = store.statistics.bytes
            with MovedBytes() as in_all:
                branch = hit_in(store, own, tokens)
                fill(branch, states, new)
            if number < COUNTED:
                with MovedBytes() as moved:
                    store.insert(own, branch, model="benchmark")
                found["moved"].append(moved.nbytes)
                found["moved_in_all"].append(in_all.nbytes + moved.nbytes)
            else:
                with quiet_clock():
                    begin, processor = time.perf_counter(), time.process_time()
                    store.insert(own, branch, model="benchmark")
                    found["seconds"].append(time.perf_counter() - begin)
                    found["processor"].append(time.process_time() - processor)
            found["more_bytes"].append(store.statistics.bytes - before)
            del branch
            tick()
    of_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize
    return {**found, "branch_bytes": new * of_token}
