"""Lookup of the longest prefix of a prompt that a stored cache can be rolled back to."""

import contextvars
import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field

import torch

from kvlayers.caches.base import Cache
from kvlayers.errors import CacheFileError, CachePathError
from kvlayers.prefix.backends import UnreachableError
from kvlayers.prefix.directory import Directory
from kvlayers.prefix.entry import PrefixEntry, fork_at, restorable_length
from kvlayers.prefix.entry_loader import NeedsConfigError
from kvlayers.prefix.index import EntryIndex
from kvlayers.prefix.radix_tree import PrefixMatch, Tokens

MAX_FILES = 4
"""Files that one lookup tries at most: only loading tells whether a window can be rolled back far enough."""


@dataclass(frozen=True)
class Hit:
    """The result of a lookup.

    Attributes:
        cache: a cache that has seen the first `covered` tokens, and belongs to the caller; `None` if nothing was found.
        covered: number of tokens of the prompt that need not be computed; at least one less than the prompt has.
        reason: why it is not more; empty if only one token is left.
    """

    cache: Cache | None = None
    covered: int = 0
    reason: str = ""


@dataclass(frozen=True)
class FileCandidate:
    """An entry in a file that may serve a prompt. It does not change, whatever becomes of the entry.

    Attributes:
        entry: the entry.
        label: model and namespace.
        ids: its tokens.
        path: path of its file.
        shared: number of tokens that it shares with the prompt and that are to be found.
    """

    entry: PrefixEntry
    label: str
    ids: Tokens
    path: str
    shared: int

    @property
    def is_whole(self) -> bool:
        """Whether all of its tokens are needed. Such an entry certainly works."""
        return len(self.ids) <= self.shared


