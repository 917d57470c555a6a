"""The public names of kvlayers, each imported when it is first asked for, as torch takes seconds to import."""

from .batching.generate_many import Generated, generate_many
from .core.cache import Cache
from .core.dynamic_cache import DynamicCache
from .core.named_caches import CacheRequest, cache_names, register, unregister
from .documents import concatenate, moved, replace_tokens
from .encoder_decoder.encoder_decoder_cache import EncoderDecoderCache
from .errors import CapacityError, KVLayersError, OptionError
from .eviction.evicting_cache import EvictingCache
from .generation.cache_by_name import make_cache
from .generation.call_cache import free_reservations
from .generation.chat import Chat
from .generation.documents import store_document
from .generation.install import generate, install, installed, is_installed, resilient_generate, uninstall
from .generation.known_ids import PromptMismatchWarning
from .generation.retried_pass import SteppedDownWarning
from .interop.aliases import (
    HQQQuantizedCache,
    HybridCache,
    HybridChunkedCache,
    HybridMambaAttentionDynamicCache,
    MambaCache,
    OffloadedCache,
    OffloadedStaticCache,
    QuantoQuantizedCache,
    SlidingWindowCache,
)
from .interop.export import ExportableDecoder, register_export_support
from .kernels.attention.cpu.kernel import compile_kernels
from .layers import (
    CacheLayer,
    DynamicLayer,
    EvictingLayer,
    HybridLayer,
    LinearAttentionLayer,
    OffloadedLayer,
    QuantizedLayer,
    RecallLayer,
    SinkLayer,
    SlidingLayer,
    StaticLayer,
    StaticSlidingLayer,
)
from .persistence import inspect_cache, load_cache, save_cache, weights_id
from .planning import plan
from .prefix import PrefixStore
from .quantized.quantized_cache import QuantizedCache, QuantizedCacheConfig
from .rows import Rows, merge
from .sinks.sink_cache import SinkCache
from .static.static_cache import StaticCache
from .stores import Quantization
from .version import __version__

__all__ = [
    "Cache",
    "CacheLayer",
    "CacheRequest",
    "CapacityError",
    "Chat",
    "DynamicCache",
    "DynamicLayer",
    "EncoderDecoderCache",
    "EvictingCache",
    "EvictingLayer",
    "ExportableDecoder",
    "Generated",
    "HQQQuantizedCache",
    "HybridCache",
    "HybridChunkedCache",
    "HybridLayer",
    "HybridMambaAttentionDynamicCache",
    "KVLayersError",
    "LinearAttentionLayer",
    "MambaCache",
    "OffloadedCache",
    "OffloadedLayer",
    "OffloadedStaticCache",
    "OptionError",
    "PrefixStore",
    "PromptMismatchWarning",
    "Quantization",
    "QuantizedCache",
    "QuantizedCacheConfig",
    "QuantizedLayer",
    "QuantoQuantizedCache",
    "RecallLayer",
    "Rows",
    "SinkCache",
    "SinkLayer",
    "SlidingLayer",
    "SlidingWindowCache",
    "SteppedDownWarning",
    "StaticCache",
    "StaticLayer",
    "StaticSlidingLayer",
    "__version__",
    "cache_names",
    "compile_kernels",
    "concatenate",
    "free_reservations",
    "generate",
    "generate_many",
    "inspect_cache",
    "install",
    "installed",
    "is_installed",
    "load_cache",
    "make_cache",
    "merge",
    "moved",
    "plan",
    "register",
    "register_export_support",
    "replace_tokens",
    "resilient_generate",
    "save_cache",
    "store_document",
    "uninstall",
    "unregister",
    "weights_id",
]
