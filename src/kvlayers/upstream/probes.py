"""What kvlayers relies on in transformers. It is looked at before it is used, so that no unknown version is refused.

A version that lacks something is refused with the names of what it lacks, rather than failing in the middle of a
generation. docs/design.md shows this list, and says what each name is for.
"""

import functools
import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvlayers.upstream.supported import NEWEST_TESTED, SUPPORTED


@dataclass(frozen=True)
class Probe:
    """A name in transformers.

    Attributes:
        module: the module that has it, without "transformers." before it.
        name: the name, with dots between a class and its attribute.
        parameters: parameters that kvlayers passes by these names, or takes by these names in a method's place.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"transformers.{self.module}.{self.name}"

    def missing(self) -> list[str]:
        """What the installed version lacks: nothing, the name itself, or parameters."""
        try:
            found: Any = functools.reduce(
                getattr, self.name.split("."), importlib.import_module(f"transformers.{self.module}")
            )
        except (ImportError, AttributeError):
            return [str(self)]
        if not self.parameters:
            return []
        taken = inspect.signature(found).parameters
        return [f"{self}(..., {name}=)" for name in self.parameters if name not in taken]


@dataclass(frozen=True)
class LoopProbe:
    """A decoding loop, whose name transformers itself lists.

    Attributes:
        mode: the value of a `GenerationMode`.
        parameters: as for `Probe`.
    """

    mode: str
    parameters: tuple[str, ...]

    def missing(self) -> list[str]:
        """What the installed version lacks: nothing, the loop, or parameters."""
        try:
            utils = importlib.import_module("transformers.generation.utils")
            name = utils.GENERATION_MODES_MAPPING[utils.GenerationMode(self.mode)]
        except (ImportError, AttributeError, KeyError, ValueError):
            return [f"transformers.generation.utils.GENERATION_MODES_MAPPING[{self.mode!r}]"]
        return Probe("generation.utils", f"GenerationMixin.{name}", self.parameters).missing()


OF_CACHES = (
    Probe("cache_utils", "Cache.update", ("key_states", "value_states", "layer_idx")),
    Probe("cache_utils", "Cache.get_seq_length", ("layer_idx",)),
    Probe("cache_utils", "Cache.get_mask_sizes", ("layer_idx",)),
    Probe("cache_utils", "Cache.is_compileable"),
    Probe("cache_utils", "Cache.is_sliding"),
    Probe("cache_utils", "CacheLayerMixin.update", ("key_states", "value_states")),
    Probe("cache_utils", "DynamicCache", ("config",)),
    Probe("cache_utils", "StaticCache", ("config", "max_cache_len")),
    Probe("cache_utils", "EncoderDecoderCache"),
    Probe("cache_utils", "DynamicLayer"),
    Probe("cache_utils", "DynamicSlidingWindowLayer"),
    Probe("cache_utils", "StaticLayer", ("max_cache_len",)),
    Probe("cache_utils", "StaticSlidingWindowLayer", ("max_cache_len", "sliding_window")),
    Probe("cache_utils", "QuantoQuantizedLayer"),
    Probe("cache_utils", "HQQQuantizedLayer"),
    Probe("utils", "ModelOutput"),
)
"""What caches rely on, looked at when kvlayers is first used."""

OF_GENERATE = (
    Probe("generation.utils", "ALL_CACHE_NAMES"),
    Probe("generation.utils", "GenerationMixin.generate", ("generation_config", "custom_generate")),
    Probe(
        "generation.utils",
        "GenerationMixin._prepare_cache_for_generation",
        ("generation_config", "model_kwargs", "generation_mode", "batch_size", "max_cache_length"),
    ),
    Probe("generation.utils", "GenerationMixin._prepare_generation_config", ("generation_config",)),
    Probe("generation.utils", "GenerationMixin._validate_generation_mode", ("generation_mode", "generation_config")),
    Probe("generation.utils", "GenerationMixin._supports_default_dynamic_cache"),
    Probe("generation.utils", "GenerationMixin._update_model_kwargs_for_generation", ("is_encoder_decoder",)),
    Probe("generation.utils", "GenerationMixin._valid_auto_compile_criteria", ("model_kwargs", "generation_config")),
    LoopProbe("assisted_generation", ("input_ids",)),
    LoopProbe("sample", ("input_ids", "logits_processor", "stopping_criteria")),
    Probe("generation.utils", "GenerationMixin.prepare_inputs_for_generation", ("input_ids",)),
    Probe("generation.configuration_utils", "ALL_CACHE_IMPLEMENTATIONS"),
    Probe("generation.configuration_utils", "GenerationConfig.save_pretrained"),
    Probe("generation.configuration_utils", "CompileConfig._compile_all_devices"),
    Probe("configuration_utils", "PretrainedConfig._attn_implementation"),
    Probe("modeling_utils", "PreTrainedModel.__call__"),
    Probe("modeling_utils", "PreTrainedModel._is_stateful"),
    Probe("masking_utils", "AttentionMaskInterface"),
)
"""What `install()` and `kvlayers.generate()` rely on, looked at when they are first used."""

OF_PREFILLS = (
    Probe("generation.utils", "GenerationMixin._prefill", ("input_ids", "generation_config", "model_kwargs")),
)
OF_STATIC_CACHES = (Probe("generation.utils", "GenerationMixin._prepare_static_cache"),)
OF_EXPORTERS = (Probe("exporters.base", "HfExporter.__init__"),)
"""The same, in versions that have prefills apart, static caches made apart, and exporters."""


def check(probes: Iterable[Probe | LoopProbe], version: object) -> None:
    """Look at names of transformers.

    Args:
        probes: the names.
        version: the installed version.

    Raises:
        ImportError: some of them are missing.
    """
    missing = [name for probe in probes for name in probe.missing()]
    if missing:
        raise ImportError(
            f"transformers {version} lacks what kvlayers relies on ({', '.join(missing)}): install a version that "
            f"kvlayers was tested with ('transformers{SUPPORTED['transformers']},<={NEWEST_TESTED}'), or a newer "
            "kvlayers."
        )
