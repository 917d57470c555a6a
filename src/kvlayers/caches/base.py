"""The cache: a list of layers, with the interface that transformers, generate() and decode loops call."""

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.caches import forward_pass
from kvlayers.caches.from_config import attention_part, dynamic_layers, offloaded, share_mask_extents
from kvlayers.caches.legacy_api import LegacySurface
from kvlayers.caches.operations import CacheState, LayerwiseOperations
from kvlayers.caches.recurrent import RecurrentSurface
from kvlayers.caches.seen_tokens import SeenTokens
from kvlayers.errors import (
    ConfigError,
    InterruptedPassError,
    LayerIndexError,
    OptionError,
    StateMismatchError,
    UnsupportedLayerError,
)
from kvlayers.layers import (
    CacheLayer,
    HybridLayer,
    LayerOperations,
    LinearAttentionLayer,
    OffloadedLayer,
    upstream_calls,
)
from kvlayers.layers.contract import unbounded_as_minus_one
from kvlayers.layers.graph_operators import GraphHandle, calls_operators, updated
from kvlayers.offload import Offloading, Prefetcher, TrafficMeter
from kvlayers.rope.rotary import Rotary
from kvlayers.stores.description import DescriptionContext
from kvlayers.upstream import compat, generate_calls
from kvlayers.utils import late
from kvlayers.utils.options import checks_options
from kvlayers.utils.registry import ClassRegistry

if TYPE_CHECKING:
    from kvlayers.caches.explanation import Explanation
    from kvlayers.caches.summary import CacheSummary

LAYERS = (LayerOperations, compat.ATTENTION_LAYER, compat.LINEAR_LAYER, *compat.DUMMY_LAYER)
"""What a cache can be made of."""

OF_OURS = (CacheLayer, LinearAttentionLayer)
"""What takes states in as layers of kvlayers do. Made once, as each layer asks at each token."""


