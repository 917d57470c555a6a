"""The command `kvlayers inspect`."""

import itertools
import os
from typing import TYPE_CHECKING, Annotated

import typer

from kvlayers.tools.cli.common import CHECK_FAILED, one_line_errors

if TYPE_CHECKING:
    from rich.table import Table

    from kvlayers.persistence import CacheFile


def inspect(
    path: Annotated[
        str, typer.Argument(help="A file that save_cache() wrote, or the directory of a prefix store: a path or a URL.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe a saved cache, or draw what the directory of a prefix store holds, without loading states.

    Exits with 2 if the file is not a saved cache, or is damaged; or if the directory cannot be reached, or has no
    entries. Exits with 1 if files in a directory are damaged or missing.
    """
    # Imported late: torch takes seconds to import, and `--help` does not need it.
    from rich.console import Console

    from kvlayers.persistence import inspect_cache
    from kvlayers.tools.cli import inspect_directory
    from kvlayers.tools.cli.console import print_json

    if "://" in path or os.path.isdir(path):
        with one_line_errors("inspect"):
            held = inspect_directory.inspected(path, Console(stderr=True))
        if as_json:
            print_json(inspect_directory.as_json(held))
        else:
            inspect_directory.show(Console(), held)
        raise typer.Exit(CHECK_FAILED if held.problems else 0)
    with one_line_errors("inspect"):
        found = inspect_cache(path)
    if as_json:
        print_json(found)
    else:
        Console().print(_table(found))


def _table(found: "CacheFile") -> "Table":
    from rich.markup import escape
    from rich.table import Table

    from kvlayers.tools.cli.console import plain
    from kvlayers.utils.units import readable_bytes

    table = Table(show_header=False, box=None)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    groups = ((kind, len(list(same))) for kind, same in itertools.groupby(found.layers))
    rows = {
        "cache": found.kind,
        "layers": ", ".join(f"{count} x {kind}" for kind, count in groups),
        "tokens": str(found.length),
        "batch": str(found.batch_size),
        "bits": _bits(found),
        "dtype of states": str(plain(found.dtype) or "several"),
        "file size": readable_bytes(found.nbytes),
        "token ids": "in the file" if found.has_token_ids else "not in the file",
        "metadata": ", ".join(found.metadata) or "none",
        "loads with": "the model's config" if found.needs_config else "nothing else",
        "prefixes": "can be loaded" if found.has_prefixes else "cannot be loaded",
        "model": _model(found),
        "made by": ", ".join(f"{package} {version}" for package, version in found.versions.items()),
        "fingerprint": found.fingerprint,
        "checksum": found.checksum,
    }
    for name, content in rows.items():
        # A file may contain anything, so its text is never read as markup.
        table.add_row(name, escape(content))
    return table


def _bits(found: "CacheFile") -> str:
    """Bits and backend of the quantized layers; consecutive layers with the same bits are one range."""
    layers = enumerate(zip(found.bits, found.backends, strict=True))
    parts = []
    for (bits, backend), same in itertools.groupby(layers, key=lambda layer: layer[1]):
        indices = [index for index, _ in same]
        if bits is None:
            continue
        keys, values = bits
        text = f"{keys}" if keys == values else f"{keys} for keys, {values} for values"
        where = f"layers {indices[0]} to {indices[-1]}" if len(indices) > 1 else f"layer {indices[0]}"
        parts.append(f"{text} ({backend}) in {where}")
    return "; ".join(parts) or "full precision"


def _model(found: "CacheFile") -> str:
    if found.model is None:
        return "unknown"
    known = (found.model_name, found.model_commit, found.weights_id, found.model.get("model_type"))
    return ", ".join(str(fact) for fact in known if fact)
