"""A store of what prompts begin with."""

import logging
import os
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from kvlayers.caches.base import Cache
from kvlayers.errors import OptionError, PrefixError
from kvlayers.prefix.backends import place_for
from kvlayers.prefix.directory import Directory
from kvlayers.prefix.entry import put_back
from kvlayers.prefix.eviction import EvictionPolicy, LeastRecentlyUsed
from kvlayers.prefix.index import EntryIndex
from kvlayers.prefix.keys import label_of, seen_by, tokens_of
from kvlayers.prefix.lookup import Hit, Search
from kvlayers.prefix.statistics import PrefixStatistics
from kvlayers.utils.options import checked_device, checks_options
from kvlayers.utils.units import amount_of_bytes, readable_bytes

logger = logging.getLogger(__name__)


class PrefixStore:
    """Finds the longest prefix of a prompt that was computed before, token by token, and gives a fork of its cache.

    A cache that keeps every token serves all prompts that begin as it does, up to where they part. One with windows,
    sinks or recurrent states can hardly go back, so it serves those that begin with all that it has seen: insert it
    where prompts part. Threads may share a store.

    Args:
        max_bytes: of memory, for all caches that are held: 2**30, or "1GiB".
        directory: where caches go that leave memory, and are found again after a restart; made where there is none. A
            path, a URL of Redis or Valkey (`redis://`), or one of a file system that fsspec reaches (`s3://`, ...).
        policy: which one goes first, `LeastRecentlyUsed` where not given.
        directory_max_bytes: of the files, `None` for as many as the disk has. The one used longest ago goes first.
        device: where caches from files are to be, the host where not given.
        snapshot_tokens: `generate()` holds caches that cannot go back (windows, sinks, recurrent states) every so many
            tokens of a prompt, and at its end; `None` for its end alone.
        storage_options: for what reaches the URL: the file system of fsspec, or `redis.Redis.from_url`.

    Raises:
        OptionError: an option that does not exist, or a budget that is no positive number of bytes; a URL of an unknown
            scheme, or of one whose package is not installed.
        CachePathError: the directory cannot be reached, made, read or written to.

    Example:
        >>> import torch, kvlayers
        >>> store = kvlayers.PrefixStore(max_bytes=2**20)
        >>> cache = kvlayers.DynamicCache()
        >>> _ = cache.update(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), layer_idx=0)
        >>> store.insert(torch.tensor([1, 2, 3, 4, 5]), cache, model="mine")
        True
        >>> store.lookup(torch.tensor([1, 2, 3, 9]), model="mine")
        Hit(cache=DynamicCache(1 x DynamicLayer, 3 tokens, batch 1, 16.6 KiB), covered=3, reason='')
        >>> store.lookup(torch.tensor([1, 2, 3, 9]), model="mine", namespace="somebody else").cache is None
        True
    """

    @checks_options
    def __init__(
        self,
        max_bytes: int | str,
        directory: str | os.PathLike[str] | None = None,
        policy: EvictionPolicy | None = None,
        directory_max_bytes: int | str | None = None,
        device: torch.device | str | None = None,
        snapshot_tokens: int | None = 512,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        max_bytes = amount_of_bytes(max_bytes, "max_bytes")
        _check_count("max_bytes", max_bytes, "bytes")
        if snapshot_tokens is not None:
            _check_count("snapshot_tokens", snapshot_tokens, "tokens")
        if directory_max_bytes is not None:
            directory_max_bytes = amount_of_bytes(directory_max_bytes, "directory_max_bytes")
            _check_count("directory_max_bytes", directory_max_bytes, "bytes")
            if directory is None:
                raise OptionError("expected a directory beside directory_max_bytes, but saw none.")
        if storage_options is not None and directory is None:
            raise OptionError("expected a directory beside storage_options, but saw none.")
        if device is not None:
            # Now, as a file would otherwise be taken for damaged later on.
            checked_device(device)
        self.device = device
        self.snapshot_tokens = snapshot_tokens
        self._lock = threading.Lock()
        self._hits = self._misses = self._covered = self._asked = self._bypassed = self._refused = 0
        files = None if directory is None else Directory(place_for(directory, storage_options))
        self._holdings = EntryIndex(max_bytes, policy or LeastRecentlyUsed(), files, directory_max_bytes)

    def insert(
        self,
        input_ids: Tensor,
        cache: Cache,
        config: object | None = None,
        namespace: str = "",
        model: str | None = None,
    ) -> bool:
        """Hold a fork of a cache for the tokens that it has seen.

        What the caller does to `cache` afterwards is not seen here. Entries that the new one can be put back to are
        dropped for it, unless they are pinned.

        Args:
            input_ids: ids of the tokens, int64 `[tokens]` or `[1, tokens]`; there may be more than `cache` has seen.
            cache: a cache of one sequence.
            config: config of the model, or the model. Models whose configs differ in what states depend on share
                nothing.
            namespace: whose it is: another one finds nothing of it.
            model: what the model is called, beside its config or instead of it: fine-tunes have equal configs, so
                pass `kvlayers.weights_id(model)` where several are served.

        Returns:
            Whether it is held: not where an entry in memory stands for these tokens already.

        Raises:
            OptionError: ids of another rank or dtype, or none; no cache of kvlayers; no model.
            StateMismatchError: the cache has several sequences, has seen no tokens, or more than `input_ids` has.
            CapacityError: it is larger than the budget, or than what is left of it beside pinned entries.
        """
        ids, label = tokens_of(input_ids), label_of(config, model, namespace)
        cache, length = seen_by(cache, ids)
        with self._lock:
            # A fork, before it is known whether there is room: other threads may go on with the cache.
            return self._holdings.put(label, ids[:length].copy(), put_back(cache, length))

    def lookup(
        self, input_ids: Tensor, config: object | None = None, namespace: str = "", model: str | None = None
    ) -> Hit:
        """A cache that has seen as many of the first tokens as can be had, but at least one less than all.

        Args:
            input_ids: ids of the prompt, int64 `[tokens]` or `[1, tokens]`.
            config: as for `insert`.
            namespace: as for `insert`.
            model: as for `insert`.

        Raises:
            OptionError: ids of another rank or dtype, or none; no model.
        """
        ids, label = tokens_of(input_ids), label_of(config, model, namespace)
        with self._lock:
            hit = Search(self._holdings, label, ids, config, self.device).run()
            self._hits += hit.cache is not None
            self._misses += hit.cache is None
            self._covered += hit.covered
            self._asked += len(ids)
            return hit

    def pin(
        self, input_ids: Tensor, config: object | None = None, namespace: str = "", model: str | None = None
    ) -> None:
        """Keep what is held for exactly these tokens where it is, until `unpin` was called as often.

        Where they are part of a longer entry that can be put back to them, that one is kept.

        Raises:
            PrefixError: nothing is held for them.
            OptionError: as `lookup`.
        """
        self._pin(input_ids, label_of(config, model, namespace), 1)

    def unpin(
        self, input_ids: Tensor, config: object | None = None, namespace: str = "", model: str | None = None
    ) -> None:
        """Take back one `pin`.

        Raises:
            PrefixError: what is held for them is not pinned.
            OptionError: as `lookup`.
        """
        self._pin(input_ids, label_of(config, model, namespace), -1)

    def _pin(self, input_ids: Tensor, label: str, change: int) -> None:
        ids = tokens_of(input_ids)
        with self._lock:
            tree = self._holdings.tree(label)
            exact = tree.get(ids)
            entry = exact if exact is not None else self._holdings.standing_for(label, ids)
            if entry is None:
                raise PrefixError(f"expected an entry for these {len(ids)} tokens, but there is none: insert() one.")
            if entry.pins + change < 0:
                raise PrefixError(
                    f"expected a pinned entry for these {len(ids)} tokens, but it is not pinned: pin() it."
                )
            entry.pins += change

    def evict(self, nbytes: int | str | None = None) -> int:
        """Free at least `nbytes` bytes of memory, all where not given, as far as entries are not pinned.

        Returns:
            Bytes that were freed. With a directory, what they held is there.
        """
        if nbytes is not None:
            nbytes = amount_of_bytes(nbytes, "nbytes")
            _check_count("nbytes", nbytes, "bytes")
        with self._lock:
            return self._holdings.evict(nbytes)

    def flush(self) -> None:
        """Write all that is in memory to the directory as well, to be found after a restart.

        Raises:
            OptionError: the store has no directory.
        """
        self._check_directory()
        with self._lock:
            self._holdings.flush()

    def refresh(self) -> int:
        """Read the directory again: find what other processes have written there, and forget what they have deleted.

        Returns:
            Entries that were added.

        Raises:
            OptionError: the store has no directory.
            CachePathError: it cannot be reached or read now; nothing is changed.
        """
        self._check_directory()
        with self._lock:
            return self._holdings.refresh()

    def _check_directory(self) -> None:
        if self._holdings.directory is None:
            raise OptionError("expected a store with a directory, but saw none: make it with directory=....")

    def clear(self) -> None:
        """Forget all entries, pinned or not, and delete their files. Statistics go on."""
        with self._lock:
            self._holdings.clear()

    @property
    def statistics(self) -> PrefixStatistics:
        """What is held now, and what was done since the store was made."""
        with self._lock:
            held = self._holdings
            return PrefixStatistics(
                entries=len(held),
                bytes=held.nbytes,
                file_bytes=held.file_bytes,
                hits=self._hits,
                misses=self._misses,
                tokens_covered=self._covered,
                tokens_asked=self._asked,
                evictions=held.evictions,
                spilled=held.spilled,
                damaged=0 if held.directory is None else held.directory.damaged,
                failed_writes=held.failed_writes,
                failed_reads=0 if held.directory is None else held.directory.failed_reads,
                bypassed=self._bypassed,
                refused=self._refused,
            )

    def note_bypassed(self, reason: str) -> None:
        """Count a call of `generate()` that could not go by the store, and say so in the log."""
        with self._lock:
            self._bypassed += 1
        logger.info("A call of generate() did not go by its prefix store: %s.", reason)

    def note_refused(self, reason: str) -> None:
        """Count a cache that there was no room for, and say so in the log."""
        with self._lock:
            self._refused += 1
        logger.info("A prefix store did not hold what generate() computed: %s", reason)

    def __len__(self) -> int:
        """Entries, in memory and in files."""
        with self._lock:
            return len(self._holdings)

    def __repr__(self) -> str:
        now = self.statistics
        held, most = readable_bytes(now.bytes), readable_bytes(self._holdings.max_bytes)
        return f"PrefixStore({now.entries} entries, {held} of {most})"


def _check_count(name: str, value: object, of: str) -> None:
    """Raise `OptionError` where `value` is no positive whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(f"expected {name} to be a positive number of {of}, but saw {value!r}.")