class Cache(LayerwiseOperations, RecurrentSurface, LegacySurface, transformers.Cache):  # type: ignore[misc]
    """A list of layers, one for each layer of the model, and no storage of its own.

    Args:
        layers: the layers, of kvlayers or of transformers.
        layer_class_to_replicate: instead of `layers`, what makes a layer whenever the model uses one more.
        offloading: hold states on the host, and on their device only while they are attended to.
        offload_only_non_sliding: leave layers that attend within a window on the device.
        offload_device: "cpu" for the host's memory, "disk" for memory-mapped files.
        offload_directory: where the files are made, for "disk".

    Raises:
        OptionError: an option that does not exist, options of offloading that contradict each other, or a layer that
            is not a layer, such as a cache.
        UnsupportedLayerError: offloading is asked for, and a layer of transformers cannot be.
        ConfigError: both or neither of the two arguments are given.
    """

    layers: list[Any]
    is_static = False
    """Whether the cache reserves its memory once, for a fixed number of tokens."""
    is_pair = False
    """Whether the cache has one part for self-attention and one for cross-attention."""
    rotates_keys = False
    """Whether held keys are rotated to new positions, so that the cache must know the model's RoPE and the padding."""
    prefix_notes: tuple[str, ...] = ()
    """What a store of prefixes had of the prompts of the call that made the cache; see `explain`."""
    _grows = False
    """Whether reservations of transformers' own layers are made larger when they are too small."""
    _traces: Mapping[int, int] = MappingProxyType({})
    """By layer, how often code that updates it was traced."""
    _at = forward_pass.NO_PASS
    """Index of the layer that the newest forward pass has updated last."""
    _in_step = -1
    """Index up to which layers have seen what the first one has, but for the pass that is under way."""
    _began: forward_pass.PassStart | None = None

    @checks_options
    def __init__(
        self,
        layers: list[Any] | None = None,
        layer_class_to_replicate: Callable[[], Any] | None = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
        offload_device: str = "cpu",
        offload_directory: str | os.PathLike[str] | None = None,
    ) -> None:
        if (layers is None) == (layer_class_to_replicate is None):
            raise ConfigError(
                "expected either layers or layer_class_to_replicate, but saw "
                f"{'neither' if layers is None else 'both'}: pass the layers of the model, or what makes one."
            )
        if layers is not None and not isinstance(layers, list | tuple):
            raise OptionError(f"expected a list of layers, but saw a {type(layers).__name__}: pass its layers.")
        if layers is not None and len({id(layer) for layer in layers}) != len(layers):
            raise ConfigError("expected a layer of its own for each layer of the model, but saw one that comes twice.")
        placement = Offloading(offload_only_non_sliding, offload_device, offload_directory)
        if placement.offload_directory is not None and not offloading:
            raise OptionError("expected offloading=True with offload_device='disk', but saw False.")
        self.offloading = bool(offloading)
        self.only_non_sliding = offload_only_non_sliding
        self._placement = placement
        self._prefetcher = Prefetcher(placement.memory()) if offloading else None
        # A cache that compiled code makes by itself is traced through.
        self._handle = None if torch.compiler.is_compiling() else GraphHandle(self)
        place = functools.partial(_placed, self._prefetcher, offload_only_non_sliding)
        self.layers = [] if layers is None else [place(layer) for layer in layers]
        share_mask_extents(self.layers)
        self.layer_class_to_replicate: functools.partial[Any] | None = None
        if layer_class_to_replicate is not None:
            self.make_more_with(layer_class_to_replicate)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is called by a handle of its own.
        return {name: value for name, value in self.__dict__.items() if name != "_handle"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._handle = GraphHandle(self)

    @property
    def kind(self) -> str:
        """Name of the kind of cache, by which saved states are known: that which its class is registered by."""
        return CACHE_CLASSES.name_of(type(self))

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The rotations that the descriptions of the cache and of its layers name by their fingerprints."""
        return tuple(rotary for layer in self.adapted_layers() for rotary in layer.rotaries)

    def describe(self) -> dict[str, Any]:
        """What the cache was made with, as far as its layers do not say it: values that JSON has, and no paths."""
        return {
            "offloading": self.offloading,
            "only_non_sliding": bool(self.only_non_sliding),
            "grows": self.layer_class_to_replicate is not None,
        }

    @classmethod
    def from_description(cls, options: Mapping[str, Any], layers: list[Any], context: DescriptionContext) -> Self:
        """An empty cache over layers that were described apart from it.

        A subclass whose initialiser sets attributes of its own sets them here as well, from what it adds to `describe`.

        Args:
            options: what `describe` returned. They may come from a file that anybody has written.
            layers: the layers, empty.
            context: what is needed besides.

        Raises:
            KeyError: an option is missing.
            KVLayersError: an option has a value that the cache does not take.
        """
        cache = cls.__new__(cls)
        Cache.__init__(
            cache, layers, offloading=options["offloading"], offload_only_non_sliding=options["only_non_sliding"]
        )
        return cache

    @classmethod
    def layers_from_config(cls, options: Mapping[str, Any], config: object, context: DescriptionContext) -> list[Any]:
        """The layers that a cache with these options has for a model, for those that no description makes.

        Args:
            options: what `describe` returned.
            config: config of the model.
            context: what is needed besides.
        """
        return dynamic_layers(config)

    def make_more_with(self, make_layer: Callable[[], Any]) -> None:
        """Let `make_layer` make a layer whenever the model uses one more."""
        place = functools.partial(_placed, self._prefetcher, self.only_non_sliding)
        self.layer_class_to_replicate = functools.partial(_made, make_layer, place)

    @property
    def traffic(self) -> TrafficMeter | None:
        """Bytes that offloading has moved, `None` where nothing is offloaded."""
        return None if self._prefetcher is None else self._prefetcher.meter

    def _fork(self) -> Self:
        twin = super()._fork()
        if self._prefetcher is not None:
            # Two caches may be in two threads, and what brings states is one thread's.
            twin._prefetcher = self._prefetcher.for_another_cache()
            for part in map(attention_part, twin.layers):
                if isinstance(part, OffloadedLayer):
                    part.use_prefetcher(twin._prefetcher)
            if self.layer_class_to_replicate is not None:
                twin.make_more_with(self.layer_class_to_replicate.args[0])
        return twin

    @property
    def self_attention(self) -> "Cache":
        """The cache that self-attention uses: this one, or the part of a pair."""
        return self

    def prepare(self, config: object, attention_mask: Tensor | None = None) -> None:
        """Tell an empty cache which model it is for, and which tokens are padding. Only some caches need to know.

        Args:
            config: config of the model, or the model.
            attention_mask: `[batch, tokens]`, 0 for padding on the left.
        """
        return

    def offloading_options(self) -> dict[str, Any]:
        """The options of offloading that this cache was made with, for another one that is held alike."""
        return {
            "offloading": self.offloading,
            "offload_only_non_sliding": self.only_non_sliding,
            "offload_device": self._placement.offload_device,
            "offload_directory": self._placement.offload_directory,
        }

    def for_cross_attention(self, encoder_length: int | None = None) -> "Cache":
        """An empty cache for the cross-attention of a model whose self-attention has this one: one that grows.

        Args:
            encoder_length: tokens of the encoder's output, where that is known, for a cache that must reserve them.
        """
        growing: Cache = late.function("DynamicCache")(**self.offloading_options())
        return growing

    def save(self, path: str | os.PathLike[str], token_ids: Tensor | None = None, config: object | None = None) -> None:
        """Write all that is needed to go on decoding to a file; see `save_cache`.

        Args:
            path: of the file, which is replaced as a whole where there is one.
            token_ids: tokens that the cache has seen, int64 `[batch, tokens]`, to be found in the file again.
            config: config of the model, or the model, so that the file is refused for another one.

        Raises:
            CachePathError: the file cannot be written.
            CacheFileError: states that a file cannot hold.
        """
        late.function("save_cache")(self, path, token_ids=token_ids, config=config)

    def summary(self) -> "CacheSummary":
        """What the cache holds: kinds of layers, tokens, bits, and bytes by where they are. Printed it is a table.

        Example:
            >>> import kvlayers, torch
            >>> cache = kvlayers.DynamicCache(length_hint=3)
            >>> _ = cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
            >>> cache.summary()  # doctest: +NORMALIZE_WHITESPACE
            DynamicCache: 3 tokens, batch 1, 384 B
            layers  kind          seen  held  device
            0       DynamicLayer     3     3   384 B
        """
        # Late, as few ask for it.
        from kvlayers.caches.summary import summary_of

        return summary_of(type(self).__name__, self._token_count(), self.batch_size, self.nbytes, self._layers_by_use())

    def explain(self) -> "Explanation":
        """Why the last calls were not faster: what of a prompt was not there, which way attention went, what compiled.

        Example:
            >>> import kvlayers
            >>> kvlayers.DynamicCache().explain()
            prefix: no store was asked
            attention: states are held in full precision, as torch reads them
            compiled: no code that updates this cache
        """
        # Late, as few ask for it.
        from kvlayers.caches.explanation import explanation_of

        layers = [layer for layers in self._layers_by_use().values() for layer in layers]
        return explanation_of(self.prefix_notes, layers, max(self._traces.values(), default=0))

    # Called while torch traces, and not by the code that it makes.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _note_trace(self, layer_idx: int) -> int:
        count = self._traces.get(layer_idx, 0) + 1
        self._traces = {**self._traces, layer_idx: count}
        return count

    def _layers_by_use(self) -> dict[str, list[Any]]:
        return {"": list(self.adapted_layers())}

    # Taking in states

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        cache_kwargs: Mapping[str, object] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Take in the states of new tokens in one layer, and return the states that their queries attend to.

        Args:
            key_states: `[batch, kv_heads, new, key_head_dim]`.
            value_states: `[batch, kv_heads, new, value_head_dim]`.
            layer_idx: index of the model's layer.
            cache_kwargs: what models written for transformers before 5.4 pass besides. Only layers of transformers' own
                ask for it, and only there.

        Returns:
            Keys and values `[batch, kv_heads, attended, head_dim]`; see `CacheLayer.update`.

        Raises:
            LayerIndexError: no layer has that index.
            StateMismatchError: states of another batch size, kv_heads, head_dim, dtype or device than those held.
            CapacityError: more tokens than fit.
            InterruptedPassError: an earlier forward pass ended before this layer, so that it lacks tokens.
        """
        if not 0 <= layer_idx < len(self.layers):
            return self._update_new_layer(key_states, value_states, layer_idx)
        compiling = torch.compiler.is_compiling()
        layer = self.layers[layer_idx]
        if compiling:
            self._note_trace(layer_idx)
            handle = self._handle
            if handle is not None and isinstance(layer, OF_OURS) and calls_operators(layer, key_states, value_states):
                return updated(handle, layer, layer_idx, key_states, value_states)
        elif not self._at < layer_idx <= self._in_step:
            self._follow(layer_idx, key_states.shape[-2])
        if isinstance(layer, compat.DUMMY_LAYER):
            raise UnsupportedLayerError(
                f"expected a layer that attends, but layer {layer_idx} holds nothing: make the cache from the config "
                "of the model that uses it."
            )
        if isinstance(layer, OF_OURS):
            attended = layer.update(key_states, value_states)
        else:
            attended = upstream_calls.update(layer, key_states, value_states, cache_kwargs)
        if not compiling:
            self._at = layer_idx
        return attended

    def _update_new_layer(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        if self.layer_class_to_replicate is None or layer_idx < 0:
            raise self._no_layer(layer_idx)
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self._follow(layer_idx, key_states.shape[-2])
        layers = self.layers_for(layer_idx + 1)
        attended: tuple[Tensor, Tensor] = layers[layer_idx].update(key_states, value_states)
        self.layers.extend(layers[len(self.layers) :])
        if not compiling:
            self._at = layer_idx
        return attended

    # Forward passes that were interrupted

    def _follow(self, layer_idx: int, tokens: int) -> None:
        """Note that a layer is about to be updated, if a pass begins there or goes further than the pass before.

        If all passes end at the same layer, this is called once a pass. Models may leave out their last layers (early
        exit), so only an update of such a layer tells: it would have seen fewer tokens than the layers before it.

        Raises:
            InterruptedPassError: the layer has seen fewer tokens than the first one of this pass.
        """
        if layer_idx <= self._at:
            self._in_step = min(self._in_step, self._at)
            in_module = forward_pass.in_module()
            # Only where there are layers behind, or may be, can this pass go further than the one before.
            may_go_on = self._in_step < len(self.layers) - 1 or self.layer_class_to_replicate is not None
            module = forward_pass.outermost_module() if in_module and may_go_on else None
            self._began = forward_pass.PassStart(layer_idx, self._seen_by(layer_idx), tokens, in_module, module)
            if in_module and layer_idx < len(self.layers) and isinstance(self.layers[layer_idx], HybridLayer):
                self._check_parts(self.layers[layer_idx], tokens)
        if layer_idx > self._in_step:
            began = self._began
            if began is not None and began.module is not None and tokens == began.tokens:
                seen = self._seen_by(layer_idx)
                uneven = None not in (seen, began.length) and seen != began.length
                if uneven and forward_pass.outermost_module() == began.module:
                    raise self._interrupted(layer_idx)
            self._in_step = layer_idx

    def _check_parts(self, layer: HybridLayer, tokens: int) -> None:
        """Raise where a pass was interrupted between the parts of its first layer. Either part may come first."""
        attended, recurrent = layer.attention.length, layer.linear.length
        if recurrent and recurrent not in (attended, attended + tokens):
            raise forward_pass.interrupted([attended, recurrent], recurrent=True)

    def _check_in_step(self) -> None:
        """Raise `InterruptedPassError` where the newest forward pass ended before the earlier ones did.

        Not within a module, where it may be under way.
        """
        began = self._began
        if began is None or not began.in_module or forward_pass.in_module(forward_pass.NO_PASS):
            return
        behind = any(self._seen_by(index) == began.length for index in range(self._at + 1, self._in_step + 1))
        if began.length is not None and behind and self._seen_by(began.layer) != began.length:
            raise self._interrupted(self._in_step)

    def interruption(self) -> InterruptedPassError | None:
        """The error for layers that have seen different numbers of tokens, `None` if they have seen as many."""
        seen = {self._seen_by(index) for index in range(len(self.layers))} - {None}
        return self._interrupted(len(self.layers) - 1) if len(seen) > 1 else None

    @override
    def state(self) -> CacheState:
        """As `LayerwiseOperations.state`.

        Raises:
            InterruptedPassError: a forward pass was interrupted, so that layers have seen different tokens.
        """
        self._check_in_step()
        return super().state()

    def _seen_by(self, layer_idx: int) -> int | None:
        """Tokens that a layer has seen, `None` where it does not know without being waited for."""
        if layer_idx >= len(self.layers):
            return 0
        layer = self.layers[layer_idx]
        if isinstance(layer, LayerOperations):
            return layer.length
        seen = layer.get_seq_length() if isinstance(layer, compat.ATTENTION_LAYER) else None
        return seen if isinstance(seen, int) else None

    def _interrupted(self, last: int) -> InterruptedPassError:
        # Of layers that are made as they are needed, the last one may not be there yet.
        seen = [self._seen_by(index) for index in range(max(len(self.layers), last + 1))]
        return forward_pass.interrupted(seen, any(layer.is_recurrent for layer in self.adapted_layers()))

    def forget_pass(self) -> None:
        """Take the next update for the beginning of a forward pass, and look at each layer if one was interrupted."""
        if self._at < self._in_step:
            self._in_step = -1
        self._at = forward_pass.NO_PASS

    def layers_for(self, count: int) -> list[Any]:
        """The layers, and as many new ones as make `count`, where layers are made as they are needed."""
        make_layer = self.layer_class_to_replicate
        missing = range(len(self.layers), count) if make_layer is not None else ()
        return [*self.layers, *(make_layer() for _ in missing if make_layer is not None)]

    def check_layer(self, layer_idx: int) -> int:
        """`layer_idx` counted from the first layer, as negative ones count from the last.

        Raises:
            LayerIndexError: no layer has that index.
        """
        if not -len(self.layers) <= layer_idx < len(self.layers):
            raise self._no_layer(layer_idx)
        return layer_idx % len(self.layers)

    def _no_layer(self, layer_idx: int) -> LayerIndexError:
        return LayerIndexError(
            f"expected a layer index from 0 to {len(self.layers) - 1}, but saw {layer_idx}: make the cache from the "
            "config of the model that uses it."
        )

    def early_initialization(
        self,
        batch_size: int,
        num_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Reserve what can be reserved before the first forward pass.

        Args:
            batch_size: sequences side by side.
            num_heads: kv_heads, for all layers or for each.
            head_dim: head_dim of keys and values, for all layers or for each.
            dtype: dtype of the states.
            device: device of the states.
        """
        if batch_size < 1:
            raise OptionError(f"expected a batch of at least one sequence, but saw batch_size={batch_size!r}.")
        heads = [num_heads] * len(self.layers) if isinstance(num_heads, int) else list(num_heads)
        dims = [head_dim] * len(self.layers) if isinstance(head_dim, int) else list(head_dim)
        if len(heads) != len(self.layers) or len(dims) != len(self.layers):
            raise LayerIndexError(
                f"expected num_heads and head_dim for each of {len(self.layers)} layers, but saw {len(heads)} and "
                f"{len(dims)}: pass one number for all, or one for each."
            )
        for layer, layer_heads, layer_dim in zip(self.layers, heads, dims, strict=True):
            if _reserves(layer) and not layer.is_initialized:
                no_tokens = torch.empty((batch_size, layer_heads, 0, layer_dim), dtype=dtype, device=device)
                if isinstance(layer, CacheLayer):
                    layer.lazy_initialization(no_tokens, no_tokens)
                else:
                    upstream_calls.reserve(layer, no_tokens)

    # Lengths and masks

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that a layer has seen. Where layer 0 does not attend, it stands for the first one that does.

        Raises:
            UnsupportedLayerError: neither attends, nor does any layer with a recurrent state know.
            InterruptedPassError: layer 0 is asked, outside of the model, and the last forward pass was interrupted, so
                that later layers have seen fewer tokens. `crop` to the length that they have, or `reset`.
        """
        if layer_idx >= len(self.layers):
            return 0
        if layer_idx == 0 and not torch.compiler.is_compiling() and self._at < self._in_step:
            self._check_in_step()
        layer = self.layers[layer_idx]
        if not isinstance(layer, LinearAttentionLayer):
            layer = self.layers[self._attending(layer_idx)]
        elif layer_idx == 0:
            layer = next((other for other in self.layers if isinstance(other, compat.ATTENTION_LAYER)), layer)
        seen = layer.get_seq_length()
        # A layer of transformers may count in a tensor, and in compiled code all static ones do.
        if torch.compiler.is_compiling():
            return seen  # type: ignore[no-any-return]
        in_prefill = generate_calls.is_prefill_of_generate(sys._getframe(1).f_code)
        return SeenTokens.of(self, seen) if in_prefill else int(seen)

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        """Length of what the next update of a layer returns, and the position of its first token.

        Args:
            query_length: tokens of the next update; or their positions, int64 `[query_length]`, as models and decode
                loops written for transformers before 5.4 pass.
            layer_idx: index of the model's layer.
        """
        if isinstance(query_length, Tensor):
            query_length = query_length.shape[0]
        if layer_idx >= len(self.layers):
            return query_length, 0
        asked = self.layers[self._attending(layer_idx)]
        if isinstance(asked, CacheLayer):
            if asked.capacity is not None:
                self._make_room(query_length)
            return asked.get_mask_sizes(query_length)
        if upstream_calls.is_reserved(asked) and not torch.compiler.is_compiling():
            self._make_room(query_length)
        return upstream_calls.mask_sizes(asked, query_length)

    def _make_room(self, tokens: int) -> None:
        """Be ready for `tokens` more in every layer, before any layer takes them in."""
        for layer in self.layers:
            if isinstance(layer, CacheLayer):
                layer.make_room(tokens)
            elif upstream_calls.is_reserved(layer) and not torch.compiler.is_compiling():
                make_room = upstream_calls.grow if self._grows else upstream_calls.check_room
                make_room(layer, tokens)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the next token in a layer."""
        return self.get_seq_length(layer_idx)

    def _attending(self, layer_idx: int) -> int:
        if isinstance(self.layers[layer_idx], compat.ATTENTION_LAYER):
            return layer_idx
        if layer_idx == 0:
            for index, layer in enumerate(self.layers):
                if isinstance(layer, compat.ATTENTION_LAYER):
                    return index
        raise UnsupportedLayerError(
            f"expected a layer that attends, but layer {layer_idx} is a {type(self.layers[layer_idx]).__name__}: ask "
            "another, where the model has one, or make the cache from the config of the model that uses it."
        )

    def most_tokens(self, layer_idx: int | None = None) -> int:
        """As `get_max_length`, whose answer is another one under `legacy_names`."""
        if layer_idx is not None:
            if layer_idx >= len(self.layers):
                return -1
            layer = self.layers[layer_idx]
            return (
                int(layer.get_max_length()) if isinstance(layer, LayerOperations) else upstream_calls.max_length(layer)
            )
        capacities = [layer.capacity for layer in self.adapted_layers() if layer.attends]
        bounded = [capacity for capacity in capacities if capacity is not None]
        return unbounded_as_minus_one(max(bounded) if bounded and len(bounded) == len(capacities) else None)

    # Placement

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Move a layer's states to the host, where its kind can.

        Raises:
            UnsupportedLayerError: it cannot.
        """
        if not (only_non_sliding and self.is_sliding[layer_idx]):
            self.layers[layer_idx].offload()

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Bring a layer's states back from the host, where its kind can leave.

        Raises:
            UnsupportedLayerError: it cannot.
        """
        if not (only_non_sliding and self.is_sliding[layer_idx]):
            self.layers[layer_idx].prefetch()

    # What the layers are

    @property
    def batch_size(self) -> int:
        """Sequences side by side, -1 before the first states."""
        return next((layer.batch_size for layer in self.adapted_layers() if layer.batch_size is not None), -1)

    @property
    def is_initialized(self) -> bool:
        """Whether every layer that takes tokens knows what they look like."""
        attending = [layer for layer in self.layers if _reserves(layer)]
        return bool(attending) and all(layer.is_initialized for layer in attending)

    @property
    def is_compileable(self) -> bool:
        """Whether generate() may compile the forward pass around this cache."""
        return bool(self.layers) and all(layer.is_compileable for layer in self.layers)

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can put every layer back as it was."""
        return all(layer.is_croppable for layer in self.adapted_layers())

    @property
    def is_sliding(self) -> list[bool]:
        """For each layer, whether it attends within a window."""
        return [layer.is_sliding for layer in self.adapted_layers()]

    @property
    def is_linear(self) -> list[bool]:
        """For each layer, whether it has a recurrent state and no attention."""
        return [layer.is_recurrent and not layer.attends for layer in self.adapted_layers()]

    @property
    def is_dummy(self) -> list[bool]:
        """For each layer, whether it holds nothing at all."""
        return [not layer.is_recurrent and not layer.attends for layer in self.adapted_layers()]

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        try:
            return self.summary().line
        except StateMismatchError as error:
            # Keys and values that were assigned do not match: a debugger shows the cache all the same.
            return f"{type(self).__name__}({error})"

    def _repr_html_(self) -> str:
        """The summary, for notebooks."""
        return self.summary()._repr_html_()


CACHE_CLASSES = ClassRegistry("cache", "kvlayers.cache_classes", "unregister_cache_class", Cache)
"""The caches that a file may name."""

CACHE_CLASSES.register(Cache)


def _reserves(layer: Any) -> bool:
    """Whether a layer can reserve memory before the first states."""
    if isinstance(layer, LayerOperations):
        return layer.supports_early_init
    return upstream_calls.reserves(layer)


def _placed(prefetcher: Prefetcher | None, only_non_sliding: bool, layer: Any) -> Any:
    if not isinstance(layer, LAYERS):
        raise OptionError(
            f"expected a layer of kvlayers or of transformers, but saw {_said_of(layer)}: a cache is made of layers, "
            "such as those of cache.layers."
        )
    return layer if prefetcher is None else offloaded(layer, prefetcher, only_non_sliding)


def _said_of(thing: object) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"


def _made(make_layer: Callable[[], Any], place: Callable[[Any], Any]) -> Any:
    return place(make_layer())
