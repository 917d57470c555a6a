"""The side of llama.cpp: reads prompts through its Python binding, in an interpreter of its own.

    PYTHON_WITH_LLAMA_CPP benchmarks/lib/llama_side.py MODEL.gguf THREADS < REQUEST

Request and answer are JSON. It imports nothing of kvlayers or of torch.

The request has `kv`, the type of the held states; `ids`, the prompt; and `following`, the tokens of the steps.
The answer has `seconds` of the prompt, `step_seconds`, `nbytes` of the held states, and `tokens`, the likeliest one
after the prompt and after each step, and `build`, the version and what it was compiled for.
"""

import ctypes
import json
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import llama_cpp

TYPES = {
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}
AT_ONCE = 512
"""Tokens of a prompt that llama.cpp reads at once, as its default is."""

WARM_UP = 32


def likeliest(model: Any) -> int:
    """The most likely token after the newest one."""
    logits = llama_cpp.llama_get_logits(model.ctx)
    of_vocab = list(logits[: model.n_vocab()])
    return of_vocab.index(max(of_vocab))


def answer(path: str, threads: int, kv: str, ids: list[int], following: list[int]) -> dict[str, Any]:
    model = llama_cpp.Llama(
        path,
        n_ctx=len(ids) + len(following) + 1,
        n_batch=AT_ONCE,
        n_ubatch=AT_ONCE,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=True,
        type_k=TYPES[kv],
        type_v=TYPES[kv],
        verbose=False,
    )
    # The weights are read from the file when they are first used.
    model.eval(ids[:WARM_UP])
    model.reset()
    begin = time.perf_counter()
    model.eval(ids)
    seconds = time.perf_counter() - begin
    tokens, step_seconds = [likeliest(model)], []
    for token in following:
        begin = time.perf_counter()
        model.eval([token])
        step_seconds.append(time.perf_counter() - begin)
        tokens.append(likeliest(model))
    nbytes = llama_cpp.llama_state_seq_get_size(model.ctx, 0)
    model.close()
    return {"seconds": seconds, "step_seconds": step_seconds, "nbytes": nbytes, "tokens": tokens}


def build() -> dict[str, str]:
    try:
        of_binding = version("llama-cpp-python")
    except PackageNotFoundError:
        of_binding = "unknown"
    told: Any = llama_cpp.llama_print_system_info()
    return {"version": of_binding, "system": (told.value if isinstance(told, ctypes.c_char_p) else told).decode()}


def main(path: str, threads: str) -> None:
    print(json.dumps({"build": build(), **answer(path, int(threads), **json.load(sys.stdin))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
