"""A cache that is sent to another process goes on there as here, and neither sees what the other one does."""

import copy
import multiprocessing
import os
import pathlib
import pickle
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing

import kvlayers
from models import tiny_model
from sent_caches import FORKED, KINDS, Answer, answer, answer_all, filled, go_on

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def check(answers: Answer, caches: Mapping[str, kvlayers.Cache], copies: Mapping[str, kvlayers.Cache]) -> None:
    """Compare what came back with the caches that were sent.

    Args:
        answers: what another process answered.
        caches: the caches that were sent, which have not gone on here.
        copies: as `caches`, never sent and none of their memory shared.
    """
    assert [*answers] == [*caches] == [*copies]
    for name, (logits, returned) in answers.items():
        sent, twin = caches[name], copy.deepcopy(copies[name])
        assert type(returned) is type(sent)
        # The other process has gone on: here nothing has changed.
        torch.testing.assert_close(go_on(name, sent, 5), go_on(name, copy.deepcopy(twin), 5), msg=f"{name}, here")
        torch.testing.assert_close(torch.from_numpy(logits), go_on(name, twin, 4), msg=f"{name}, there")
        torch.testing.assert_close(go_on(name, returned, 6), go_on(name, twin, 6), msg=f"{name}, back again")


def values_of(caches: Mapping[str, kvlayers.Cache]) -> dict[str, kvlayers.Cache]:
    """Copies by a plain pickle, whose own tests are elsewhere."""
    return pickle.loads(pickle.dumps(caches))


@pytest.mark.slow
def test_a_process_goes_on_with_its_argument_and_with_what_comes_through_queues() -> None:
    caches = filled()
    copies = values_of(caches)
    spawn = torch.multiprocessing.get_context("spawn")
    inboxes, outbox = (spawn.Queue(), multiprocessing.get_context("spawn").Queue()), spawn.Queue()
    # Nobody here holds the argument: it is a copy that goes once the process has been started.
    process = spawn.Process(target=answer_all, args=(values_of(caches), inboxes, outbox))
    process.start()
    answers = [outbox.get(timeout=240)]
    for inbox in inboxes:
        inbox.put({name: caches[name].fork() for name in FORKED})
        # A queue pickles in a thread of its own, and what it was given is a fork.
        here = {name: go_on(name, caches[name].fork(), 7) for name in FORKED}
        answers.append(outbox.get(timeout=240))
        for name, logits in here.items():
            torch.testing.assert_close(logits, go_on(name, copy.deepcopy(copies[name]), 7), msg=name)
    process.join()
    assert process.exitcode == 0
    for answered in answers:
        chosen = {name: caches[name].fork() for name in answered}
        check(answered, chosen, {name: copies[name] for name in answered})


def test_torch_saves_and_loads_caches(tmp_path: pathlib.Path) -> None:
    caches = filled()
    torch.save(caches, tmp_path / "caches.pt")
    check(answer(torch.load(tmp_path / "caches.pt", weights_only=False), 4), caches, values_of(caches))
    few = {name: caches[name] for name in FORKED}
    torch.save(few, tmp_path / "few.pt")
    twins = values_of(few)
    for _ in range(2):
        # What is written to a mapped cache is not in the file.
        mapped = torch.load(tmp_path / "few.pt", weights_only=False, mmap=True, map_location="cpu")
        check(answer(mapped, 4), {name: cache.fork() for name, cache in few.items()}, twins)


def sent(thing: Any) -> Any:
    """What another process gets, here: tensors that are sent as torch sends them have the same memory."""
    return pickle.loads(ForkingPickler.dumps(thing))


def storages(*tensors: torch.Tensor | None) -> set[int]:
    # Those of no bytes have no address.
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None and tensor.nbytes}


def test_nothing_of_a_cache_is_sent_as_shared_memory() -> None:
    for name, cache in filled().items():
        before = set(cache.storages())
        layers, state = cache.adapted_layers(), cache.state()
        for layer, twin in zip(layers, map(sent, layers), strict=True):
            assert not storages(*layer.held_tensors()) & storages(*twin.held_tensors()), name
        assert not any(t.is_shared() for layer in layers for t in layer.held_tensors() if name != "on disk"), name
        sent(state)
        assert not any(t.is_shared() for layer in state.layers for t in layer.tensors.values()), name
        # Kernels know their addresses.
        assert set(cache.storages()) == before, name