@dataclass(eq=False)
class Found:
    """The longest prefix that was found so far.

    Attributes:
        cache: a cache that has seen it; `None` if nothing was found.
        entry: the entry that it is from.
        is_whole: whether the cache was loaded from a file with all tokens of the entry.
        damaged: entries whose files are gone or damaged.
        notes: why files did not serve.
    """

    cache: Cache | None = None
    entry: PrefixEntry | None = None
    is_whole: bool = False
    damaged: list[FileCandidate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def covered(self) -> int:
        """Number of tokens."""
        return 0 if self.cache is None else self.cache.get_seq_length()

    def note(self, text: str) -> None:
        """Add a reason, once."""
        if text not in self.notes:
            self.notes.append(text)


@dataclass(eq=False)
class Search:
    """One lookup.

    Args:
        label: model and namespace, as returned by `keys.label_of`.
        ids: the prompt.

    Attributes:
        found: the longest prefix.
        files: what to load, the best first: each may serve more tokens than what memory has.
    """

    label: str
    ids: Tokens
    found: Found = field(default_factory=Found)
    files: list[FileCandidate] = field(default_factory=list)
    _shared: int = 0
    _entries: int = 0

    def choose(self, index: EntryIndex) -> None:
        """Find the longest prefix in memory, and the files that may have a longer one."""
        most_tokens, tree = len(self.ids) - 1, index.tree(self.label)
        self.found, self.files, self._shared, self._entries = Found(), [], 0, len(tree)
        if not most_tokens or not self._entries:
            return
        files: list[FileCandidate] = []
        groups = itertools.groupby(tree.nearest(self.ids), key=lambda match: min(match.tokens, most_tokens))
        for bound, group in groups:
            self._shared = max(self._shared, bound)
            if bound <= self.found.covered:
                break
            # The shortest first, as a window that has moved less is more likely to be rolled back far enough.
            ordered = sorted(group, key=lambda match: match.value.length)
            self._choose_in_memory(ordered, bound)
            if self.found.covered < bound:
                files += [
                    FileCandidate(match.value, self.label, match.value.ids, match.value.path, bound)
                    for match in ordered
                    if match.value.cache is None and match.value.path is not None
                ]
            if sum(file.is_whole for file in files) >= MAX_FILES:
                # More would never be read, unless all of these are damaged.
                break
        self.files = [file for file in files if file.shared > self.found.covered]

    def _choose_in_memory(self, group: list[PrefixMatch[PrefixEntry]], bound: int) -> None:
        for match in group:
            covered = self.found.covered
            if covered >= bound:
                return
            cache = match.value.cache
            if cache is not None and (target := restorable_length(cache, bound)) > covered:
                self.found.cache, self.found.entry = fork_at(cache, target), match.value

    def load(
        self, directory: Directory, config: object | None, device: torch.device | str | None, deadline: float
    ) -> None:
        """Load from files until nothing longer can be found, or until `deadline`, as `time.monotonic()` counts."""
        # What arrives late is used as far as it has arrived, and this takes a moment.
        last_call = deadline - min((deadline - time.monotonic()) / 10, 0.5)
        result: Future[Found] = Future()

        def load() -> None:
            try:
                result.set_result(_loaded(self.files, self.found, directory, config, device, last_call))
            except BaseException as error:
                result.set_exception(error)

        # In a thread, since nobody knows how long a file system takes to answer.
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(load,), name="kvlayers-prefix-reader", daemon=True).start()
        try:
            self.found = result.result(max(deadline - time.monotonic(), 0.0))
        except FutureTimeout:
            directory.reports.unreachable(UnreachableError(f"{self.files[0].path} was not read in time."))
            self.found.note("a file could not be reached in time")

    def hit(self) -> Hit:
        """The longest prefix that was found. It belongs to the caller."""
        found, most_tokens = self.found, len(self.ids) - 1
        if found.cache is None or found.entry is None:
            return Hit(reason=self._reason(0, most_tokens, ends=False))
        ends = found.entry.length == found.covered
        return Hit(found.cache, found.covered, self._reason(found.covered, most_tokens, ends))

    def _reason(self, covered: int, most_tokens: int, ends: bool) -> str:
        if covered == most_tokens:
            return "" if most_tokens else "the prompt is a single token, which must be computed"
        notes = self.found.notes
        if not self._entries:
            reason = "nothing is stored for this model and namespace"
        elif not self._shared:
            reason = "no stored sequence starts with these tokens"
        elif covered < self._shared and notes:
            reason = f"{self._shared} tokens are stored, but only {covered} of them can be used now"
        elif covered < self._shared:
            reason = (
                f"{self._shared} tokens are stored, but windows and recurrent states can be rolled back to {covered} "
                "of them only: insert a cache where prompts diverge"
            )
        else:
            reason = f"the stored sequence {'ends' if ends else 'diverges'} after {covered}"
        return "; ".join([reason, *notes])


def _loaded(
    files: Sequence[FileCandidate],
    in_memory: Found,
    directory: Directory,
    config: object | None,
    device: torch.device | str | None,
    deadline: float,
) -> Found:
    """The longest prefix in memory or in one of these files."""
    found, tried = Found(in_memory.cache, in_memory.entry), 0
    for file in files:
        if file.shared <= found.covered:
            break
        if tried >= MAX_FILES and not file.is_whole:
            found.note(f"a lookup tries no more than {MAX_FILES} files")
            continue
        tried += 1
        try:
            cache = directory.load(file, file.shared, config, device, deadline)
        except NeedsConfigError:
            found.note("a file needs config=model.config to be loaded")
        except UnreachableError as error:
            directory.reports.unreachable(error)
            found.note("a file could not be reached")
            # Do not wait for the others.
            break
        except CachePathError:
            found.damaged.append(file)
        except CacheFileError as error:
            directory.reports.damaged(file.path, error)
            found.damaged.append(file)
            found.note("a damaged file was skipped")
        else:
            length = 0 if cache is None else cache.get_seq_length()
            if cache is not None and cache.keeps_every_token and length < min(file.shared, len(file.ids)):
                found.note("part of a file was damaged, missing or late")
            if length > found.covered:
                found.cache, found.entry, found.is_whole = cache, file.entry, length == len(file.ids)
    return found
