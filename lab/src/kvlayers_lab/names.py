"""Names and defaults that `--help` shows. This module imports nothing, so that `--help` need not wait for torch."""

KVLAYERS = "kvlayers"
TRANSFORMERS = "transformers"

TRANSFORMERS_CACHES = ("dynamic", "static", "quanto", "hqq")
"""Caches of transformers. `quanto` and `hqq` are its quantized caches, with 4 bits."""

DEMO_MODEL = "SmolLM2-135M-Instruct"
HUB_NAME = f"HuggingFaceTB/{DEMO_MODEL}"
"""The model that commands use by default."""

BENCH_REPORT = "kvlayers-bench.html"
"""File that `kvlayers bench` writes by default."""

FIDELITY_BITS = "8,fp8,k8v4,4,k4v2,3,2"
"""Settings that `kvlayers fidelity` measures by default."""

FIDELITY_CONTEXT, FIDELITY_SCORED = 1024, 512
"""Tokens that `kvlayers fidelity` reads before it scores, and tokens that it scores, by default."""

FIDELITY_CHUNK = 32
"""Tokens of a forward pass when `kvlayers fidelity` reads a text, by default."""

TASKS = ("needle", "keys", "values", "variables", "words")
"""Long-context tasks of kvlayers, easiest first."""

TASK_BITS = "8,fp8,4,2"
"""Settings that `kvlayers fidelity --tasks` measures by default."""

TASK_LENGTHS = "512,1k,2k"
"""Lengths in tokens of the tasks of `kvlayers fidelity --tasks`, by default."""

TASK_DEPTHS = "0,50,100"
"""Depths of the tasks of `kvlayers fidelity --tasks`, in percent, by default."""

DOCUMENT_TOKENS = 512
"""Tokens of each document of `kvlayers fidelity --documents`, by default."""

DOCUMENT_SCORED = 64
"""Tokens that `kvlayers fidelity --documents` scores behind documents, by default."""

RECOMPUTES = "0,5%,15%,30%"
"""What `kvlayers fidelity --documents` computes again, by default."""
