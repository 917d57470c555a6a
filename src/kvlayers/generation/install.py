"""Let `generate()` use kvlayers' caches: explicitly, reversibly, and with as few changes to transformers as possible.

While kvlayers is installed, these are replaced (`hooks.py` and `cache_by_name.py` have what replaces them):

* `GenerationMixin.generate`, so that it takes legacy tuples and `return_legacy_cache=True`, which transformers 5
  dropped, keeps the name of a cache that it is asked for, and uses a prefix store (`prefix_reuse/`). To decode with
  drafts it gets a view of the model (`assisted.py`): transformers refuses models with recurrent states, which kvlayers'
  caches can roll back, and its loop passes the whole sequence again, although the cache has seen a part of it.
* `GenerationMixin._prepare_cache_for_generation`, which makes the cache that a name asks for.
* `GenerationMixin._prefill`, which ignores what a cache has seen if the model's scan starts from zero
  (`prefill.py`).
* `PreTrainedModel.__call__`, so that models take and return legacy tuples (`legacy_tuples.py`), empty caches of
  transformers get layers of kvlayers (`call_cache.py`), and caches remember the ids of prompts (`known_ids.py`).
* `DynamicCache.__init__`, so that a cache that a model makes itself, in a call without one, gets layers of kvlayers.
* `GenerationConfig.save_pretrained`, so that a config with a name that only kvlayers knows can be loaded without
  kvlayers.
* `ContinuousMixin.init_continuous_batching` and `ContinuousMixin.destroy_cached_continuous_batching_manager`, so that
  rows serve continuous batching (the room `batching`).
* `HfExporter.__init__`, so that torch takes kvlayers' caches apart before the exporter does it differently.
* `prepare_inputs_for_generation` of models that keep an older name of the cache argument, so that they get the cache
  (`hooks.py`).

These are added to:

* `ALL_CACHE_IMPLEMENTATIONS`, the names that a `GenerationConfig` accepts, which gets the names of the registry.
* `AttentionInterface` and `AttentionMaskInterface` get the attention function "kvlayers", for
  `attn_implementation="kvlayers"`.
* With `legacy_names=True`, names of transformers 4 that later versions lack (`transformers4_names.py`).
"""

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import PreTrainedModel

from kvlayers.core import named_caches
from kvlayers.documents.joining import EVERYTHING
from kvlayers.errors import OptionError
from kvlayers.generation import (
    cache_by_name,
    call_arguments,
    call_cache,
    hooks,
    known_ids,
    retried_pass,
    transformers4_names,
)
from kvlayers.generation.current_call import USES_KVLAYERS
from kvlayers.generation.documents import DocumentPrompt
from kvlayers.generation.patching import Activation, Method, Patch, ScopedValue, around, overriding
from kvlayers.generation.prefix_reuse import active_store
from kvlayers.interop.export import register_export_support
from kvlayers.kernels.attention import model_attention
from kvlayers.memory import LADDER
from kvlayers.prefix import PrefixStore
from kvlayers.upstream import compat, generate_calls, supported
from kvlayers.utils import late
from kvlayers.utils.options import checks_options

_lock = threading.RLock()
"""Held while `install` and `uninstall` make several changes, and while an `installed` block starts."""


