"""Lookup of the longest prefix of a prompt that a stored cache can be rolled back to."""

import itertools
from dataclasses import dataclass, field

import torch

from kvlayers.caches.base import Cache
from kvlayers.errors import CacheFileError, CachePathError
from kvlayers.prefix.backends import UnreachableError
from kvlayers.prefix.directory import NeedsConfigError
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


@dataclass
class Search:
    """One lookup.

    Attributes:
        index: the entries.
        label: model and namespace, as returned by `keys.label_of`.
        ids: the prompt.
        config: config of the model, for layers in files that need it.
        device: device for states from files, `None` for the host.
    """

    index: EntryIndex
    label: str
    ids: Tokens
    config: object | None = None
    device: torch.device | str | None = None
    _notes: list[str] = field(default_factory=list)
    _files: int = 0
    _is_cut_off: bool = False
    _lost: list[PrefixEntry] = field(default_factory=list)
    _loaded: list[tuple[PrefixEntry, Cache]] = field(default_factory=list)

    def run(self) -> Hit:
        """Find the longest prefix."""
        most_tokens = len(self.ids) - 1
        tree = self.index.tree(self.label)
        best, entry, shared, entries = None, None, 0, len(tree)
        if most_tokens and entries:
            groups = itertools.groupby(tree.nearest(self.ids), key=lambda found: min(found.tokens, most_tokens))
            for bound, group in groups:
                shared = max(shared, bound)
                if bound <= (0 if best is None else best.get_seq_length()):
                    break
                best, entry = self._best_of(list(group), bound, best, entry)
        self._apply_changes()
        if best is None or entry is None:
            return Hit(reason=self._reason(0, shared, most_tokens, entries, ends=False))
        self.index.touch(entry)
        covered = best.get_seq_length()
        return Hit(best, covered, self._reason(covered, shared, most_tokens, entries, ends=entry.length == covered))

    def _apply_changes(self) -> None:
        """Apply changes to the index that had to wait until the tree was read."""
        for lost in self._lost:
            self.index.drop_file(lost)
        for entry, cache in self._loaded:
            self.index.keep_in_memory(entry, cache)

    def _best_of(
        self, group: list[PrefixMatch[PrefixEntry]], bound: int, best: Cache | None, best_entry: PrefixEntry | None
    ) -> tuple[Cache | None, PrefixEntry | None]:
        """The longest prefix among `best` and the entries of `group`, which share the same number of tokens."""
        # Memory first, then the shortest, as a window that has moved less is more likely to be rolled back far enough.
        for found in sorted(group, key=lambda found: (found.value.cache is None, found.value.length)):
            entry, most = found.value, 0 if best is None else best.get_seq_length()
            if most >= bound:
                break
            if entry.cache is not None:
                target = restorable_length(entry.cache, bound)
                found_cache = fork_at(entry.cache, target) if target > most else None
            else:
                found_cache = self._from_file(entry, bound)
            if found_cache is not None and found_cache.get_seq_length() > most:
                best, best_entry = found_cache, entry
        return best, best_entry

    def _from_file(self, entry: PrefixEntry, length: int) -> Cache | None:
        directory = self.index.directory
        # If one file could not be reached, do not wait for the others.
        if directory is None or self._is_cut_off:
            return None
        # An entry with just the shared tokens certainly works, and ends the search.
        if self._files >= MAX_FILES and entry.length > length:
            self._note(f"a lookup tries no more than {MAX_FILES} files")
            return None
        self._files += 1
        try:
            cache = directory.load(entry, length, self.config, self.device)
        except NeedsConfigError:
            self._note("a file needs config=model.config to be loaded")
            return None
        except UnreachableError as error:
            directory.report_unreachable(error)
            self._is_cut_off = True
            self._note("a file could not be reached")
            return None
        except CachePathError:
            self._lost.append(entry)
            return None
        except CacheFileError as error:
            directory.report_damaged(str(entry.path), error)
            self._lost.append(entry)
            self._note("a damaged file was skipped")
            return None
        if cache is None or cache.get_seq_length() < entry.length:
            return cache
        self._loaded.append((entry, cache))
        return cache.fork()

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _reason(self, covered: int, shared: int, most_tokens: int, entries: int, ends: bool) -> str:
        if covered == most_tokens:
            return "" if most_tokens else "the prompt is a single token, which must be computed"
        if not entries:
            reason = "nothing is stored for this model and namespace"
        elif not shared:
            reason = "no stored sequence starts with these tokens"
        elif covered < shared:
            reason = (
                f"{shared} tokens are stored, but windows and recurrent states can be rolled back to {covered} of them "
                "only: insert a cache where prompts diverge"
            )
        else:
            reason = f"the stored sequence {'ends' if ends else 'diverges'} after {covered}"
        return "; ".join([reason, *self._notes])
