"""Files in a Redis or Valkey server, in parts: a value there has at most 512 MB."""

import contextlib
import importlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from kvlayers.errors import OptionError
from kvlayers.persistence.safetensors_header import Content
from kvlayers.prefix.backends.contract import (
    ABANDONED_SECONDS,
    SUFFIX,
    Address,
    StoredFile,
    UnreachableError,
    clock,
)
from kvlayers.prefix.backends.remote import ByteRange, RemoteBackend

Result = TypeVar("Result")

SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
"""The scheme that the client knows for each scheme of a URL."""

DEFAULT_PREFIX = "kvlayers:prefix"

PART_BYTES = 16 * 2**20
MIN_PART_BYTES = 2**16
MAX_PART_BYTES = 2**29
"""Sizes of parts: what this module writes, and the limits that it accepts in a manifest. A server takes no larger
values, and smaller parts would be too many."""

MAX_PARTS = 2**16
"""The most parts that are accepted in a manifest: with them a file can have a terabyte, and their keys take little
memory."""

MAX_MANIFEST_BYTES = 512

CONNECT_SECONDS = 5
ANSWER_SECONDS = 30
"""Timeouts, unless the options or the URL set others."""


@dataclass(frozen=True)
class _Manifest:
    """The value under the key of a file, written once all of its parts exist."""

    nonce: str
    nbytes: int
    part_bytes: int

    @classmethod
    def parse(cls, text: bytes | None) -> "_Manifest | None":
        """The manifest that a server has returned; `None` if it is missing or not a valid manifest."""
        if text is None or len(text) > MAX_MANIFEST_BYTES:
            return None
        try:
            manifest = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None
        sizes = (manifest.nbytes, manifest.part_bytes)
        if not isinstance(manifest.nonce, str) or not re.fullmatch("[0-9a-f]{32}", manifest.nonce):
            return None
        if not all(type(size) is int for size in sizes):
            return None
        if not MIN_PART_BYTES <= manifest.part_bytes <= MAX_PART_BYTES:
            return None
        return manifest if 0 <= manifest.nbytes <= MAX_PARTS * manifest.part_bytes else None

    def stored(self, name: str, used: int = 0) -> StoredFile:
        return StoredFile(name, self.nbytes, f"{self.nonce} {self.part_bytes}", used)


