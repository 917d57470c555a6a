"""Why a test is skipped on some version of transformers: named conditions, each with its reason."""

import contextlib
import inspect
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version

import kvlayers
from kvlayers.upstream import cache_argument, compat
from kvlayers.utils.triton_support import MINIMUM_VERSION, triton_version

TRANSFORMERS = Version(Version(transformers.__version__).base_version)


LEAVES_THE_CACHE_TO_MODELS = Version("5.0") <= TRANSFORMERS < Version("5.1")
"""Whether `generate()` leaves it to the model to make a cache of no name, so that it cannot prefill in chunks."""


CROPS_STATIC_LAYERS = Version("5.24") <= TRANSFORMERS
"""Whether transformers' own static layers can be cropped."""

PACKS_ONE_QUERY = Version("5.23") <= TRANSFORMERS
"""Whether the query heads of a KV head are queries of one product, if there is one token with a mask."""


def _since(version: str, what: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        Version(version) > TRANSFORMERS,
        reason=f"transformers {TRANSFORMERS} has no {what}, which came with {version}",
    )


TRITON = triton_version()
"""Version 0 if triton is not installed."""

interprets_kernels = pytest.mark.skipif(
    Version(MINIMUM_VERSION) > TRITON or (Version("3.7") > TRITON and Version(np.__version__) >= Version("2.4")),
    reason=f"triton {TRITON} has no interpreter that works with numpy {np.__version__}: see constraints-shared.txt",
)
compiles_kernels = pytest.mark.skipif(
    Version(MINIMUM_VERSION) > TRITON, reason=f"triton {TRITON} is older than {MINIMUM_VERSION}, or is not installed"
)
kvlayers_recurrent_layers = pytest.mark.skipif(
    not compat.MODELS_PASS_COLUMNS,
    reason=f"models of transformers {TRANSFORMERS} do not say what their convolutions keep, as kvlayers' layers need, "
    "which came with 5.15",
)
benchmarks_of_transformers = pytest.mark.skipif(
    Version("5.23") > TRANSFORMERS,
    reason=f"benchmarks measure the caches of transformers as they are since 5.23, and not those of {TRANSFORMERS}",
)
static_indexers = pytest.mark.skipif(
    compat.INDEXERS_DEPEND_ON_CHUNKS,
    reason=f"static indexers of transformers {TRANSFORMERS} choose among slots without tokens, so kvlayers has none",
)
leaves_masks_as_they_are = pytest.mark.skipif(
    Version("5.6") > TRANSFORMERS,
    reason=f"attention of transformers {TRANSFORMERS} cuts every mask that is longer than the keys by itself",
)
windows_refuse_quantization = pytest.mark.skipif(
    Version("5.17") > TRANSFORMERS,
    reason=f"quantized caches of transformers {TRANSFORMERS} take models with windows, and keep every token",
)
windows_in_chunks = pytest.mark.skipif(
    Version("5.0") <= TRANSFORMERS < Version("5.1"),
    reason=f"static windows of transformers {TRANSFORMERS} give other tokens if a prompt comes in chunks",
)
cache_length_of_a_call = _since("5.13", "max_cache_len in a GenerationConfig")
NO_END = None if Version("5.13") <= TRANSFORMERS else 10_000
"""For `eos_token_id`, where no token is to end a sequence. Before 5.13 prompt look-up asked for one: none of those that
there are."""


def need_frequencies_of(name: str) -> None:
    """Skip a test of a RoPE that depends on the length, where transformers itself does not get it right."""
    if name == "phimoe":
        need_since("5.6", "factors of PhiMoE's RoPE")
    if name == "llama dynamic":
        need_since("5.17", "dynamic RoPE without a trace of earlier prompts")


DRAFTS_MAY_HAVE_A_LEAST_LENGTH = Version("5.6") <= TRANSFORMERS
"""Whether assisted decoding takes `min_new_tokens`."""

prefills_apart = pytest.mark.skipif(
    not compat.PREFILLS_APART, reason=f"transformers {TRANSFORMERS} has no _prefill, which came with 5.0"
)
compiled_by_length = pytest.mark.skipif(
    compat.MASKS_BY_CACHE_POSITION,
    reason=f"models of transformers {TRANSFORMERS} cannot be compiled without cache_position, as from 5.4 on",
)
images_in_prefixes = _since("5.3", "method that makes positions of images")

