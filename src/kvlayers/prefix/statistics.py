"""Statistics of a prefix store."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefixStatistics:
    """What a store holds now, and what it has done since it was made.

    Attributes:
        entries: number of entries, in memory and in files.
        bytes: bytes of memory that the entries take, also while they wait to be written. Shared memory counts once.
        file_bytes: bytes of their files. Blocks that several entries share count once.
        hits: lookups that found a prefix.
        misses: lookups that did not.
        tokens_covered: tokens of all looked-up prompts that were found.
        tokens_asked: tokens of all looked-up prompts.
        evictions: entries that left memory, or leave it as soon as they are written.
        spilled: entries that were written to the directory.
        damaged: damaged files that were skipped.
        failed_writes: entries that could not be written to the directory, after several tries if it was not reached.
        failed_reads: how often a file in the directory could not be reached, or not in time. The file may be in order.
        bypassed: calls of `generate()` that could not use the store.
        refused: caches from `generate()` for which there was no room.
        dropped_writes: entries that were dropped before they were written, because a caller needed their memory and had
            waited for `write_wait_seconds`.
        pending_writes: entries that wait to be written, or are being written.
        tokens: tokens in memory. Those that several entries begin with count once.
        shared_bytes: those of `bytes` that several entries hold.
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
    dropped_writes: int
    pending_writes: int
    tokens: int
    shared_bytes: int
