"""What each operation of a cache asks of a GPU: no more launches than it may, and the host waits for no decode step."""

import gc
import importlib
import json
import pathlib
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvlayers
import versions
from kvlayers.eviction import BUILTIN_RULES
from kvlayers.quantized.quantization import Quantization
from kvlayers.quantized.quantized_store import QuantizedStore
from kvlayers.utils.triton_support import TritonKernel
from matrix import once
from models import fresh_model

BENCHMARKS = str(pathlib.Path(__file__).parents[2] / "lab" / "benchmarks")
sys.path.insert(0, BENCHMARKS)
launches: Any = importlib.import_module("launches")
counting: Any = importlib.import_module("lib.counting")
sys.path.remove(BENCHMARKS)

DEVICE = counting.DEVICE
BOUND = [operation for operation in launches.operations() if not operation.name.startswith("transformers")]


@pytest.fixture(autouse=True)
def _on_a_gpu() -> Iterator[None]:
    with torch.no_grad(), counting.gpu():
        yield


@pytest.mark.parametrize("operation", BOUND, ids=lambda operation: operation.name)
def test_an_operation_asks_for_no_more_than_it_may(operation: Any) -> None:
    assert operation.complaints(operation.measure()) == []


def test_the_table_has_the_bounds_and_what_was_counted(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["launches.py", "--only", "DynamicCache: update", "--json"])
    assert launches.main() == 0
    upstream, own = json.loads(capsys.readouterr().out)
    assert (own["operation"], own["at_most"], own["launches"]) == ("DynamicCache: update", 2, 2)
    assert own["by_operator"] == {"kernels": {"copy_": 2}}
    assert upstream["launches"] >= own["launches"]
    monkeypatch.setattr(sys, "argv", ["launches.py", "--only", "DynamicCache: update", "--operators"])
    assert launches.main() == 0
    assert "kernels: copy_ 2" in capsys.readouterr().out


