"""What differs between versions of transformers and torch. Outside `upstream`, nothing asks which version is installed.

Each flag says since when ("From x on"), or until when ("Before x"), something is so.
"""

import re
from typing import Any

import torch
import transformers
from packaging.version import Version

from kvlayers.upstream.supported import OF_CACHES, check, check_supported, note_untested

TRANSFORMERS = check_supported("transformers", transformers.__version__)
TORCH = check_supported("torch", torch.__version__)

check(OF_CACHES, TRANSFORMERS)
note_untested(TRANSFORMERS)

# Only now, since an unsupported version may lack what is imported from here.
import transformers.cache_utils as upstream  # noqa: E402

MASKS_BY_CACHE_POSITION = Version("5.4") > TRANSFORMERS
"""Before 5.4, models made masks and positions from `cache_position`, `[query_length]`, which they derived from the
length of the cache if it was not given, and asked a layer for its mask sizes with it. Since then they ask with the
number of queries."""

UPDATES_BY_CACHE_POSITION = Version("5.4") > TRANSFORMERS
"""Before 5.4, static layers were told in `cache_kwargs` which slots to write."""

LOOPS_COUNT_CACHE_POSITION = Version("5.4") > TRANSFORMERS
"""Before 5.4, the loops of `generate()` got the `cache_position` of the prompt, and counted it up token by token."""

CHUNKS_BEGIN_AT_ZERO = Version("5.21") > TRANSFORMERS
"""Before 5.21, a chunked prefill read the whole sequence, whatever the given cache had seen of it."""

SLICES_BY_CACHE_POSITION = Version("5.3") > TRANSFORMERS
"""Before 5.3, `prepare_inputs_for_generation` found the newest tokens by `cache_position`; since then by number."""

KNOWS_FIRST_ITERATION = Version("5.0") <= TRANSFORMERS
"""From 5.0 on, `prepare_inputs_for_generation` is told whether it is called for the first time."""

PREPARES_POSITIONS = Version("5.3") <= TRANSFORMERS
"""From 5.3 on, a method of a model makes the positions of tokens and images before the first pass of `generate()`."""

MASKS_IMAGES_BY_POSITION = Version("5.23") <= TRANSFORMERS
"""From 5.23 on, the tokens of an image behind cached ones attend to each other; before, only those of a first pass."""

HAS_LINEAR_LAYERS = Version("5.5") <= TRANSFORMERS
"""From 5.5 on, layers of a cache hold recurrent states; before, each model had its own class of cache for them."""

STATES_BY_INDEX = Version("5.14") <= TRANSFORMERS
"""From 5.14 on, a layer has several recurrent states, addressed by index, and one function returns the layer types of
a config together with their options."""

MODELS_PASS_COLUMNS = Version("5.15") <= TRANSFORMERS
"""From 5.15 on, models pass a layer the columns of new tokens, and how many its convolution keeps. kvlayers' layers
with recurrent states work this way, and cannot serve models of earlier versions."""

CACHES_LATENTS = Version("5.15") <= TRANSFORMERS
"""From 5.15 on, multi-head latent attention caches the latent and the rotated part of a key; before, the keys and
values of all heads that are computed from the two."""

INDEXERS_CACHE_LATENTS = Version("5.18") <= TRANSFORMERS
"""As `CACHES_LATENTS`, for models whose latent attention has an indexer (deepseek_v32)."""

LAYERS_SAY_WHAT_THEY_CAN_CROP = Version("5.17") <= TRANSFORMERS
"""From 5.17 on, transformers' layers know whether they can be rolled back; before, no recurrent layer can."""

INDEXERS_DEPEND_ON_CHUNKS = Version("5.17") > TRANSFORMERS
"""Before 5.17 (known for 5.12), what layers with an indexer attended to depended on which tokens came in one pass, and
their static layers chose among slots without tokens."""

LAYER_CLASSES_TAKE_CONFIG = Version("5.8") <= TRANSFORMERS < Version("5.14")
"""From 5.8 to 5.13, layer classes are listed by layer type, and are made from the config of the model."""

RECORDS_BEFORE_DRAFTS = Version("5.14") <= TRANSFORMERS
"""From 5.14 on (5.15 for a draft model), assisted decoding lets a cache record its past; before, it used a cache that
drops nothing."""

