"""A conversation that computes each of its tokens once."""

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.utils import GenerationMixin

from kvlayers.core.cache import Cache
from kvlayers.errors import CacheFileError, KVLayersError, OptionError
from kvlayers.generation.cache_by_name import DYNAMIC, either, own_cache, requested_cache
from kvlayers.generation.call_arguments import check_is
from kvlayers.generation.install import generate
from kvlayers.generation.prefix_reuse.active_store import required_store
from kvlayers.persistence import inspect_cache, load_cache, save_cache
from kvlayers.prefix import PrefixStore
from kvlayers.prefix.keys import common_tokens
from kvlayers.rope.from_config import depends_on_length, frequencies_within
from kvlayers.upstream import cache_argument, generate_calls, model_layers, model_types
from kvlayers.utils.options import checks_options

Message = dict[str, Any]

_SET_BY_CHATS = frozenset(
    ("add_generation_prompt", "continue_final_message", "return_dict", "return_tensors", "tokenize")
)
_SET_IN_TURNS = frozenset(
    ("attention_mask", "inputs", "input_ids", "inputs_embeds", "namespace", "prefix_store", "return_dict_in_generate")
) | frozenset(cache_argument.SPELLINGS)

_SET_WITH_CACHES = frozenset(("cache_implementation", "cache_config"))
"""Options of a call that a chat with a cache of its own does not pass on: its turns have one cache."""

_SAVED = "chat"
"""The name of the messages in the metadata of a saved chat."""


