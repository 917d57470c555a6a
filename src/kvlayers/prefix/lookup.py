"""Lookup of the longest prefix of a prompt that a stored cache can be rolled back to."""

import itertools
from dataclasses import dataclass, field

import torch

from kvlayers.caches.base import Cache
from kvlayers.errors import CacheFileError, CachePathError
from kvlayers.prefix.backends import UnreachableError
from kvlayers.prefix.directory import Directory, NeedsConfigError
from kvlayers.prefix.entry import PrefixEntry, fork_at, restorable_length
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
class Search:
    """One lookup: `choose` and `hit` need the lock of the store, `load` reads files without it.

    Args:
        label: model and namespace, as returned by `keys.label_of`.
        ids: the prompt.

    Attributes:
        files: what to load, the best first: each may serve more tokens than what memory has.
        loaded: an entry that was loaded as a whole, and its cache.
        damaged: entries whose files are gone or damaged.
    """

    label: str
    ids: Tokens
    files: list[FileCandidate] = field(default_factory=list)
    loaded: tuple[PrefixEntry, Cache] | None = None
    damaged: list[FileCandidate] = field(default_factory=list)
    _best: Cache | None = None
    _entry: PrefixEntry | None = None
    _shared: int = 0
    _entries: int = 0
    _notes: list[str] = field(default_factory=list)

    @property
    def _covered(self) -> int:
        return 0 if self._best is None else self._best.get_seq_length()

    def choose(self, index: EntryIndex) -> None:
        """Find the longest prefix in memory, and the files that may have a longer one."""
        most_tokens, tree = len(self.ids) - 1, index.tree(self.label)
        self._best, self._entry, self._shared, self._entries, self.files = None, None, 0, len(tree), []
        if not most_tokens or not self._entries:
            return
        files: list[FileCandidate] = []
        groups = itertools.groupby(tree.nearest(self.ids), key=lambda found: min(found.tokens, most_tokens))
        for bound, group in groups:
            self._shared = max(self._shared, bound)
            if bound <= self._covered:
                break
            # The shortest first, as a window that has moved less is more likely to be rolled back far enough.
            ordered = sorted(group, key=lambda found: found.value.length)
            self._choose_in_memory(ordered, bound)
            if self._covered < bound:
                files += [
                    FileCandidate(found.value, self.label, found.value.ids, found.value.path, bound)
                    for found in ordered
                    if found.value.cache is None and found.value.path is not None
                ]
            if sum(file.is_whole for file in files) >= MAX_FILES:
                # More would never be read, unless all of these are damaged.
                break
        self.files = [file for file in files if file.shared > self._covered]

    def _choose_in_memory(self, group: list[PrefixMatch[PrefixEntry]], bound: int) -> None:
        for found in group:
            covered = self._covered
            if covered >= bound:
                return
            cache = found.value.cache
            if cache is not None and (target := restorable_length(cache, bound)) > covered:
                self._best, self._entry = fork_at(cache, target), found.value

    def load(
        self, directory: Directory, config: object | None, device: torch.device | str | None, deadline: float
    ) -> None:
        """Load from files until nothing longer can be found, or until `deadline`."""
        tried = 0
        for file in self.files:
            if file.shared <= self._covered:
                return
            if tried >= MAX_FILES and not file.is_whole:
                self._note(f"a lookup tries no more than {MAX_FILES} files")
                continue
            tried += 1
            try:
                cache = directory.load(file, file.shared, config, device, deadline)
            except NeedsConfigError:
                self._note("a file needs config=model.config to be loaded")
            except UnreachableError as error:
                directory.report_unreachable(error)
                self._note("a file could not be reached")
                # Do not wait for the others.
                return
            except CachePathError:
                self.damaged.append(file)
            except CacheFileError as error:
                directory.report_damaged(file.path, error)
                self.damaged.append(file)
                self._note("a damaged file was skipped")
            else:
                if cache is not None:
                    self._compare(cache, file)

    def _compare(self, cache: Cache, file: FileCandidate) -> None:
        """Take a cache that was loaded if it has more tokens than what was found before."""
        length = cache.get_seq_length()
        if cache.keeps_every_token and length < min(file.shared, len(file.ids)):
            self._note("part of a file was damaged, missing or late")
        if length > self._covered:
            self._best, self._entry = cache, file.entry
            self.loaded = (file.entry, cache) if length == len(file.ids) else None

    def hit(self) -> Hit:
        """The longest prefix that was found. It belongs to the caller."""
        covered, most_tokens, entry = self._covered, len(self.ids) - 1, self._entry
        if self._best is None or entry is None:
            return Hit(reason=self._reason(0, most_tokens, ends=False))
        return Hit(self._best, covered, self._reason(covered, most_tokens, ends=entry.length == covered))

    @property
    def entry(self) -> PrefixEntry | None:
        """The entry of the longest prefix that was found."""
        return self._entry

    def keep_loaded(self) -> Cache | None:
        """The loaded cache for the store, `None` without one. The caller of the lookup gets a fork of it."""
        if self.loaded is None:
            return None
        self._best = self.loaded[1].fork()
        return self.loaded[1]

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _reason(self, covered: int, most_tokens: int, ends: bool) -> str:
        if covered == most_tokens:
            return "" if most_tokens else "the prompt is a single token, which must be computed"
        if not self._entries:
            reason = "nothing is stored for this model and namespace"
        elif not self._shared:
            reason = "no stored sequence starts with these tokens"
        elif covered < self._shared and self._notes:
            reason = f"{self._shared} tokens are stored, but only {covered} of them can be used now"
        elif covered < self._shared:
            reason = (
                f"{self._shared} tokens are stored, but windows and recurrent states can be rolled back to {covered} "
                "of them only: insert a cache where prompts diverge"
            )
        else:
            reason = f"the stored sequence {'ends' if ends else 'diverges'} after {covered}"
        return "; ".join([reason, *self._notes])
