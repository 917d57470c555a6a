"""The longest prefix of a prompt that what is held can be put back to."""

import itertools
from dataclasses import dataclass, field

import torch

from kvlayers.caches.base import Cache
from kvlayers.errors import CacheFileError, CachePathError
from kvlayers.prefix.backends import UnreachableError
from kvlayers.prefix.directory import NeedsConfigError
from kvlayers.prefix.entry import PrefixEntry, put_back, reach
from kvlayers.prefix.index import EntryIndex
from kvlayers.prefix.radix_tree import SharedRun, Tokens

MOST_FILES = 4
"""Files that are tried for one look-up: whether a window can go back far enough is only known when it is."""


@dataclass(frozen=True)
class Hit:
    """What was found for a prompt.

    Attributes:
        cache: has seen the first `covered` tokens, and is the caller's own; `None` where nothing was found.
        covered: how many tokens of the prompt need not be computed, at least one less than there are.
        reason: why not more; empty where one token is left.
    """

    cache: Cache | None = None
    covered: int = 0
    reason: str = ""


@dataclass
class Search:
    """One look-up.

    Attributes:
        holdings: what is held.
        label: model and namespace.
        ids: the prompt.
        config: config of the model, where layers in files need it.
        device: where states from files are to be, `None` for the host.
    """

    holdings: EntryIndex
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
        """The best that can be had."""
        wanted = len(self.ids) - 1
        tree = self.holdings.tree(self.label)
        best, entry, shared, held = None, None, 0, len(tree)
        if wanted and held:
            groups = itertools.groupby(tree.nearest(self.ids), key=lambda found: min(found.tokens, wanted))
            for bound, group in groups:
                shared = max(shared, bound)
                if bound <= (0 if best is None else best.get_seq_length()):
                    break
                best, entry = self._best_of(list(group), bound, best, entry)
        self._settle()
        if best is None or entry is None:
            return Hit(reason=self._why(0, shared, wanted, held, ends=False))
        self.holdings.touch(entry)
        covered = best.get_seq_length()
        return Hit(best, covered, self._why(covered, shared, wanted, held, ends=entry.length == covered))

    def _settle(self) -> None:
        """Do to the tree what could not be done while it was read."""
        for lost in self._lost:
            self.holdings.lose_file(lost)
        for entry, cache in self._loaded:
            self.holdings.validate(entry, cache)

    def _best_of(
        self, group: list[SharedRun[PrefixEntry]], bound: int, best: Cache | None, best_entry: PrefixEntry | None
    ) -> tuple[Cache | None, PrefixEntry | None]:
        """The best among entries that share equally many tokens, and what was best before them."""
        # Memory first, and then the shortest: the less a window has moved on, the sooner it can go back.
        for found in sorted(group, key=lambda found: (found.value.cache is None, found.value.length)):
            entry, most = found.value, 0 if best is None else best.get_seq_length()
            if most >= bound:
                break
            if entry.cache is not None:
                target = reach(entry.cache, bound)
                found_cache = put_back(entry.cache, target) if target > most else None
            else:
                found_cache = self._from_file(entry, bound)
            if found_cache is not None and found_cache.get_seq_length() > most:
                best, best_entry = found_cache, entry
        return best, best_entry

    def _from_file(self, entry: PrefixEntry, length: int) -> Cache | None:
        directory = self.holdings.directory
        # What one file has waited for in vain, the others need not.
        if directory is None or self._is_cut_off:
            return None
        # One that is of the shared tokens alone serves for certain, and ends the search.
        if self._files >= MOST_FILES and entry.length > length:
            self._note(f"no more than {MOST_FILES} files are tried at once")
            return None
        self._files += 1
        try:
            cache = directory.load(entry, length, self.config, self.device)
        except NeedsConfigError:
            self._note("a file needs config=model.config to be loaded")
            return None
        except UnreachableError as error:
            directory.missed(error)
            self._is_cut_off = True
            self._note("a file could not be reached")
            return None
        except CachePathError:
            self._lost.append(entry)
            return None
        except CacheFileError as error:
            directory.report(entry, error)
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

    def _why(self, covered: int, shared: int, wanted: int, held: int, ends: bool) -> str:
        if covered == wanted:
            return "" if wanted else "the prompt is a single token, which is to be computed"
        if not held:
            why = "nothing is held for this model and namespace"
        elif not shared:
            why = "nothing that is held begins as these tokens do"
        elif covered < shared:
            why = (
                f"{shared} tokens are held, but windows and recurrent states can be put back to {covered or 'none'} of "
                "them: insert a cache where prompts part"
            )
        else:
            why = f"what is held {'ends' if ends else 'parts from these tokens'} after {covered}"
        return "; ".join([why, *self._notes])
