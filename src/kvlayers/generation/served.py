"""`transformers serve`, whose answers say how much of a prompt a prefix store had.

The server passes calls of `generate()` to a thread for each model, and makes the `usage` of an answer in the task of
its request. The task and the call get one list here, by way of the context. So the call also has the settings of
`installed()` that hold in the task.
"""

import contextvars
import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

from kvlayers.generation.patching import Patch
from kvlayers.generation.prefix_reuse import active_store
from kvlayers.upstream import compat, supported

logger = logging.getLogger(__name__)


def _in_context_of_request(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def submit(self: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if active_store.CURRENT.get() is not None:
            active_store.COVERED.set([])
        return original(self, contextvars.copy_context().run, function, *args, **kwargs)

    return submit


def _usage_of_completions(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def usage(**counts: Any) -> Any:
        covered = active_store.COVERED.get()
        details = {} if covered is None else {"prompt_tokens_details": {"cached_tokens": sum(covered)}}
        return original(**counts, **details)

    return usage


def _usage_of_responses(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def usage(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        made.input_tokens_details.cached_tokens = sum(active_store.COVERED.get() or ())
        return made

    return usage


def patches() -> list[Patch]:
    """What is replaced in the modules of transformers' server, which are imported."""
    modules = {name: importlib.import_module(f"transformers.cli.serving.{name}") for name in supported.SERVER_MODULES}
    return [
        Patch(modules["utils"].InferenceThread, "submit", _in_context_of_request),
        Patch(modules["utils"].InferenceThread, "async_submit", _in_context_of_request),
        Patch(modules["chat_completion"], "CompletionUsage", _usage_of_completions),
        Patch(modules["completion"], "CompletionUsage", _usage_of_completions),
        Patch(modules["response"], "compute_usage", _usage_of_responses),
    ]


def report_reuse() -> list[Patch]:
    """Let the server of this process report reused tokens, and return what was changed.

    A server of another version that lacks a name serves as before, and the log says so.
    """
    try:
        supported.check(supported.OF_SERVERS, compat.TRANSFORMERS)
    except ImportError as error:
        logger.warning("The `usage` of this server does not say what was reused: %s", error)
        return []
    changed = patches()
    for patch in changed:
        patch.apply()
    return changed
