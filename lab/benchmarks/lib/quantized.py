"""The quantized caches that are compared, what they read, and the bytes that each holds, scales included."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import cache_utils

import kvlayers
from kvlayers.errors import OptionError
from lib.contenders import backend_options, fill
from lib.internals import CacheMaker, cache_nbytes, default_text, passages
from lib.workload import RandomModel, Shape

LIBRARIES = {"kvlayers": kvlayers, "transformers": transformers}


def has_windows(config: Any) -> bool:
    return "sliding_attention" in (getattr(config.get_text_config(), "layer_types", None) or [])


class Contender(NamedTuple):
    """One cache of the comparison: its library, its backend and its bits (`None` for full precision)."""

    library: str
    backend: str
    bits: int | None

    @property
    def name(self) -> str:
        return f"{self.library} {self.backend}" + ("" if self.bits is None else f", {self.bits} bits")

    def make(self, config: Any) -> Any:
        """Make an empty cache; raise the library's error if it has no such cache.

        transformers' `QuantizedCache` refuses models with sliding windows. For these, its layers are put into a cache
        by hand, so that there is something to compare with: they quantize and hold every token, and masks apply the
        windows.
        """
        if self.bits is None:
            return FULL[self](config)
        options = backend_options(self.backend, self.bits)
        try:
            return LIBRARIES[self.library].QuantizedCache(self.backend, config, **options)
        except ValueError:
            if self.library == "kvlayers" or not has_windows(config):
                raise
            layers = range(config.get_text_config().num_hidden_layers)
            return transformers.Cache(layers=[cache_utils.QuantoQuantizedLayer(**options) for _ in layers])


REFERENCE = Contender("transformers", "DynamicCache", None)
EXACT = Contender("kvlayers", "DynamicCache", None)
"""Full precision, like the reference: a score other than zero would be an error of the measurement."""

FULL: dict[Contender, CacheMaker] = {
    REFERENCE: lambda config: transformers.DynamicCache(config=config),
    EXACT: lambda config: kvlayers.DynamicCache(config=config),
}


def own(backend: str, **options: Any) -> CacheMaker:
    return lambda config: kvlayers.QuantizedCache(backend, config=config, **options)


RANDOM = "random llama"
QUICK_SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=64, intermediate=128, vocab=256)
"""Its heads have the 64 channels that transformers' quantized caches need."""


def load(source: str, text: Path | None, dtype: str, count: int, tokens: int) -> tuple[Any, list[Tensor]]:
    """A model and passages of token ids `[1, tokens]` from places spread over a text.

    Args:
        source: directory or hub name; `RANDOM` for a small random model.
        text: what it reads; the topics of Python's help if it is `None`.
        dtype: of the model.
        count: passages.
        tokens: of each.
    """
    if source == RANDOM:
        ids = torch.randint(QUICK_SHAPE.vocab, (count, tokens), generator=torch.Generator().manual_seed(0))
        return RandomModel(QUICK_SHAPE).model.to(getattr(torch, dtype)), list(ids[:, None])
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).eval()
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        raise SystemExit(f"{source} has a context of {limit} tokens, and passages have {tokens}: use shorter ones")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    try:
        return model, passages(tokenizer, text.read_text() if text else default_text(), count, tokens)
    except OptionError as error:
        raise SystemExit(str(error)) from None


def measure_bytes(make: CacheMaker, config: Any, context: int, scored: int, chunk: int) -> dict[str, float]:
    """Bytes per token of a cache that is filled in chunks with states in bfloat16, as caches hold them in use.

    The bytes depend on the number of states, not on their values: a residual in full precision fills and empties. So
    they are counted after every chunk of the scored part.

    Returns:
        `bytes` is the mean over these chunks, and `last_bytes` are those at the end.
    """
    text_config = config.get_text_config()
    heads = text_config.num_attention_heads
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, kv_heads, context + scored, head_dim, generator=generator).bfloat16().unbind(0)
    cache = make(config)
    seen = []
    with torch.no_grad():
        for start in range(0, context + scored, chunk):
            new = keys[:, :, start : start + chunk], values[:, :, start : start + chunk]
            fill(cache, [new] * text_config.num_hidden_layers, chunk)
            if start >= context:
                seen.append(cache_nbytes(cache) / (start + chunk))
    return {"bytes": sum(seen) / len(seen), "last_bytes": seen[-1]}
