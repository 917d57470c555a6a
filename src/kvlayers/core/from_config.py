"""Makes the layers of a cache from a model's config: one for each layer of the model, of the kind that serves it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from typing_extensions import override

from kvlayers.core.cache_layer import CacheLayer, adapted, beside_attention
from kvlayers.core.description import DescriptionContext, Fact, Facts, OptionFacts, OptionsArgument
from kvlayers.core.token_layer import DynamicLayer, SlidingLayer, TokenLayer
from kvlayers.core.token_store import TokenStore
from kvlayers.errors import ConfigError
from kvlayers.upstream import compat, model_layers, model_types
from kvlayers.upstream.model_layers import LayerSpec
from kvlayers.utils import late
from kvlayers.utils.options import as_options, check_whole_number, mapping_option


@mapping_option("checkpoints")
@dataclass(frozen=True)
class Checkpoints(OptionFacts):
    """When a recurrent layer takes checkpoints, and how many it keeps.

    A checkpoint is taken at the end of each update of several tokens (so at the end of the prompt), every `every`
    tokens, and where a past that may be taken back begins (`activate_past_recording`, and each rollback while
    recording). Compiled code takes no checkpoints. A checkpoint takes as much memory as the states of the layer,
    whatever the number of tokens.

    Args:
        every: take a checkpoint every `every` tokens as well; `None` to leave that out.
        most: the most checkpoints to keep; the oldest is dropped first. While a past is recorded, at least two are
            kept.

    Raises:
        OptionError: a value that is not a whole number, or too small.

    Example:
        >>> import kvlayers
        >>> kvlayers.layers.Checkpoints(every=256, most=8)
        Checkpoints(every=256, most=8)
    """

    fact_names: ClassVar[Mapping[str, str]] = {"every": "checkpoint_every", "most": "most_checkpoints"}

    every: int | None = None
    most: int = 2

    def __post_init__(self) -> None:
        if self.every is not None:
            check_whole_number(self.every, "`every` of the checkpoints", 1)
        check_whole_number(self.most, "`most` of the checkpoints", 0)

    @classmethod
    def of(cls, given: "Checkpoints | Mapping[str, int | None] | None") -> "Checkpoints":
        """The `Checkpoints` for the option `checkpoints` of a cache: a `Checkpoints`, or a mapping of its arguments.

        Raises:
            OptionError: the option is something else, or names an argument that does not exist.
        """
        if given is None:
            return cls()
        return as_options(cls, given, "{'every': 64}")

    def due_at(self, length: int) -> bool:
        """Whether a checkpoint is due at this number of tokens."""
        return self.most > 0 and self.every is not None and length > 0 and length % self.every == 0


WINDOWED = ("sliding_attention", "chunked_attention")
"""Layer types that attend to a fixed number of tokens. For a cache they are one kind: only their masks differ."""

FULL = "full_attention"
"""The layer type that attends to every token."""

RECURRENT = ("linear_attention", "conv")
"""Layer types that have states of a fixed size and do not attend."""

HYBRID = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
"""Layer types that have states of a fixed size and attend, with the layer type of their attention."""

Factory = Callable[[LayerSpec], Any]
CheckpointOptions = Checkpoints | Mapping[str, int | None] | None


class AttentionMaker(Protocol):
    """Options of a cache that choose another kind of layer for full attention, such as `Recall`."""

    def layer(self, length_hint: int | None, store: TokenStore | None = None) -> DynamicLayer:
        """A layer that keeps every token in `store`, or in a store of its own."""

    def facts(self) -> dict[str, Fact]:
        """The options as plain facts."""


def dynamic_layers(
    config: object,
    length_hint: int | None = None,
    checkpoints: CheckpointOptions = None,
    recall: AttentionMaker | None = None,
) -> list[Any]:
    """A layer that grows for each layer of a model; transformers' layer if kvlayers has no kind for the layer type.

    Args:
        config: config of the model.
        length_hint: the most tokens that are expected, if known.
        checkpoints: see `Checkpoints`, for layers with recurrent states.
        recall: how single queries choose the pages that they attend to in layers of full attention, if they do.
    """
    kinds: dict[str, Factory] = {
        "full_attention": lambda spec: full_attention_layer(length_hint, recall),
        **dict.fromkeys(WINDOWED, lambda spec: SlidingLayer(spec.options["sliding_window"])),
    }
    return layers_of(config, kinds, checkpoints)


def full_attention_layer(length_hint: int | None = None, recall: AttentionMaker | None = None) -> DynamicLayer:
    """A layer that keeps every token in full precision; single queries choose pages of it if `recall` is given."""
    return DynamicLayer(length_hint) if recall is None else recall.layer(length_hint)


def recall_of(given: AttentionMaker | Mapping[str, Any] | None) -> AttentionMaker | None:
    """What the option `recall` of a cache says: a `kvlayers.layers.Recall`, or a mapping of its arguments.

    Raises:
        OptionError: the option is something else, or names an argument that does not exist.
    """
    return None if given is None else late.function("recall")(given)


def budget_of(max_bytes: object, ladder: object, length_hint: int | None) -> Any:
    """What the options `max_bytes` and `ladder` of a cache say: a `Budget` of the room `memory`, `None` without them.

    Raises:
        OptionError: they are no bytes and no steps, or contradict each other.
    """
    return None if max_bytes is None and ladder is None else late.function("budget")(max_bytes, ladder, length_hint)


@dataclass(frozen=True)
class ProvidedArgument(OptionsArgument):
    """Options of a cache that a room above serves, such as `recall`."""

    @override
    def read(self, facts: Facts, context: DescriptionContext) -> Any:
        return late.function(f"{self.name} in facts")(facts) if self.fact in facts else None


RECALL = ProvidedArgument("recall", fact="recall_pages")
BUDGET = ProvidedArgument("budget", fact="max_bytes")
"""Options of caches that grow."""


def every_token_layers(
    config: object, length_hint: int | None = None, checkpoints: CheckpointOptions = None
) -> list[Any]:
    """As `dynamic_layers`, but layers with a window hold every token, and leave the window to the mask."""
    kinds: dict[str, Factory] = dict.fromkeys(
        ("full_attention", *WINDOWED), lambda spec: DynamicLayer(length_hint=length_hint)
    )
    return layers_of(config, kinds, checkpoints)


def layers_of(
    config: object, kinds: Mapping[str, Factory], checkpoints: CheckpointOptions, max_cache_len: int | None = None
) -> list[Any]:
    """A layer for each layer of a model.

    Args:
        config: config of the model.
        kinds: for each layer type that attends, a function that makes the layer.
        checkpoints: see `Checkpoints`, for layers with recurrent states.
        max_cache_len: tokens that transformers' layers reserve, `None` for layers that grow.
    """
    policy, specs, every = Checkpoints.of(checkpoints), model_layers.layer_specs(config), dict(kinds)
    if compat.MODELS_PASS_COLUMNS and any(spec.layer_type in (*RECURRENT, *HYBRID) for spec in specs):
        every |= late.function("recurrent kinds")(kinds, policy, model_types.tokens_at_once(config))
    return [
        every[spec.layer_type](spec) if spec.layer_type in every else model_layers.upstream_layer(spec, max_cache_len)
        for spec in specs
    ]


def with_attention(dynamic: Any, attention: TokenLayer) -> CacheLayer:
    """A layer with this attention, and with the recurrent part of `dynamic` if it has one.

    Raises:
        ConfigError: kvlayers does not hold the recurrent states of the layer.
    """
    layer = adapted(dynamic)
    if layer.traits.is_recurrent and layer.traits.is_upstream:
        raise ConfigError(
            f"Recurrent states must be held by kvlayers, as from transformers 5.15 on, got a "
            f"{type(dynamic).__name__}: use a DynamicCache, or a newer transformers."
        )
    return beside_attention(layer, attention)
