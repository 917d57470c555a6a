"""The prefix store: caches of prompts, to be found by the prefix that a new prompt shares with them."""

import dataclasses
import logging
import math
import os
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.core.cache import Cache
from kvlayers.errors import OptionError, PrefixError
from kvlayers.persistence.fingerprint import weights_id
from kvlayers.prefix.backends import backend_for
from kvlayers.prefix.directory import Directory
from kvlayers.prefix.entry import EvictionPolicy, LeastRecentlyUsed
from kvlayers.prefix.index import EntryIndex
from kvlayers.prefix.keys import Tokens, checked_cache, label_of, tokens_of
from kvlayers.prefix.lookup import IN_SESSION, EntryAccess, Hit
from kvlayers.prefix.report import PrefixStatistics, PrefixTree, tree_of
from kvlayers.prefix.write_queue import WriteQueue
from kvlayers.utils import late
from kvlayers.utils.options import checked_device, checks_options
from kvlayers.utils.units import amount_of_bytes, readable_bytes

logger = logging.getLogger(__name__)

MOST_RECENT = 16
"""Look-ups that found less than they might have, which `explain` tells."""


class PrefixStore:
    """Stores caches by the tokens that they have seen, and finds the longest stored prefix of a prompt.

    A cache that keeps every token serves all prompts that share a prefix with it, up to where they diverge. A cache
    with windows, sinks or recurrent states can hardly be rolled back, so it serves prompts that start with all that it
    has seen: insert it where prompts diverge.

    A store is thread-safe. With a directory, a thread of the store writes what is evicted. The store is a context
    manager: it is closed at the end of the block, so that all its entries are in the directory then.

    Args:
        max_bytes: bytes of memory for all caches: 2**30, or "1GiB". The default is the same on every machine, as caches
            are held on the device of their model, which the store does not know. It is 8k tokens of Llama 3.1 8B in
            bfloat16, and 32k of Llama 3.2 1B.
        directory: where evicted caches are written, to be found again, even after a restart. A path, a URL of Redis or
            Valkey (`redis://`), or a URL of any file system that fsspec supports (`s3://`, ...). It is created if it
            does not exist. Default: evicted caches are dropped.
        policy: decides which entry is evicted first. Default: `LeastRecentlyUsed`.
        directory_max_bytes: bytes of all files; the least recently used file is deleted first. Default: no limit.
        device: device for caches from files. Default: the host.
        snapshot_tokens: during the prefill, `generate()` inserts caches that cannot be rolled back (windows, sinks,
            recurrent states) at most this many tokens apart, and at the end of the prompt. `None`: at the end only.
        storage_options: options for the file system of fsspec, or for `redis.Redis.from_url`.
        write_wait_seconds: how long `insert` waits at most until evicted entries are in the directory, if it needs
            their memory. After that, the entry that has waited longest is dropped, and counted in
            `statistics.dropped_writes`.
        read_wait_seconds: how long `lookup` waits at most for files. After that, it uses what has arrived.
        on_event: is called with a `StoreEvent` for each prefix that the store has now or has no longer, in a thread of
            its own, which holds no lock.

    Raises:
        OptionError: an option does not exist, a budget is not a positive number of bytes, a number of seconds is
            negative, or a URL has a scheme that is unknown or whose package is not installed.
        CachePathError: the directory cannot be reached, created, read or written to.

    Example:
        >>> import torch, kvlayers
        >>> store = kvlayers.PrefixStore(max_bytes=2**20)
        >>> cache = kvlayers.DynamicCache()
        >>> _ = cache.update(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), layer_idx=0)
        >>> store.insert(torch.tensor([1, 2, 3, 4, 5]), cache, model="mine")
        True
        >>> store.lookup(torch.tensor([1, 2, 3, 9]), model="mine")
        Hit(cache=DynamicCache(1 x DynamicLayer, 3 tokens, batch 1, 1.25 KiB), covered=3, reason='', known=3)
        >>> store.lookup(torch.tensor([1, 2, 3, 9]), model="mine", namespace="somebody else").cache is None
        True
    """

    @checks_options
    def __init__(
        self,
        max_bytes: int | str = "1GiB",
        directory: str | os.PathLike[str] | None = None,
        policy: EvictionPolicy | None = None,
        directory_max_bytes: int | str | None = None,
        device: torch.device | str | None = None,
        snapshot_tokens: int | None = 1024,
        storage_options: Mapping[str, object] | None = None,
        write_wait_seconds: float = 1.0,
        read_wait_seconds: float = 30.0,
        on_event: Callable[[Any], object] | None = None,
    ) -> None:
        max_bytes = _positive("max_bytes", amount_of_bytes(max_bytes, "max_bytes"), "bytes")
        if snapshot_tokens is not None:
            _positive("snapshot_tokens", snapshot_tokens, "tokens")
        if directory_max_bytes is not None:
            directory_max_bytes = _positive(
                "directory_max_bytes", amount_of_bytes(directory_max_bytes, "directory_max_bytes"), "bytes"
            )
            if directory is None:
                raise OptionError("`directory_max_bytes` needs a `directory`, got none: pass both.")
        if policy is not None and (isinstance(policy, type) or not isinstance(policy, EvictionPolicy)):
            raise OptionError(
                f"`policy` must have a method `rank`, got {policy!r}: pass, for example, LeastRecentlyUsed()."
            )
        if storage_options is not None and directory is None:
            raise OptionError("`storage_options` need a `directory`, got none: pass both.")
        for name, seconds in (("write_wait_seconds", write_wait_seconds), ("read_wait_seconds", read_wait_seconds)):
            if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds < math.inf:
                raise OptionError(f"`{name}` must be a number of seconds, 0 or more, got {seconds!r}: pass one.")
        if device is not None:
            # Checked now, since files would otherwise seem damaged later.
            checked_device(device)
        self.device = device
        self.snapshot_tokens = snapshot_tokens
        self.write_wait_seconds, self.read_wait_seconds = write_wait_seconds, read_wait_seconds
        # Guards all that follows. Nobody reads or writes a file while holding it.
        self._lock = threading.Lock()
        changed = threading.Condition(self._lock)
        self._counts: Counter[str] = Counter()
        self._bypasses: Counter[str] = Counter()
        self._index = EntryIndex(max_bytes, policy or LeastRecentlyUsed(), directory is not None)
        if on_event is not None:
            self._index.note = late.function("listener")(on_event, self._index, self._lock).note
        self._recent: deque[tuple[str, Tokens, Hit]] = deque(maxlen=MOST_RECENT)
        self._writes: WriteQueue | None = None
        if directory is not None:
            backend = backend_for(directory, storage_options)
            backend.prepare()
            self._writes = WriteQueue(self._index, Directory(backend), directory_max_bytes, changed)
            self.refresh()
        self._own_ids: WeakKeyDictionary[torch.nn.Module, str] | None = None
        self._access = EntryAccess(self._index, self._lock, changed, self._writes)

    # Without `checks_options`, whose reference to the cache would keep the store from taking over its memory.
    def insert(
        self,
        input_ids: Tensor,
        cache: Cache,
        config: object | None = None,
        namespace: str = "",
        model: str | None = None,
    ) -> bool:
        """Insert a fork of a cache for the tokens that it has seen.

        Later changes to `cache` do not affect the store. Tokens that the store holds already are not held twice.
        Entries that the new entry can be rolled back to are dropped, unless they are pinned. If there is no room, other
        entries are evicted, which takes `write_wait_seconds` at most.

        Args:
            input_ids: ids of the tokens, int64 `[tokens]` or `[1, tokens]`. There may be more than `cache` has seen.
            cache: a cache of one sequence.
            config: config of the model, or the model. Models whose configs differ in anything that affects states
                share no entries.
            namespace: namespace of the entry. Lookups in other namespaces do not find it.
            model: name of the model, besides its config or instead of it. Fine-tuned models have the same config, so
                pass `kvlayers.weights_id(model)` if you serve several of them.

        Returns:
            Whether it was inserted: `False` if an entry in memory serves these tokens already.

        Raises:
            OptionError: `input_ids` has another rank or dtype, or is empty; `cache` is not a cache of kvlayers; or
                neither `config` nor `model` is given.
            StateMismatchError: the cache has several sequences, is empty, has seen more tokens than `input_ids` has, or
                was concatenated or moved, so that some of its states are not those of its text.
            CapacityError: it is larger than the budget, or than what is left of it by pinned entries and by an entry
                that is being written.
        """
        ids, label = tokens_of(input_ids), label_of(config, model, namespace)
        cache, length = checked_cache(cache, ids)
        ids, session = ids[:length].copy(), next(reversed(IN_SESSION.get()), None)
        with self._lock:
            is_new = not self._index.use_covering(label, ids)
        if is_new:
            # Forked before it is clear whether there is room, since other threads may continue to use the cache.
            cache, pins = cache.fork(), () if session is None else session.pins_in(self._access)
            is_new = self._access.insert(label, ids, cache, self.write_wait_seconds, pins)
        if session is not None:
            with self._lock:
                session.add(self._access, label, ids)
        return is_new

    @checks_options
    def lookup(
        self,
        input_ids: Tensor,
        config: object | None = None,
        namespace: str = "",
        model: str | None = None,
        leave: int = 1,
    ) -> Hit:
        """Find a cache that has seen as many of the first tokens as possible.

        Args:
            input_ids: ids of the prompt, int64 `[tokens]` or `[1, tokens]`.
            config: as for `insert`.
            namespace: as for `insert`.
            model: as for `insert`.
            leave: how many of the last tokens are not looked for, and so are left to compute: 1 for a prompt, as its
                last logits are needed, and 0 for states alone.

        Returns:
            The cache, which belongs to the caller, and how many tokens it has seen.

        Raises:
            OptionError: `input_ids` has another rank or dtype, or is empty; neither `config` nor `model` is given; or
                `leave` is not from 0 to the number of tokens.
        """
        ids, label = tokens_of(input_ids), label_of(config, model, namespace)
        if leave not in range(len(ids) + 1):
            raise OptionError(
                f"`leave` must be from 0 to the number of tokens, {len(ids)}, got {leave!r}: pass 1 to have one "
                "token left to compute."
            )
        hit = self._access.find(label, ids[: len(ids) - leave], config, self.device, self.read_wait_seconds)
        with self._lock:
            self._counts.update({"misses" if hit.cache is None else "hits": 1}, covered=hit.covered, asked=len(ids))
            if hit.reason:
                self._recent.append((label, ids, dataclasses.replace(hit, cache=None)))
        return hit

    @checks_options
    def pin(
        self,
        input_ids: Tensor,
        config: object | None = None,
        namespace: str = "",
        model: str | None = None,
        *,
        ttl: float | None = None,
        priority: float | None = None,
    ) -> None:
        """Do not evict these tokens, until `unpin` has been called as often as `pin`.

        The entry for exactly these tokens is pinned. If a longer entry in memory can be rolled back to them, they get
        an entry first, and what the longer one has beyond them may be evicted.

        Args:
            input_ids: as for `lookup`.
            config: as for `lookup`.
            namespace: as for `lookup`.
            model: as for `lookup`.
            ttl: seconds after which this pin ends by itself, whatever happens to the clock. Default: it does not.
            priority: a number. What has less leaves before, and what is not pinned has 0; so tokens of a priority
                leave memory in the end, if there is no room, and below 0 they leave first. Default: they never leave.

        Raises:
            PrefixError: there is no such entry.
            CapacityError: the longer entry shares no memory (static and offloaded caches), and there is no room for a
                copy of it.
            OptionError: as `lookup`; or `ttl` or `priority` is no such number.
        """
        ids, label = tokens_of(input_ids), label_of(config, model, namespace)
        if not self._access.pin(label, ids, late.function("pin")(ttl, priority)):
            raise _no_entry(ids)

    @checks_options
    def unpin(
        self, input_ids: Tensor, config: object | None = None, namespace: str = "", model: str | None = None
    ) -> None:
        """Undo the newest `pin`.

        Raises:
            PrefixError: there is no such entry, or it is not pinned any more.
            OptionError: as `lookup`.
        """
        label, ids = label_of(config, model, namespace), tokens_of(input_ids)
        with self._lock:
            self._index.end_pins()
            entry = self._index.entries.get(label, ids)
            if entry is None:
                raise _no_entry(ids)
            if not entry.pins:
                raise PrefixError(
                    f"the entry for these {len(ids)} tokens is not pinned: call unpin() once for each pin()."
                )
            self._index.set_pins(entry, entry.pins[:-1])

    @checks_options
    def session(self, name: str, namespace: str = "", ttl: float = 3600.0) -> Any:
        """The `Session` of a name, by which one conversation is kept, and taken to another host.

        Args:
            name: its name, any text. Equal names in different namespaces are different sessions.
            namespace: the namespace of the conversation.
            ttl: seconds without use after which the session expires, and its name is free.

        Raises:
            OptionError: `name` is empty or no text, `namespace` is no text, or `ttl` is no positive number.

        Example:
            >>> store = PrefixStore("1MiB")
            >>> store.session("../user-17").tokens
            0
        """
        return late.function("session")(self._access, name, namespace, ttl)

    @checks_options
    def import_session(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        config: object | None = None,
        namespace: str = "",
    ) -> Any:
        """Insert what `Session.export` has written, and return its session.

        It is found by look-ups for the model that it was computed with, and by no others.

        Args:
            path: the file.
            name: name of the session here. Default: the name that it had.
            config: as for `lookup`.
            namespace: its namespace, which must be the one that it had.

        Raises:
            CachePathError: the file does not exist or cannot be read.
            CacheFileError: it is damaged, or holds no session.
            PrefixError: it is of another namespace.
            CapacityError: there is no room for all of it. What was inserted before stays.
            OptionError: as `session`, or `config` is needed.
        """
        access, wait_seconds = self._access, self.write_wait_seconds
        return late.function("import of a session")(access, path, name, config, namespace, self.device, wait_seconds)

    @checks_options
    def evict(self, nbytes: int | str | None = None) -> int:
        """Evict entries until at least `nbytes` bytes of memory are free, or all that are not pinned.

        With a directory, this returns when the evicted entries are in it.

        Args:
            nbytes: bytes to free: 2**20, or "1MiB". Default: all.

        Returns:
            Number of bytes freed.
        """
        if nbytes is not None:
            nbytes = _positive("nbytes", amount_of_bytes(nbytes, "nbytes"), "bytes")
        with self._lock, self._index.counted():
            before = self._index.memory.nbytes
            leaving = self._index.evict(0 if nbytes is None else before - nbytes)
            if self._writes is not None:
                self._writes.write(leaving)
                self._writes.wait()
            return max(before - self._index.memory.nbytes, 0)

    def flush(self) -> bool:
        """Write every entry in memory to the directory as well, to be found after a restart.

        This returns when all that is in memory now is written. Other threads may use the store meanwhile.

        Returns:
            Whether everything was written. If not, `statistics.failed_writes` or `statistics.dropped_writes` has grown.

        Raises:
            OptionError: the store has no directory.
        """
        writes = self._need_directory()
        with self._lock:
            lost = writes.lost
            writes.write(self._index.entries)
            writes.wait()
            return writes.lost == lost

    def close(self) -> bool:
        """Write every entry in memory to the directory, if the store has one.

        A store is closed at the end of a `with` block, and at the end of the process. It may be closed several times.

        Returns:
            As `flush`; `True` without a directory.
        """
        return True if self._writes is None else self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def refresh(self) -> int:
        """Read the directory again: add what other processes have written, and drop what they have deleted.

        Other threads may use the store meanwhile.

        Returns:
            Number of entries that were added.

        Raises:
            OptionError: the store has no directory.
            CachePathError: the directory cannot be reached or read now; nothing is changed.
        """
        writes = self._need_directory()
        with self._lock:
            known = {entry.path for entry in self._index.entries if entry.path is not None}
        changes = writes.directory.changes(known)
        with self._lock, self._index.counted():
            added = self._index.update(changes.added, changes.gone)
            writes.wait()
        writes.tidy()
        return added

    def _need_directory(self) -> WriteQueue:
        if self._writes is None:
            raise OptionError("this needs a store with a directory: make it with directory=....")
        return self._writes

    def clear(self) -> None:
        """Remove all entries, pinned or not, and delete their files. Statistics continue."""
        with self._lock, self._index.counted():
            paths = self._index.clear()
            if self._writes is not None:
                # Entries that wait to be written are in the index no more, and so are not written.
                self._writes.wait()
        if self._writes is not None and paths:
            self._writes.delete(paths)

    def forget_weights(self) -> None:
        """Remove all entries, since weights have changed, and take weights as unchanged until the next call of this.

        Without it, `generate()` looks at the weights in each call, and reads every byte of them after a change. In a
        training loop, where they change at each step, say so instead: from the first call on, models are told apart as
        objects, and their weights are not looked at. Active adapters and autocast still count.

        Example:
            >>> import torch, kvlayers
            >>> store, model = kvlayers.PrefixStore(max_bytes=2**20), torch.nn.Linear(2, 2)
            >>> store.forget_weights()
            >>> before = store.weights_id(model)
            >>> _ = torch.nn.init.zeros_(model.weight)
            >>> store.weights_id(model) == before
            True
            >>> store.forget_weights()
            >>> store.weights_id(model) == before
            False
        """
        with self._lock:
            # A call that runs now inserts what it computes under an id that nobody asks for again.
            self._own_ids = WeakKeyDictionary()
        self.clear()

    def weights_id(self, model: torch.nn.Module) -> str:
        """What tells the weights of a model from others here: `kvlayers.weights_id`, or see `forget_weights`.

        Args:
            model: the model.

        Raises:
            ConfigError: the weights are not in memory, and `forget_weights` was never called.
        """
        with self._lock:
            if self._own_ids is not None:
                return self._own_ids.setdefault(model, f"object:{uuid.uuid4()}")
        return weights_id(model)

    def tree(self) -> PrefixTree:
        """What is held, as a tree of tokens, for people: `print(store.tree())`."""
        with self._lock:
            chains = {
                entry: self._writes.directory.chain(entry.path) if self._writes and entry.path else []
                for entry in self._index.entries
            }
            return tree_of({entry: {node.name: node.nbytes for node in chain} for entry, chain in chains.items()})

    @property
    def statistics(self) -> PrefixStatistics:
        """What the store holds now, and what it has done since it was made."""
        with self._lock:
            index, writes = self._index, self._writes
            return PrefixStatistics(
                entries=len(index.entries),
                bytes=index.memory.nbytes,
                file_bytes=0 if writes is None else writes.directory.nbytes,
                hits=self._counts["hits"],
                misses=self._counts["misses"],
                tokens_covered=self._counts["covered"],
                tokens_asked=self._counts["asked"],
                evictions=index.evictions,
                spilled=0 if writes is None else writes.spilled,
                damaged=0 if writes is None else writes.directory.damaged_files,
                failed_writes=0 if writes is None else writes.failed_writes,
                failed_reads=0 if writes is None else writes.directory.failed_reads,
                bypassed=self._bypasses.total(),
                refused=self._counts["refused"],
                dropped_writes=0 if writes is None else writes.dropped_writes,
                pending_writes=0 if writes is None else len(writes.jobs),
                tokens=index.in_memory.tokens,
                shared_bytes=index.memory.shared_bytes,
                bypasses=dict(self._bypasses),
            )

    def explain(self) -> str:
        """How much of the prompts the store had, and why calls and the newest look-ups found no more: text for people.

        Example:
            >>> store = PrefixStore("1MiB")
            >>> store.record_bypass("it is given a cache")
            >>> print(store.explain())
            0 of 0 tokens that were asked for were stored
            1 call went on without it: it is given a cache
        """
        return str(late.function("explain")(self.statistics, self._recent, self._index, self._lock))

    def record_bypass(self, reason: str) -> None:
        """Count a call of `generate()` that could not use the store, and log the reason if it is a new one."""
        with self._lock:
            self._bypasses[reason] += 1
            is_new = self._bypasses[reason] == 1
        if is_new:
            logger.warning("A call of generate() did not use its prefix store: %s.", reason)

    def record_refusal(self, reason: str) -> None:
        """Count a cache for which there was no room, and log the reason."""
        with self._lock:
            self._counts["refused"] += 1
        logger.info("A prefix store did not insert what generate() computed: %s", reason)

    def __len__(self) -> int:
        """Number of entries, in memory and in files."""
        with self._lock:
            return len(self._index.entries)

    def __bool__(self) -> bool:
        """True, also without entries: whether there is a store is what `if store` asks."""
        return True

    def __repr__(self) -> str:
        now = self.statistics
        used, most = readable_bytes(now.bytes), readable_bytes(self._index.max_bytes)
        return f"PrefixStore({now.entries} entries, {used} of {most})"


def _no_entry(ids: Tokens) -> PrefixError:
    return PrefixError(f"the store has no entry for these {len(ids)} tokens: insert() one first.")


def _positive(name: str, value: int, unit: str) -> int:
    """Raise `OptionError` unless `value` is a positive whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(f"`{name}` must be a positive number of {unit}, got {value!r:.60}: pass a whole number.")
    return value
