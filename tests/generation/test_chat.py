"""Chats: each turn answers what the template says, whatever the cache holds, and computes only what is new."""

import contextlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import every_causal_model
import kvlayers
from chats import CHATML, FORGETFUL, LETTERS, SPECIAL, TEMPLATES, answer_without_cache, greedy, tokenizer_with
from kvlayers import Chat
from matrix import once
from models import read, tiny_model


@pytest.fixture
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture
def tokenizer() -> Any:
    return tokenizer_with(CHATML)


def written() -> dict[str, Any]:
    """Options of an answer whose text has the same ids again: of letters, without spaces around it."""
    unwritten = [*range(len(SPECIAL)), *range(len(SPECIAL) + len(LETTERS), 97), len(SPECIAL) + LETTERS.index(" ")]
    return {**greedy(), "suppress_tokens": [*unwritten, len(SPECIAL) + LETTERS.index("\n")]}


def checked_turns(chat: Chat, *questions: str) -> None:
    """Ask, and compare each answer and the conversation with those of a model without a cache."""
    for question in questions:
        asked = [*map(dict, chat.messages), {"role": "user", "content": question}]
        expected = answer_without_cache(chat._model, chat._tokenizer, asked, 6)
        assert chat.ask(question, **greedy(6)) == expected
        assert chat.messages == [*asked, {"role": "assistant", "content": expected}]


def reloaded(chat: Chat, directory: pathlib.Path, **options: Any) -> Chat:
    chat.save(directory / "chat.safetensors")
    loaded = Chat.load(directory / "chat.safetensors", chat._model, chat._tokenizer, **options)
    assert loaded.messages == chat.messages
    return loaded


@pytest.mark.parametrize(("family", "template"), once(["llama", "mistral", "gemma3", "mamba", "jamba"], TEMPLATES))
def test_turns_answer_as_without_a_cache(family: str, template: str, tmp_path: pathlib.Path) -> None:
    chat = Chat(tiny_model(family), tokenizer_with(TEMPLATES[template]))
    checked_turns(chat, "Name a bird.", " Why? ")
    checked_turns(reloaded(chat, tmp_path), "So?")


