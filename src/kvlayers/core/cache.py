"""The cache: a list of layers, with the interface that transformers, generate() and decode loops call."""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor
from typing_extensions import Self, override

from kvlayers.core.arguments import query_count, whole_number
from kvlayers.core.cache_layer import CacheLayer, adapted, in_step, let_static_layers_agree
from kvlayers.core.cache_operations import AS_TEXT, Origin
from kvlayers.core.description import Argument, DescriptionContext, arguments_of, described_facts, rotaries_of
from kvlayers.core.forward_pass import ForwardPassFollower, GivenToGenerate, PassStart
from kvlayers.core.from_config import AttentionMaker, dynamic_layers
from kvlayers.core.graph_operators import GraphHandle, calls_operators, updated
from kvlayers.core.legacy_api import LegacySurface
from kvlayers.core.summary import CacheSummary, Explanation, explanation_of, summary_of
from kvlayers.errors import (
    ConfigError,
    OptionError,
    StateMismatchError,
    UnsupportedLayerError,
)
from kvlayers.kernels.attention.cpu import kernel
from kvlayers.kernels.attention.latents import as_latents
from kvlayers.rope.rotary import Rotary
from kvlayers.utils import late
from kvlayers.utils.options import checks_options
from kvlayers.utils.registry import ClassRegistry


