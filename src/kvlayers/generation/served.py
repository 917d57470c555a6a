"""`transformers serve`, whose answers say how much of a prompt a prefix store had.

The server passes calls of `generate()` to a thread for each model, and makes the `usage` of an answer in the task of
its request. The task and the call get one list here, by way of the context. So the call also has the settings of
`installed()` that hold in the task.
"""

import contextvars
import hashlib
import importlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvlayers.generation.patching import Method, Patch, around
from kvlayers.generation.prefix_reuse import active_store
from kvlayers.prefix import PrefixStore
from kvlayers.serving.sessions import enter_session
from kvlayers.upstream import compat, supported

logger = logging.getLogger(__name__)


def _in_context_of_request(original: Method, pool: Any, function: Method, *args: Any, **kwargs: Any) -> Any:
    if active_store.CURRENT.get() is not None:
        active_store.COVERED.set([])
    return original(pool, contextvars.copy_context().run, function, *args, **kwargs)


def _in_session(original: Method, handler: Any, body: Any) -> None:
    original(handler, body)
    if (active := active_store.CURRENT.get()) is not None:
        enter_session(active.store, active.namespace, body)


def _usage_of_completions(original: Method, **counts: Any) -> Any:
    if (covered := active_store.COVERED.get()) is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": sum(covered)}
    return original(**counts)


def _usage_of_responses(original: Method, *args: Any, **kwargs: Any) -> Any:
    made = original(*args, **kwargs)
    made.input_tokens_details.cached_tokens = sum(active_store.COVERED.get() or ())
    return made


App = Callable[..., Awaitable[None]]


def namespace_of_key(app: App, store: PrefixStore, namespace: str) -> App:
    """A middleware (ASGI) that gives each request the store in a namespace of its API key, which is kept nowhere.

    Args:
        app: the server.
        store: the store.
        namespace: namespace that those of all keys are in.
    """

    async def serve(scope: Mapping[str, Any], *args: Any) -> None:
        key = dict(scope.get("headers", ())).get(b"authorization", b"")
        active = active_store.optional_store(store, f"{namespace} {hashlib.sha256(key).hexdigest()}")
        with active_store.CURRENT.override(active):
            await app(scope, *args)

    return serve


def separate_keys(store: PrefixStore, namespace: str) -> Patch:
    """Let requests to the server of this process use a store, each key in a namespace of its own.

    It is called before the server is built, and returns what was changed. Calls of `generate()` outside of requests do
    not use the store.
    """

    def build_server(original: Method, *args: Any, **kwargs: Any) -> Any:
        app = original(*args, **kwargs)
        app.add_middleware(namespace_of_key, store=store, namespace=namespace)
        return app

    server = importlib.import_module("transformers.cli.serving.server")
    if "build_server" not in vars(server):
        logger.warning("Requests to this server do not use the store: it has no function `build_server`.")
    patch = Patch(server, "build_server", around(build_server))
    patch.apply()
    return patch


def report_reuse() -> list[Patch]:
    """Let the server of this process report reused tokens, and return what was changed.

    A server of another version that lacks a name serves as before, and the log says so.
    """
    try:
        supported.check(supported.OF_SERVERS, compat.TRANSFORMERS)
    except ImportError as error:
        logger.warning("The `usage` of this server does not say what was reused: %s", error)
        return []
    modules = {name: importlib.import_module(f"transformers.cli.serving.{name}") for name in supported.SERVER_MODULES}
    replacements = (
        (modules["utils"].BaseHandler, "_validate_request", _in_session),
        (modules["utils"].InferenceThread, "submit", _in_context_of_request),
        (modules["utils"].InferenceThread, "async_submit", _in_context_of_request),
        (modules["chat_completion"], "CompletionUsage", _usage_of_completions),
        (modules["completion"], "CompletionUsage", _usage_of_completions),
        (modules["response"], "compute_usage", _usage_of_responses),
    )
    changed = [Patch(owner, name, around(hook)) for owner, name, hook in replacements]
    for patch in changed:
        patch.apply()
    return changed
