"""A model and its static cache as one module that `torch.export` can export."""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from kvlayers.caches.base import Cache
from kvlayers.caches.from_config import WINDOWED
from kvlayers.errors import UnsupportedLayerError
from kvlayers.layers import StaticLayer
from kvlayers.layers.static import check_reserved
from kvlayers.upstream import cache_argument, compat, model_layers


class ExportableDecoder(nn.Module):
    """A decoder-only model whose cache is part of it: buffers that an exported program carries and writes to.

    Layers with a window keep all tokens, and their masks leave out the tokens that the window has passed.

    Args:
        model: the language model, which returns logits.
        max_cache_len: tokens to reserve.
        batch_size: sequences side by side.

    Raises:
        UnsupportedLayerError: the model has layers that do not keep tokens, an encoder, or no language-modelling head;
            or torch is older than 2.7.
        OptionError: a reservation of no tokens or no sequences.

    Example:
        >>> import kvlayers, torch, transformers
        >>> config = transformers.LlamaConfig(
        ...     num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=32
        ... )
        >>> decoder = kvlayers.ExportableDecoder(transformers.LlamaForCausalLM(config).eval(), max_cache_len=64)
        >>> one_token = torch.tensor([[1]]), torch.tensor([0])
        >>> program = torch.export.export(decoder, one_token)
        >>> decode = program.module()
        >>> [tuple(decode(torch.tensor([[7]]), torch.tensor([position])).shape) for position in range(2)]
        [(1, 1, 32), (1, 1, 32)]
    """

    def __init__(self, model: Any, max_cache_len: int, batch_size: int = 1) -> None:
        super().__init__()
        if not compat.TELLS_EXPORTING:
            raise UnsupportedLayerError(
                f"expected torch 2.7 or newer, which tells exporting from compiling, but saw {compat.TORCH}: install a "
                "newer torch, or compile the decode loop."
            )
        check_reserved(max_cache_len, "max_cache_len", "tokens")
        check_reserved(batch_size, "batch_size", "sequences")
        if model.config.is_encoder_decoder or model.get_output_embeddings() is None:
            raise UnsupportedLayerError(
                f"expected a decoder-only language model, which returns logits, but saw a {type(model).__name__}: pass "
                "the model with its language-modelling head."
            )
        specs = model_layers.layer_specs(model.config)
        unknown = {spec.layer_type for spec in specs} - {"full_attention", *WINDOWED}
        if unknown:
            raise UnsupportedLayerError(
                f"expected a model whose layers all keep tokens, but saw layers of other types "
                f"({', '.join(sorted(unknown))}): such a model cannot be exported with its cache yet."
            )
        self.model = model
        self.cache = Cache(layers=[StaticLayer(max_cache_len) for _ in specs])
        with torch.no_grad():
            # A forward pass shows the shapes of the states, which a config may not tell.
            token: Any = torch.zeros((batch_size, 1), dtype=torch.int64, device=next(model.parameters()).device)
            model(token, **{cache_argument.name_for(model): self.cache})
        self.cache.reset()
        for index, layer in enumerate(self.cache.layers):
            for name, tensor in layer.tensors().items():
                self.register_buffer(f"{name}_{index}", tensor, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        raise UnsupportedLayerError(
            "expected a module that stays on its device, since its cache holds the buffers too: move or convert the "
            "model before."
        )

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        """Logits of new tokens.

        Args:
            input_ids: `[batch, new]`, int64.
            cache_position: positions of the new tokens, `[new]`, int64, consecutive. Tokens before the first position
                stay in the cache, and all others are removed from it.

        Returns:
            `[batch, new, vocabulary]`.

        Raises:
            RollbackError: in eager code, fewer tokens are held than the first position says. A program cannot check
                this. If it is asked for more tokens than are reserved, it raises torch's `IndexError`.
        """
        if compat.is_exporting():
            for layer in self.cache.layers:
                layer.tensors()["position"].copy_(cache_position[0])
        else:
            self.cache.truncate(int(cache_position[0]))
        told = {"cache_position": cache_position} if compat.MASKS_BY_CACHE_POSITION else {}
        passed = {cache_argument.name_for(self.model): self.cache}
        logits: Tensor = self.model(input_ids, **passed, **told).logits
        return logits
