"""Statistics of a prefix store."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefixStatistics:
    """What a store holds now, and what it has done since it was made.

    Attributes:
        entries: number of entries, in memory and in files.
        bytes: bytes of memory that the entries take. Shared memory counts once.
        file_bytes: bytes of their files.
        hits: lookups that found a prefix.
        misses: lookups that did not.
        tokens_covered: tokens of all looked-up prompts that were found.
        tokens_asked: tokens of all looked-up prompts.
        evictions: entries that left memory.
        spilled: entries that were written to the directory.
        damaged: damaged files that were skipped.
        failed_writes: entries that could not be written to the directory.
        failed_reads: how often a file in the directory could not be reached. The file may be in order.
        bypassed: calls of `generate()` that could not use the store.
        refused: caches from `generate()` for which there was no room.
    """

    entries: int
    bytes: int
    file_bytes: int
    hits: int
    misses: int
    tokens_covered: int
    tokens_asked: int
    evictions: int
    spilled: int
    damaged: int
    failed_writes: int
    failed_reads: int
    bypassed: int
    refused: int