CROPS_DRAFTS_TO_LENGTHS = Version("5.15") > TRANSFORMERS
"""Before 5.15, assisted decoding cropped the cache of a draft model to a length, which may be zero."""

PREFILLS_APART = Version("5.0") <= TRANSFORMERS
"""From 5.0 on, `generate()` has a method for the first forward pass, `_prefill`."""

PREFILL_SUBTRACTS_LENGTHS = Version("5.4") <= TRANSFORMERS
"""From 5.4 on, `_prefill` takes the newest tokens, as many as the sequence has beyond the length of the cache, and all
tokens if it has none. Before, it took them by their positions, and found none in this case."""

MARKS_GIVEN_CACHES = Version("5.17") <= TRANSFORMERS
"""From 5.17 on, `generate()` sets an attribute of a cache that it is given, before it asks for its length."""

RESERVES_AHEAD = Version("5.13") <= TRANSFORMERS
"""From 5.13 on, the memory of a static cache is reserved before a prefill that is compiled."""

ROPE_HAS_ONE_DICT = Version("5.0") <= TRANSFORMERS
"""From 5.0 on, a config has all that it says about RoPE in `rope_parameters`; before, in `rope_theta`, `rope_scaling`
and, if sliding layers rotate by other angles, `rope_local_base_freq`."""

RESERVES_FOR_KEYS_AND_VALUES = Version("5.0") <= TRANSFORMERS
"""From 5.0 on, a layer is told the shape of values as well as that of keys."""

SAYS_WHAT_RESERVES = Version("5.13") <= TRANSFORMERS
"""From 5.13 on, transformers' layers say whether they can reserve memory before the first states."""

RENAMED_MAXIMA = Version("5.13") <= TRANSFORMERS
"""From 5.13 on, `get_max_cache_shape`, `max_cache_len` and `max_batch_size` of caches are old names of `get_max_length`
and `batch_size`. Before, they are the only names, and transformers calls them."""

CROPS_BY_COUNT_ALONE = Version("5.15") <= TRANSFORMERS
"""From 5.15 on, `crop` warns about a positive argument, and from 5.20 on refuses it; before, it is a length."""

CONVERTS_TO_TUPLES = Version("5.0") > TRANSFORMERS
"""Before 5.0, `generate()` returned tuples if a config had `return_legacy_cache`."""

PASTS_NEED_DECODER_MASKS = Version("5.4") <= TRANSFORMERS
"""From 5.4 on, `generate()` takes all ids of a decoder for new ones unless a mask gives the length of the sequence."""

ITERATES_AS_PAIRS = Version("5.0") > TRANSFORMERS
"""Before 5.0, iterating over a cache yields keys and values; since then also the window of each layer."""

HOLLOW_CACHE_NAMES = (
    *(("SinkCache",) if Version("5.0") > TRANSFORMERS else ()),
    *(("SlidingWindowCache",) if Version("5.6") <= TRANSFORMERS else ()),
)
"""Names of old caches that transformers has without the cache: a class that only raises, or `StaticCache`."""

NAME_FOR_DRAFTS = "dynamic_full" if Version("5.15") > TRANSFORMERS else None
"""The name by which assisted decoding requests a draft model's cache; before 5.15, that of one that drops nothing."""

HAS_EXPORTERS = Version("5.14") <= TRANSFORMERS
"""From 5.14 on, transformers has exporters, which take caches apart to make them inputs of a program."""

STATIC_CACHES_MADE_APART = Version("5.1") <= TRANSFORMERS
"""From 5.1 on, models may have a method of their own that makes static caches, `_prepare_static_cache`."""

BLOOM_MASKS_RESERVATION = Version("5.21") > TRANSFORMERS
"""Before 5.21, BLOOM always pads its mask to the length of a static cache; since then only if it is compiled."""

COMPILES_TENSOR_SUBCLASSES = Version("2.13") <= TORCH
"""From torch 2.13 on, TorchDynamo can trace the tensor subclass of `kernels/attention/packed_tensor.py`."""

