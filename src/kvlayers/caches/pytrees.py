"""Caches as trees of tensors, which `torch.export` needs for the inputs and outputs of a program."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from kvlayers.attention.packed_tensor import as_dense
from kvlayers.caches.base import Cache
from kvlayers.caches.dynamic import DynamicCache
from kvlayers.caches.encoder_decoder import EncoderDecoderCache
from kvlayers.errors import UnsupportedLayerError
from kvlayers.layers import DynamicLayer, SlidingLayer
from kvlayers.upstream import compat

Children = list[Any]
Context = Any
"""The facts of a tree besides its tensors, in types that JSON has. Programs are compared and saved with it."""

LISTS = ("key_cache", "value_cache")
"""Names of the children of a `DynamicCache`, the same as in transformers."""

PARTS = ("self_attention_cache", "cross_attention_cache")
"""Names of the children of an `EncoderDecoderCache`."""


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
    kinds: list[type[Cache]] = [Cache, *_subclasses(Cache)]
    for kind in kinds:
        flatten, rebuild, names = _TREES.get(kind, (_refuse, _refuse_to_rebuild, ()))
        _register(kind, flatten, rebuild, names)


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


def _subclasses(kind: type[Cache]) -> Iterator[type[Cache]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


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
    if not layer.attends and not layer.is_recurrent:
        return None
    if type(layer) not in (DynamicLayer, SlidingLayer):
        raise UnsupportedLayerError(
            f"expected layers that hold keys and values alone, in full precision and on their device, but saw a "
            f"{type(layer.original).__name__}: export with a DynamicCache of a model whose layers all attend."
        )
    facts: dict[str, Any] = {"holds": layer.keys is not None, "window": None, "counted_by": None}
    if layer.is_sliding:
        counting = (
            index
            for index, other in enumerate(layers)
            if other.attends
            and not other.is_sliding
            and facts["holds"] == (other.keys is not None)
            and other.length == layer.length
        )
        facts |= {"window": layer.sliding_window, "counted_by": next(counting, None)}
        if facts["counted_by"] is None and layer.length > layer.store.length:
            raise UnsupportedLayerError(
                "expected a window that holds all of its tokens, or a layer of full attention beside it, which says "
                f"how many they were, but saw {layer.store.length} of {layer.length} tokens: export with "
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


def _flatten_pair(cache: EncoderDecoderCache) -> tuple[Children, Context]:
    return [cache.self_attention_cache, cache.cross_attention_cache], None


def _rebuild_pair(children: Iterable[Any], context: Context) -> EncoderDecoderCache:
    return EncoderDecoderCache(*children)


def _refuse(cache: Any) -> tuple[Children, Context]:
    if compat.is_exporting():
        # The cache is not an input: a module within the program is given it, and it belongs to the program.
        return [], cache
    raise UnsupportedLayerError(
        f"expected a DynamicCache, which torch can take apart into keys and values, but saw a {type(cache).__name__}: "
        "export with a DynamicCache, with kvlayers.ExportableDecoder for a static cache, or without install()."
    )


def _refuse_to_rebuild(children: Iterable[Any], context: Context) -> Any:
    if compat.is_exporting() and isinstance(context, Cache):
        return context
    raise UnsupportedLayerError("expected a tree of a DynamicCache or an EncoderDecoderCache, but saw another tree.")


_TREES: dict[type[Cache], tuple[Any, Any, tuple[str, ...]]] = {
    DynamicCache: (_flatten_dynamic, _rebuild_dynamic, LISTS),
    EncoderDecoderCache: (_flatten_pair, _rebuild_pair, PARTS),
}
