"""Times saving and loading a cache of SmolLM2's shape, beside `torch.save` of transformers' DynamicCache."""

import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import kvlayers

LAYERS, KV_HEADS, HEAD_DIM, TOKENS, TRIALS = 30, 3, 64, 4096, 7


def median(call: Callable[[], Any]) -> str:
    seconds = []
    for _ in range(TRIALS):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    low, middle, high = (1e3 * pick(seconds) for pick in (min, statistics.median, max))
    return f"{middle:.0f} ms ({low:.0f}-{high:.0f})"


def to_disk(path: pathlib.Path) -> None:
    with open(path, "r+b") as file:
        os.fsync(file.fileno())


def filled(cache: Any, layers: int, heads: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    for index in range(layers):
        form = (1, heads, TOKENS, HEAD_DIM)
        keys, values = (torch.randn(form, generator=generator).bfloat16() for _ in range(2))
        cache.update(keys, values, index)
    return cache


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        torch_file, kvlayers_file, packed = (pathlib.Path(directory) / name for name in ("torch", "kvlayers", "packed"))
        upstream = filled(transformers.DynamicCache(), LAYERS, KV_HEADS)
        cache = filled(kvlayers.DynamicCache(), LAYERS, KV_HEADS)
        quantized = filled(kvlayers.QuantizedCache(nbits=4), LAYERS, KV_HEADS)
        print("torch.save and fsync", median(lambda: (torch.save(upstream, torch_file), to_disk(torch_file))))
        print("save_cache", median(lambda: kvlayers.save_cache(cache, kvlayers_file)))
        print("torch.load", median(lambda: torch.load(torch_file, weights_only=False)))
        print("load_cache", median(lambda: kvlayers.load_cache(kvlayers_file)))
        print("load_cache(verify=False)", median(lambda: kvlayers.load_cache(kvlayers_file, verify=False)))
        print("load_cache(length=512)", median(lambda: kvlayers.load_cache(kvlayers_file, length=512)))
        print("inspect_cache", median(lambda: kvlayers.inspect_cache(kvlayers_file)))
        print("save_cache, 4 bits", median(lambda: kvlayers.save_cache(quantized, packed)))
        print("load_cache, 4 bits", median(lambda: kvlayers.load_cache(packed)))
        print("bytes", torch_file.stat().st_size, kvlayers_file.stat().st_size, packed.stat().st_size)
        config = transformers.MistralConfig(num_hidden_layers=1, sliding_window=16)
        torch.save(filled(transformers.DynamicCache(config=config), 1, 2), torch_file)
        kvlayers.save_cache(filled(kvlayers.DynamicCache(config=config), 1, 2), kvlayers_file)
        print("bytes of a window of 16", torch_file.stat().st_size, kvlayers_file.stat().st_size)


if __name__ == "__main__":
    main()
