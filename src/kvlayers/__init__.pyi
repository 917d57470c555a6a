"""The public names of kvlayers, each imported when it is first asked for, as torch takes seconds to import."""

from .core.cache import (
    Cache as Cache,
)
from .core.dynamic_cache import (
    DynamicCache as DynamicCache,
)
from .core.named_caches import (
    CacheRequest as CacheRequest,
)
from .core.named_caches import (
    cache_names as cache_names,
)
from .core.named_caches import (
    register as register,
)
from .core.named_caches import (
    unregister as unregister,
)
from .encoder_decoder.encoder_decoder_cache import (
    EncoderDecoderCache as EncoderDecoderCache,
)
from .errors import (
    CapacityError as CapacityError,
)
from .errors import (
    KVLayersError as KVLayersError,
)
from .errors import (
    OptionError as OptionError,
)
from .evaluation.engine import (
    score as score,
)
from .eviction.evicting_cache import (
    EvictingCache as EvictingCache,
)
from .generation.cache_by_name import (
    make_cache as make_cache,
)
from .generation.chat import (
    Chat as Chat,
)
from .generation.install import (
    generate as generate,
)
from .generation.install import (
    install as install,
)
from .generation.install import (
    installed as installed,
)
from .generation.install import (
    is_installed as is_installed,
)
from .generation.install import (
    uninstall as uninstall,
)
from .generation.known_ids import (
    PromptMismatchWarning as PromptMismatchWarning,
)
from .generation.resilient import (
    SteppedDownWarning as SteppedDownWarning,
)
from .generation.resilient import (
    resilient_generate as resilient_generate,
)
from .generation.static_pool import (
    free_reservations as free_reservations,
)
from .interop.aliases import (
    HQQQuantizedCache as HQQQuantizedCache,
)
from .interop.aliases import (
    HybridCache as HybridCache,
)
from .interop.aliases import (
    HybridChunkedCache as HybridChunkedCache,
)
from .interop.aliases import (
    HybridMambaAttentionDynamicCache as HybridMambaAttentionDynamicCache,
)
from .interop.aliases import (
    MambaCache as MambaCache,
)
from .interop.aliases import (
    OffloadedCache as OffloadedCache,
)
from .interop.aliases import (
    OffloadedStaticCache as OffloadedStaticCache,
)
from .interop.aliases import (
    QuantoQuantizedCache as QuantoQuantizedCache,
)
from .interop.aliases import (
    SlidingWindowCache as SlidingWindowCache,
)
from .interop.export import (
    ExportableDecoder as ExportableDecoder,
)
from .interop.export import (
    register_export_support as register_export_support,
)
from .layers import (
    CacheLayer as CacheLayer,
)
from .layers import (
    DynamicLayer as DynamicLayer,
)
from .layers import (
    EvictingLayer as EvictingLayer,
)
from .layers import (
    HybridLayer as HybridLayer,
)
from .layers import (
    LinearAttentionLayer as LinearAttentionLayer,
)
from .layers import (
    OffloadedLayer as OffloadedLayer,
)
from .layers import (
    QuantizedLayer as QuantizedLayer,
)
from .layers import (
    RecallLayer as RecallLayer,
)
from .layers import (
    SinkLayer as SinkLayer,
)
from .layers import (
    SlidingLayer as SlidingLayer,
)
from .layers import (
    StaticLayer as StaticLayer,
)
from .layers import (
    StaticSlidingLayer as StaticSlidingLayer,
)
from .persistence import (
    inspect_cache as inspect_cache,
)
from .persistence import (
    load_cache as load_cache,
)
from .persistence import (
    save_cache as save_cache,
)
from .persistence import (
    weights_id as weights_id,
)
from .planning import (
    plan as plan,
)
from .prefix import (
    PrefixStore as PrefixStore,
)
from .quantized.quantized_cache import (
    QuantizedCache as QuantizedCache,
)
from .quantized.quantized_cache import (
    QuantizedCacheConfig as QuantizedCacheConfig,
)
from .sinks.sink_cache import (
    SinkCache as SinkCache,
)
from .static.static_cache import (
    StaticCache as StaticCache,
)
from .stores import (
    Quantization as Quantization,
)
from .tools.calibration import (
    BytesBudget as BytesBudget,
)
from .tools.calibration import (
    Calibration as Calibration,
)
from .tools.calibration import (
    DivergenceBudget as DivergenceBudget,
)
from .tools.calibration import (
    calibrate as calibrate,
)
from .tools.kernels import (
    compile_kernels as compile_kernels,
)
from .version import __version__ as __version__

__all__ = [
    "BytesBudget",
    "Cache",
    "CacheLayer",
    "CacheRequest",
    "Calibration",
    "CapacityError",
    "Chat",
    "DivergenceBudget",
    "DynamicCache",
    "DynamicLayer",
    "EncoderDecoderCache",
    "EvictingCache",
    "EvictingLayer",
    "ExportableDecoder",
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
    "calibrate",
    "compile_kernels",
    "free_reservations",
    "generate",
    "inspect_cache",
    "install",
    "installed",
    "is_installed",
    "load_cache",
    "make_cache",
    "plan",
    "register",
    "register_export_support",
    "resilient_generate",
    "save_cache",
    "score",
    "uninstall",
    "unregister",
    "weights_id",
]
