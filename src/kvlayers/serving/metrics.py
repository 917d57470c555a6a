"""Figures of a store in the text format of Prometheus, and why look-ups found no more."""

import dataclasses
import re
import threading
from collections.abc import Iterable, Mapping

from kvlayers.errors import OptionError
from kvlayers.prefix.index import EntryIndex
from kvlayers.prefix.keys import Tokens, common_tokens
from kvlayers.prefix.lookup import Hit
from kvlayers.prefix.report import PrefixStatistics

GAUGES = frozenset(("entries", "bytes", "file_bytes", "pending_writes", "tokens", "shared_bytes"))
"""Figures of now. The others count what has happened since the store was made."""

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def prometheus_text(
    statistics: PrefixStatistics, labels: Mapping[str, str] | None = None, prefix: str = "kvlayers_prefix"
) -> str:
    r"""The figures of a store in the text format of Prometheus, which a server returns for `/metrics`.

    Args:
        statistics: `store.statistics`.
        labels: labels of all figures, such as `{"host": "a"}`.
        prefix: what the names of the figures begin with.

    Raises:
        OptionError: `statistics` are no statistics of a store, or a name or a label is none of Prometheus.

    Example:
        >>> import kvlayers
        >>> text = prometheus_text(kvlayers.PrefixStore("1MiB").statistics, {"host": "a"})
        >>> print(*text.splitlines()[:3], sep="\n")
        # HELP kvlayers_prefix_entries number of entries, in memory and in files.
        # TYPE kvlayers_prefix_entries gauge
        kvlayers_prefix_entries{host="a"} 0
    """
    if not isinstance(statistics, PrefixStatistics):
        raise OptionError(f"`statistics` must be store.statistics, got a {type(statistics).__name__}.")
    own = dict(labels or {})
    wrong = [name for name in (prefix, *own) if not _NAME.fullmatch(str(name)) or name in ("reason", "__name__")]
    if wrong or not all(isinstance(value, str) for value in own.values()):
        raise OptionError(f"`labels` and `prefix` must be names and texts of Prometheus, got {wrong or own}.")
    helps = dict(re.findall(r"^ {8}(\w+): (.*)$", PrefixStatistics.__doc__ or "", re.MULTILINE))
    lines = []
    for field in dataclasses.fields(statistics):
        kind = "gauge" if field.name in GAUGES else "counter"
        name, value = f"{prefix}_{field.name}{'_total' * (kind == 'counter')}", getattr(statistics, field.name)
        lines += [f"# HELP {name} {helps.get(field.name, field.name)}", f"# TYPE {name} {kind}"]
        if isinstance(value, Mapping):
            lines += [f"{name}{_labels({**own, 'reason': reason})} {count}" for reason, count in value.items()]
        else:
            lines.append(f"{name}{_labels(own)} {value}")
    return "\n".join([*lines, ""])


def _labels(labels: Mapping[str, str]) -> str:
    escaped = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    pairs = [f'{name}="{value.translate(escaped)}"' for name, value in labels.items()]
    return "{" + ",".join(pairs) + "}" if pairs else ""


def explained(
    now: PrefixStatistics, recent: Iterable[tuple[str, Tokens, Hit]], index: EntryIndex, lock: threading.Lock
) -> str:
    """As `PrefixStore.explain`, given the newest look-ups that found less than they might have."""
    lines = [f"{now.tokens_covered} of {now.tokens_asked} tokens that were asked for were stored"]
    counts = sorted(now.bypasses.items(), key=lambda bypass: -bypass[1])
    lines += [f"{count} calls went on without it: {reason}" for reason, count in counts]
    with lock:
        for label, ids, hit in list(recent):
            lines.append(f"{hit.covered} of {len(ids)} tokens: {hit.reason}")
            left = max((common_tokens(text, ids) for own, text in index.left if own == label), default=0)
            if left > hit.known:
                lines.append(f"    {left} of them were stored, and have left for room")
            others = [tree.groups(ids)[0][0] for tree in index.entries if tree is not index.entries.of(label)]
            if max(others, default=0) > hit.known:
                lines.append(f"    {max(others)} of them are stored for another model, cache or namespace")
    return "\n".join(lines)