@pytest.mark.parametrize(
    ("name", "template"), once(["dynamic", "int4", "static", "offloaded", "sink"], ["chatml", "trimmed"])
)
def test_a_turn_computes_what_is_new(name: str, template: str, model: Any, tmp_path: pathlib.Path) -> None:
    """The cache has seen all tokens but the last one of the answer, which ends where it is long enough."""
    tokenizer = tokenizer_with(TEMPLATES[template])
    sizes = {"static": {"max_cache_len": 256}, "sink": {"window_length": 20, "num_sink_tokens": 4}}
    chat = Chat(model, tokenizer, kvlayers.make_cache(name, model, **sizes.get(name, {})))
    chat.ask("Name a bird.", **written())
    assert chat.cached_tokens == 0
    for question in ("Why?", "So?"):
        before = chat.prompt_tokens
        chat.ask(question, **written())
        assert chat.cached_tokens == before + 9 - 1
    loaded = reloaded(chat, tmp_path)
    seen = kvlayers.inspect_cache(tmp_path / "chat.safetensors")
    ids = seen.token_ids()
    assert ids is not None
    assert ids.shape == (1, seen.length + 1)
    said = tokenizer.apply_chat_template(chat.messages[:-1], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(ids[0]) == said + chat.messages[-1]["content"]
    assert loaded.ask("Bye.", **written()) == chat.ask("Bye.", **written())
    assert loaded.cached_tokens == chat.cached_tokens == seen.length


def test_a_prefix_store_serves_chats(model: Any, tokenizer: Any) -> None:
    store = kvlayers.PrefixStore(max_bytes=2**24)
    for _ in range(2):
        chat = Chat(model, tokenizer, prefix_store=store, namespace="user 1")
        checked_turns(chat, "Name a bird.", "Why?")
    # The second chat asks the same, so that all but the last token of its prompt was stored.
    assert chat.cached_tokens == chat.prompt_tokens - 1
    other = Chat(model, tokenizer, prefix_store=store, namespace="user 2")
    checked_turns(other, "Name a bird.")
    assert other.cached_tokens == 0


def test_turns_can_be_taken_back_edited_and_forked(model: Any, tokenizer: Any, tmp_path: pathlib.Path) -> None:
    chat = reloaded(Chat(model, tokenizer, messages=[{"role": "system", "content": "Be short."}]), tmp_path)
    checked_turns(chat, "Name a bird.", "Why?")
    before = chat.prompt_tokens
    del chat.messages[-2:]
    twin = chat.fork()
    checked_turns(chat, "Name a fish.")
    assert chat.cached_tokens >= before - len("Why?") - 20
    checked_turns(twin, "Why?")
    assert len(chat.messages) == len(twin.messages) == 5
    chat.messages[0]["content"] = "Be long."
    assert twin.messages[0]["content"] == "Be short."
    checked_turns(chat, "And now?")
    assert chat.cached_tokens < 20
    checked_turns(twin, "And now?")


def test_options_reach_the_template(model: Any) -> None:
    chat = Chat(model, tokenizer_with(FORGETFUL), chat_template_kwargs={"think": True})
    asked = [{"role": "user", "content": "Name a bird."}]
    expected = answer_without_cache(model, tokenizer_with(FORGETFUL), asked, think=True)
    assert chat.ask("Name a bird.", **greedy()) == expected


@pytest.mark.parametrize("family", ["llama", "mistral", "jamba"])
def test_an_interrupted_turn_leaves_the_chat_as_it_was(family: str, tokenizer: Any) -> None:
    chat = Chat(tiny_model(family), tokenizer)
    checked_turns(chat, "Name a bird.")
    messages, lengths = [*map(dict, chat.messages)], []

    def interrupt(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """After two tokens, as by ctrl-C."""
        lengths.append(input_ids.shape[1])
        if len(lengths) == 3:
            raise KeyboardInterrupt
        return scores

    with contextlib.suppress(KeyboardInterrupt):
        chat.ask("Why?", logits_processor=[interrupt], **greedy())
    assert chat.messages == messages
    checked_turns(chat, "So?")


def test_beams_answer_and_are_forgotten(model: Any, tokenizer: Any) -> None:
    chat = Chat(model, tokenizer)
    for question in ("Name a bird.", "And a fish?"):
        chat.ask(question, num_beams=3, **greedy())
        checked_turns(chat, "Why?")


def test_a_cache_that_two_chats_share_by_mistake_gives_no_other_answers(model: Any, tokenizer: Any) -> None:
    cache = kvlayers.DynamicCache(config=model.config)
    one, other = Chat(model, tokenizer, cache), Chat(model, tokenizer, cache)
    for question in ("Name a bird.", "Why?"):
        checked_turns(one, question)
        checked_turns(other, question + " And a fish.")


def warmth(town: str) -> str:
    """How warm it is.

    Args:
        town: where.
    """
    return town


def test_messages_of_tools(model: Any, tmp_path: pathlib.Path) -> None:
    tokenizer = tokenizer_with(CHATML.replace("message['content']", "message['content'] or 'called'"))
    tools = {"chat_template_kwargs": {"tools": [warmth]}}
    chat = Chat(model, tokenizer, **tools)
    chat.messages = [
        {"role": "user", "content": "How warm is it?"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "warmth", "arguments": {}}]},
    ]
    chat.ask({"role": "tool", "content": "12"}, **written())
    with pytest.raises(kvlayers.OptionError, match="pass them again"):
        reloaded(chat, tmp_path)
    loaded = reloaded(chat, tmp_path, **tools)
    assert loaded.ask("So?", **written()) == chat.ask("So?", **written())
    assert loaded.cached_tokens == chat.cached_tokens > 0


def filled(model: Any) -> kvlayers.DynamicCache:
    return read(model, torch.tensor([[5, 6, 7]]), kvlayers.DynamicCache(config=model.config))[0]