def test_too_many_launches_and_waits_fail_the_command(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def measure() -> Any:
        with counting.counted() as counts:
            torch.zeros(3, device=DEVICE).add_(1).tolist()
        return counts

    monkeypatch.setattr(launches, "operations", lambda: [launches.Operation("too much", measure, at_most=1)])
    monkeypatch.setattr(sys, "argv", ["launches.py", "--json"])
    assert launches.main() == 1
    complaints = json.loads(capsys.readouterr().out)[0]["complaints"]
    assert complaints[0].startswith("2 launches instead of at most 1")
    assert complaints[1] == "the host waits for the device: {'to the host': 1}"


@pytest.mark.parametrize(
    ("head_dim", "path"), [(128, "by a Triton kernel"), (512, "in plain torch, as the head_dim is 512, above 256")]
)
def test_explain_says_how_blocks_were_packed(head_dim: int, path: str) -> None:
    cache = kvlayers.QuantizedCache(nbits=8)
    for tokens in (300, *[1] * 80):
        cache.update(*[torch.empty(1, 8, tokens, head_dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)], 0)
    assert dict(cache.explain().packing) == {f"keys {path}": 2, f"values {path}": 2}
    assert f"packing, 2 times: keys {path}" in repr(cache.explain())


def test_packed_memory_goes_with_the_last_reference_to_it() -> None:
    store = QuantizedStore(Quantization(nbits=4))
    gc.collect()
    gc.disable()
    try:
        for tokens in (300, 1):
            states = [torch.empty(1, 8, tokens, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
            store.validate(*states)
            keys, values = store.extend(*states)
        query = torch.empty(1, 32, 1, 128, dtype=torch.bfloat16, device=DEVICE)
        torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        segment = weakref.ref(keys.snapshot.segments.in_order[1])
        assert segment().kernel_cache
        del store, keys, values
        assert segment() is None
    finally:
        gc.enable()


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "gpu.md"
STATED = dict(re.findall(r"^\| ([^|]+) \| [\d,]* ?\| (\d+) \|$", PAGE.read_text(), re.MULTILINE))


@pytest.mark.parametrize("operation", [each for each in BOUND if each.name in STATED], ids=lambda each: each.name)
def test_the_page_has_the_counts(operation: Any) -> None:
    assert str(operation.measure().launches) == STATED[operation.name]


def test_every_row_of_the_page_is_counted() -> None:
    assert len(STATED) == 12
    assert STATED.keys() <= {operation.name for operation in BOUND}


# The counter


def on_device(*shape: int) -> Tensor:
    return torch.empty(shape, device=DEVICE)


KERNELS: dict[str, tuple[Callable[[], Any], int]] = {
    "a view": (lambda: on_device(4, 4)[1:].transpose(0, 1).reshape(4, 3, 1), 0),
    "arithmetic": (lambda: on_device(4) * 2 + on_device(4), 2),
    "arithmetic in place": (lambda: on_device(4).mul_(2).fill_(1), 2),
    "nothing to write": (lambda: on_device(0) + 1, 0),
    "attention": (lambda: torch.nn.functional.scaled_dot_product_attention(*[on_device(1, 2, 3, 4)] * 3), 1),
    "a copy within the device": (lambda: on_device(4).copy_(on_device(4)), 1),
    "a tensor of the CPU": (lambda: torch.ones(3) + 1, 0),
    "a kernel of kvlayers": (lambda: TritonKernel("no.module", "name").launch(DEVICE, (1,), (), {}), 1),
}


@pytest.mark.parametrize("kind", KERNELS)
def test_kernels_are_counted(kind: str) -> None:
    compute, kernels = KERNELS[kind]
    with counting.counted() as counts:
        compute()
    assert counts.launches == kernels
    assert counts.stalls == {}


STALLS: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda tensor: tensor.sum().item(),
    "a condition": lambda tensor: bool(tensor.isfinite().all()),
    "a comparison": lambda tensor: torch.equal(tensor, tensor),
    "a list": lambda tensor: tensor.tolist(),
    "a copy to the host": lambda tensor: tensor.cpu(),
    "a copy into the memory of the host": lambda tensor: torch.empty(tensor.shape).copy_(tensor),
    "a copy to the device": lambda tensor: torch.ones(3).to(tensor.device),
    "a copy into the memory of the device": lambda tensor: tensor.copy_(torch.ones(3)),
    "numbers of the host": lambda tensor: torch.tensor([1, 2], device=tensor.device),
    "an index of the host": lambda tensor: tensor[torch.tensor([0, 2])],
}


@pytest.mark.parametrize("kind", STALLS)
def test_whatever_the_host_waits_for_is_counted(kind: str) -> None:
    with counting.counted() as counts:
        STALLS[kind](on_device(3))
    assert sum(counts.stalls.values()) == 1


@pytest.mark.parametrize("find", [torch.nonzero, lambda tensor: tensor[tensor > 0], torch.unique])
def test_a_shape_that_depends_on_numbers_is_refused(find: Callable[[Tensor], Any]) -> None:
    with counting.counted() as counts, pytest.raises(NotImplementedError):
        find(on_device(3))
    assert counts.stalls


def test_two_devices_do_not_mix() -> None:
    with counting.counted(), pytest.raises(RuntimeError, match="of the device and of the CPU"):
        on_device(3) + torch.ones(3)


# A model


# One rule of eviction that needs queries, and one that does not, stand for the others.
CACHES = sorted({*kvlayers.cache_names()} - {"auto", *BUILTIN_RULES} | {"snapkv", "keydiff"})
PROMPT, CROPPED = 400, 230


def make_cache(name: str, config: Any, padding: Tensor | None) -> Any:
    from kvlayers.core.named_caches import CacheRequest
    from kvlayers.generation.cache_by_name import cache_for

    cache: Any = cache_for(name, CacheRequest(config, {}, 2, 2 * PROMPT, attention_mask=padding))
    return transferring(cache)


def transferring(cache: Any) -> Any:
    """The cache, with states that are offloaded from the device."""
    prefetcher = kvlayers.offload.Prefetcher(transfers=counting.Transfers)
    for layer in cache.layers:
        if isinstance(layer, kvlayers.OffloadedLayer):
            layer.use_prefetcher(prefetcher)
    return cache


def passed(model: Any, cache: Any, seen: int, new: int, padded: bool) -> Any:
    """Counts of a forward pass of new tokens behind those that the cache has seen."""
    ids = torch.zeros(2, new, dtype=torch.int64, device=DEVICE)
    mask = torch.ones(2, seen + new, dtype=torch.int64, device=DEVICE) if padded else None
    with counting.counted() as counts:
        positions = torch.arange(seen, seen + new, device=DEVICE)[None]
        model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    return counts


@pytest.mark.parametrize(("family", "padded", "name"), once([("gemma3", True), ("llama", False)], CACHES))
def test_the_host_waits_no_more_than_with_the_cache_of_transformers(family: str, name: str, padded: bool) -> None:
    versions.need_since("5.1", "models on a device that torch.autocast does not know")
    if (family, name) == ("llama", "sliding_window"):
        pytest.skip("the model has no windows")
    model = fresh_model(family, max_position_embeddings=2 * PROMPT).to(DEVICE)
    upstream = transformers.DynamicCache(config=model.config)
    padding = torch.ones(2, PROMPT, dtype=torch.int64) if padded else None
    if padding is not None:
        padding[0, :9] = 0
    cache, seen = make_cache(name, model.config, padding), 0
    allowed = [passed(model, upstream, tokens, new, padded).stalls for tokens, new in ((0, PROMPT), (PROMPT, 1))][1]

    def check_step(cache: Any, seen: int) -> int:
        stalls = passed(model, cache, seen, 1, padded).stalls
        assert Counter(stalls) - Counter(allowed) == Counter()
        return seen + 1

    passed(model, cache, 0, PROMPT, padded)
    seen = check_step(cache, check_step(cache, PROMPT))
    with counting.counted() as counts:
        cache.reorder_cache(torch.zeros(2, dtype=torch.int64, device=DEVICE))
    # The host selects sequences where they are held, and it counts the tokens of each sequence that evicts: with
    # padding, sequences hold different numbers, so it reads once which sequences go on.
    counting_layers = sum(isinstance(layer, kvlayers.EvictingLayer) for layer in cache.layers) if padded else 0
    assert sum(counts.stalls.values()) <= counting_layers or "offloaded" in name
    seen = check_step(cache, seen)
    check_step(transferring(cache.fork()), seen)
    if family == "llama" and cache.layers[0].fidelity != "evicting":
        cache.crop(CROPPED)
        check_step(cache, check_step(cache, CROPPED))
    cache.reset()
    passed(model, cache, 0, PROMPT, padded)
    check_step(cache, PROMPT)
