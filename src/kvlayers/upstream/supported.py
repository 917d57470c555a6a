"""The supported versions of transformers and torch. They are checked first, as older ones may lack what is imported."""

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

logger = logging.getLogger(__name__)

SUPPORTED = {"transformers": SpecifierSet(">=4.57"), "torch": SpecifierSet(">=2.6")}

NEWEST_TESTED = Version("5.24.0")
"""The newest transformers that the tests have run on. What a newer one lacks is found by probes."""


def check_supported(package: str, version: str) -> Version:
    """The release of `version`, without development and local parts.

    Raises:
        ImportError: the release is older than the oldest supported one.
    """
    release = Version(Version(version).base_version)
    if release not in SUPPORTED[package]:
        raise ImportError(
            f"{package} must be {SUPPORTED[package]}, got {version}: install '{package}{SUPPORTED[package]}', "
            "or another version of kvlayers."
        )
    return release


def note_untested(transformers: Version) -> None:
    """Log one line if transformers is newer than any version that was tested."""
    if transformers > NEWEST_TESTED:
        logger.warning(
            "transformers %s is newer than %s, the newest version that kvlayers was tested with: it has all that "
            "kvlayers relies on, but compare what you generate.",
            transformers,
            NEWEST_TESTED,
        )


def check_installed() -> None:
    """Check the installed versions, without importing either package. Raises as `check_supported`."""
    for package in SUPPORTED:
        loaded = sys.modules.get(package)
        # A package built from source may have no metadata. Then `compat` checks it.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            check_supported(package, loaded.__version__ if loaded else importlib.metadata.version(package))


def is_command() -> bool:
    """Whether this process is the command `kvlayers`, or `python -m kvlayers`.

    The command answers `--help` without transformers, and reports an unsupported version in one line. If another
    process is mistaken for the command, `compat` raises for such a version when it is first imported.
    """
    started = Path(sys.argv[0]).stem if sys.argv else ""
    # While Python looks for the module to run, the first argument is "-m".
    return started in ("kvlayers", "kvlayers-script") or (started == "-m" and "kvlayers" in sys.orig_argv)


@dataclass(frozen=True)
class Probe:
    """A name in transformers.

    Attributes:
        module: the module that has it, without "transformers." before it.
        name: the name, with dots between a class and its attribute.
        parameters: parameters that kvlayers passes by these names, or takes by these names in a method's place.
        since: the version that has it first. Before, kvlayers does without it.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    since: str = "4.57"

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
        taken = inspect.signature(found).parameters if self.parameters else ()
        return [f"{self}(..., {name}=)" for name in self.parameters if name not in taken]


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
    Probe("generation.utils", "GenerationMixin._prepare_special_tokens", ("device",)),
    Probe(
        "generation.utils",
        "GenerationMixin._get_logits_processor",
        ("input_ids_seq_length", "encoder_input_ids", "prefix_allowed_tokens_fn", "logits_processor", "device"),
    ),
    Probe("generation.utils", "GenerationMixin._get_stopping_criteria", ("stopping_criteria", "tokenizer")),
    Probe("generation.utils", "GenerationMixin._valid_auto_compile_criteria", ("model_kwargs", "generation_config")),
    Probe("generation.utils", "GENERATION_MODES_MAPPING"),
    Probe("generation.utils", "GenerationMixin.prepare_inputs_for_generation", ("input_ids",)),
    Probe("generation.configuration_utils", "ALL_CACHE_IMPLEMENTATIONS"),
    Probe("generation.configuration_utils", "GenerationConfig.save_pretrained"),
    Probe("generation.configuration_utils", "CompileConfig._compile_all_devices"),
    Probe("configuration_utils", "PretrainedConfig._attn_implementation"),
    Probe("modeling_utils", "PreTrainedModel.__call__"),
    Probe("modeling_utils", "PreTrainedModel._is_stateful"),
    Probe("masking_utils", "AttentionMaskInterface"),
    Probe(
        "generation.utils",
        "GenerationMixin._prefill",
        ("input_ids", "generation_config", "model_kwargs"),
        since="5.0",
    ),
    Probe("generation.utils", "GenerationMixin._prepare_static_cache", since="5.1"),
    Probe(
        "generation.utils",
        "GenerationMixin._prepare_position_ids_for_generation",
        ("inputs_tensor", "model_kwargs"),
        since="5.3",
    ),
    Probe("exporters.base", "HfExporter.__init__", since="5.14"),
)
"""What `install()` and `kvlayers.generate()` rely on, looked at when they are first used."""

SERVER_MODULES = ("utils", "chat_completion", "completion", "response")
OF_SERVERS = (
    Probe("cli.serving.utils", "BaseHandler._validate_request", ("body",)),
    Probe("cli.serving.utils", "InferenceThread.submit", ("fn",)),
    Probe("cli.serving.utils", "InferenceThread.async_submit", ("fn",)),
    Probe("cli.serving.chat_completion", "CompletionUsage"),
    Probe("cli.serving.completion", "CompletionUsage"),
    Probe("cli.serving.response", "compute_usage"),
    Probe("cli.serving.server", "build_server"),
)
"""What `kvlayers run` relies on in `transformers serve`, looked at when a server starts."""


def check(probes: Iterable[Probe], version: Version) -> None:
    """Look at names of transformers.

    Args:
        probes: the names.
        version: the installed version.

    Raises:
        ImportError: some of them are missing.
    """
    missing = [name for probe in probes if Version(probe.since) <= version for name in probe.missing()]
    if missing:
        raise ImportError(
            f"transformers {version} lacks what kvlayers relies on ({', '.join(missing)}): install a version that "
            f"kvlayers was tested with ('transformers{SUPPORTED['transformers']},<={NEWEST_TESTED}'), or a newer "
            "kvlayers."
        )