WRONG: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "the other way round": (lambda model, tokenizer: Chat(tokenizer, model), "a model with generate"),
    "an encoder": (lambda model, tokenizer: Chat(tiny_model("t5"), tokenizer), "has an encoder"),
    "no tokenizer": (lambda model, tokenizer: Chat(model, None), "`tokenizer` must be a tokenizer, got a NoneType"),
    "no template": (lambda model, tokenizer: Chat(model, tokenizer_with("")), "must have a chat template"),
    "what a chat sets": (
        lambda model, tokenizer: Chat(model, tokenizer, chat_template_kwargs={"tokenize": False}),
        "must not have `tokenize`",
    ),
    "a namespace alone": (lambda model, tokenizer: Chat(model, tokenizer, namespace="user 1"), "namespace"),
    "no cache's name": (lambda model, tokenizer: Chat(model, tokenizer, "dynamick"), "did you mean 'dynamic'"),
    "no cache's name beside a store": (
        lambda model, tokenizer: Chat(model, tokenizer, "dynamick", prefix_store=kvlayers.PrefixStore("1MiB")),
        "did you mean 'dynamic'",
    ),
    "a cache beside a store": (
        lambda model, tokenizer: Chat(
            model, tokenizer, kvlayers.DynamicCache(), prefix_store=kvlayers.PrefixStore("1MiB")
        ),
        "must be a name",
    ),
    "a cache that has seen tokens": (lambda model, tokenizer: Chat(model, tokenizer, filled(model)), r"Chat\.load"),
    "messages that are texts": (
        lambda model, tokenizer: Chat(model, tokenizer, messages=["Name a bird."]),
        "a role and a content",
    ),
    "a message without a role": (lambda model, tokenizer: Chat(model, tokenizer).ask({"text": "Name a bird."}), "role"),
    "a message without a content": (
        lambda model, tokenizer: Chat(model, tokenizer).ask({"role": "user", "content": None}),
        "a role and a content",
    ),
    "a cache in a turn": (
        lambda model, tokenizer: Chat(model, tokenizer).ask("Name a bird.", cache=kvlayers.DynamicCache()),
        "a chat sets it",
    ),
    "a cache in a turn, as it was called": (
        lambda model, tokenizer: Chat(model, tokenizer).ask("Name a bird.", past_key_values=kvlayers.DynamicCache()),
        "a chat sets it",
    ),
    "a mask in a turn": (
        lambda model, tokenizer: Chat(model, tokenizer).ask("Name a bird.", attention_mask=torch.ones(1, 3)),
        "a chat sets it",
    ),
    "several answers": (
        lambda model, tokenizer: Chat(model, tokenizer).ask("Name a bird.", num_return_sequences=2, do_sample=True),
        "fork",
    ),
    "a file of a chat with a store": (
        lambda model, tokenizer: Chat(model, tokenizer, prefix_store=kvlayers.PrefixStore("1MiB")).save("nowhere"),
        r"keep\s+chat.messages",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_arguments(what: str, model: Any, tokenizer: Any) -> None:
    call, message = WRONG[what]
    with pytest.raises((kvlayers.OptionError, kvlayers.errors.RegistryError), match=message):
        call(model, tokenizer)


def test_files_that_hold_no_chat(model: Any, tokenizer: Any, tmp_path: pathlib.Path) -> None:
    path, empty = tmp_path / "cache.safetensors", {"messages": [], "chat_template_kwargs": {}}
    cache = kvlayers.DynamicCache(config=model.config)
    for metadata, words in (
        ({}, "a cache alone"),
        *(({"chat": text}, "no chat") for text in ("{", "[]", json.dumps({**empty, "messages": [5]}))),
    ):
        kvlayers.save_cache(cache, path, metadata=metadata)
        with pytest.raises(kvlayers.errors.CacheFileError, match=words):
            Chat.load(path, model, tokenizer)
    kvlayers.save_cache(filled(model), path, metadata={"chat": json.dumps(empty)})
    checked_turns(Chat.load(path, model, tokenizer), "Name a bird.")


def test_a_model_that_keeps_states_in_its_modules_reads_each_turn_whole(tokenizer: Any) -> None:
    """Its second turn began from zero behind what the cache holds."""
    model = every_causal_model.model_of("recurrent_gemma")
    chat = Chat(model, tokenizer)
    for text in ("Name a bird.", "And another one?"):
        messages = [*chat.messages, {"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        given = {name: ids[name] for name in ("input_ids", "attention_mask")}
        expected = model.generate(**given, **written())[0, ids["input_ids"].shape[1] :]
        assert chat.ask(text, **written()) == tokenizer.decode(expected, skip_special_tokens=True)
        assert chat.cached_tokens == 0
