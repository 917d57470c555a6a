"""`transformers serve` under `kvlayers run`: what `usage` says, who hangs up, two models, and a store that is full."""

import asyncio
import contextvars
import functools
import socket
import sys
import threading
import time
import types
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import transformers

import kvlayers
from kvlayers import PrefixStore
from kvlayers.generation import served
from kvlayers.generation.prefix_reuse import active_store
from kvlayers.upstream import supported
from model_directories import save_model

MODULES = [f"transformers.cli.serving.{name}" for name in (*supported.SERVER_MODULES, "server")]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Modules that look like those of the server, whose thread runs what it is given in a context of its own."""
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in MODULES}

    class InferenceThread:
        def submit(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
            return contextvars.Context().run(fn, *args, **kwargs)

        async_submit = submit

    modules[MODULES[0]].InferenceThread = InferenceThread
    modules[MODULES[0]].BaseHandler = types.SimpleNamespace(_validate_request=lambda self, body: None)
    for name in MODULES[1:3]:
        modules[name].CompletionUsage = dict
    modules[MODULES[3]].compute_usage = lambda tokens: types.SimpleNamespace(
        input_tokens_details=types.SimpleNamespace(cached_tokens=0)
    )
    modules[MODULES[4]].build_server = types.SimpleNamespace
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def test_each_request_has_what_its_own_call_has_found(stand_ins: dict[str, Any]) -> None:
    utils, chat, _, response, _ = stand_ins.values()
    before = vars(utils.InferenceThread)["submit"], chat.CompletionUsage, response.compute_usage
    changed = served.report_reuse()
    thread = utils.InferenceThread()

    def call(found: int) -> int:
        covered = active_store.COVERED.get()
        if covered is not None:
            covered.append(found)
        return found

    def request(found: int) -> Any:
        assert thread.submit(call, found) == found
        usage = chat.CompletionUsage(prompt_tokens=9)
        return usage, response.compute_usage(9).input_tokens_details.cached_tokens

    without = contextvars.copy_context()
    with kvlayers.installed(prefix_store=PrefixStore("1MiB")):
        contexts = [contextvars.copy_context() for _ in range(2)]
        for context, found in zip(contexts, (5, 7), strict=True):
            details = {"prompt_tokens_details": {"cached_tokens": found}}
            assert context.run(request, found) == ({"prompt_tokens": 9, **details}, found)
    # Without a store, an answer is as it was.
    assert without.run(request, 3) == ({"prompt_tokens": 9}, 0)
    for patch in changed:
        patch.remove()
    assert (vars(utils.InferenceThread)["submit"], chat.CompletionUsage, response.compute_usage) == before


def test_another_server_serves_as_before(stand_ins: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    del stand_ins[MODULES[3]].compute_usage
    assert served.report_reuse() == []
    assert "does not say what was reused" in caplog.text
    assert stand_ins[MODULES[1]].CompletionUsage is dict


# The real server, in this process


TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
TEXT = "the sea is a sea of the sea and a sea . " * 8


@pytest.fixture(scope="module")
def start() -> Iterator[Any]:
    """Starts `transformers serve` in a thread, once for the same options, and returns a client.

    With a store, each key has a namespace of its own.
    """
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package, reason='the server of transformers needs "transformers[serving]"')
    serving = pytest.importorskip("transformers.cli.serve", reason="this transformers has another server")
    import openai

    servers: list[Any] = []
    changed = served.report_reuse()

    @functools.cache
    def started(by_key: PrefixStore | None = None, **options: Any) -> Any:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        patches = [] if by_key is None else [served.separate_keys(by_key, "mine")]
        servers.append(serving.Serve(port=port, device="cpu", dtype="float32", non_blocking=True, **options))
        for patch in patches:
            patch.remove()
        for _ in range(1000):
            try:
                urllib.request.urlopen(f"http://localhost:{port}/health")
                break
            except OSError:
                time.sleep(0.01)
        return openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0)

    yield started
    for server in servers:
        server.kill_server()
    for patch in changed:
        patch.remove()


@pytest.fixture(scope="module")
def name_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The name of a model of a family, by which a server finds it."""

    @functools.cache
    def saved(family: str) -> str:
        directory = save_model(tmp_path_factory.mktemp(family) / family, family)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(directory)
        return str(directory)

    return saved


@pytest.fixture
def serve(start: Any, name_of: Any) -> Iterator[Any]:
    """Returns a client and the name of each model."""
    yield lambda *families, **options: (start(**options), [name_of(family) for family in families])
    kvlayers.uninstall()