class Chat:
    """A conversation with a model, of which each turn computes only what the cache has not seen.

    Before each turn, the tokenizer's chat template writes the whole conversation. The cache keeps the tokens with which
    the new text begins, and forgets the rest, so the model always reads what the template says: also if the template
    rewrites earlier turns, if an answer was cut off, and if you have edited `messages`.

    Args:
        model: a model with a language-modelling head.
        tokenizer: its tokenizer, with a chat template.
        cache: name of a cache, one of `cache_names()`, or an empty cache, which this chat then uses alone. Default:
            `"dynamic"`.
        cache_implementation: the same as `cache` for a name, by the name that `generate()` has for it.
        messages: the conversation so far, for example `[{"role": "system", "content": "Answer briefly."}]`.
        prefix_store: a store that the chat shares with others. It takes the place of a cache of the chat's own: `cache`
            is then a name.
        namespace: the namespace of the store.
        chat_template_kwargs: options of the template, such as `{"enable_thinking": False}`.

    Attributes:
        messages: the conversation, a list of `{"role": ..., "content": ...}`. You may change it between turns:
            `del chat.messages[-2:]` takes back the newest question and its answer.
        cached_tokens: of the newest turn, how many tokens of the prompt were not computed again.
        prompt_tokens: of the newest turn, tokens of the whole prompt.

    Raises:
        OptionError: an argument is not of its kind; the model has an encoder; the tokenizer has no chat template; the
            cache has seen tokens.
        RegistryError: there is no cache of this name.

    Example:
        >>> import kvlayers
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> name = "HuggingFaceTB/SmolLM2-135M-Instruct"  # doctest: +SKIP
        >>> tokenizer = AutoTokenizer.from_pretrained(name)  # doctest: +SKIP
        >>> chat = kvlayers.Chat(AutoModelForCausalLM.from_pretrained(name), tokenizer)  # doctest: +SKIP
        >>> chat.ask("Name a bird.", max_new_tokens=20)  # doctest: +SKIP
        >>> chat.ask("And another one?", max_new_tokens=20)  # doctest: +SKIP
    """

    @checks_options
    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        cache: Cache | str | None = None,
        *,
        cache_implementation: str | None = None,
        messages: Iterable[Mapping[str, Any]] = (),
        prefix_store: PrefixStore | None = None,
        namespace: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_is(GenerationMixin, model, "model", "a model with generate()", "pass a loaded model")
        if model_types.config_of(model).is_encoder_decoder:
            raise OptionError(
                f"`model` must be a decoder, which continues its prompt, but {type(model).__name__} has an encoder: "
                "call generate() for each turn."
            )
        check_is(PreTrainedTokenizerBase, tokenizer, "tokenizer", "a tokenizer", "of a processor, pass its `tokenizer`")
        if not tokenizer.chat_template:
            raise OptionError(
                "`tokenizer` must have a chat template, which says how turns are written, but it has none: set "
                "`tokenizer.chat_template`, or load the instruction-tuned model."
            )
        cache = either(cache, cache_implementation)
        required_store(prefix_store, namespace)
        check_is(Mapping | None, chat_template_kwargs, "chat_template_kwargs", "a mapping", "pass a dict")
        for name in _SET_BY_CHATS & set(chat_template_kwargs or ()):
            raise OptionError(f"`chat_template_kwargs` must not have `{name}`: a chat sets it.")
        if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
            raise OptionError(
                f"`messages` must be a list of messages, got a {type(messages).__name__}: pass for example "
                f"[{{'role': 'user', 'content': 'Hello'}}]."
            )
        self.messages: list[Message] = [checked_message(message) for message in messages]
        self.cached_tokens = self.prompt_tokens = 0
        self._model = model
        self._tokenizer = tokenizer
        self._template_kwargs = dict(chat_template_kwargs or {})
        self._store = prefix_store
        self._namespace = namespace
        self._name = cache if isinstance(cache, str) else None
        self._cache = self._checked_cache(cache)
        self._seen: list[int] = []
        """Ids of the tokens of the newest turn and its answer. The cache has seen the first ones of them."""
        self._frequencies: str | None = None
        """By which frequencies the keys in the cache are rotated, `None` if several, or none, are known."""

    def _checked_cache(self, cache: Cache | str | None) -> Cache | None:
        """The cache of the chat's own, `None` with a store, which has one for each turn."""
        if not isinstance(cache, Cache):
            named = requested_cache(DYNAMIC if cache is None else cache, None)
            return own_cache(self._model, named, batch_size=1) if self._store is None else None
        if self._store is not None:
            raise OptionError(
                "`cache` must be a name if a `prefix_store` is given, because the store has a cache for each turn, "
                f"got a {type(cache).__name__}: pass for example cache='int4', or leave out the store."
            )
        if cache.length or cache.is_pair:
            raise OptionError(
                f"`cache` must be an empty cache of a decoder, got {cache!r}: pass the conversation as `messages`, or "
                "load a saved chat with Chat.load()."
            )
        return cache

    @property
    def cache(self) -> Cache | None:
        """The cache of the chat, `None` with a `prefix_store`."""
        return self._cache

    def ask(self, message: str | Mapping[str, Any], **options: Any) -> str:
        """Add a message to the conversation, and return the model's answer, which is added too.

        If the call fails or is interrupted, the conversation stays as it was.

        Args:
            message: what the user says, or a whole message, such as `{"role": "tool", "content": "12 degrees"}`.
            options: as for `model.generate`, such as `max_new_tokens`, `do_sample` and `streamer`.

        Returns:
            The answer, without special tokens.

        Raises:
            OptionError: the message or an option is invalid, or the options ask for several answers.
        """
        asked = checked_message({"role": "user", "content": message} if isinstance(message, str) else message)
        taken = _SET_IN_TURNS if self._cache is None and self._name is None else _SET_IN_TURNS | _SET_WITH_CACHES
        for name in taken & set(options):
            raise OptionError(f"`{name}` cannot be an option of a turn: a chat sets it.")
        encoded = self._tokenizer.apply_chat_template(
            [*self.messages, asked],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **self._template_kwargs,
        )
        ids = list(encoded["input_ids"])
        output = self._generate(ids, options)
        answer_ids = output.sequences[0, len(ids) :]
        answer: str = self._tokenizer.decode(answer_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self.messages += [asked, {"role": "assistant", "content": answer}]
        self.prompt_tokens = len(ids)
        return answer

    def _generate(self, ids: list[int], options: dict[str, Any]) -> Any:
        prompt = torch.tensor([ids], device=self._model.device)
        options = {**options, "attention_mask": torch.ones_like(prompt), "return_dict_in_generate": True}
        config, _ = generate_calls.full_generation_config(self._model, options)
        if (config.num_return_sequences or 1) > 1:
            raise OptionError(
                f"`num_return_sequences` must be 1, got {config.num_return_sequences}: fork() the chat for each answer."
            )
        if self._cache is None:
            if self._name is not None:
                options["cache_implementation"] = self._name
            output = generate(self._model, prompt, prefix_store=self._store, namespace=self._namespace, **options)
            self.cached_tokens = output.cached_tokens[0]
            return output
        frequencies = frequencies_within(self._model.config, len(ids), len(ids))
        rotates_otherwise = frequencies not in {self._frequencies} - {None} and depends_on_length(self._model.config)
        # Beams cannot start from one row, and what they leave in the cache cannot be continued. Neither can a cache
        # that has only some of the states.
        if (
            generate_calls.sequences_per_prompt(config) > 1
            or model_types.kept_states(self._model) is not None
            or rotates_otherwise
        ):
            self._cache.reset()
        known = common_tokens(np.array(self._held_ids(self._cache), np.int64), np.array(ids, np.int64))
        # At least one token is left, for the model to compute.
        held = _rolled_back(self._cache, min(known, len(ids) - 1))
        self._seen, self._frequencies = ids, None
        options[cache_argument.name_in_generate(self._model)] = self._cache
        try:
            output = generate(self._model, prompt, **options)
        except BaseException:
            _rolled_back(self._cache, held)
            raise
        self.cached_tokens = held
        self._seen = output.sequences[0].tolist()
        self._frequencies = frequencies_within(self._model.config, len(ids), len(self._seen))
        if self._cache.batch_size != 1:
            # Which of the beams in it is the answer is not known.
            self._cache.reset()
        return output

    def _held_ids(self, cache: Cache) -> list[int]:
        """Ids of the tokens in the cache, as far as they are known. Another chat may have used it meanwhile."""
        known = self._seen if cache.known_ids is None else cache.known_ids[0].tolist()
        return known[: cache.length]

    def fork(self) -> "Chat":
        """A second chat that goes on from here. What both hold is held once; see `Cache.fork`."""
        twin = Chat.__new__(Chat)
        vars(twin).update(
            vars(self),
            messages=[dict(message) for message in self.messages],
            _seen=list(self._seen),
            _cache=None if self._cache is None else self._cache.fork(),
        )
        return twin

    def save(self, path: str | os.PathLike[str], *, weights_id: str | None = None) -> None:
        """Write the conversation and its cache to a file, from which `Chat.load` goes on; see `save_cache`.

        Args:
            path: the file. An existing file is replaced as a whole.
            weights_id: id of the model's weights, so that the file is refused for others; see `weights_id()`.

        Raises:
            OptionError: the chat has a prefix store: keep `messages`, since the store has the states. Or a message
                holds something else than texts, numbers, lists and dicts.
            CachePathError: the file cannot be written.
        """
        if self._cache is None:
            raise OptionError(
                "`chat` must have a cache of its own to be saved, got one with a `prefix_store`: keep chat.messages, "
                "and give the store a directory to keep its states."
            )
        try:
            messages = json.dumps(self.messages)
        except (TypeError, ValueError) as error:
            raise OptionError(f"`messages` must be texts, numbers, lists and dicts to be saved: {error}.") from error
        try:
            template = json.dumps(self._template_kwargs)
        except (TypeError, ValueError):
            # Tools may be functions. `load` asks for them again.
            template = "null"
        chat = f'{{"messages": {messages}, "chat_template_kwargs": {template}}}'
        held = self._held_ids(self._cache)
        ids = torch.tensor([[*held, *self._seen[len(held) :]]]) if held else None
        save_cache(self._cache, path, token_ids=ids, config=self._model, weights_id=weights_id, metadata={_SAVED: chat})

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: Any,
        tokenizer: Any,
        *,
        weights_id: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> "Chat":
        """Go on with a conversation that `save` wrote.

        Args:
            path: the file.
            model: the model that the chat was with.
            tokenizer: its tokenizer.
            weights_id: as for `save`.
            chat_template_kwargs: replace the saved ones. Functions cannot be saved, so pass them here.

        Raises:
            OptionError: `chat_template_kwargs` is missing.
            CacheFileError: the file is damaged, or holds no chat.
            CachePathError: the file does not exist or cannot be read.
            ModelMismatchError: it was saved for another model.
        """
        saved = inspect_cache(path)
        messages, template_kwargs = _read(path, saved.metadata.get(_SAVED))
        if chat_template_kwargs is None and template_kwargs is None:
            raise OptionError("`chat_template_kwargs` could not be saved with this chat: pass them again.")
        loaded = cls(
            model,
            tokenizer,
            messages=messages,
            chat_template_kwargs=template_kwargs if chat_template_kwargs is None else chat_template_kwargs,
        )
        cache, ids = load_cache(path, config=model, device=model.device, weights_id=weights_id), saved.token_ids()
        # A file does not say which of several devices computes a layer: there, the conversation is computed again.
        if ids is not None and not model_layers.layer_devices(model):
            loaded._cache, loaded._seen = cache, ids[0].tolist()
        return loaded

    def __repr__(self) -> str:
        return f"Chat({len(self.messages)} messages, {self._store if self._cache is None else self._cache!r})"


def _rolled_back(cache: Cache, length: int) -> int:
    """Roll a cache back to `length` tokens, or as far as it must go, and return how many it has then."""
    try:
        if cache.length != length:
            cache.truncate(length)
    except KVLayersError:
        # Tokens before a window are gone.
        cache.reset()
    return cache.length


def checked_message(message: object) -> Message:
    """A message of a chat as a mapping of its own.

    Raises:
        OptionError: it has no role, or nothing that it says.
    """
    fields: dict[str, Any] = dict(message) if isinstance(message, Mapping) else {}
    has_content = isinstance(fields.get("content"), str | list) or fields.get("tool_calls")
    if not isinstance(fields.get("role"), str) or not has_content:
        raise OptionError(
            f"`message` must be a text, or have a role and a content, got {message!r}: write for example "
            '{"role": "system", "content": "Answer briefly."}.'
        )
    return fields


def _read(path: str | os.PathLike[str], text: str | None) -> tuple[list[Message], dict[str, Any] | None]:
    """The messages and the options of the template that `Chat.save` wrote."""
    if text is None:
        raise CacheFileError(f"{os.fspath(path)} must be a saved chat, but holds a cache alone: use load_cache().")
    try:
        chat = json.loads(text)
        written = chat["chat_template_kwargs"]
        return list(map(checked_message, chat["messages"])), None if written is None else dict(written)
    except (ValueError, LookupError, TypeError, OptionError) as error:
        raise CacheFileError(f"{os.fspath(path)} holds no chat that Chat.save() has written: {error}") from error
