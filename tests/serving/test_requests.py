"""What clients of `transformers serve` say of their conversations, in fields that the server lets through."""

import contextvars
import logging
from typing import Any

import pytest
import torch

import kvlayers
from kvlayers import PrefixStore
from kvlayers.generation.patching import around
from kvlayers.generation.served import _in_session
from models import fresh_model

PROMPT = torch.arange(3, 40)[None]


class Handler:
    """As the server's: it refuses fields that it does not know, before anybody else looks at them."""

    def validate(self, body: dict[str, Any]) -> None:
        if "unknown" in body:
            raise ValueError("422")


Handler.validate = around(_in_session)(Handler.validate)  # type: ignore[method-assign]


def answered(store: PrefixStore, body: dict[str, Any], namespace: str = "") -> None:
    """Serve a request in a context of its own, whose copy a thread would have."""
    model = fresh_model("llama")

    def serve() -> None:
        with kvlayers.installed(prefix_store=store, namespace=namespace):
            Handler().validate(body)
            contextvars.copy_context().run(model.generate, PROMPT, max_new_tokens=2, do_sample=False)

    contextvars.copy_context().run(serve)


def test_a_request_belongs_to_the_session_that_it_names() -> None:
    store = PrefixStore("16MiB")
    answered(store, {"prompt_cache_key": "user-17"}, "tenant 1")
    assert store.session("user-17", "tenant 1").tokens == PROMPT.shape[1] + 1
    assert store.session("user-17").tokens == store.session("user-18", "tenant 1").tokens == 0
    answered(store, {"messages": []}, "tenant 2")
    assert store.session("user-17", "tenant 1").tokens == PROMPT.shape[1] + 1


def test_a_client_keeps_its_session_for_a_time_but_no_one_else_out() -> None:
    store = PrefixStore("16MiB")
    answered(store, {"prompt_cache_key": "a", "metadata": {"cache_ttl": "600", "cache_priority": "2"}})
    assert store.session("a", ttl=1).seconds_left > 500
    answered(store, {})
    (entry,) = store._index.entries
    assert [pin.priority for pin in entry.pins] == [2.0]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt_cache_key": ""},
        {"prompt_cache_key": 3},
        {"prompt_cache_key": None, "metadata": None},
        {"prompt_cache_key": "a", "metadata": []},
        {"prompt_cache_key": "a", "metadata": {"cache_ttl": "soon"}},
        {"prompt_cache_key": "a", "metadata": {"cache_ttl": "-1"}},
        {"prompt_cache_key": "a", "metadata": {"cache_ttl": "1", "cache_priority": "inf"}},
        {"prompt_cache_key": "a", "metadata": {"cache_ttl": None}},
    ],
    ids=str,
)
def test_whatever_a_client_writes_is_answered(body: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    store = PrefixStore("16MiB")
    with caplog.at_level(logging.WARNING):
        answered(store, body)
    (entry,) = store._index.entries
    assert entry.pins == ()
    is_told = isinstance(body.get("metadata"), dict)
    assert ("does not keep its session" in caplog.text) is is_told


def test_a_request_that_the_server_refuses_is_in_no_session() -> None:
    store = PrefixStore("16MiB")
    with pytest.raises(ValueError, match="422"):
        answered(store, {"unknown": 1, "prompt_cache_key": "a"})
    assert store.session("a").tokens == 0
