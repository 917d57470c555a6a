"""What a prefix store says of itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefixStatistics:
    """What a store holds, and what it was good for.

    Attributes:
        entries: caches held, in memory and in files.
        bytes: of memory that they take. What several of them share counts once.
        file_bytes: of their files.
        hits: look-ups that found something.
        misses: look-ups that did not.
        tokens_covered: tokens of all prompts that were found.
        tokens_asked: tokens of all prompts.
        evictions: entries that left memory.
        spilled: entries written to the directory.
        damaged: files that were skipped.
        failed_writes: entries that could not be written to the directory.
        failed_reads: times that the directory could not be reached for a file, which may well be in order.
        bypassed: calls of `generate()` that could not go by the store.
        refused: caches that `generate()` made and that there was no room for.
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
