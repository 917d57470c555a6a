"""What each layer of a model holds of a token, and of a whole sequence: all that a plan knows of the model."""

from dataclasses import dataclass
from typing import Any

import torch

from kvlayers.caches.from_config import HYBRID, RECURRENT, WINDOWED
from kvlayers.errors import ConfigError
from kvlayers.planning.attention_shapes import INDEXED, TokenShape, token_shape
from kvlayers.planning.fields import Fields
from kvlayers.planning.recurrent_shapes import RecurrentShape, recurrent_shape
from kvlayers.stores.buffer import StateForm
from kvlayers.upstream import compat, model_types
from kvlayers.upstream.compat import LayerSpec

NO_DEVICE = torch.device("meta")
"""Where planned states are."""

HOLD_NOTHING = ("dummy", "moe", "mlp")
"""Layer types without a cache of their own."""


SAY_TOO_LITTLE = ("cpmant", "dots3_note_text", "hy_v4", "mllama_text_model", "openai-gpt")
"""Model types whose layers hold more, or less, than their configs say: other tokens than those of the text, indexers of
some layers alone, or nothing."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer holds.

    Attributes:
        batch_size: sequences side by side.
        dtype: dtype of the model.
        token: what it holds of each token, `None` where it does not attend.
        recurrent: what it holds of each sequence besides, `None` where it has no such states.
    """

    batch_size: int
    dtype: torch.dtype
    token: TokenShape | None = None
    recurrent: RecurrentShape | None = None

    def forms(self) -> tuple[StateForm, StateForm]:
        """Forms of the keys and of the values.

        Raises:
            ConfigError: the layer does not attend.
        """
        token = self._attending()
        rest = self.dtype, NO_DEVICE
        return (
            (self.batch_size, token.kv_heads, token.key_head_dim, *rest),
            (self.batch_size, token.kv_heads, token.value_head_dim, *rest),
        )

    def indexer_bytes(self) -> int:
        """Bytes of the indexer's key of a token, for all sequences."""
        return self.batch_size * self._attending().indexer_head_dim * self.dtype.itemsize

    def recurrent_bytes(self) -> int:
        """Bytes of the convolution and recurrent states, for all sequences."""
        if self.recurrent is None:
            return 0
        conv = self.recurrent.conv * self.dtype.itemsize
        return self.batch_size * (conv + self.recurrent.recurrent * torch.float32.itemsize)

    def _attending(self) -> TokenShape:
        if self.token is None:
            raise ConfigError(
                "expected a cache whose layers attend where those of the model do, but saw one more: make it from the "
                "config of the model."
            )
        return self.token


def layer_shapes(config: object, batch_size: int, dtype: torch.dtype) -> list[LayerShape]:
    """The shape of each layer that has a cache, in order.

    Raises:
        ConfigError: `config` is no model config, lacks a field, or has layers of a type that is not known here.
    """
    model_type, specs = model_types.decoder_config(config).model_type, compat.layer_specs(config)
    # Until a recent version a config did not say which layers those are.
    hides_states = model_type in model_types.KEEPS_STATES_IN_MODULES and all(
        spec.layer_type not in RECURRENT for spec in specs
    )
    if model_type in SAY_TOO_LITTLE or hides_states:
        raise ConfigError(
            f"expected a config that says what its layers hold, which those of type '{model_type}' do not: make the "
            "cache, run the model, and ask the cache for nbytes."
        )
    # Fewer specs than configs where the last layers read what earlier ones hold.
    return [
        _shape_of(spec, own, batch_size, dtype) for spec, own in zip(specs, compat.layer_configs(config), strict=False)
    ]


def _shape_of(spec: LayerSpec, config: Any, batch_size: int, dtype: torch.dtype) -> LayerShape:
    fields, layer_type = Fields(config), spec.layer_type
    if layer_type in HOLD_NOTHING:
        return LayerShape(batch_size, dtype)
    attending = layer_type in ("full_attention", *WINDOWED, *INDEXED, *HYBRID)
    recurrent = layer_type in (*RECURRENT, *HYBRID)
    if not attending and not recurrent:
        raise ConfigError(
            f"expected layers that hold keys and values or recurrent states of a known form, but saw '{layer_type}': "
            "make the cache, run the model, and ask the cache for nbytes."
        )
    if recurrent and not compat.MODELS_PASS_COLUMNS:
        raise ConfigError(
            f"expected transformers 5.15 or newer for recurrent layers, whose states kvlayers then holds, but saw "
            f"{compat.TRANSFORMERS}: make the cache, run the model, and ask the cache for nbytes."
        )
    token = token_shape(fields, HYBRID.get(layer_type, layer_type)) if attending else None
    return LayerShape(batch_size, dtype, token, recurrent_shape(fields) if recurrent else None)
