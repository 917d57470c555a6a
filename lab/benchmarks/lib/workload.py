"""The models for decoding, and the states that fill their caches before the clock starts."""

import functools
import os
import pathlib
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from kvlayers.errors import OptionError
from lib.contenders import fill
from lib.internals import default_text, passages

FILL_CHUNK = 2048
PREFILL_CHUNK = 512
OWN_PREFILL_UP_TO = 1024
"""Up to this many tokens, every contender prefills by itself; beyond, all get the states of one prefill."""

DEMO_MODEL = ".models/SmolLM2-135M-Instruct"


@dataclass
class Shape:
    """The size of a random llama-like model."""

    layers: int = 8
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 64
    intermediate: int = 2816
    vocab: int = 1024

    def config(self, positions: int = 65536, **options: Any) -> transformers.PretrainedConfig:
        """Config of a llama with so many positions; with `sliding_window` among the options, of a mistral."""
        config_class = transformers.MistralConfig if "sliding_window" in options else transformers.LlamaConfig
        return config_class(
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.heads * self.head_dim,
            intermediate_size=self.intermediate,
            vocab_size=self.vocab,
            max_position_embeddings=positions,
            **options,
        )

    def states(self, tokens: int, dtype: torch.dtype, seed: int = 0, batch: int = 1) -> list[tuple[Tensor, Tensor]]:
        """Keys and values `[batch, kv_heads, tokens, head_dim]` for each layer, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)

        def normal() -> Tensor:
            return torch.empty(batch, self.kv_heads, tokens, self.head_dim, dtype=dtype).normal_(generator=generator)

        # With a standard deviation of two, attention selects among tokens instead of averaging over all of them. A
        # cache that loses tokens then gives other logits.
        return [(normal().mul_(2), normal()) for _ in range(self.layers)]


QUICK_SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=64, intermediate=128, vocab=256)
"""A model that only shows that a benchmark runs. transformers' quantized caches need heads of 64 channels."""


class RandomModel:
    """A llama-like model with random weights, and caches with random states.

    Args:
        sliding_window: tokens that each layer attends to; `None` for all.
        chunk: tokens in each chunk that fills a cache.
    """

    def __init__(
        self,
        shape: Shape,
        sliding_window: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        chunk: int = FILL_CHUNK,
    ) -> None:
        windows = {} if sliding_window is None else {"sliding_window": sliding_window}
        self.shape, self.chunk = shape, chunk
        self.name = "random llama" if sliding_window is None else f"random mistral, window {sliding_window}"
        torch.manual_seed(0)
        self.model = transformers.AutoModelForCausalLM.from_config(shape.config(**windows), dtype=dtype).eval()
        self.states: list[tuple[Tensor, Tensor]] = []

    def prepare(self, length: int, batch: int = 1) -> Tensor:
        """Make the states of `length` tokens; return the tokens `[batch, 1]` to decode from."""
        self.states = self.shape.states(length, self.model.dtype, batch=batch)
        return self.prompt(batch).view(batch, 1)

    def prompt(self, tokens: int) -> Tensor:
        return torch.randint(self.shape.vocab, (1, tokens), generator=torch.Generator().manual_seed(0))

    def passages(self, count: int, tokens: int) -> list[Tensor]:
        """So many texts of token ids, int64 `[1, tokens]` each, without special tokens."""
        generator = torch.Generator().manual_seed(0)
        return list(torch.randint(3, self.shape.vocab, (count, 1, tokens), generator=generator))

    def fill(self, cache: Any) -> None:
        fill(cache, self.states, self.chunk)


class RealModel:
    """A model from a directory or the hub, which reads the topics of Python's help."""

    rows: Tensor

    def __init__(self, source: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.name = pathlib.Path(source).name
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
        self._positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.states: list[tuple[Tensor, Tensor]] = []

    @functools.cached_property
    def ids(self) -> Tensor:
        """The beginning of the text, int64 `[1, tokens]`."""
        # Tokenizers are slow on long text, and no token is shorter than a character.
        text = default_text()[: 8 * (self._positions or 32768)]
        ids: Tensor = self.tokenizer(text, return_tensors="pt").input_ids
        return ids

    def prepare(self, length: int, batch: int = 1) -> Tensor:
        """Read `length` tokens of the text for each sequence; return the tokens `[batch, 1]` after them."""
        text = self.prompt(batch * length + 1)[0]
        self.rows, self.states = text[:-1].view(batch, length), []
        if length > OWN_PREFILL_UP_TO:
            cache = transformers.DynamicCache(config=self.model.config)
            self._prefill(cache)
            self.states = [(layer.keys, layer.values) for layer in cache.layers]
        return text[length::length][:, None]

    def prompt(self, tokens: int) -> Tensor:
        if self.ids.shape[1] < tokens:
            raise SystemExit(f"the text has {self.ids.shape[1]} tokens, and {tokens} are needed: use a longer one")
        return self.ids[:, :tokens]

    def passages(self, count: int, tokens: int) -> list[Tensor]:
        """Passages from places spread over the text, int64 `[1, tokens]` each."""
        if self._positions is not None and tokens > self._positions:
            raise SystemExit(
                f"{self.name} has a context of {self._positions} tokens, and passages have {tokens}: use shorter ones"
            )
        try:
            return passages(self.tokenizer, default_text(), count, tokens)
        except OptionError as error:
            raise SystemExit(str(error)) from None

    def fill(self, cache: Any) -> None:
        if self.states:
            fill(cache, self.states, FILL_CHUNK)
        else:
            self._prefill(cache)

    def _prefill(self, cache: Any) -> None:
        with torch.no_grad():
            for chunk in self.rows.split(PREFILL_CHUNK, dim=1):
                self.model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)


def default_model() -> str | None:
    source = os.environ.get("KVLAYERS_DEMO_MODEL", DEMO_MODEL)
    return source if pathlib.Path(source).is_dir() else None