@checks_options
def install(
    prefix_store: PrefixStore | None = None,
    namespace: str = "",
    legacy_names: bool = False,
    replace_empty_caches: bool | None = None,
    strict_prompts: bool | None = None,
    cache: str | None = None,
    cache_implementation: str | None = None,
    continuous_batching: bool | None = None,
) -> None:
    """Make every call of `generate()` use kvlayers' caches, until `uninstall()`.

    Models may also have `attn_implementation="kvlayers"`, an attention that reads states as the cache holds them.

    Calling it again changes the options that are given and keeps the others.

    Args:
        prefix_store: a store that every call uses if it can: states of a prompt that are in the store are not computed
            again, and newly computed states are inserted.
        namespace: the namespace of the store in which calls look up and insert. Needs a `prefix_store`.
        legacy_names: also bring back the cache classes that transformers 5 dropped, in the modules where old code
            looks for them, and the methods that transformers' caches have lost.
        replace_empty_caches: whether an empty `transformers.DynamicCache` or `transformers.StaticCache` that is passed
            to a model gets kvlayers' layers, and without gradients a `DynamicCache` that a model makes itself. Its
            class stays the same. Default: `True`.
        strict_prompts: whether a prompt that starts with other tokens than the passed cache has seen raises
            `PromptMismatchError`, and also one that cannot be compared, as the ids of tokens in the cache are unknown
            (`known_ids`). Otherwise the first is a `PromptMismatchWarning`, once per cache, and the second goes on.
            Caches with recurrent states alone, and pairs, are not compared. Default: `False`.
        cache: the name of the cache of calls that neither name nor pass one, such as "int4", also with options:
            "sink:window_length=512". Models that cannot have it go on without it, and the log says so once.
            A later call of `install()` with another name replaces it, and says nothing.
        cache_implementation: the same as `cache`, by the name that `generate()` has for it.
        continuous_batching: whether rows of kvlayers serve `generate_batch`, `continuous_batching_context_manager` and
            `transformers serve --continuous-batching`, with the cache and the store of the other options. Default: for
            models on a CPU. Models that rows refuse are served by transformers, and the log says so.

    Raises:
        OptionError: `prefix_store` is not a `PrefixStore`, `namespace` is given without a store, the cache has no such
            option, or another option is not a bool. Nothing is changed.
        RegistryError: no cache has this name. Nothing is changed.
    """
    given = _given(**locals())
    with _lock:
        if legacy_names:
            transformers4_names.ACTIVATION.activate()
        for setting, value in given:
            setting.set_default(value)
        _activation.activate()


def uninstall() -> None:
    """Restore transformers as it was before `install()`, even inside an `installed()` block.

    Calls of `generate()` that other threads have started finish with kvlayers. Calls that start later do not use it.
    The methods of transformers are restored when the last of the earlier calls ends.
    """
    with _lock:
        for setting in (active_store.CURRENT, cache_by_name.DEFAULT, SERVED):
            setting.set_default(None)
        call_cache.REPLACE.set_default(True)
        known_ids.STRICT_PROMPTS.set_default(False)
        transformers4_names.ACTIVATION.deactivate()
        _activation.deactivate()


def is_installed() -> bool:
    """Whether `generate()` uses kvlayers' caches now: after `install()`, or inside an `installed()` block."""
    return bool(_activation)


@checks_options
@contextlib.contextmanager
def installed(
    prefix_store: PrefixStore | None = None,
    namespace: str = "",
    legacy_names: bool = False,
    replace_empty_caches: bool | None = None,
    strict_prompts: bool | None = None,
    cache: str | None = None,
    cache_implementation: str | None = None,
    continuous_batching: bool | None = None,
) -> Iterator[None]:
    """`install()` for the length of a `with` block. Blocks nest and overlap: the last one to end uninstalls.

    `prefix_store`, `replace_empty_caches`, `strict_prompts` and `cache` apply to calls in the thread of the block only.
    Other threads may need another namespace, for example. A call by a thread that has no store counts as one that
    bypasses the store of the block; a thread whose target is `contextvars.copy_context().run` has it.

    Args:
        prefix_store: as for `install`.
        namespace: as for `install`.
        legacy_names: as for `install`.
        replace_empty_caches: as for `install`.
        strict_prompts: as for `install`.
        cache: as for `install`.
        cache_implementation: as for `install`.
        continuous_batching: as for `install`.

    Raises:
        OptionError: as `install`.
        RegistryError: as `install`.

    Example:
        >>> import torch, transformers, kvlayers
        >>> config = transformers.LlamaConfig(
        ...     num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=99,
        ...     eos_token_id=None,
        ... )
        >>> model, ids = transformers.LlamaForCausalLM(config).eval(), torch.tensor([[5, 8, 13]])
        >>> options = {"max_new_tokens": 4, "return_dict_in_generate": True}
        >>> with kvlayers.installed():
        ...     output = model.generate(ids, cache_implementation="int8", **options)
        >>> sequences, cache = output.to_tuple()
        >>> type(cache).__name__, kvlayers.is_installed()
        ('QuantizedCache', False)
    """
    given = _given(**locals())
    with contextlib.ExitStack() as stack:
        with _lock:
            stack.enter_context(_activation.block())
            if legacy_names:
                stack.enter_context(transformers4_names.ACTIVATION.block())
        for setting, value in given:
            stack.enter_context(setting.override(value))
        if prefix_store is not None:
            stack.enter_context(active_store.noting_other_threads(prefix_store))
        yield


