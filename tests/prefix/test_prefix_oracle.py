"""What a prefix store finds, against an ideal tree of tokens from which the token goes first that was used longest ago."""

import heapq
import itertools
import pathlib
import random
from collections.abc import Iterable

import pytest
import torch

import kvlayers
from kvlayers import CapacityError, PrefixStore

HEADS, HEAD_DIM, LAYERS = 2, 4, 2
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 4

Ids = tuple[int, ...]


class IdealTree:
    """Each token of each prompt once. Leaves go first, of these the one that was used longest ago."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used: dict[Ids, int] = {}
        self.children: dict[Ids, int] = {}
        self.pinned: set[Ids] = set()
        self.now = 0

    def find(self, ids: Ids) -> int:
        """Tokens that are found, which are used now."""
        self.now += 1
        found = next((n for n in range(len(ids) - 1, 0, -1) if ids[:n] in self.used), 0)
        for length in range(1, found + 1):
            self.used[ids[:length]] = self.now
        return found

    def add(self, ids: Ids) -> None:
        if len({*(ids[:n] for n in range(1, len(ids) + 1)), *self.pinned}) > self.most:
            return
        for length in range(1, len(ids) + 1):
            if ids[:length] not in self.used:
                self.children[ids[:length]] = 0
                self.children[ids[: length - 1]] = self.children.get(ids[: length - 1], 0) + 1
            self.used[ids[:length]] = self.now
        leaves = [(time, key) for key, time in self.used.items() if not self.children[key] and key not in self.pinned]
        heapq.heapify(leaves)
        while len(self.used) > self.most:
            _, key = heapq.heappop(leaves)
            del self.used[key], self.children[key]
            above = key[:-1]
            self.children[above] -= 1
            if above in self.used and not self.children[above] and above not in self.pinned:
                heapq.heappush(leaves, (self.used[above], above))

    def pin(self, ids: Ids) -> None:
        self.pinned |= {ids[:n] for n in range(1, len(ids) + 1)}


def passed(cache: kvlayers.DynamicCache, ids: Iterable[int]) -> None:
    states = torch.tensor(list(ids), dtype=torch.float32)[None, None, :, None].expand(1, HEADS, -1, HEAD_DIM)
    for layer in range(LAYERS):
        cache.update(states, -states, layer)


def ask(store: PrefixStore, ids: Ids) -> tuple[int, kvlayers.Cache]:
    """Look a prompt up, compute the rest, and insert it, as `generate()` does."""
    hit = store.lookup(torch.tensor(ids), model="m")
    cache = kvlayers.DynamicCache() if hit.cache is None else hit.cache
    passed(cache, ids[hit.covered :])
    try:
        store.insert(torch.tensor(ids), cache, model="m")
    except CapacityError:
        assert len(ids) > store.max_tokens
    return hit.covered, cache


class Prompts:
    """Random prompts that begin like others: with the same first token, with instructions, with a document."""

    def __init__(self, seed: int, longest: int) -> None:
        self.chance = random.Random(seed)
        self.longest = longest
        self.asked: list[Ids] = []
        self.beginnings = [self.fresh(1, 3), *(self.fresh(1, longest) for _ in range(self.chance.randint(0, 4)))]

    def fresh(self, least: int, most: int) -> Ids:
        length = self.chance.randint(least, most)
        return (1, *(self.chance.randrange(2, 10**6) for _ in range(length - 1)))

    def next(self) -> Ids:
        kind = self.chance.random()
        if self.asked and kind < 0.45:
            # Popular ones, the newer the more.
            ids = self.asked[-min(int(self.chance.expovariate(0.15)) + 1, len(self.asked))]
            if kind < 0.1:
                ids = ids[: self.chance.randint(1, len(ids))]
            if kind < 0.25:
                ids = (*ids, *self.fresh(1, 40))
        else:
            ids = (*self.chance.choice(self.beginnings), *self.fresh(1, self.longest))
        ids = ids[: 2 * self.longest]
        self.asked.append(ids)
        return ids


def simulate(seed, most, longest, steps=250, retain=0, spare=0):
    prompts, ideal, store = Prompts(seed, longest), IdealTree(most), PrefixStore(most * TOKEN_BYTES + spare)
    held, found, of_ideal, total = [], 0, 0, 0
    refused=0
    for step in range(steps):
        ids = prompts.next()
        of_ideal += ideal.find(ids)
        ideal.add(ids)
        hit = store.lookup(torch.tensor(ids), model="m")
        cache = kvlayers.DynamicCache() if hit.cache is None else hit.cache
        passed(cache, ids[hit.covered:])
        try:
            store.insert(torch.tensor(ids), cache, model="m")
            assert store.lookup(torch.tensor((*ids,0)), model="m").covered == len(ids)
        except CapacityError as e:
            refused+=1
            assert len(ids) > most, (len(ids), most, e)
        assert store.statistics.bytes <= most*TOKEN_BYTES
        found += hit.covered
        total += len(ids)
        held = [*held, cache][-retain:] if retain else []
        del hit, cache
    return found, of_ideal, total, refused, store

if __name__ == "__main__":
    import time
    for seed in range(40):
        c = random.Random(seed)
        longest = c.choice([20, 100, 150, 400]); most = c.choice([longest+5, 2*longest, 4*longest, 10*longest, 30*longest])
        retain = c.choice([0,1,10])
        t=time.time()
        f, i, total, refused, store = simulate(seed, most, longest, retain=retain)
        print(seed, longest, most, retain, f, i, total, round(f/max(i,1),3), "refused", refused, "entries", len(store), "bytes", round(store.statistics.bytes/most/TOKEN_BYTES,3), "ev", store.statistics.evictions, round(time.time()-t,1), flush=True)
