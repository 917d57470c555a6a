"""Times saving and loading a cache of SmolLM2's shape, beside `torch.save` of transformers' DynamicCache."""

import os
import pathlib
import statistics
import tempfile
import time
from typing import Any

import torch
import transformers

import kvlayers
from lib.contenders import fill
from lib.workload import Shape

TOKENS, TRIALS = 4096, 7


def filled(cache: Any, shape: Shape) -> Any:
    fill(cache, shape.states(TOKENS, torch.bfloat16), TOKENS)
    return cache


def save_and_sync(cache: Any, path: pathlib.Path) -> None:
    torch.save(cache, path)
    with open(path, "r+b") as file:
        os.fsync(file.fileno())


def main() -> None:
    torch.set_num_threads(1)
    shape = Shape(layers=30, heads=9, kv_heads=3)
    upstream = filled(transformers.DynamicCache(), shape)
    cache, quantized = filled(kvlayers.DynamicCache(), shape), filled(kvlayers.QuantizedCache(nbits=4), shape)
    with tempfile.TemporaryDirectory() as directory:
        upstream_file, own_file, packed_file = (
            pathlib.Path(directory) / name for name in ("torch", "kvlayers", "packed")
        )
        for name, call in {
            "torch.save and fsync": lambda: save_and_sync(upstream, upstream_file),
            "save_cache": lambda: kvlayers.save_cache(cache, own_file),
            "torch.load": lambda: torch.load(upstream_file, weights_only=False),
            "load_cache": lambda: kvlayers.load_cache(own_file),
            "load_cache(verify=False)": lambda: kvlayers.load_cache(own_file, verify=False),
            "load_cache(length=512)": lambda: kvlayers.load_cache(own_file, length=512),
            "inspect_cache": lambda: kvlayers.inspect_cache(own_file),
            "save_cache, 4 bits": lambda: kvlayers.save_cache(quantized, packed_file),
            "load_cache, 4 bits": lambda: kvlayers.load_cache(packed_file),
        }.items():
            seconds = []
            for _ in range(TRIALS):
                begin = time.perf_counter()
                call()
                seconds.append(1e3 * (time.perf_counter() - begin))
            print(f"{name} {statistics.median(seconds):.0f} ms ({min(seconds):.0f}-{max(seconds):.0f})")
        print("bytes", *(path.stat().st_size for path in (upstream_file, own_file, packed_file)))
        config, layer = transformers.MistralConfig(num_hidden_layers=1, sliding_window=16), Shape(1, kv_heads=2)
        torch.save(filled(transformers.DynamicCache(config=config), layer), upstream_file)
        kvlayers.save_cache(filled(kvlayers.DynamicCache(config=config), layer), own_file)
        print("bytes of a window of 16", upstream_file.stat().st_size, own_file.stat().st_size)


if __name__ == "__main__":
    main()