RECURRENT_FAMILIES = (
    *("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "granitemoehybrid", "lfm2", "qwen3_next", "qwen3_5"),
    *("zamba2", "falcon_h1", "nemotron_h"),
)
"""Families whose recurrent states are held by layers of kvlayers."""

RECURRENT_TYPES = (*RECURRENT_FAMILIES, "lfm2_moe", "olmo_hybrid", "qwen3_5_text")
"""Model types with such states."""

CROSS_ATTENTION_FORGETS = Version("5.12") > TRANSFORMERS
"""Whether transformers gives cross-attention the windows of self-attention, so that its own tokens are wrong (t5gemma
with an encoder's output longer than those)."""


def need_since(version: str, what: str) -> None:
    """Skip a test on versions of transformers before one that `what` runs on."""
    if Version(version) > TRANSFORMERS:
        pytest.skip(f"transformers {TRANSFORMERS} does not run {what}, as {version} does")


def need_until(version: str, what: str) -> None:
    """Skip a test of `what` from the version on that has it no longer."""
    if Version(version) <= TRANSFORMERS:
        pytest.skip(f"transformers {TRANSFORMERS} has no {what}, which ended with {version}")


def need_cache(model: Any) -> None:
    """Skip a test on versions of transformers whose `model` takes no cache."""
    if not cache_argument.is_taken_by(model):
        pytest.skip(f"a {type(model).__name__} of transformers {TRANSFORMERS} takes no cache")


def peft_passes_prefixes() -> bool:
    """Whether PEFT passes the states of a trained prefix by the name that the models of transformers take."""
    import peft.peft_model

    return f'"{cache_argument.usual_name()}"' in inspect.getsource(peft.peft_model.PeftModelForCausalLM)


def need_model_class(class_name: str) -> None:
    """Skip a test of a family that the installed transformers does not have."""
    if class_name not in dir(transformers):
        pytest.skip(f"transformers {TRANSFORMERS} has no {class_name}")


def need_recurrent_layers(family: str) -> None:
    """Skip a test of a family whose recurrent states kvlayers does not hold on the installed transformers."""
    if family in RECURRENT_TYPES and not compat.MODELS_PASS_COLUMNS:
        pytest.skip(kvlayers_recurrent_layers.kwargs["reason"])


def recording() -> AbstractContextManager[None]:
    """Where drafts are verified with a cache that is given, and windows must record what they may have to go back to.

    Until transformers 5.14 it did not tell them to, and kvlayers does where it is installed.
    """
    return contextlib.nullcontext() if compat.RECORDS_BEFORE_DRAFTS else kvlayers.installed()


def rope(**parameters: Any) -> dict[str, Any]:
    """`rope_parameters` of a config, in the words of the installed transformers: arguments of a config class.

    Args:
        parameters: as transformers 5 has them, for all layers, or for "full_attention" and "sliding_attention".
    """
    if compat.ROPE_HAS_ONE_DICT:
        return {"rope_parameters": parameters}
    general = parameters.get("full_attention", parameters)
    if general["rope_type"] == "longrope":
        # phi3 takes the first two and no others.
        names = [name for name in ("short_factor", "long_factor", "factor") if name in general]
        own = {"type": "longrope"} | {name: general[name] for name in names}
        return {"rope_theta": general["rope_theta"], "rope_scaling": own}
    own = {name: value for name, value in general.items() if name not in ("rope_theta", "partial_rotary_factor")}
    said = {"rope_theta": general["rope_theta"], "rope_scaling": None if own == {"rope_type": "default"} else own}
    if "partial_rotary_factor" in general:
        said["partial_rotary_factor"] = general["partial_rotary_factor"]
    if "sliding_attention" in parameters:
        said["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
    return said


def set_rope_theta(config: Any, theta: float) -> None:
    """Change the base of the angles that a config says."""
    if compat.ROPE_HAS_ONE_DICT:
        config.rope_parameters["rope_theta"] = theta
    else:
        config.rope_theta = theta


def positions(ids: torch.Tensor, cache: Any) -> dict[str, torch.Tensor]:
    """What a compiled forward pass must be told of new tokens `[batch, new]` behind those that a cache has seen.

    Until transformers 5.4 models made their positions of the length of the cache, which compiled code does not know.
    """
    if not compat.MASKS_BY_CACHE_POSITION:
        return {}
    seen = cache.get_seq_length()
    return {"cache_position": torch.arange(seen, seen + ids.shape[1])}
