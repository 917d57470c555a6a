"""URLs of storage backends, and how they are shown without credentials."""

import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

from kvlayers.prefix.backends.contract import UnreachableError

MAX_DETAIL = 300
"""Characters of another library's error message that are passed on."""


class Address:
    """A URL and the options for the library that reaches it.

    Args:
        url: a URL with a scheme.
        options: options of the library.

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
            # If a password contains a character that should have been escaped, its end is unknown.
            self.shown = f"{self.scheme}://***"
        self._secrets = {secret for secret in (*_parts(rest), *_strings(self.options)) if secret}

    def __repr__(self) -> str:
        return self.shown

    def path_of(self, name: str) -> str:
        """The URL of a file below this one, without credentials."""
        return f"{self.shown}/{name}"

    def detail(self, error: BaseException) -> str:
        """The error of another library on one line; only its class if the message repeats a secret."""
        kind, text = type(error).__name__, " ".join(str(error).split())
        if not text or not text.isprintable() or any(secret in text for secret in self._secrets):
            return kind
        return f"{kind}: {text[:MAX_DETAIL].rstrip('.')}"

    def unreachable(self, error: BaseException) -> UnreachableError:
        """The error to raise if another library cannot reach the URL.

        Raise it `from None`, since the original error may contain credentials.
        """
        return UnreachableError(
            f"cannot reach {self.shown}, got {self.detail(error)}: check that it exists, and that it can be read and "
            "written to from here."
        )


def _parts(rest: str) -> Iterator[str]:
    """The parts of a URL that may be credentials: before the host, and after a question mark."""
    credentials, _, _ = rest.rpartition("@")
    query = rest.partition("?")[2]
    found = [credentials, *re.split("[:/]+", credentials), *(text.partition("=")[2] for text in query.split("&"))]
    for text in found:
        yield from (text, unquote(text))


def _strings(options: object) -> Iterator[str]:
    """All strings in options, at any depth."""
    if isinstance(options, str):
        yield options
    elif isinstance(options, Mapping):
        for value in options.values():
            yield from _strings(value)
    elif isinstance(options, list | tuple):
        for value in options:
            yield from _strings(value)