class Cache(LegacySurface, transformers.Cache):  # type: ignore[misc]
    """A list of layers, one for each layer of the model. The cache itself stores nothing.

    Args:
        layers: layers of kvlayers or of transformers.
        layer_class_to_replicate: instead of `layers`, a function that makes a layer whenever the model uses one more.
        offloading: hold states on the host, and on their device only while they are attended to.
        offload_only_non_sliding: leave layers that attend within a window on the device.
        offload_device: "cpu" for the host's memory, "disk" for memory-mapped files.
        offload_directory: the directory of these files, for "disk".

    Raises:
        OptionError: an option that does not exist, options of offloading that contradict each other, or something in
            `layers` that is not a layer, such as a cache.
        UnsupportedLayerError: a layer cannot be offloaded, and offloading is asked for.
        ConfigError: both or neither of the two arguments are given.
    """

    layer_class_to_replicate: Callable[[], Any] | None
    is_static = False
    """Whether the cache reserves its memory once, for a fixed number of tokens."""
    is_pair = False
    """Whether the cache has one part for self-attention and one for cross-attention."""
    rotates_keys = False
    """Whether held keys are rotated to new positions, so that the cache must know the model's RoPE."""
    learns_padding = False
    """Whether the cache must know the model and the padding before the first tokens; see `prepare`."""
    described: ClassVar[tuple[str, ...]] = ()
    """Names of attributes that a file records beside the layers, each a value that JSON has."""
    made_with: ClassVar[tuple[Argument, ...]] = ()
    """The other attributes that a file records. A subclass inherits them, and names its own in `described`."""
    prefix_notes: tuple[str, ...] = ()
    """What a prefix store had of the prompts of the call that made the cache; see `explain`."""
    recall: AttentionMaker | None = None
    """How single queries choose the pages that they attend to, if they do."""
    _traces: Mapping[int, int] = MappingProxyType({})
    """For each layer index, how often code that updates the layer was traced."""
    steps_taken: tuple[str, ...] = ()
    """The steps that `give_way` has taken."""
    _prefetcher: Any = None
    _outlives_generate = False

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
        # Now, rather than when a kernel is first needed, which may be in the middle of a generation.
        kernel.LIBRARY.begin()
        kernel.MANY.begin()
        if (layers is None) == (layer_class_to_replicate is None):
            raise ConfigError(
                "Either `layers` or `layer_class_to_replicate` must be given, got "
                f"{'neither' if layers is None else 'both'}: pass the layers of the model, or what makes one layer."
            )
        if layers is not None and not isinstance(layers, list | tuple):
            raise OptionError(f"`layers` must be a list, got a {type(layers).__name__}: pass its layers.")
        if layers is not None and len({id(layer) for layer in layers}) != len(layers):
            raise ConfigError(
                "`layers` must be a layer of its own for each layer of the model, got one twice: copy it."
            )
        self.only_non_sliding = offload_only_non_sliding
        options = offloading, offload_only_non_sliding, offload_device, offload_directory
        stays = options[0] is False and isinstance(options[1], bool) and options[2:] == ("cpu", None)
        placement = None if stays else late.function("offloading")(*options)
        self._pass = ForwardPassFollower()
        # A cache that is made within compiled code is traced through.
        self._handle = None if torch.compiler.is_compiling() else GraphHandle(self)
        self.layer_class_to_replicate = layer_class_to_replicate
        self._place(layers or (), placement)
        let_static_layers_agree(self.adapted_layers())

    def __getstate__(self) -> dict[str, Any]:
        # Compiled code knows a copy by another handle, and no call of generate() was given the copy. Layers that others
        # have replaced would take back the rows that they share.
        return {
            name: value
            for name, value in {**self.__dict__, "_adapted": self.adapted_layers()}.items()
            if name not in ("_handle", "_given")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._handle = GraphHandle(self)

    @property
    def offloading(self) -> bool:
        """Whether states are held on the host, and on their device only while they are attended to."""
        return self._prefetcher is not None

    @property
    def kind(self) -> str:
        """Name of the kind of cache in saved states: the name that its class is registered by."""
        return CACHE_CLASSES.name_of(type(self))

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The rotations that the descriptions of the cache and of its layers name by their fingerprints."""
        described = (
            each
            for cache in self.parts()
            for each in (cache, *(part.unwrapped for layer in cache.adapted_layers() for part in layer.parts))
        )
        return tuple(rotary for each in described for rotary in rotaries_of(each))

    def describe(self) -> dict[str, Any]:
        """The arguments of the cache that its layers do not describe themselves: values that JSON has, and no paths."""
        return {
            "offloading": self.offloading,
            "only_non_sliding": bool(self.only_non_sliding),
            "grows": self.layer_class_to_replicate is not None,
            # Rows of different origins are not saved together.
            **({} if self.origins == (AS_TEXT,) else self.origins[0]._asdict()),
            **described_facts(self),
        }

    @classmethod
    def from_description(cls, options: Mapping[str, Any], layers: list[Any], context: DescriptionContext) -> Self:
        """An empty cache over empty layers, which were described by themselves.

        A subclass whose initialiser sets attributes of its own names them in `described` (or in `made_with`). They are
        set here too.

        Args:
            options: what `describe` returned. They may come from a file that anybody could have written.
            layers: the empty layers.
            context: what else descriptions are read with, such as rotations.

        Raises:
            KeyError: an option is missing.
            KVLayersError: an option has a value that the cache does not take.
        """
        cache = cls.__new__(cls)
        Cache.__init__(
            cache, layers, offloading=options["offloading"], offload_only_non_sliding=options["only_non_sliding"]
        )
        cache.origins = (described_origin(options),)
        for argument in arguments_of(cls):
            setattr(cache, argument.attribute or argument.name, argument.read(options, context))
        cache.layer_class_to_replicate = cache._layer_maker() if options["grows"] else None
        return cache

    def _layer_maker(self) -> Callable[[], Any] | None:
        """What makes further layers of a cache without a config, if the class of the cache says that."""
        return None

    def layers_of_model(self, config: Any) -> list[Any]:
        """The layers of a cache with these options for a model. They replace layers that a description cannot make."""
        return dynamic_layers(config, recall=self.recall)

    def _place(self, layers: Sequence[Any], offloading: Any) -> None:
        """Hold the states of these layers, and of those that are made later, where `offloading` says.

        Args:
            layers: layers whose states are on the device that computes.
            offloading: an `Offloading` of the room `offload`, `None` for the device that computes.

        Raises:
            UnsupportedLayerError: a layer cannot be offloaded; nothing is changed.
        """
        prefetcher = None if offloading is None else offloading.prefetcher()
        only_non_sliding = self.only_non_sliding if offloading is None else offloading.only_non_sliding
        self.layers = [_placed(layer, prefetcher, only_non_sliding) for layer in layers]
        self._offloading, self._prefetcher, self.only_non_sliding = offloading, prefetcher, only_non_sliding

    @property
    def traffic(self) -> Any:
        """Bytes that offloading has moved, a `kvlayers.offload.TrafficMeter`; `None` if nothing is offloaded."""
        return None if self._prefetcher is None else self._prefetcher.meter

    @override
    def _twin_with(self, layers: Sequence[CacheLayer]) -> Self:
        twin = super()._twin_with(layers)
        twin._pass = copy.copy(self._pass)
        twin.budget = None if self.budget is None else self.budget.fork()
        if self._prefetcher is not None:
            # A prefetcher belongs to one thread, and the two caches may be used in two.
            twin._prefetcher = self._prefetcher.for_another_cache()
            rows: list[Any] = [row for layer in twin.adapted_layers() for row in layer.parts[0].separate_rows]
            for moved in (row for row in rows if row.unwrapped is not row):
                moved.use_prefetcher(twin._prefetcher)
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

    def offloading_options(self) -> dict[str, Any]:
        """The options of offloading that this cache was made with, to make another cache with the same."""
        return {"offloading": False} if self._offloading is None else self._offloading.options()

    def for_cross_attention(self, encoder_length: int | None = None) -> "Cache":
        """An empty cache for cross-attention in a model that has this cache for self-attention. It grows.

        Args:
            encoder_length: tokens of the encoder's output, if they are known, for a cache that must reserve them.
        """
        growing: Cache = late.function("DynamicCache")(**self.offloading_options())
        return growing

    def summary(self) -> CacheSummary:
        """What the cache holds: kinds of layers, tokens, bits, and bytes by their place. Printed, it is a table.

        Example:
            >>> import kvlayers, torch
            >>> cache = kvlayers.DynamicCache(length_hint=3)
            >>> _ = cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
            >>> cache.summary()  # doctest: +NORMALIZE_WHITESPACE
            DynamicCache: 3 tokens, batch 1, 384 B
            layers  kind          seen  held  device
            0       DynamicLayer     3     3   384 B
        """
        return summary_of(type(self).__name__, self.most_seen(), self.batch_size, self.nbytes, self._layers_by_use())

    def explain(self) -> Explanation:
        """Why the last calls were not faster: which prefix was missing, which way attention went, what compiled.

        Example:
            >>> import kvlayers
            >>> kvlayers.DynamicCache().explain()
            prefix: no store was asked
            attention: states are held in full precision, for torch or the compiled kernel to read
            compiled: no code that updates this cache
        """
        return explanation_of(
            self.prefix_notes,
            [layer for layers in self._layers_by_use().values() for layer in layers],
            max(self._traces.values(), default=0),
            "" if self.budget is None else self.budget.note,
        )

    # Called while torch traces, and not by the code that it makes.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _note_trace(self, layer_idx: int) -> int:
        count = self._traces.get(layer_idx, 0) + 1
        self._traces = {**self._traces, layer_idx: count}
        return count

    def _layers_by_use(self) -> dict[str, Sequence[CacheLayer]]:
        return {
            use: part.adapted_layers()
            for use, part in zip(("self", "cross") if self.is_pair else ("",), self.parts(), strict=True)
        }

    # Taking in states

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens to a layer, and return the states that their queries attend to.

        Args:
            key_states: `[batch, kv_heads, new, key_head_dim]`.
            value_states: `[batch, kv_heads, new, value_head_dim]`.
            layer_idx: index of the model's layer.
            *args: further arguments of models, which change with the version of transformers. They are handed on to
                transformers' own layers, and ignored by others.
            **kwargs: the same.

        Returns:
            Keys and values `[batch, kv_heads, attended, head_dim]`; see `CacheLayer.update`.

        Raises:
            LayerIndexError: no layer has that index.
            StateMismatchError: the batch size, kv_heads, head_dim, dtype or device differ from those held.
            CapacityError: more tokens than fit.
            InterruptedPassError: an earlier forward pass ended before this layer, which therefore lacks tokens.
        """
        try:
            layer = self.layers[layer_idx] if 0 <= layer_idx < len(self.layers) else None
        except (TypeError, ValueError, RuntimeError):
            raise self._no_layer(layer_idx) from None
        made: Sequence[CacheLayer] = ()
        if layer is None:
            if self.layer_class_to_replicate is None or layer_idx < 0:
                raise self._no_layer(layer_idx)
            # The cache does not hold new ones yet.
            made = [adapted(each) for each in self.layers_for(layer_idx + 1)]
            layer = made[layer_idx]
        elif layer_idx >= len(self._adapted) or self._adapted[layer_idx] is not layer:
            layer = self._layer(layer_idx)
            if not layer.traits.attends:
                raise UnsupportedLayerError(
                    f"`layer_idx` must be that of a layer that attends, got {layer_idx}, which holds nothing that is "
                    "attended to: make the cache from the config of the model that uses it."
                )
        following, compiling = self._pass, torch.compiler.is_compiling()
        if compiling:
            self._note_trace(layer_idx)
            handle = self._handle
            if handle is not None and not made and calls_operators(layer, key_states, value_states):
                return updated(handle, layer, layer_idx, key_states, value_states)
            if made and self.budget is not None:
                # Only of the pass that makes layers: to ask breaks the graph, which other passes should not pay for.
                self.budget.make_room(self, made, layer_idx, key_states, value_states)
        elif (
            made
            or not following.at < layer_idx <= following.in_step
            # A pass may have begun with recurrent states, which ask no budget.
            or (self.budget is not None and layer_idx <= self.budget.asked[1])
        ):
            new = key_states.shape[-2] if isinstance(key_states, Tensor) and key_states.dim() > 1 else 0
            if new and (key_states.dtype, key_states.device) != following.goes_on_with:
                following.check_states(layer, key_states, value_states)
            if self.budget is not None:
                self.budget.make_room(self, made or self.adapted_layers(), layer_idx, key_states, value_states)
                # It may have set rows apart.
                layer = (made or self.adapted_layers())[layer_idx]
            following.follow(self, layer_idx, layer, new)
        attended: tuple[Tensor, Tensor] = (
            layer.update(key_states, value_states, *args, **kwargs)
            if layer.traits.is_upstream
            else layer.update(key_states, value_states)
        )
        if made:
            # Only now, as its states might not have been taken in.
            self.layers.extend([new_layer.original for new_layer in made[len(self.layers) :]])
            # Compiled code must not find out: what it sees for the first time it is compiled for.
            self.adapted_layers()
        if not compiling:
            following.at = layer_idx
            if key_states.shape[1] == 1 and _are_latents(key_states, value_states):
                return as_latents(*attended)
        return attended

    # What transformers (from 5.17 on) sets if a call of generate() is given a cache, and reads to return it

    @property
    def _is_user_defined(self) -> bool:
        return self._outlives_generate

    @_is_user_defined.setter
    def _is_user_defined(self, is_user_defined: bool) -> None:
        self.forget_call()
        self._given = GivenToGenerate(self)
        self._outlives_generate = is_user_defined

    def newest_pass(self) -> PassStart | None:
        """Where the newest forward pass began, as far as it was not compiled; `None` before the first one."""
        return self.self_attention._pass.began

    @override
    def layers_for(self, count: int) -> list[Any]:
        make_layer = self.layer_class_to_replicate
        made = [] if make_layer is None else [make_layer() for _ in range(len(self.layers), count)]
        return [*self.layers, *(_placed(layer, self._prefetcher, self.only_non_sliding) for layer in made)]

    # Lengths and masks

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        """Length of the states that the next update of a layer returns, and the position of its first token.

        No memory is taken, and no token is moved or counted. There is one exception: if compiled code takes the tokens
        in, it can do neither, so layers that read buckets do it now.

        Args:
            query_length: tokens of the next update; or their positions, int64 `[query_length]`, as models and decode
                loops written for transformers before 5.4 pass.
            layer_idx: index of the model's layer.

        Raises:
            CapacityError: the tokens do not fit in this layer.
        """
        # In ordinary calls without a call in Python.
        if not (type(query_length) is int and query_length >= 0):
            query_length = query_count(query_length)
        layer = self._layer_at(layer_idx)
        if layer is None:
            return query_length, 0
        asked = layer if layer.traits.attends else self._attending(layer_idx)
        if asked.capacity is not None:
            layers = self.adapted_layers()
            for index in self._in_step_with(layer_idx):
                layers[index].make_room(query_length)
        return asked.mask_sizes(query_length)

    # Its result is read while torch traces, and not by the code that it makes: lengths would be constants of that code.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _in_step_with(self, layer_idx: int) -> tuple[int, ...]:
        """Layers that make room together with a layer that is asked how its next tokens are masked."""
        return in_step(self._attending(layer_idx), self.adapted_layers())

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the next token in a layer."""
        seen = self.get_seq_length(layer_idx)
        return seen if torch.compiler.is_compiling() else int(seen)

    # Memory

    def give_way(self, ladder: Sequence[str] | None = None) -> str | None:
        """Take less memory, in place and by one step: 8 bits, then 4 bits, then states on the host.

        A step is taken as a whole: by all layers that can take it. If memory runs out within a step, some layers have
        taken it, the tokens are those that were held, and the next call goes on with the same step.

        Args:
            ladder: the steps that may be taken, the first of them first; all three if it is not given.

        Returns:
            The step that was taken, "int8", "int4" or "offloaded"; `None` if there is none left.
        """
        step: str | None = late.function("give way")(self, ladder)
        if step is not None:
            self.steps_taken += (step,)
        return step

    def pack(self, nbits: int = 4) -> None:
        """Hold all but the oldest and the newest tokens in `nbits` bits at most, in place, from now on.

        Layers that cannot stay as they are, and the log names their kinds: reservations, recurrent states, and layers
        that keep something of their tokens beside them. Windows are rounded too.

        Raises:
            OptionError: the native quantizer has no such bits.
            UnsupportedLayerError: no layer can.
        """
        late.function("pack")(self, nbits)

    def offload(
        self,
        layer_idx: int | None = None,
        only_non_sliding: bool = True,
        device: str = "cpu",
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        """Hold states on the host or on disk from now on, and on their device only while they are attended to.

        Args:
            layer_idx: one layer, for code of transformers, whose layers move by themselves; by default all layers.
            only_non_sliding: leave layers that attend within a window where they are.
            device: "cpu" for the host's memory, "disk" for memory-mapped files.
            directory: the directory of these files, for "disk".

        Raises:
            OptionError: the place does not exist, or states are offloaded to another one.
            UnsupportedLayerError: a layer cannot be offloaded; nothing is changed.
            CapacityError: there is no memory for the states; nothing is changed.
        """
        if layer_idx is None:
            late.function("offload")(self, device, directory, only_non_sliding)
        elif not (only_non_sliding and self._layer(layer_idx).is_sliding):
            self._layer(layer_idx).offload()

    def onload(self) -> None:
        """Hold all states on the device that computes from now on: the inverse of `offload`."""
        late.function("onload")(self)

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Bring a layer's states back from the host, if its kind can.

        Raises:
            UnsupportedLayerError: it cannot.
        """
        if not (only_non_sliding and self._layer(layer_idx).is_sliding):
            self._layer(layer_idx).prefetch()

    def __repr__(self) -> str:
        try:
            return self.summary().line
        except StateMismatchError as error:
            # Assigned keys and values do not match. A debugger shows the cache all the same.
            return f"{type(self).__name__}({error})"

    def _repr_html_(self) -> str:
        """The summary, for notebooks."""
        return self.summary()._repr_html_()


def described_origin(options: Mapping[str, Any]) -> Origin:
    """The origin of the states of a cache, by what `Cache.describe` returned.

    Raises:
        OptionError: what should be a number is something else.
    """
    exact = options.get("exact_tokens")
    return Origin(
        whole_number(options.get("first_position", 0), "`first_position`"),
        None if exact is None else whole_number(exact, "`exact_tokens`"),
    )


CACHE_CLASSES = ClassRegistry("cache", "kvlayers.cache_classes", "unregister_cache_class", Cache)
"""The caches that a file may name."""

CACHE_CLASSES.register(Cache)


def _are_latents(keys: Tensor, values: Tensor) -> bool:
    """Whether states may be those of multi-head latent attention: one head, and fewer channels that are rotated."""
    return keys.shape[1] == 1 and keys.shape[3] != values.shape[3] and keys.dim() == 4


def _placed(layer: Any, prefetcher: Any, only_non_sliding: bool) -> Any:
    """A layer of the cache, wrapped by the prefetcher's room if its states are held elsewhere."""
    return layer if prefetcher is None else late.function("place")(layer, prefetcher, only_non_sliding)
