"""The models that decode, and what their caches are filled with before the clock starts."""

import os
import pathlib
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from torch import Tensor

from contenders import fill, random_states

FILL_CHUNK = 2048
PREFILL_CHUNK = 512
OWN_PREFILL_UP_TO = 1024
"""Tokens up to which every contender prefills by itself; beyond, the states of one prefill are given to all."""

DEMO_MODEL = ".models/SmolLM2-135M-Instruct"


@dataclass
class Shape:
    """Size of a random llama-like model."""

    layers: int = 8
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 64
    intermediate: int = 2816
    vocab: int = 1024


class RandomModel:
    """A llama-like model of random weights, in bfloat16, over caches of random states.

    Args:
        shape: its size.
        sliding_window: tokens that each layer attends to, `None` for all.
        positions: the most tokens that it must know positions for.
    """

    def __init__(self, shape: Shape, sliding_window: int | None = None, positions: int = 65536) -> None:
        sizes: dict[str, Any] = {
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "hidden_size": shape.heads * shape.head_dim,
            "intermediate_size": shape.intermediate,
            "vocab_size": shape.vocab,
            "max_position_embeddings": positions,
        }
        self.shape = shape
        self.name = "random llama" if sliding_window is None else f"random mistral, window {sliding_window}"
        config = (
            transformers.LlamaConfig(**sizes)
            if sliding_window is None
            else transformers.MistralConfig(**sizes, sliding_window=sliding_window)
        )
        torch.manual_seed(0)
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self.limit: int | None = None
        self.states: list[tuple[Tensor, Tensor]] = []

    def prepare(self, length: int) -> int:
        """Make the states of `length` tokens; return the token that decoding begins with."""
        shape = self.shape
        self.states = random_states(shape.layers, shape.kv_heads, shape.head_dim, length, torch.bfloat16)
        return length % shape.vocab

    def fill(self, cache: Any) -> None:
        """Put the prepared states into a cache, in chunks."""
        fill(cache, self.states, FILL_CHUNK)


class RealModel:
    """A model from a directory or a hub, in bfloat16, over real text.

    Args:
        source: directory or hub name.
        text: what it reads.
    """

    def __init__(self, source: str, text: str) -> None:
        self.name = pathlib.Path(source).name
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
        self.limit: int | None = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        # Tokenisers are slow on long text, and no token is shorter than a character.
        most = 8 * (self.limit or 32768)
        self.ids: Tensor = tokenizer(text[:most], return_tensors="pt").input_ids
        self.states: list[tuple[Tensor, Tensor]] = []
        self.length = 0

    def prepare(self, length: int) -> int:
        """Read `length` tokens of the text; return the one after them."""
        if self.ids.shape[1] <= length:
            raise SystemExit(f"the text has {self.ids.shape[1]} tokens, and {length + 1} are needed: use a longer one")
        self.length, self.states = length, []
        if length > OWN_PREFILL_UP_TO:
            cache = transformers.DynamicCache(config=self.model.config)
            self._prefill(cache)
            self.states = [(layer.keys, layer.values) for layer in cache.layers]
        return int(self.ids[0, length])

    def fill(self, cache: Any) -> None:
        """Prefill a cache with the text that was read."""
        if self.states:
            fill(cache, self.states, FILL_CHUNK)
        else:
            self._prefill(cache)

    def _prefill(self, cache: Any) -> None:
        with torch.no_grad():
            for chunk in self.ids[:, : self.length].split(PREFILL_CHUNK, dim=1):
                self.model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)


Workload = RandomModel | RealModel


def default_model() -> str | None:
    """The demo model where it has been brought, else `None`."""
    source = os.environ.get("KVLAYERS_DEMO_MODEL", DEMO_MODEL)
    return source if pathlib.Path(source).is_dir() else None


def default_text() -> str:
    """Some 700 kB of English that every Python has."""
    return "\n\n".join(text for _, text in sorted(topics.items()))
