"""The shapes that a layer of a model holds for each token and each sequence. Planned bytes are computed from them."""

from dataclasses import dataclass

import torch

from kvlayers.errors import ConfigError
from kvlayers.stores.buffer import StateForm

NO_DEVICE = torch.device("meta")
"""The device of planned states."""


@dataclass(frozen=True)
class TokenShape:
    """What a layer of attention holds for one token of one sequence.

    Attributes:
        kv_heads: heads of the keys, and of the values.
        key_head_dim: channels of a key.
        value_head_dim: channels of a value.
        indexer_head_dim: channels of the indexer's key, 0 if the layer has no indexer.
        heads: heads of the queries, `None` for as many as `kv_heads`.
    """

    kv_heads: int
    key_head_dim: int
    value_head_dim: int
    indexer_head_dim: int = 0
    heads: int | None = None


@dataclass(frozen=True)
class RecurrentShape:
    """What a recurrent layer holds for one sequence, whatever its length.

    Attributes:
        conv: elements of the convolution state, `channels * kernel`, in the dtype of the model.
        recurrent: elements of the recurrent state, which every model keeps in float32.
    """

    conv: int
    recurrent: int = 0


@dataclass(frozen=True)
class LayerShape:
    """What a layer holds.

    Attributes:
        batch_size: sequences side by side.
        dtype: dtype of the model.
        token: shape for each token, `None` if the layer does not attend.
        recurrent: shape for each sequence, `None` if the layer has no recurrent states.
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
        return (
            StateForm(self.batch_size, token.kv_heads, token.key_head_dim, self.dtype, NO_DEVICE),
            StateForm(self.batch_size, token.kv_heads, token.value_head_dim, self.dtype, NO_DEVICE),
        )

    def query_form(self) -> StateForm:
        """The form of the queries.

        Raises:
            ConfigError: the layer does not attend.
        """
        heads = self._attending().heads
        key_form = self.forms()[0]
        return key_form if heads is None else key_form._replace(kv_heads=heads)

    def indexer_nbytes(self, tokens: int) -> int:
        """Bytes of the indexer's keys of `tokens` tokens, for all sequences."""
        return self.batch_size * tokens * self._attending().indexer_head_dim * self.dtype.itemsize

    def _attending(self) -> TokenShape:
        if self.token is None:
            raise ConfigError(
                "The cache has a layer of attention where the model's layer does not attend: make the cache from the "
                "model's config."
            )
        return self.token