def _given(
    prefix_store: PrefixStore | None,
    namespace: str,
    cache: str | None,
    cache_implementation: str | None,
    **flags: object,
) -> list[tuple[ScopedValue[Any], Any]]:
    """The settings that the arguments of `install` give, with their values."""
    asked = cache_by_name.either(cache, cache_implementation)
    active = active_store.optional_store(prefix_store, namespace)
    for name, value in flags.items():
        if not isinstance(value, bool) and (value is not None or name == "legacy_names"):
            raise OptionError(f"`{name}` must be True or False, got {value!r}: pass one, or leave it out.")
    settings: list[tuple[ScopedValue[Any], Any]] = [
        (active_store.CURRENT, active),
        (call_cache.REPLACE, flags["replace_empty_caches"]),
        (known_ids.STRICT_PROMPTS, flags["strict_prompts"]),
        (SERVED, flags["continuous_batching"]),
        (cache_by_name.DEFAULT, None if asked is None else cache_by_name.DefaultCache(asked)),
    ]
    return [(setting, value) for setting, value in settings if value is not None]


SERVED: ScopedValue[bool | None] = ScopedValue("whether rows serve continuous batching", None)
"""The option `continuous_batching`; `None` for models on a CPU alone."""


@contextlib.contextmanager
def call_with_kvlayers() -> Iterator[None]:
    """Lasts for one call that uses kvlayers, installed or not. Calls in other threads are not affected."""
    with _activation.block(is_active=False), overriding(USES_KVLAYERS, True):
        yield


def _uses_kvlayers() -> bool:
    """Whether code that runs now uses kvlayers: as the current call of `generate()` does, or if it is installed."""
    in_call = USES_KVLAYERS.get()
    return is_installed() if in_call is None else in_call


def _generate(original: Method, model: Any, *args: Any, **kwargs: Any) -> Any:
    with _activation.call() as is_active, transformers4_names.ACTIVATION.call():
        # Decided once, so that all methods agree, even if another thread installs or uninstalls meanwhile. A call
        # within another one, such as that of a draft model, follows the outer call.
        uses_kvlayers = is_active or bool(USES_KVLAYERS.get())
        with overriding(USES_KVLAYERS, uses_kvlayers):
            return (functools.partial(hooks.generate, original) if uses_kvlayers else original)(model, *args, **kwargs)


def _export_support_first(original: Method, exporter: Any, *args: Any, **kwargs: Any) -> None:
    register_export_support()
    original(exporter, *args, **kwargs)


def _by_rows(original: Method, model: Any, *args: Any, **kwargs: Any) -> Any:
    """For a method of continuous batching: what rows do in its place. Few programs need what makes them."""
    return late.function(original.__name__)(original, model, *args, **kwargs)


def _patches() -> list[Patch]:
    """The table of all that is replaced in classes of transformers while kvlayers is installed."""
    replacements: list[tuple[type, str, Method]] = [
        (GenerationMixin, "_prepare_cache_for_generation", hooks.prepare_cache_for_generation),
        (GenerationConfig, "save_pretrained", cache_by_name.save_pretrained),
    ]
    if compat.PREFILLS_APART:
        replacements.append((GenerationMixin, "_prefill", hooks.prefill))
    batching = generate_calls.batching()
    if batching is not None:
        replacements += [(batching, name, _by_rows) for name in generate_calls.BATCHING_METHODS]
    if compat.HAS_EXPORTERS:
        from transformers.exporters.base import HfExporter

        replacements.append((HfExporter, "__init__", _export_support_first))
    return [
        Patch(GenerationMixin, "generate", around(_generate)),
        *(Patch(owner, name, around(hook, _uses_kvlayers)) for owner, name, hook in replacements),
        # This one costs something at each token, so it asks as late as possible whether kvlayers is used.
        Patch(PreTrainedModel, "__call__", hooks.forward_pass),
        Patch(DynamicCache, "__init__", around(hooks.make_dynamic_cache)),
    ]