def test_a_cache_goes_on_after_its_keys_were_sent_as_torch_sends_tensors() -> None:
    # Heads of different lengths have no keys in one tensor.
    caches = filled(("dynamic", "sliding", "static", "static sliding", "packed", "sink", "evicting", "recall"))
    copies = values_of(caches)
    for name, cache in caches.items():
        held = [sent(states) for layer in cache.layers for states in (layer.keys, layer.values)]
        before = [states.clone() for states in held]
        torch.testing.assert_close(go_on(name, cache, 4), go_on(name, copies[name], 4), msg=name)
        # Static layers hand out live states.
        if "static" not in name:
            torch.testing.assert_close(held, before, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("kind", ["dynamic", "packed", "latents"])
def test_states_that_an_update_returns_are_sent_by_value(kind: str) -> None:
    family, make = KINDS[kind]
    cache = make(tiny_model(family).config)
    layer = cache.layers[0]
    form = (1, 1, 64) if kind == "latents" else (2, 2, 64)
    for tokens in (200, 1):
        new = torch.randn(form[0], form[1], tokens, form[2], dtype=torch.bfloat16)
        keys = layer.update(new, new)[0] if kind != "latents" else cache.update(new, new[..., :32], 0)[0]
    assert type(keys) is not torch.Tensor
    twin = sent(keys)
    assert type(twin) is torch.Tensor
    assert not twin.is_shared()
    torch.testing.assert_close(twin, keys.float().to(keys.dtype), rtol=0, atol=0)


def test_a_cache_that_autograd_follows_is_sent_without_its_past() -> None:
    cache = kvlayers.DynamicCache()
    keys, values = (torch.randn(1, 2, 5, 8, requires_grad=True) * 2 for _ in range(2))
    cache.update(keys, values, 0)
    twin = sent(cache)
    torch.testing.assert_close(twin.layers[0].keys, keys.detach(), rtol=0, atol=0, check_layout=False)


class OfAnotherPackage(kvlayers.DynamicCache):
    """A subclass that registers nothing."""


def test_subclasses_of_users_are_sent_by_value() -> None:
    cache = OfAnotherPackage(config=tiny_model("llama").config)
    go_on("dynamic", cache, 1)
    twin = sent(cache)
    assert type(twin) is OfAnotherPackage
    assert not set(twin.storages()) & set(cache.storages())


OPERATIONS: dict[str, Callable[[kvlayers.Cache], object]] = {
    "an update": lambda cache: go_on("on disk", cache, 4),
    "a crop": lambda cache: cache.crop(5),
    "a reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "a reset": lambda cache: cache.reset(),
    "a fork": lambda cache: cache.fork(),
    "a deep copy": copy.deepcopy,
    "a pickle": pickle.dumps,
    "a state": lambda cache: cache.state(),
    "keys": lambda cache: cache.layers[0].keys,
    "compact": lambda cache: cache.compact(),
}


def try_all(caches: Mapping[str, kvlayers.Cache], empty: kvlayers.Cache, outbox: Any) -> None:
    """What each operation on a cache of the parent raises, and the steps of caches that have no file of it."""
    raised = {}
    for (name, operation), cache in zip(OPERATIONS.items(), caches.values(), strict=True):
        with pytest.raises(kvlayers.errors.UnsupportedLayerError) as error:
            operation(cache)
        raised[name] = str(error.value)
    fresh = KINDS["on disk"][1](tiny_model("llama").config)
    outbox.put((os.getpid(), raised, go_on("on disk", empty, 4).numpy(), go_on("on disk", fresh, 4).numpy()))


@forks
def test_a_forked_process_does_not_touch_the_files_of_its_parent() -> None:
    caches = {name: filled(["on disk"])["on disk"] for name in OPERATIONS}
    twin, empty = (
        values_of({"on disk": caches["an update"]})["on disk"],
        KINDS["on disk"][1](tiny_model("llama").config),
    )
    fork = multiprocessing.get_context("fork")
    outbox = fork.SimpleQueue()
    process = fork.Process(target=try_all, args=(caches, empty, outbox))
    process.start()
    process.join()
    assert process.exitcode == 0
    pid, raised, *steps = outbox.get()
    assert [*raised] == [*OPERATIONS]
    for message in raised.values():
        assert f"must be used by the process {os.getpid()}" in message
        assert f"got the process {pid}" in message
    for logits in steps:
        torch.testing.assert_close(torch.from_numpy(logits), go_on("on disk", kvlayers.DynamicCache(), 4))
    expected = go_on("on disk", twin, 5)
    for name, cache in caches.items():
        torch.testing.assert_close(go_on("on disk", cache, 5), expected, msg=name)
