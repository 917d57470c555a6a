"""A model and its static cache as one module that `torch.export` can export."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from typing_extensions import Self

from kvlayers.core.cache import Cache
from kvlayers.core.dynamic_cache import DynamicCache
from kvlayers.core.from_config import WINDOWED
from kvlayers.core.token_layer import DynamicLayer, SlidingLayer
from kvlayers.encoder_decoder.encoder_decoder_cache import EncoderDecoderCache
from kvlayers.errors import OptionError, UnsupportedLayerError
from kvlayers.kernels.attention.packed_tensor import as_dense
from kvlayers.static.static_layer import StaticLayer
from kvlayers.static.static_store import check_reserved
from kvlayers.upstream import cache_argument, compat, model_layers

Children = list[Any]
Context = Any
"""The facts of a tree besides its tensors, in types that JSON has. Programs are compared and saved with it."""


def register_export_support() -> None:
    """Let `torch.export` take kvlayers' caches as inputs and outputs of a program, as torch pytrees.

    A `DynamicCache` is the same tree as in transformers: its `key_cache` and its `value_cache`, each a list of
    `[batch, kv_heads, tokens, head_dim]` tensors, one for each layer that holds states. An `EncoderDecoderCache` is a
    tree of its two caches. Every other cache of kvlayers is refused when it becomes an input or an output.

    Call it before `torch.export.export`, and before `torch.export.load` in the process that loads a program. It is not
    done at import: torch would then take caches apart wherever it maps a function over the arguments of a module (FSDP2
    does so to cast them), and a module would update a copy of the cache that it was given. Under `install()`,
    transformers' exporters call it by themselves.

    At export, `UnsupportedLayerError` is raised for a cache that is not a tree of keys and values only: a static,
    quantized, offloaded or recurrent cache, or a cache whose layers all have windows that have dropped tokens.

    Example:
        >>> import kvlayers, torch
        >>> kvlayers.register_export_support()
        >>> cache = kvlayers.DynamicCache()
        >>> _ = cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), layer_idx=0)
        >>> leaves, spec = torch.utils._pytree.tree_flatten(cache)
        >>> [tuple(leaf.shape) for leaf in leaves]
        [(1, 2, 3, 8), (1, 2, 3, 8)]
        >>> torch.utils._pytree.tree_unflatten(leaves, spec).get_seq_length()
        3
    """
    kinds: list[type[Cache]] = [Cache]
    for kind in kinds:
        kinds += kind.__subclasses__()
        _register(kind, *_TREES.get(kind, (_refuse, _refuse_to_rebuild, ())))


def _register(
    kind: type[Cache],
    flatten: Callable[[Any], tuple[Children, Context]],
    rebuild: Callable[[Iterable[Any], Context], Any],
    names: tuple[str, ...],
) -> None:
    # transformers' exporters register every cache that they see with their own function, which takes any object apart
    # by its attributes.
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        if node.flatten_fn is flatten:
            return
        pytree._deregister_pytree_node(kind)

    def flatten_with_keys(cache: Any) -> tuple[list[tuple[Any, Any]], Context]:
        children, context = flatten(cache)
        return [(pytree.MappingKey(name), child) for name, child in zip(names, children, strict=True)], context

    pytree.register_pytree_node(
        kind,
        flatten,
        rebuild,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


def _flatten_dynamic(cache: DynamicCache) -> tuple[Children, Context]:
    layers = cache.adapted_layers()
    layout = [_describe(layer, layers) for layer in layers]
    held: list[Any] = [
        layer for layer, facts in zip(layers, layout, strict=True) if facts is not None and facts["holds"]
    ]
    return [[as_dense(layer.keys) for layer in held], [as_dense(layer.values) for layer in held]], layout


def _describe(layer: Any, layers: Sequence[Any]) -> dict[str, Any] | None:
    """The facts of a layer besides its tensors; `None` for a layer that holds nothing.

    The count of tokens is not one of them, or a program would serve only one count. The shape of the tensors of full
    attention tells it, and a window that has dropped tokens has seen as many tokens as another layer of the cache.
    """
    if not layer.traits.attends and not layer.traits.is_recurrent:
        return None
    if type(layer) not in (DynamicLayer, SlidingLayer):
        raise UnsupportedLayerError(
            f"Layers must hold keys and values alone, in full precision and on their device, to be exported, got a "
            f"{type(layer.original).__name__}: export with a DynamicCache of a model whose layers all attend."
        )
    facts: dict[str, Any] = {"holds": layer.keys is not None, "window": None, "counted_by": None}
    if layer.is_sliding:
        counting = (
            index
            for index, other in enumerate(layers)
            if other.traits.attends
            and not other.is_sliding
            and facts["holds"] == (other.keys is not None)
            and other.length == layer.length
        )
        facts |= {"window": layer.sliding_window, "counted_by": next(counting, None)}
        if facts["counted_by"] is None and layer.length > layer.store.length:
            raise UnsupportedLayerError(
                "A window must hold all of its tokens to be exported, or have a layer of full attention beside it that "
                f"says how many they were, got {layer.store.length} of {layer.length} tokens: export with "
                "kvlayers.ExportableDecoder, which has a reservation for all of them."
            )
    return facts


def _rebuild_dynamic(children: Iterable[Any], layout: Context) -> DynamicCache:
    windows = [() if facts is None or facts["window"] is None else (facts["window"],) for facts in layout]
    cache = DynamicCache([(None, None, *window) for window in windows])
    pairs: Iterator[tuple[Tensor, Tensor]] = zip(*children, strict=True)
    for index, facts in enumerate(layout):
        if facts is None:
            cache.layers[index] = compat.DUMMY_LAYER[0]()
        elif facts["holds"]:
            cache.layers[index].update(*next(pairs))
    for layer, facts in zip(cache.layers, layout, strict=True):
        if facts is not None and facts["counted_by"] is not None:
            layer.resume_at(cache.layers[facts["counted_by"]].length)
    return cache


def _refuse(cache: Any) -> tuple[Children, Context]:
    if compat.is_exporting():
        # The cache is not an input: a module within the program is given it, and it belongs to the program.
        return [], cache
    raise UnsupportedLayerError(
        "The cache must be a DynamicCache, which torch can take apart into keys and values, got a "
        f"{type(cache).__name__}: export with a DynamicCache, with kvlayers.ExportableDecoder for a static cache, or "
        "without install()."
    )


def _refuse_to_rebuild(children: Iterable[Any], context: Context) -> Any:
    if compat.is_exporting() and isinstance(context, Cache):
        return context
    raise UnsupportedLayerError(
        "The tree must be that of a DynamicCache or an EncoderDecoderCache, got that of another cache: flatten one of "
        "them."
    )


_TREES: dict[type[Cache], tuple[Any, Any, tuple[str, ...]]] = {
    DynamicCache: (_flatten_dynamic, _rebuild_dynamic, ("key_cache", "value_cache")),
    EncoderDecoderCache: (
        lambda cache: ([cache.self_attention_cache, cache.cross_attention_cache], None),
        lambda children, context: EncoderDecoderCache(*children),
        ("self_attention_cache", "cross_attention_cache"),
    ),
}
"""For each cache that is a tree: what takes it apart, what makes it again, and the names of its children, as in
transformers."""


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
        OptionError: `model` is no model, or a reservation of no tokens or no sequences.

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
                f"torch must be 2.7 or newer, which tells exporting from compiling, got {compat.TORCH}: install a "
                "newer torch, or compile the decode loop."
            )
        check_reserved(max_cache_len, "max_cache_len", "tokens")
        check_reserved(batch_size, "batch_size", "sequences")
        is_model = isinstance(model, nn.Module)
        if not is_model:
            raise OptionError(f"`model` must be a model, got a {type(model).__name__}: pass the model itself.")
        if model.config.is_encoder_decoder or model.get_output_embeddings() is None:
            raise UnsupportedLayerError(
                f"`model` must be a decoder-only language model, which returns logits, got a {type(model).__name__}: "
                "pass the model with its language-modelling head."
            )
        specs = model_layers.layer_specs(model.config)
        unknown = {spec.layer_type for spec in specs} - {"full_attention", *WINDOWED}
        if unknown:
            raise UnsupportedLayerError(
                f"`model` must be a model whose layers all keep tokens, got layers of other types "
                f"({', '.join(sorted(unknown))}): export another model, as this one cannot be exported with its cache."
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
            "An ExportableDecoder must stay as it was made, since its cache holds the buffers too, got a call to "
            "move or convert it: move or convert the model before."
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
        told: dict[str, Any] = {"cache_position": cache_position} if compat.MASKS_BY_CACHE_POSITION else {}
        told[cache_argument.name_for(self.model)] = self.cache
        return self.model(input_ids, **told).logits  # type: ignore[no-any-return]