supported.check(supported.OF_GENERATE, compat.TRANSFORMERS)
_PATCHES = _patches()


_ATTENTION = (
    (AttentionInterface, model_attention.attention),
    (AttentionMaskInterface, model_attention.attention_mask),
)
"""What `attn_implementation="kvlayers"` computes, by the interfaces of transformers that list it."""


def _apply_patches() -> None:
    for patch in _PATCHES:
        patch.apply()
    hooks.is_active = _uses_kvlayers
    for interface, function in _ATTENTION:
        interface.register(model_attention.NAME, function)
    _accept_names()


def _remove_patches() -> None:
    for patch in _PATCHES:
        patch.remove()
    hooks.is_active = None
    hooks.take_cache_back()
    for interface, function in _ATTENTION:
        # `register` has no inverse. One of the dicts of the class has what it added, unless somebody has replaced it.
        for functions in [
            value for owner in interface.__mro__ for value in vars(owner).values() if type(value) is dict
        ]:
            if functions.get(model_attention.NAME) is function:
                del functions[model_attention.NAME]
    _accept_names()
    call_cache.free_reservations()


_activation = Activation(_apply_patches, _remove_patches)


def _accept_names() -> None:
    """Let a `GenerationConfig` accept the names of the registry while kvlayers is in place, and no longer."""
    cache_by_name.accept_names(lambda: named_caches.cache_names() if _activation.is_in_place else [])


named_caches.on_change(_accept_names)


