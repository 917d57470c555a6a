"""Caches of every kind that are sent to another process, and the decoding that goes on here and there."""

import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

import kvlayers
from kvlayers.layers import layer_names
from kvlayers.upstream import cache_argument, compat
from models import ENCODER_DECODERS, WINDOW, prompt, tiny_model

PROMPT, STEPS, ROOM, ENCODED = 80, 4, 128, 9
BATCH = 2

CODES: dict[str, Any] = {"residual_length": 8, "sink_tokens": 4}
EVICTS: dict[str, Any] = {"keep": 0.5, "sink_tokens": 2, "recent_tokens": 8}
RECALL = {"pages": 2, "page_tokens": 8, "sink_tokens": 2, "recent_tokens": 8}


KINDS: dict[str, tuple[str, Callable[[Any], kvlayers.Cache]]] = {
    "dynamic": ("llama", lambda config: kvlayers.DynamicCache(config=config)),
    "without a config": ("llama", lambda config: kvlayers.DynamicCache()),
    "sliding": ("gemma2", lambda config: kvlayers.DynamicCache(config=config)),
    "static": ("llama", lambda config: kvlayers.StaticCache(config, max_cache_len=ROOM)),
    "static sliding": ("gemma2", lambda config: kvlayers.StaticCache(config, max_cache_len=ROOM)),
    "packed": ("llama", lambda config: kvlayers.QuantizedCache(config=config, nbits=4, **CODES)),
    "sink": ("llama", lambda config: kvlayers.SinkCache(WINDOW, 2, config=config)),
    "evicting": ("llama", lambda config: kvlayers.EvictingCache(config=config, per_head=False, **EVICTS)),
    "evicting from heads": ("llama", lambda config: kvlayers.EvictingCache(config=config, per_head=True, **EVICTS)),
    "evicting packed tokens": (
        "llama",
        lambda config: kvlayers.EvictingCache(config=config, per_head=True, quantization=CODES, **EVICTS),
    ),
    "recall": ("llama", lambda config: kvlayers.DynamicCache(config=config, recall=RECALL)),
    "latents": ("deepseek_v3", lambda config: kvlayers.QuantizedCache(config=config, nbits=8, **CODES)),
    "on disk": (
        "llama",
        lambda config: kvlayers.DynamicCache(
            config=config, offloading=True, offload_device="disk", offload_directory=tempfile.gettempdir()
        ),
    ),
    "encoder-decoder": (
        "t5",
        lambda config: kvlayers.EncoderDecoderCache(
            kvlayers.DynamicCache(config=config), kvlayers.StaticCache(config, max_cache_len=ENCODED)
        ),
    ),
    "recurrent": ("mamba", lambda config: kvlayers.DynamicCache(config=config)),
    "hybrid": ("jamba", lambda config: kvlayers.DynamicCache(config=config)),
}
if not compat.MODELS_PASS_COLUMNS:
    # Recurrent states are not held by layers of kvlayers.
    KINDS = {kind: value for kind, value in KINDS.items() if value[0] not in ("mamba", "jamba")}

for kind, layer in (("recall", "RecallLayer"), ("sink", "SinkLayer")):
    # A test removes these rooms.
    if layer not in layer_names():
        KINDS.pop(kind)

FORKED = ("dynamic", "packed", "evicting from heads")
"""Kinds whose forks share memory, which are sent as forks too."""


@torch.no_grad()
def read(family: str, cache: Any, ids: Tensor) -> Tensor:
    """Logits of new tokens `[batch, new]` behind what a cache has seen."""
    model = tiny_model(family)
    given: dict[str, Any] = {"input_ids": ids}
    if family in ENCODER_DECODERS:
        hidden = torch.randn(BATCH, ENCODED, 32, generator=torch.Generator().manual_seed(0))
        given = {"decoder_input_ids": ids, "encoder_outputs": BaseModelOutput(hidden)}
    logits: Tensor = model(**given, use_cache=True, **{cache_argument.name_for(model): cache}).logits
    return logits


def go_on(name: str, cache: Any, seed: int) -> Tensor:
    """Logits of some steps of a cache, whose tokens are chosen by the seed."""
    ids = prompt(BATCH, STEPS, seed)
    return torch.cat([read(KINDS[kind_of(name)][0], cache, ids[:, at : at + 1]) for at in range(STEPS)], dim=1)


def kind_of(name: str) -> str:
    """The kind of a cache of `filled`."""
    return name.split(", ")[0]


def filled(kinds: Iterable[str] = KINDS) -> dict[str, kvlayers.Cache]:
    """A cache of each kind after a prompt and some steps, and forks that share memory with another cache here."""
    caches = {}
    for kind in kinds:
        family, make = KINDS[kind]
        cache = caches[kind] = make(tiny_model(family).config)
        read(family, cache, prompt(BATCH, PROMPT))
        go_on(kind, cache, seed=1)
        assert cache.batch_size == BATCH
        if kind in FORKED:
            caches[f"{kind}, forked"] = fork = cache.fork()
            go_on(kind, cache, seed=2)
            go_on(kind, fork, seed=3)
    return caches


Answer = dict[str, tuple[Any, kvlayers.Cache]]
"""The logits of each cache as an array, which no other process must keep alive, and the cache after these steps."""


def answer(caches: Mapping[str, kvlayers.Cache], seed: int) -> Answer:
    """Go on with caches, in whichever process this is called."""
    return {name: (go_on(name, cache, seed).numpy(), cache) for name, cache in caches.items()}


def answer_all(caches: Mapping[str, kvlayers.Cache], inboxes: Iterable[Any], outbox: Any) -> None:
    """In a process: go on with its argument, and then with what comes through each queue."""
    torch.set_num_threads(1)
    outbox.put(answer(caches, seed=4))
    for inbox in inboxes:
        outbox.put(answer(inbox.get(), seed=4))
