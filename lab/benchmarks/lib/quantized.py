"""What the compared quantized caches read, and the bytes that each holds, scales included."""

from typing import Any

import torch
import transformers
from torch import Tensor

from kvlayers.errors import OptionError
from lib.contenders import Maker, fill
from lib.internals import cache_nbytes, default_text, passages
from lib.workload import RandomModel, Shape

RANDOM = "random llama"
QUICK_SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=64, intermediate=128, vocab=256)
"""Its heads have the 64 channels that transformers' quantized caches need."""


def load(source: str, count: int, tokens: int) -> tuple[Any, list[Tensor]]:
    """A model in float32, and passages of token ids `[1, tokens]` from places spread over the topics of Python's help.

    Args:
        source: directory or hub name; `RANDOM` for a small random model.
        count: passages.
        tokens: of each.
    """
    if source == RANDOM:
        ids = torch.randint(QUICK_SHAPE.vocab, (count, tokens), generator=torch.Generator().manual_seed(0))
        return RandomModel(QUICK_SHAPE, dtype=torch.float32).model, list(ids[:, None])
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        raise SystemExit(f"{source} has a context of {limit} tokens, and passages have {tokens}: use shorter ones")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    try:
        return model, passages(tokenizer, default_text(), count, tokens)
    except OptionError as error:
        raise SystemExit(str(error)) from None


def measure_bytes(make: Maker, config: Any, context: int, scored: int, chunk: int) -> dict[str, float]:
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
