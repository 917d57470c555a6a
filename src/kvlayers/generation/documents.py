"""Prompts of documents: each one is computed once, kept in a prefix store, and concatenated with others in any order.

A document stands in the store as a prompt that was computed, which it is: exact, and found by any call whose prompt
starts with it. What is concatenated from documents is not what their text would give, so no store ever gets it.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from kvlayers.core.cache import Cache
from kvlayers.core.from_config import WINDOWED
from kvlayers.documents.joining import EVERYTHING, check_into, check_joinable, joined, recompute_amount
from kvlayers.errors import OptionError
from kvlayers.generation import cache_by_name
from kvlayers.generation.call_arguments import check_is
from kvlayers.generation.prefix_reuse import active_store
from kvlayers.generation.prefix_reuse.eligibility import IneligibleError, StorePart, check_generate
from kvlayers.generation.prefix_reuse.prefixed_call import (
    PrefixedCall,
    call_with,
    pass_counted,
    usable_cache,
)
from kvlayers.prefix import PrefixStore
from kvlayers.upstream import cache_argument, model_layers, model_types

PROMPTS = ("inputs", "input_ids", "inputs_embeds", "attention_mask")
"""Arguments of `generate()` in whose place documents stand."""


@dataclass(frozen=True)
class DocumentPrompt:
    """A prompt that consists of documents and a question. All ids are int64 `[1, tokens]`, on the model's device.

    Attributes:
        beginning: what stands before the first document; there may be no tokens.
        documents: the documents.
        question: what stands after the last one.
        recompute: as for `concatenate`.
    """

    beginning: Tensor
    documents: Sequence[Tensor]
    question: Tensor
    recompute: int | str

    @classmethod
    def of(
        cls,
        model: Any,
        documents: Sequence[Tensor | str] | None,
        question: Tensor | str | None,
        beginning: Tensor | str | None,
        recompute: int | str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> "DocumentPrompt | None":
        """The prompt that a call of `generate()` gives in parts; `None` if it gives none.

        A BOS token belongs to the beginning, so that documents are the same wherever they stand. It is added only if
        the first part is text and does not begin with it.

        Raises:
            OptionError: an argument is wrong, is missing, or contradicts another one.
        """
        if documents is None:
            if question is not None or beginning is not None or recompute != EVERYTHING:
                raise OptionError(
                    "`question`, `beginning` and `recompute` need `documents`, got none: pass documents as well."
                )
            return None
        recompute_amount(recompute)
        # As from a program whose system prompt may be missing.
        beginning = None if isinstance(beginning, str) and not beginning else beginning
        if not isinstance(documents, list | tuple) or not documents:
            raise OptionError(
                f"`documents` must be a list of texts or ids, at least one, got {documents!r:.60}: pass [text]."
            )
        cache = cache_argument.passed_in(kwargs)
        others = [name for name in PROMPTS if kwargs.get(name) is not None]
        if args or others or not isinstance(cache, str | None):
            given = ", ".join(others) or ("a cache" if not args else "positional arguments")
            raise OptionError(f"`documents` cannot be combined with {given}: leave one of them out.")
        ids_of = functools.partial(_ids, kwargs.get("tokenizer"), model_layers.model_device(model))
        parts, last = [ids_of("documents", each) for each in documents], ids_of("question", question)
        before = parts[0][:, :0] if beginning is None else ids_of("beginning", beginning)
        if isinstance(documents[0] if beginning is None else beginning, str):
            bos = before.new_tensor([model_types.bos_ids(kwargs["tokenizer"])])
            if not torch.equal(torch.cat([before, parts[0]], dim=1)[:, : bos.shape[1]], bos):
                before = torch.cat([bos, before], dim=1)
        return cls(before, parts, last, recompute)

    def generate(self, model: Any, kwargs: Mapping[str, Any]) -> Any:
        """Call `model.generate` with the concatenated states of the documents, or with all of it as one text.

        States are kept in the store of the call, or without one for this call alone.

        Args:
            model: the model.
            kwargs: arguments of `model.generate` besides the prompt.

        Returns:
            What `model.generate` returns. Its `cached_tokens` counts the tokens that were not computed.

        Raises:
            OptionError: the states of the call depend on more than tokens, or it does not decode in the usual way.
            CapacityError, ConfigError, UnsupportedLayerError: as `concatenate`.
        """
        name, amount = cache_argument.name_in_generate(model), recompute_amount(self.recompute)
        ids = torch.cat([self.beginning, *self.documents, self.question], dim=1)
        arguments = {
            **cache_argument.respelled(model, dict(kwargs), name),
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
        }
        if isinstance(amount, Fraction) and amount == 1:
            return model.generate(**arguments)
        cache_by_name.read_cache_argument(model, name, arguments)
        cache, cached_tokens = self._put_together(model, active_store.for_call() or _for_one_call(), arguments)
        with active_store.CURRENT.override(None):
            # The cache has the options already.
            return call_with(cache, model.generate, {**arguments, name: cache, "cache_config": None}, (cached_tokens,))

    def _put_together(
        self, model: Any, active: active_store.ActiveStore, arguments: dict[str, Any]
    ) -> tuple[Cache, int]:
        """The cache of a prompt up to its question, for all of its sequences, and how many tokens were not computed."""
        images = [each for each in model_types.image_arguments(model.config) if arguments.get(each) is not None]
        tokens, shared, are_moved = arguments["input_ids"].shape[1], self.beginning.shape[1], len(self.documents) > 1
        amount = recompute_amount(self.recompute) if are_moved else 0
        with _refusing(
            "`documents` cannot be concatenated, as {}: pass recompute='100%', which computes them as one prompt."
        ):
            if images:
                raise IneligibleError(f"the call is given {', '.join(sorted(images))}")
            call = PrefixedCall(active, model, arguments)
            documents = StoredDocuments(model, active, amount, tokens, are_moved)
            into = call.empty()
            check_into(into, model, documents.layers, 1, tokens - self.question.shape[1], "cache_implementation")
            found = [
                documents.find(torch.cat([self.beginning, own], dim=1), call.config.prefill_chunk_size)
                for own in self.documents
            ]
        # They know their ids.
        cache, recomputed = joined([own for own, _ in found], model, self.recompute, None, shared, into)
        stored: set[int] = set()
        begin = end = 0
        for own, covered in found:
            stored.update(range(end, end + covered - begin))
            end += own.length - begin
            begin = shared
        cached_tokens = len(stored.difference(recomputed))
        cache = call.repeated(cache)
        cache.prefix_notes = (
            f"documents were concatenated with recompute={self.recompute!r}, "
            f"{cached_tokens} of {end} tokens were not computed",
        )
        return cache, cached_tokens


def _ids(tokenizer: Any, device: torch.device, name: str, given: object) -> Tensor:
    """The ids of a part of a prompt, `[1, tokens]`.

    Args:
        tokenizer: for texts, `None` without one.
        device: device of the model.
        name: the argument that the part is from.
        given: its text or its ids.
    """
    if isinstance(given, str):
        if tokenizer is None:
            raise OptionError(f"`tokenizer` must be given for texts in `{name}`, got none: pass it, or pass ids.")
        given = torch.tensor([tokenizer(given, add_special_tokens=False).input_ids], dtype=torch.int64)
    shape = list(given.shape) if isinstance(given, Tensor) and given.dtype == torch.int64 else None
    if not isinstance(given, Tensor) or shape not in ([given.numel()], [1, given.numel()]) or not given.numel():
        shown = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else repr(given)
        raise OptionError(
            f"`{name}` must be text, or ids of at least one token, int64 [tokens] or [1, tokens], got {shown}: pass "
            "what the tokenizer returns."
        )
    return given.reshape(1, -1).to(device)


def _for_one_call() -> active_store.ActiveStore:
    store = PrefixStore(max_bytes=sys.maxsize)
    # Its models are told apart as objects, so that no weights are read.
    store.forget_weights()
    return active_store.ActiveStore(store, "", store.record_bypass)


class StoredDocuments:
    """The documents of one model in a store.

    Their caches keep every token, so that tokens can be recomputed. Without windows in the model, they are those of
    ordinary calls.

    Args:
        model: the model.
        active: the store.
        amount: what is to be recomputed.
        tokens: tokens of the longest context.
        are_moved: whether documents get other positions.

    Attributes:
        layers: the layers of the cache of each document.

    Raises:
        IneligibleError: the states of the model depend on more than tokens.
        CapacityError, ConfigError, UnsupportedLayerError: they cannot be concatenated.
    """

    def __init__(
        self, model: Any, active: active_store.ActiveStore, amount: int | Fraction, tokens: int, are_moved: bool
    ) -> None:
        has_windows = any(spec.layer_type in WINDOWED for spec in model_layers.layer_specs(model.config))
        self._model, self._name = model, "dynamic_full" if has_windows else "dynamic"
        check_generate(model, {})
        self._part = StorePart(model, active, self._name, {})
        self.layers = self._empty().adapted_layers()
        check_joinable(model, self.layers, tokens, amount, are_moved)

    def _empty(self, tokens: int | None = None) -> Any:
        """An empty cache for a document of so many tokens."""
        return cache_by_name.make_cache(self._name, self._model, length_hint=tokens)

    @torch.no_grad()
    def find(self, ids: Tensor, chunk: int | None) -> tuple[Cache, int]:
        """The cache of a document, and how many of its tokens were stored. The others are computed and inserted.

        Args:
            ids: int64 `[1, tokens]`, on the device of the model.
            chunk: tokens of one forward pass, `None` for all.

        Raises:
            IneligibleError: the model puts other tokens into its cache.
        """
        tokens, empty = ids.shape[1], functools.partial(self._empty, ids.shape[1])
        hit = self._part.lookup(ids, leave=0)
        cache = usable_cache(hit.cache, self._part.device, empty)
        if hit.covered < tokens:
            pass_counted(self._model, ids, cache, chunk)
            self._part.insert(ids, cache)
        cache.known_ids = ids
        return cache, hit.covered


def store_document(
    store: PrefixStore, ids: Tensor, model: Any, *, beginning: Tensor | None = None, namespace: str = ""
) -> Cache:
    """Compute a document's states, or find them in the store.

    What the store lacks is computed and inserted. The result is for `kvlayers.concatenate`. Calls of `generate()`
    with the documents find these entries. So do calls whose prompt starts with the document, unless the model
    attends within windows: documents keep every token.

    Args:
        store: the store.
        ids: ids of the document, int64 `[tokens]` or `[1, tokens]`.
        model: the model. Entries of other weights, adapters or settings of autocast are not found.
        beginning: ids of the tokens before it, such as a system prompt, int64 `[tokens]` or `[1, tokens]`. Several
            documents after the same beginning hold it once.
        namespace: as for `PrefixStore.insert`.

    Returns:
        A cache that belongs to the caller. It has seen `beginning` and `ids`, and knows them (`known_ids`).

    Raises:
        OptionError: ids are no such tensor, or there are none; or the states of the model depend on more than
            tokens.
        CapacityError: there are more tokens than positions of the model.
        ConfigError, UnsupportedLayerError: the model's states cannot be moved; see `moved`.

    Example:
        >>> import torch, transformers, kvlayers
        >>> config = transformers.LlamaConfig(
        ...     num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=99
        ... )
        >>> model, store = transformers.LlamaForCausalLM(config).eval(), kvlayers.PrefixStore("1MiB")
        >>> ids = torch.tensor([5, 8, 13])
        >>> cache = kvlayers.store_document(store, ids, model)
        >>> kvlayers.store_document(store, ids, model).get_seq_length(), store.statistics.tokens_covered
        (3, 3)
    """
    check_is(PrefixStore, store, "store", "a PrefixStore", "pass it first")
    ids_of = functools.partial(_ids, None, model_layers.model_device(model))
    before = [] if beginning is None else [ids_of("beginning", beginning)]
    whole = torch.cat([*before, ids_of("ids", ids)], dim=1)
    with _refusing("`ids` cannot be stored as a document, as {}: pass them to generate() as a part of the prompt."):
        documents = StoredDocuments(
            model, active_store.ActiveStore(store, namespace, store.record_bypass), 0, whole.shape[1], are_moved=True
        )
        return documents.find(whole, model.generation_config.prefill_chunk_size)[0]


@contextlib.contextmanager
def _refusing(message: str) -> Iterator[None]:
    """Raise `OptionError` with a message and the reason in it, if states depend on more than tokens."""
    try:
        yield
    except IneligibleError as reason:
        raise OptionError(message.format(reason)) from None