def ask(client: Any, model: str, text: str, stream: bool = False, **options: Any) -> tuple[str, int | None]:
    """The answer, and the tokens that were reused."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=6,
        stream=stream,
        **options,
    )
    if not stream:
        details = answer.usage.prompt_tokens_details
        return answer.choices[0].message.content, details and details.cached_tokens
    chunks = list(answer)
    details = next(chunk.usage for chunk in reversed(chunks) if chunk.usage).prompt_tokens_details
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return text, details and details.cached_tokens


@pytest.mark.slow
def test_usage_says_what_was_reused_and_two_models_have_their_own_entries(serve: Any) -> None:
    client, models = serve("llama", "mistral")
    plain = {(model, stream): ask(client, model, TEXT, stream) for model in models for stream in (False, True)}
    assert {cached for _, cached in plain.values()} == {None}
    kvlayers.install(prefix_store=PrefixStore("1GiB"))
    tokens = len(TEXT.split())
    for stream in (False, True):
        for model in models:
            text, cached = ask(client, model, TEXT, stream)
            assert text == plain[model, stream][0]
            assert cached == (tokens - 1 if stream else 0)
    longer = client.responses.create(model=models[0], input=TEXT + "a sea", max_output_tokens=4, stream=False)
    assert longer.usage.input_tokens_details.cached_tokens == tokens
    whole = client.completions.create(model=models[0], prompt=TEXT + "a sea", max_tokens=4)
    assert whole.usage.prompt_tokens_details.cached_tokens == tokens + 1


@pytest.mark.slow
def test_a_client_that_hangs_up_leaves_its_prompt(serve: Any) -> None:
    client, (model,) = serve("llama")
    store = PrefixStore("1GiB")
    kvlayers.install(prefix_store=store)
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": TEXT}], temperature=0, max_tokens=400, stream=True
    )
    for chunk in answer:
        if chunk.choices[0].delta.content:
            break
    answer.close()
    # The next request waits for the thread of the model.
    assert ask(client, model, TEXT)[1] == len(TEXT.split()) - 1
    # What was decoded for the one that hung up is not stored.
    assert store.statistics.tokens < len(TEXT.split()) + 400


@pytest.mark.slow
def test_a_store_that_is_full_and_a_cache_that_does_not_suit_break_no_request(serve: Any) -> None:
    client, (model,) = serve("gpt2")
    expected = ask(client, model, TEXT)[0]
    store = PrefixStore(100)
    kvlayers.install(cache="sink:window_length=30", prefix_store=store)
    assert ask(client, model, TEXT) == (expected, 0)
    assert store.statistics.refused == 1


@pytest.mark.slow
def test_requests_at_once_have_their_own_counts(serve: Any) -> None:
    client, (model,) = serve("llama")
    kvlayers.install(prefix_store=PrefixStore("1GiB"))
    texts = [f"w{each} {TEXT}" for each in range(6)]

    async def both() -> list[Any]:
        return await asyncio.gather(*(asyncio.to_thread(ask, client, model, text, True) for text in texts * 2))

    found = asyncio.run(both())
    assert [text for text, _ in found[:6]] == [text for text, _ in found[6:]]
    assert sorted(cached for _, cached in found) == [0] * 6 + [len(TEXT.split())] * 6


@pytest.mark.slow
def test_each_key_has_a_namespace_of_its_own(serve: Any) -> None:
    store = PrefixStore("1GiB")
    client, (model,) = serve("llama", by_key=store)
    kvlayers.install()
    tokens = len(TEXT.split())
    for key, cached in (("one", 0), ("other", 0), ("one", tokens - 1), ("other", tokens - 1)):
        assert ask(client.with_options(api_key=key), model, TEXT)[1] == cached
    assert store.statistics.hits == 2


def rows_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvlayers rows"]


@pytest.mark.slow
def test_rows_of_a_server_outlive_clients_that_hang_up_and_prompts_without_end(serve: Any) -> None:
    pytest.importorskip("transformers.cli.serving.server", reason="this server has no continuous batching of its own")
    kvlayers.install()
    client, (model,) = serve("llama", continuous_batching=True)
    texts = [f"w{each} {TEXT[:40]}" for each in range(8)]
    expected = [ask(client, model, text)[0] for text in texts]
    assert len(rows_threads()) == 1

    def hang_up(text: str) -> None:
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=400, stream=True
        )
        next(chunk for chunk in answer if chunk.choices and chunk.choices[0].delta.content)
        answer.close()

    def ask_too_much() -> None:
        # The server tells its log why.
        with pytest.raises(Exception, match="Error code: 500"):
            ask(client, model, "sea " * 5000)

    async def all_at_once() -> list[Any]:
        answers = [asyncio.to_thread(ask, client, model, text, bool(each % 2)) for each, text in enumerate(texts * 4)]
        others = [
            *(asyncio.to_thread(hang_up, text) for text in texts),
            *(asyncio.to_thread(ask_too_much) for _ in range(4)),
        ]
        return (await asyncio.gather(*answers, *others))[: len(answers)]

    assert [text for text, _ in asyncio.run(all_at_once())] == expected * 4
    assert ask(client, model, texts[0])[0] == expected[0]
    (thread,) = rows_threads()
    assert thread.is_alive()
