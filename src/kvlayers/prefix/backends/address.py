"""Where a place is, and how that is said without what lets somebody in."""

import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

from kvlayers.prefix.backends.contract import UnreachableError

MOST_DETAIL = 300
"""Characters of another library's message that are passed on."""


class Address:
    """A URL, and the options that go with it.

    Args:
        url: with a scheme.
        options: for the library that reaches it.

    Example:
        >>> Address("redis://me:secret@host:6379/0?ssl_password=other", {})
        redis://***@host:6379/0
    """

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self.url = url
        self.options = dict(options)
        self.scheme, _, rest = url.partition("://")
        host = re.split(r"[/?#]", rest, maxsplit=1)[0]
        visible = re.split(r"[?#]", rest, maxsplit=1)[0].rstrip("/")
        if "@" not in rest:
            self.shown = f"{self.scheme}://{visible}"
        elif rest.count("@") == 1 and "@" in host:
            self.shown = f"{self.scheme}://***@{visible.partition('@')[2]}"
        else:
            # A password with a character that should have been escaped may end anywhere.
            self.shown = f"{self.scheme}://***"
        self._secrets = {secret for secret in (*_parts(rest), *_texts(self.options)) if secret}

    def __repr__(self) -> str:
        return self.shown

    def path_of(self, name: str) -> str:
        """What a file there is called."""
        return f"{self.shown}/{name}"

    def detail(self, error: BaseException) -> str:
        """What another library says, on one line; its kind alone where that repeats what is not to be shown."""
        kind, text = type(error).__name__, " ".join(str(error).split())[:MOST_DETAIL]
        if not text or not text.isprintable() or any(secret in text for secret in self._secrets):
            return kind
        return f"{kind}: {text.rstrip('.')}"

    def unreachable(self, error: BaseException) -> UnreachableError:
        """The error for a place that another library does not reach.

        Raise it `from None`: what led to it may repeat credentials.
        """
        return UnreachableError(
            f"expected to reach {self.shown}, but saw {self.detail(error)}: see that it is there, and that it may be "
            "read and written to from here."
        )


def _parts(rest: str) -> Iterator[str]:
    """The texts of a URL that may let somebody in: before the host, and after a question mark."""
    credentials, _, _ = rest.rpartition("@")
    query = rest.partition("?")[2]
    found = [credentials, *re.split("[:/]+", credentials), *(text.partition("=")[2] for text in query.split("&"))]
    for text in found:
        yield from (text, unquote(text))


def _texts(options: object) -> Iterator[str]:
    """All texts in options, however deep."""
    if isinstance(options, str):
        yield options
    elif isinstance(options, Mapping):
        for value in options.values():
            yield from _texts(value)
    elif isinstance(options, list | tuple):
        for value in options:
            yield from _texts(value)
