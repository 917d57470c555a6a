"""`generate()` with a `PrefixStore`: what is held is looked up, the rest computed, and what was computed is held.

Nothing but the cache that `generate()` is given differs from a plain call. There are three ways to make it:

* One prompt: the cache of its longest prefix goes on.
* Prompts that begin alike: the cache of what they have in common is expanded, so that it is held once for all of them.
  Padding, which is on the left, moves behind that, where nothing depends on the order of the ids but the model, which
  goes by its `position_ids`.
* Other prompts, and caches that cannot be shared so: each prompt is computed on its own, from its own longest prefix,
  and the caches are put side by side, padded as the prompts are.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerationMixin, GenerationMode
from transformers.utils import ModelOutput

from .. import compat
from ..cache import Cache
from ..errors import CapacityError, ConfigError, OptionError
from ..layers.dispatch import keeps_every_token, recurrent_part
from ..prefix import Hit, PrefixStore
from ..rotary_config import depends_on_length
from ..sink_cache import SinkCache
from ..stacking import can_be_stacked, stack
from ..static_cache import StaticCache
from . import registry
from .calls import by_name, whole_config
from .model_identity import model_identity
from .passing import at_once, pass_tokens
from .prompt_rows import PromptRows, is_token_ids
from .prompts import LEAST_TOKENS

MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)
"""Ways of generating that pass a prompt to one model, as a whole."""

UNRELATED = frozenset(("input_ids", "attention_mask", "tokenizer"))
"""Arguments for the model, or beside it, on which no state depends but through the ids."""

ORDER_SENSITIVE = ("no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "stop_strings", "watermarking_config")
"""Options that look at tokens in the order of the ids."""

ROOM_FOR_ANSWER = 256
"""Tokens of an answer that memory is reserved for at first: what is held keeps it, and most answers end early."""

CHECKPOINTS = {"most": 16}
"""Of recurrent states, so that one entry serves many of the places where prompts may part."""


class UnusableError(Exception):
    """A call that cannot go by a store; the message says why. For this package alone."""


@dataclass
class Prefixes:
    """A store that calls of `generate()` go by.

    Attributes:
        store: where prefixes are looked up and held.
        namespace: whose they are.
        is_required: whether a call that cannot go by it is an error, rather than counted.
    """

    store: PrefixStore
    namespace: str = ""
    is_required: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.store, PrefixStore):
            raise OptionError(
                f"expected prefix_store to be a kvlayers.PrefixStore, but saw a {type(self.store).__name__}."
            )
        if not isinstance(self.namespace, str):
            raise OptionError(f"expected namespace to be a text, but saw a {type(self.namespace).__name__}.")


_in_use: ContextVar[tuple[Prefixes | None] | None] = ContextVar("what the current call goes by", default=None)
_own_cache: ContextVar[Cache | None] = ContextVar("the cache that the current call goes on from", default=None)
_installed: list[Prefixes] = []


@contextmanager
def using(prefixes: Prefixes | None) -> Iterator[None]:
    """Let calls of `generate()` in this context go by `prefixes`, or by none, whatever is installed."""
    token = _in_use.set((prefixes,))
    try:
        yield
    finally:
        _in_use.reset(token)


def add(prefixes: Prefixes) -> None:
    """Let all calls go by `prefixes`, until it is removed or another one is added."""
    _installed.append(prefixes)


def remove(prefixes: Prefixes) -> None:
    """Take back one `add`, where there was one."""
    for index in reversed(range(len(_installed))):
        if _installed[index] is prefixes:
            del _installed[index]
            return


def remove_all() -> None:
    """Let no call go by a store, but for `using`."""
    _installed.clear()


def current() -> Prefixes | None:
    """What a call goes by that is made now."""
    in_use = _in_use.get()
    if in_use is not None:
        return in_use[0]
    return _installed[-1] if _installed else None


Generate = Callable[..., Any]


def generate(prefixes: Prefixes, plain: Generate, model: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
    """What `plain(*args, **arguments)` returns, by way of a store where that is possible.

    Raises:
        OptionError: it is not possible, and required.
    """
    with using(None):
        try:
            call = PrefixedCall(prefixes, model, args, arguments)
            cache, given = call.prepared()
        except UnusableError as reason:
            if prefixes.is_required:
                raise OptionError(
                    f"expected a call that can go by a prefix_store, but {reason}: leave prefix_store out for it."
                ) from None
            prefixes.store.note_bypassed(str(reason))
            return plain(*args, **arguments)
        token = _own_cache.set(cache)
        try:
            output = plain(*call.unnamed, **given)
        finally:
            _own_cache.reset(token)
        return call.finished(output, cache)


def is_own(cache: object) -> bool:
    """Whether a cache that the current call was given was given by this module, in the place of one by name."""
    return cache is not None and cache is _own_cache.get()


class PrefixedCall:
    """A call of `generate()` that goes by a store.

    Args:
        prefixes: the store.
        model: the model.
        args: what `generate()` was given without a name.
        arguments: what it was given by name.

    Raises:
        UnusableError: it cannot.
    """

    def __init__(self, prefixes: Prefixes, model: Any, args: tuple[Any, ...], arguments: Mapping[str, Any]) -> None:
        self._model, self._store = model, prefixes.store
        self._cache_name = compat.cache_argument(model)
        self.unnamed, self._arguments = by_name(model, args, dict(arguments))
        _check_model(model, self._arguments)
        self._config, model_kwargs = whole_config(model, self._arguments)
        _check_options(self._config, model_kwargs)
        self._prompts = _prompts(self._config, self._arguments)
        self._repeats = max(self._config.num_beams or 1, self._config.num_return_sequences or 1)
        self._name = self._config.cache_implementation or "dynamic"
        self._options = dict(self._config.cache_config or {})
        if not registry.is_registered(self._name) or compat.makes_its_own_cache(model, self._name):
            raise UnusableError(f"the cache '{self._name}' of {type(model).__name__} is none of kvlayers'")
        try:
            identity = model_identity(model)
        except ConfigError as error:
            raise UnusableError(f"its weights cannot be told apart: {error}") from error
        kind = f"{identity} {self._name} {sorted(self._options.items())}"
        self._whose = {"config": model.config, "namespace": prefixes.namespace, "model": kind}

    def prepared(self) -> tuple[Cache, dict[str, Any]]:
        """The cache to go on from, and what to call `generate()` with.

        Raises:
            UnusableError: the prompts differ, and their caches cannot be put side by side.
        """
        changes: dict[str, Any] = {}
        if len(self._prompts) == self._repeats == 1 and not self._prompts.is_padded:
            cache = self._of_one_prompt()
        else:
            example = self._empty()
            if isinstance(example, SinkCache):
                raise UnusableError(f"what the layers of {example!r} hold depends on which tokens came at once")
            common, stackable = self._prompts.common_tokens(), can_be_stacked(example)
            shareable = self._can_share(example, common)
            if not shareable and not stackable:
                raise UnusableError(
                    f"its prompts begin alike for {common} tokens only or are padded, and caches like {example!r} "
                    "cannot be put side by side"
                )
            hits = [self._lookup(row) for row in self._prompts.rows()] if stackable else []
            if shareable and all(hit.covered <= common for hit in hits):
                cache, changes = self._of_common_tokens(common, hits)
            else:
                cache = self._of_each_prompt(common, hits)
        given = {**self._arguments, **changes, self._cache_name: cache}
        return cache, given

    def finished(self, output: Any, cache: Cache) -> Any:
        """What `generate()` is to return; what it has computed for one prompt is held."""
        sequences = output.sequences if isinstance(output, ModelOutput) else output
        ids = self._prompts.input_ids
        if self._prompts.is_padded:
            # It may have had the padding elsewhere.
            sequences[:, : ids.shape[1]] = ids.repeat_interleave(sequences.shape[0] // ids.shape[0], dim=0)
        elif cache.batch_size == sequences.shape[0] == 1:
            self._insert(sequences, cache)
        return output

    def _of_one_prompt(self) -> Cache:
        ids = self._prompts.row(0)
        cache = self._continued(self._lookup(ids))
        if not isinstance(cache, SinkCache) and not all(map(keeps_every_token, cache.layers)):
            self._compute(ids, cache, ids.shape[1] - 1)
        return cache

    def _of_common_tokens(self, common: int, hits: list[Hit]) -> tuple[Cache, dict[str, Any]]:
        cache = self._of_the_first(common, hits)
        cache.expand(len(self._prompts) * self._repeats)
        if not self._prompts.is_padded:
            return cache, {}
        moved, mask = self._prompts.with_padding_behind(common)
        return cache, {_ids_name(self._arguments): moved, "attention_mask": mask}

    def _of_the_first(self, common: int, hits: list[Hit]) -> Cache:
        """A cache that has seen the tokens that all prompts begin with."""
        ids = self._prompts.row(0)[:, : common + 1]
        own = [hit for hit in hits if hit.covered <= common]
        cache = self._continued(max(own, key=lambda hit: hit.covered) if own else self._lookup(ids))
        self._compute(ids, cache, common)
        return cache

    def _of_each_prompt(self, common: int, hits: list[Hit]) -> Cache:
        caches: list[Cache] = []
        behind = sum(hit.covered < common for hit in hits)
        shared = self._of_the_first(common, hits) if behind > 1 and common >= LEAST_TOKENS else None
        for ids, hit in zip(self._prompts.rows(), hits, strict=True):
            cache = self._continued(hit) if shared is None or hit.covered >= common else shared.fork()
            self._compute(ids, cache, ids.shape[1] - 1)
            # Reservations cannot be expanded, so each prompt comes as often as it is to be gone on from.
            caches.extend([cache] * self._repeats)
        together = self._empty(rows=len(caches))
        stack(caches, together, self._prompts.input_ids.shape[1] - 1)
        return together

    def _can_share(self, example: Cache, common: int) -> bool:
        if isinstance(example, StaticCache) or common < (LEAST_TOKENS if len(self._prompts) > 1 else 1):
            return False
        if not self._prompts.is_padded:
            return True
        reads_order = any(vars(self._config).get(name) for name in ORDER_SENSITIVE) or any(
            self._arguments.get(name) for name in ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
        )
        # By index, the padding between would count: in a window, and where positions are not told.
        told = "position_ids" in inspect.signature(self._model.forward).parameters
        return told and not reads_order and all(map(keeps_every_token, example.layers))

    def _lookup(self, ids: Tensor) -> Hit:
        return self._store.lookup(ids, **self._whose)

    def _insert(self, ids: Tensor, cache: Cache) -> None:
        try:
            self._store.insert(ids, cache, **self._whose)
        except CapacityError as error:
            self._store.note_refused(str(error))

    def _empty(self, rows: int = 1) -> Cache:
        """A cache like the one that `generate()` would make."""
        tokens = self._prompts.input_ids.shape[1]
        whole = tokens + _most_new_tokens(self._config, tokens)
        cache = self._made(rows, min(whole, tokens + ROOM_FOR_ANSWER))
        return self._made(rows, whole) if isinstance(cache, StaticCache) else cache

    def _made(self, rows: int, length_hint: int) -> Cache:
        options = self._options
        cache = self._from_registry(options, rows, length_hint)
        if any(recurrent_part(layer) is not None for layer in cache.layers) and "checkpoints" not in options:
            return self._from_registry({**options, "checkpoints": CHECKPOINTS}, rows, length_hint)
        return cache

    def _from_registry(self, options: Mapping[str, Any], rows: int, length_hint: int) -> Cache:
        model = self._model
        request = registry.CacheRequest(
            model.config, options, batch_size=rows, length_hint=length_hint, device=model.device, dtype=model.dtype
        )
        cache = registry.cache_for(self._name, request)
        if not isinstance(cache, Cache) or not cache.layers:
            raise UnusableError(f"the cache '{self._name}' is a {type(cache).__name__}, which is none of kvlayers'")
        return cache

    def _continued(self, hit: Hit) -> Cache:
        """The cache that was found, or an empty one."""
        if hit.cache is not None and not isinstance(hit.cache, StaticCache):
            return hit.cache
        cache = self._empty()
        if hit.cache is not None:
            # It was reserved for another call.
            cache.load_state(hit.cache.state())
        return cache

    def _compute(self, ids: Tensor, cache: Cache, length: int) -> None:
        """Pass the first `length` of `ids`, `[1, tokens]`, as far as they are new to `cache`, and hold the cache."""
        begin, chunk = cache.get_seq_length(), self._config.prefill_chunk_size
        for stop in self._stops(cache, begin, length):
            ahead = stop - begin
            most = (chunk if at_once(cache) is None else None) if begin else min(chunk or ahead, ahead)
            model_kwargs: dict[str, Any] = {self._cache_name: cache, "attention_mask": None, "use_cache": True}
            if self._model._supports_logits_to_keep():
                model_kwargs["logits_to_keep"] = 1
            pass_tokens(self._model, ids[:, :stop].to(self._model.device), model_kwargs, cache, begin, most)
            self._insert(ids[:, :stop], cache)
            begin = stop

    def _stops(self, cache: Cache, begin: int, length: int) -> list[int]:
        """Where to hold what is computed between `begin` and `length`."""
        if begin >= length:
            return []
        # A cache that cannot go back serves no prompt that parts in between; one that takes tokens one by one, behind
        # others, is slow to come there.
        every = self._store.snapshot_tokens
        if all(map(keeps_every_token, cache.layers)) or at_once(cache) is not None or every is None:
            return [length]
        return [*range(begin - begin % every + every, length, every), length]


def _check_model(model: Any, arguments: Mapping[str, Any]) -> None:
    name = type(model).__name__
    if type(model).generate is not GenerationMixin.generate or arguments.get("custom_generate") is not None:
        raise UnusableError(f"the generate() of {name} is not that of transformers")
    if model.config.is_encoder_decoder:
        raise UnusableError(f"the states of {name} depend on an encoder's input")
    if compat.decoder_config(model.config) is not model.config:
        raise UnusableError(f"the states of {name} may depend on more than tokens")
    if not model._supports_default_dynamic_cache():
        raise UnusableError(f"{name} makes a cache of its own")
    if model.config.model_type in compat.KEEPS_STATES_IN_MODULES:
        raise UnusableError(f"{name} keeps states outside of its cache")
    if depends_on_length(model.config):
        raise UnusableError(f"{name} rotates keys by how long their prompt is (its rope_type)")
    if arguments.get(compat.cache_argument(model)) is not None:
        raise UnusableError("it is given a cache")


def _check_options(config: Any, model_kwargs: Mapping[str, Any]) -> None:
    others = sorted(name for name, value in model_kwargs.items() if value is not None and name not in UNRELATED)
    if others:
        raise UnusableError(f"states may depend on {', '.join(others)}")
    mode = config.get_generation_mode()
    if mode not in MODES or config.is_assistant or config.cache_implementation == "paged":
        raise UnusableError(f"it decodes by {mode.value}, as an assistant, or in continuous batches")
    if config.use_cache is False:
        raise UnusableError("use_cache is False")
    if config.token_healing:
        raise UnusableError("token_healing changes the prompt")
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise UnusableError("what the prompt's tokens attend to, or their hidden states, are to be returned")


def _ids_name(arguments: Mapping[str, Any]) -> str:
    return "inputs" if arguments.get("inputs") is not None else "input_ids"


def _prompts(config: Any, arguments: Mapping[str, Any]) -> PromptRows:
    if arguments.get("assistant_model") is not None:
        raise UnusableError("it decodes with an assistant")
    ids, mask = arguments.get(_ids_name(arguments)), arguments.get("attention_mask")
    if not is_token_ids(ids) or not (mask is None or isinstance(mask, Tensor)):
        raise UnusableError("its prompts are no ids of tokens, int64 [rows, tokens]")
    ids = torch.as_tensor(ids)
    if mask is None and config.pad_token_id is not None and bool((ids == config.pad_token_id).any()):
        raise UnusableError("the prompts have a pad token, and no attention_mask says whether it is padding")
    prompts = PromptRows.of(ids, mask)
    if prompts is None:
        raise UnusableError("its attention_mask leaves out other tokens than padding on the left")
    return prompts


def _most_new_tokens(config: Any, prompt_tokens: int) -> int:
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    # As generate() has it, where nothing is said: 20 more.
    return max(int(config.max_length or 0) - prompt_tokens, 20)