class RedisBackend(RemoteBackend):
    """Files under keys with a common prefix: an index, manifests, and the parts that the manifests name.

    A manifest is written last, together with the index, and the parts that it replaces are deleted in the same
    transaction. Thus each file exists completely or not at all, whoever else writes, and whenever a writer is killed.
    Parts without a manifest expire after `ABANDONED_SECONDS`, so that those of a killed writer disappear by themselves.

    The client gives each thread a connection of its own, so that any number of threads may use this.

    Args:
        address: a URL `redis://`, `rediss://`, `valkey://` or `valkeys://`, with `?prefix=` for another prefix of
            keys, and options of `redis.Redis.from_url`.

    Raises:
        OptionError: the package `redis` is not installed, or it does not accept the URL or the options.
        CachePathError: the server cannot be reached.
    """

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._redis = _package(address)
        url, self._prefix = _split(address)
        retry = self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 1)
        failures = [self._redis.exceptions.ConnectionError, self._redis.exceptions.TimeoutError]
        # Retry once immediately, as a restarted server has closed all connections. A lookup should not wait longer.
        options = {
            "socket_connect_timeout": CONNECT_SECONDS,
            "socket_timeout": ANSWER_SECONDS,
            "retry": retry,
            "retry_on_error": failures,
            **address.options,
        }
        try:
            self._client: Any = self._redis.Redis.from_url(url, **options)
            settings = self._client.get_connection_kwargs()
            self._call(self._client.ping)
        except (TypeError, ValueError) as error:
            # Without its cause and its message about the URL, since an invalid port may be a part of a password.
            seen = address.detail(error) if isinstance(error, TypeError) else "an invalid URL or option"
            raise OptionError(
                f"the URL and `storage_options` must be valid for redis.Redis.from_url(), got {seen}: see its "
                "documentation, and escape special characters in a password with urllib.parse.quote()."
            ) from None
        if settings.get("decode_responses"):
            raise OptionError("the server must return bytes, got decode_responses: leave it out.")

    def prepare(self) -> None:
        """As `StorageBackend.prepare`. The server itself deletes what writers that were killed have left."""
        self._call(self._probe)

    def _probe(self) -> None:
        key = f"{self._prefix}:probe:{secrets.token_hex(16)}"
        self._client.set(key, b"", ex=60)
        self._client.unlink(key)

    def _call(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except (self._redis.exceptions.RedisError, OSError) as error:
            raise self._address.unreachable(error) from None

    @property
    def _index(self) -> str:
        """Key of a sorted set: names by their last use, in microseconds, which a double represents exactly."""
        return f"{self._prefix}:index"

    def _key(self, name: str) -> str:
        return f"{self._prefix}:file:{name}"

    def _parts(self, manifest: _Manifest) -> list[str]:
        count = -(-manifest.nbytes // manifest.part_bytes)
        return [self._part(manifest.nonce, number) for number in range(count)]

    def _part(self, nonce: str, number: int) -> str:
        return f"{self._prefix}:part:{nonce}:{number}"

    def listed(self) -> list[StoredFile]:
        """As `RemoteBackend.listed`."""
        uses = self.last_uses()
        names = [name for name in uses if name.endswith(SUFFIX)]
        files = []
        texts = self._call(lambda: self._many([("GET", self._key(name)) for name in names]))
        for name, text in zip(names, texts, strict=True):
            manifest = _Manifest.parse(text)
            if manifest is not None:
                files.append(manifest.stored(name, uses[name]))
            elif text is None:
                # The server has evicted the manifest, if it is configured to evict keys.
                self._call(partial(self._unlist, name))
        return files

    def _many(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answers of the server to several commands that are sent together."""
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        answers: list[Any] = pipeline.execute()
        return answers

    def _unlist(self, name: str) -> None:
        def unlist(transaction: Any) -> None:
            exists = transaction.exists(self._key(name))
            transaction.multi()
            if not exists:
                transaction.zrem(self._index, name)

        self._client.transaction(unlist, self._key(name))

    def find(self, names: Sequence[str]) -> list[StoredFile | None]:
        """As `StorageBackend.find`."""
        asked = [command for name in names for command in (("GET", self._key(name)), ("ZSCORE", self._index, name))]
        answers = self._call(lambda: self._many(asked))
        files: list[StoredFile | None] = []
        for name, text, score in zip(names, answers[::2], answers[1::2], strict=True):
            manifest = _Manifest.parse(text)
            files.append(None if manifest is None else manifest.stored(name, _used(score)))
        return files

    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[bytes | UnreachableError]:
        """As `RemoteBackend.read_ranges`. A missing part has no bytes."""
        commands: list[tuple[Any, ...]] = []
        owners: list[int] = []
        for number, (file, start, end) in enumerate(ranges):
            nonce, _, size = file.version.partition(" ")
            part_bytes = int(size)
            for part in range(start // part_bytes, -(-end // part_bytes)):
                first, last = max(start - part * part_bytes, 0), min(end - part * part_bytes, part_bytes) - 1
                commands.append(("GETRANGE", self._part(nonce, part), first, last))
                owners.append(number)
        pieces: list[list[bytes]] = [[] for _ in ranges]
        for owner, piece in zip(owners, self._call(lambda: self._many(commands)), strict=True):
            pieces[owner].append(piece)
        return [b"".join(each) for each in pieces]

    def read_whole(self, files: Sequence[StoredFile]) -> list[bytes | UnreachableError | None]:
        """As `RemoteBackend.read_whole`. One request gets the manifests, and one the parts of all files."""
        found = self.find([file.name for file in files])
        there = [
            ByteRange(now, 0, min(now.nbytes, file.nbytes + 1))
            for file, now in zip(files, found, strict=True)
            if now is not None
        ]
        contents = iter(self.read_ranges(there))
        return [None if now is None else next(contents) for now in found]

    def write(self, name: str, content: Content) -> None:
        """As `StorageBackend.write`."""
        view = memoryview(content)
        manifest = _Manifest(secrets.token_hex(16), len(view), PART_BYTES)
        parts = self._parts(manifest)
        try:
            for number, part in enumerate(parts):
                piece = view[number * PART_BYTES : (number + 1) * PART_BYTES]
                self._call(partial(self._client.set, part, piece, ex=ABANDONED_SECONDS))
        except UnreachableError:
            # The parts would expire by themselves, but a server that is full needs the memory now.
            with contextlib.suppress(UnreachableError):
                self._call(lambda: self._client.unlink(*parts))
            raise
        self._call(lambda: self._commit(name, manifest))

    def _commit(self, name: str, manifest: _Manifest) -> None:
        parts = self._parts(manifest)
        text = json.dumps(asdict(manifest))

        def commit(transaction: Any) -> None:
            old = _Manifest.parse(transaction.get(self._key(name)))
            there = transaction.exists(*parts) if parts else 0
            if there != len(parts):
                raise TimeoutError(f"parts of a file expired before all of it was written, in {ABANDONED_SECONDS} s")
            transaction.multi()
            for part in parts:
                transaction.persist(part)
            transaction.set(self._key(name), text)
            transaction.zadd(self._index, _scores([name]))
            self._unlink_parts(transaction, old)

        self._client.transaction(commit, self._key(name))

    def delete(self, names: Sequence[str], used_before: int | None = None) -> None:
        """As `StorageBackend.delete`. If somebody uses or writes one of the files meanwhile, it is looked at again."""
        for name in names:
            self._call(partial(self._delete, name, used_before))

    def _delete(self, name: str, used_before: int | None) -> None:
        def delete(transaction: Any) -> None:
            old = _Manifest.parse(transaction.get(self._key(name)))
            used = _used(transaction.zscore(self._index, name))
            transaction.multi()
            if used_before is not None and used >= used_before:
                return
            transaction.unlink(self._key(name))
            transaction.zrem(self._index, name)
            self._unlink_parts(transaction, old)

        watched = [self._key(name)] if used_before is None else [self._key(name), self._index]
        self._client.transaction(delete, *watched)

    def _unlink_parts(self, transaction: Any, manifest: _Manifest | None) -> None:
        if manifest is not None and manifest.nbytes:
            transaction.unlink(*self._parts(manifest))

    def last_uses(self) -> Mapping[str, int]:
        """As `StorageBackend.last_uses`; uses by all stores count."""
        found = self._call(lambda: self._client.zrange(self._index, 0, -1, withscores=True))
        return {name.decode("utf-8", "replace"): _used(score) for name, score in found}

    def record_uses(self, names: Sequence[str]) -> None:
        """As `RemoteBackend.record_uses`."""
        if names:
            # `xx`, since a file that was deleted meanwhile must not be listed again.
            self._call(lambda: self._client.zadd(self._index, _scores(names), xx=True))


def _scores(names: Sequence[str]) -> dict[str, int]:
    return {name: used // 1000 for name, used in clock.uses(names).items()}


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
