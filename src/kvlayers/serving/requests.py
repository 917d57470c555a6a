"""What a request to `transformers serve` says of its conversation, in the fields that the server lets through."""

import logging
from collections.abc import Mapping
from typing import Any

from kvlayers.errors import OptionError
from kvlayers.prefix import PrefixStore
from kvlayers.prefix.lookup import IN_SESSION

logger = logging.getLogger(__name__)

SESSION, OPTIONS = "prompt_cache_key", "metadata"
"""The field with the name of a session, and the one with `cache_ttl` and `cache_priority`, numbers as texts."""


def enter_session(store: PrefixStore, namespace: str, body: Mapping[str, Any]) -> None:
    """Let what this request inserts belong to the session that it names, in the context that is copied for its thread.

    A client that passes a time keeps the session for so long, with a finite priority: what has less leaves first. The
    server answers whatever a client has written: what is no time or no priority is logged.
    """
    name, options = body.get(SESSION), body.get(OPTIONS)
    if not isinstance(name, str) or not name:
        return
    session = store.session(name, namespace)
    IN_SESSION.set(session)
    if isinstance(options, Mapping) and "cache_ttl" in options:
        try:
            session.pin(float(options["cache_ttl"]), float(options.get("cache_priority", 1)))
        except (TypeError, ValueError, OptionError) as error:
            logger.warning("A request does not keep its session: %.300s", error)