def generate(
    model: Any,
    *args: Any,
    cache: Any = None,
    cache_config: Mapping[str, Any] | None = None,
    prefix_store: PrefixStore | None = None,
    namespace: str = "",
    documents: Sequence[Tensor | str] | None = None,
    question: Tensor | str | None = None,
    beginning: Tensor | str | None = None,
    recompute: int | str = EVERYTHING,
    **kwargs: Any,
) -> Any:
    """Call `model.generate(*args, **kwargs)` with kvlayers' caches, whether or not kvlayers is installed.

    With a store, the states of a prompt that the store has are not computed again, and newly computed states are
    inserted: with one prompt, those of the prompt and its answer; with several prompts, those of their common prefix,
    or of each prompt.

    Instead of a prompt, pass `documents` and a `question`. The prompt is `beginning`, the documents in order, then the
    question. With `recompute` below "100%", the states of each document are computed once, after the beginning, and
    found in the store in whatever order documents come. A document's states then lack attention to the documents before
    it, except in the tokens that are recomputed. The store gets the states of single documents, and nothing that was
    concatenated.

    Args:
        model: a model of transformers.
        args: as for `model.generate`. In the place of ids, what a tokenizer or a processor returns may stand, as in
            `generate(model, tokenizer(text, return_tensors="pt"))`.
        cache: the name of a cache, also with options ("sink:window_length=512"), or a cache that you made, which holds
            the tokens of the call afterwards. Default: the cache that `install` was given, or "dynamic".
        cache_config: options of the cache that is named, such as `{"nbits": 4}`.
        prefix_store: the store to use. Default: the store that was passed to `install`, if any.
        namespace: the namespace of the store in which the call looks up and inserts. Other namespaces do not see its
            entries. Needs a `prefix_store`.
        documents: texts, or ids `[tokens]` or `[1, tokens]`, int64. Each text is tokenized separately, without special
            tokens. If the tokenizer begins texts with a BOS token, it is added once, at the start, but only if the
            first part is text and does not begin with it.
        question: what stands after the documents: a text, or ids.
        beginning: what stands before the documents, such as a system prompt: a text, or ids.
        recompute: how many first tokens of each document after the first to recompute, or a share of the tokens after
            the first document, such as "15%"; see `kvlayers.concatenate`. By default, all of the prompt is computed as
            one text.
        kwargs: as for `model.generate`, such as the `tokenizer`.

    Returns:
        What `model.generate` returns. With a store and `return_dict_in_generate=True`, its attribute `cached_tokens`
        has for each prompt how many tokens the call did not have to compute; it is empty if a call could not use the
        store of `install()`.

    Raises:
        OptionError: the model, the prompt or the cache is not one; `prefix_store` is not a `PrefixStore`; the call
            cannot use a store, or concatenate documents, for the reason in the message; `namespace` is given without a
            store; or documents are given without a question, beside another prompt or cache, or empty.
        CapacityError, ConfigError, UnsupportedLayerError: the documents cannot be concatenated; see
            `kvlayers.concatenate`. Nothing was computed.

    Example:
        >>> import torch, transformers, kvlayers
        >>> config = transformers.LlamaConfig(
        ...     num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=99,
        ...     eos_token_id=None,
        ... )
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> store = kvlayers.PrefixStore(max_bytes=2**20)
        >>> ids = kvlayers.generate(model, torch.tensor([[5, 8, 13]]), prefix_store=store, max_new_tokens=4)
        >>> kvlayers.generate(
        ...     model, ids, prefix_store=store, max_new_tokens=4, return_dict_in_generate=True
        ... ).cached_tokens
        (6,)
        >>> kvlayers.generate(
        ...     model, documents=[torch.tensor([8, 13]), ids[0]], question=torch.tensor([21]), recompute=0,
        ...     prefix_store=store, max_new_tokens=4, return_dict_in_generate=True,
        ... ).cached_tokens
        (7,)
    """
    call_arguments.check_model(model)
    kwargs |= {name: given for name, given in (("cache", cache), ("cache_config", cache_config)) if given is not None}
    active = active_store.required_store(prefix_store, namespace)
    prompt = DocumentPrompt.of(model, documents, question, beginning, recompute, args, kwargs)
    if (
        active is not None
        and isinstance(model, GenerationMixin)
        and type(model).generate is not GenerationMixin.generate
    ):
        raise OptionError(
            f"`model` must have the generate() of transformers for a `prefix_store`, got a {type(model).__name__}, "
            "whose own may never use the store: leave prefix_store out."
        )
    with contextlib.nullcontext() if active is None else active_store.CURRENT.override(active), call_with_kvlayers():
        return model.generate(*args, **kwargs) if prompt is None else prompt.generate(model, kwargs)


def resilient_generate(model: Any, *args: Any, ladder: Sequence[str] = LADDER, **kwargs: Any) -> Any:
    """As `kvlayers.generate`, which makes each forward pass again that runs out of memory, by steps of your choice.

    The cache is kvlayers': the one that the call names or passes, or a `DynamicCache`. For each such pass it gives way
    by one step, in place: to 8 bits, to 4 bits, to the host. Each step warns with `SteppedDownWarning`. Under
    `install()`, every call of `generate()` does this.

    Args:
        model: a model of transformers.
        args: as for `generate`.
        ladder: the steps that the cache may take, the first of them first, of "int8", "int4" and "offloaded".
        kwargs: as for `generate`.

    Returns:
        What `model.generate` returns.

    Raises:
        OptionError: `ladder` is empty, or has something else. Nothing was generated.
        torch.OutOfMemoryError: no step is left. The message lists the steps that were taken.

    Example:
        >>> import torch, transformers
        >>> config = transformers.LlamaConfig(
        ...     num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=99
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> resilient_generate(model, torch.tensor([[5, 8, 13]]), max_new_tokens=4).shape
        torch.Size([1, 7])
    """
    if not isinstance(ladder, list | tuple) or not ladder or any(step not in LADDER for step in ladder):
        raise OptionError(
            f"`ladder` must be steps of {', '.join(map(repr, LADDER))}, got {ladder!r}: pass a tuple of them."
        )
    with retried_pass.LADDER.override(ladder):
        return generate(model, *args, **kwargs)