OUTSIDE_CUDA_GRAPHS: dict[str, Any] = (
    {"tags": (torch.Tag.cudagraph_unsafe,)} if "cudagraph_unsafe" in torch.Tag.__members__ else {}
)
"""Options of an operator that runs Python at each call, so that torch records no CUDA graph with it."""

# torch 2.6 calls them current_device_idx and set_device_idx, which are deprecated from 2.7 on.
_NAMES_ITS_INDEX = Version("2.7") <= TORCH
current_device_index = (
    torch.accelerator.current_device_index if _NAMES_ITS_INDEX else torch.accelerator.current_device_idx
)
set_device_index = torch.accelerator.set_device_index if _NAMES_ITS_INDEX else torch.accelerator.set_device_idx

LIMITS_PINNED_ROUNDING = Version("2.13") <= TORCH
"""From torch 2.13 on, settings of the allocator can limit which sizes of pinned memory it rounds up to a power of two.
Before, it rounds all sizes."""


def pinned_nbytes(nbytes: int) -> int:
    """Bytes to request for `nbytes` bytes of pinned memory, so that torch's allocator does not round up.

    If the settings are not known, this is a power of two, to which no allocator of torch adds anything.
    """
    settings = torch._C._accelerator_getAllocatorSettings() if LIMITS_PINNED_ROUNDING else ""
    limits = re.findall(r"pinned_max_(?:round_threshold|cached_size)_mb\s*:\s*(\d+)", settings)
    if not nbytes or any(nbytes > int(limit) << 20 for limit in limits):
        return nbytes
    return 1 << (nbytes - 1).bit_length()


TELLS_EXPORTING = Version("2.7") <= TORCH
"""From torch 2.7 on, torch says whether code is traced for export rather than for compilation."""


def is_exporting() -> bool:
    """Whether code is traced for export. Before torch 2.7 this misses strict exports, which look like compilation."""
    if TELLS_EXPORTING:
        # Not torch.compiler.is_exporting(): before torch 2.13 TorchDynamo takes that for true whatever it traces for.
        return torch.compiler._is_exporting_flag
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


def may_be_exporting() -> bool:
    """Whether code may be traced for export, so that what it reads must work for any number of tokens."""
    return is_exporting() if TELLS_EXPORTING else torch.compiler.is_compiling()


class _NoLinearLayer:
    """Stands for the base of layers with recurrent states in versions that have none."""


LINEAR_LAYER: type = upstream.LinearAttentionCacheLayerMixin if HAS_LINEAR_LAYERS else _NoLinearLayer
ATTENTION_LAYER = upstream.CacheLayerMixin
DUMMY_LAYER: tuple[type, ...] = (upstream.DummyLayer,) if Version("5.23") <= TRANSFORMERS else ()
"""The placeholder for a layer that holds nothing, in versions whose caches have one entry for every model layer."""

STATIC_LAYER: Any = upstream.StaticLayer
QUANTO_LAYER: type = upstream.QuantoQuantizedLayer
HQQ_LAYER: type = upstream.HQQQuantizedLayer


class _NoFp8Layer:
    """Stands for transformers' fp8 layer in versions that have none."""


FP8_LAYER: type = upstream.Fp8QuantizedLayer if Version("5.23") <= TRANSFORMERS else _NoFp8Layer

QUANTIZED_LAYERS = (QUANTO_LAYER, HQQ_LAYER, FP8_LAYER)
"""transformers' layers that round states."""

_HAS_INDEXERS = Version("5.11") <= TRANSFORMERS
INDEXED_LAYER: tuple[Any, ...] = (upstream.DynamicIndexedLayer,) if _HAS_INDEXERS else ()
"""A layer of full attention that also caches the keys of an indexer, in versions that have one."""
STATIC_INDEXED_LAYER: tuple[Any, ...] = (upstream.StaticIndexedLayer,) if _HAS_INDEXERS else ()
"""The same with a reservation."""


def dequantizing_gguf() -> dict[str, Any]:
    """Arguments of `from_pretrained` for reading a GGUF file in full precision.

    From 5.17 on, that must be asked for, as such a file may be read as it is quantized.
    """
    is_asked = Version("5.17") <= TRANSFORMERS
    return {"quantization_config": transformers.GgufConfig(dequantize=True)} if is_asked else {}
