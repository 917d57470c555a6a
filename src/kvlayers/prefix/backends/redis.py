"""Files in a Redis or Valkey server, each a value there."""

import contextlib
import importlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from kvlayers.errors import CapacityError, KVLayersError, OptionError
from kvlayers.persistence.tensor_file import DIGEST_BYTES, Content
from kvlayers.prefix.backends.contract import (
    Address,
    ByteRange,
    StorageBackend,
    StoredFile,
    UnreachableError,
    clock,
    is_of_a_store,
)

logger = logging.getLogger(__name__)

SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
"""The scheme that the client knows for each scheme of a URL."""

DEFAULT_PREFIX = "kvlayers:prefix"

MOST_BYTES = 512 * 2**20
"""Bytes of a file, as a server takes no larger value. A node of 256 tokens has far fewer."""

CONNECT_SECONDS = 5
ANSWER_SECONDS = 30
"""Timeouts, unless the options or the URL set others."""


class RedisBackend(StorageBackend):
    """Files under keys with a common prefix, and an index of them by uses.

    A file is written by one command, so each exists completely or not at all, whoever else writes, whenever a writer is
    killed, and whatever a server evicts that has no more memory.

    The client gives each thread a connection of its own, so that any number of threads may use this.

    Args:
        address: a URL `redis://`, `rediss://`, `valkey://` or `valkeys://`, with `?prefix=` for another prefix of
            keys, and options of `redis.Redis.from_url`.

    Raises:
        OptionError: the package `redis` is not installed, or it does not accept the URL or the options.
        CachePathError: the server cannot be reached.
    """

    def __init__(self, address: Address) -> None:
        super().__init__(address.shown)
        self._address = address
        self._redis = _package(address)
        url, self._prefix = _split(address)
        # A sorted set: names by their last use, in microseconds, which a double represents exactly.
        self._index = f"{self._prefix}:index"
        options = {
            "socket_connect_timeout": CONNECT_SECONDS,
            "socket_timeout": ANSWER_SECONDS,
            # Once immediately, as a restarted server has closed all connections. A lookup should not wait longer.
            "retry": self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 1),
            "retry_on_error": [self._redis.exceptions.ConnectionError, self._redis.exceptions.TimeoutError],
            **address.options,
        }
        try:
            self._client: Any = self._redis.Redis.from_url(url, **options)
            with self._reaching():
                self._client.ping()
        except (TypeError, ValueError) as error:
            # Without its cause and its message about the URL, since an invalid port may be a part of a password.
            seen = address.detail(error) if isinstance(error, TypeError) else "an invalid URL or option"
            raise OptionError(
                f"the URL and `storage_options` must be valid for redis.Redis.from_url(), got {seen}: see its "
                "documentation, and escape special characters in a password with urllib.parse.quote()."
            ) from None
        if self._client.get_connection_kwargs().get("decode_responses"):
            raise OptionError("the server must return bytes, got decode_responses: leave it out.")

    def prepare(self) -> None:
        """As `StorageBackend.prepare`. The server itself deletes what writers that were killed have left."""
        key = f"{self._prefix}:probe:{secrets.token_hex(16)}"
        with self._reaching():
            self._client.set(key, b"", ex=60)
            self._client.unlink(key)

    def _reaching(self) -> contextlib.AbstractContextManager[None]:
        return self._address.reaching(self._redis.exceptions.RedisError, OSError)

    def _key(self, name: str) -> str:
        return f"{self._prefix}:file:{name}"

    def _many(self, commands: Sequence[tuple[Any, ...]], together: bool = False) -> list[Any]:
        """The answers of the server to several commands that are sent together, or also take effect together.

        `None` stands for that of a key at which somebody has put something else than a text.
        """
        pipeline = self._client.pipeline(transaction=together)
        for command in commands:
            pipeline.execute_command(*command)
        with self._reaching():
            answers = pipeline.execute(raise_on_error=together)
            for answer in answers:
                if isinstance(answer, Exception) and not str(answer).startswith("WRONGTYPE"):
                    raise answer
        return [None if isinstance(answer, Exception) else answer for answer in answers]

    def _taken(self, names: Sequence[str]) -> set[str]:
        """Those of these names whose keys somebody has given a value of another type, which stays."""
        types = self._many([("TYPE", self._key(name)) for name in names])
        return {name for name, found in zip(names, types, strict=True) if found not in (b"none", b"string")}

    def files(self) -> list[StoredFile]:
        """As `StorageBackend.files`."""
        uses = {name: used for name, used in self.last_uses().items() if is_of_a_store(name)}
        found = dict(zip(uses, self.find(list(uses)), strict=True))
        # Those that the server has evicted, if it is configured to do that, unless somebody writes them now.
        for name, file in found.items():
            if file is None:
                self.delete([name], uses[name] + 1)
        return [file for file in found.values() if file is not None]

    def find(self, names: Sequence[str]) -> list[StoredFile | None]:
        """As `StorageBackend.find`. The last digest in a file stands for all of its bytes.

        A file that the index lacks, as the server has evicted it, is listed for nobody: it is to be written again.
        """
        asked = [
            command
            for key, name in ((self._key(name), name) for name in names)
            for command in (("STRLEN", key), ("GETRANGE", key, -DIGEST_BYTES, -1), ("ZSCORE", self._index, name))
        ]
        found = iter(self._many(asked))
        return [
            StoredFile(name, nbytes, digest.hex(), _used(score)) if nbytes and digest and score is not None else None
            for name, nbytes, digest, score in zip(names, found, found, found, strict=True)
        ]

    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[Content | KVLayersError | None]:
        """As `StorageBackend.read_ranges`."""
        found = self._many([("GETRANGE", self._key(name), start, end - 1) for name, start, end in ranges])
        # What does not exist has no bytes.
        return [content or None for content in found]

    def write(self, name: str, content: Content) -> None:
        """As `StorageBackend.write`.

        Raises:
            CapacityError: the file is larger than a server takes.
        """
        if len(content) > MOST_BYTES:
            raise CapacityError(
                f"{self.path_of(name)} must have at most {MOST_BYTES} bytes, got {len(content)}: choose a file system "
                "as `directory`."
            )
        ((_, used),) = clock.uses([name]).items()
        if self._taken([name]):
            raise UnreachableError(
                f"{self.path_of(name)} is a value of another type than a text, which stays: remove it, or choose other "
                "keys by ?prefix= in the URL."
            )
        self._many(
            [("SET", self._key(name), memoryview(content)), ("ZADD", self._index, used // 1000, name)], together=True
        )

    def delete(self, names: Sequence[str], used_before: int | None = None) -> None:
        """As `StorageBackend.delete`. If somebody uses one of the files meanwhile, it is looked at again."""
        taken = self._taken(names)
        if taken:
            logger.warning(
                "Keys with values of another type than texts are no files: %s", ", ".join(map(self._key, taken))
            )
            with self._reaching():
                self._client.zrem(self._index, *taken)
        for name in [name for name in names if name not in taken]:
            if used_before is None:
                self._many([("UNLINK", self._key(name)), ("ZREM", self._index, name)], together=True)
            else:
                with self._reaching():
                    self._client.transaction(partial(self._delete, name, used_before), self._index)

    def _delete(self, name: str, used_before: int, transaction: Any) -> None:
        is_old = _used(transaction.zscore(self._index, name)) < used_before
        transaction.multi()
        if is_old:
            transaction.unlink(self._key(name))
            transaction.zrem(self._index, name)

    def last_uses(self) -> Mapping[str, int]:
        """As `StorageBackend.last_uses`; uses by all stores count."""
        with self._reaching():
            found = self._client.zrange(self._index, 0, -1, withscores=True)
        return {name.decode("utf-8", "replace"): _used(score) for name, score in found}

    def touch(self, names: Sequence[str]) -> None:
        """As `StorageBackend.touch`."""
        scores = {name: used // 1000 for name, used in clock.uses(names).items()}
        if scores:
            # `xx`, since a file that was deleted meanwhile must not be listed again.
            with self._reaching():
                self._client.zadd(self._index, scores, xx=True)


def _used(score: Any) -> int:
    """The score of a name in the index, in nanoseconds since 1970; 0 if it is not in the index."""
    return 0 if score is None else int(float(score)) * 1000


def _package(address: Address) -> Any:
    try:
        return importlib.import_module("redis")
    except ImportError as error:
        raise OptionError(
            f"the package redis, which reaches {address.scheme}://, cannot be imported ({error}): run "
            '`pip install redis`, or `pip install ".[redis]"` in a checkout of kvlayers.'
        ) from error


def _split(address: Address) -> tuple[str, str]:
    """The URL for the client, and the prefix of the keys."""
    try:
        parts = urlsplit(address.url)
        query = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError:
        raise OptionError(
            "`directory` must be a URL such as redis://user:password@host:6379/0, got one that cannot be parsed: "
            "escape special characters in a password with urllib.parse.quote()."
        ) from None
    prefixes = [value for name, value in query if name == "prefix"] or [DEFAULT_PREFIX]
    if len(prefixes) > 1 or not prefixes[0]:
        raise OptionError("the URL must have one prefix of keys, got several, or an empty one: leave it out.")
    others = urlencode([(name, value) for name, value in query if name != "prefix"])
    return urlunsplit(parts._replace(scheme=SCHEMES[address.scheme], query=others)), prefixes[0]
